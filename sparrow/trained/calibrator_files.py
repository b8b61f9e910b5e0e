"""Files of calibrators: a model folder has those of its model, a run directory those of each
checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from sparrow.core.config import from_dict, read_toml, to_dict, write_toml
from sparrow.core.errors import UserError
from sparrow.core.files import cannot_write, write_text
from sparrow.trained.calibrators import FAMILY, FILE, FOLDER, KINDS, Calibrator


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """What a file holds: one for each label, and of a run directory's the fingerprints of
    checkpoint and log.
    """

    labels: tuple[Annotated[Calibrator, FAMILY], ...]
    checkpoint: str | None = None
    log: str | None = None


# -- of a model folder, whose manifest knows the bytes of its files --------------------------------


def save(calibrators: Sequence[Calibrator], folder: Path) -> None:
    """Write a folder's file, if there are any."""
    if calibrators:
        text = write_toml(
            {"labels": _plain(calibrators)}, header="What scores pass through, for each label."
        )
        write_text(folder / FILE, text)


def load(folder: Path) -> tuple[Calibrator, ...]:
    """Returns the calibrators of a folder.

    Raises:
        UserError: when the file cannot be read as such.
    """
    path = folder / FILE
    return _read(read_toml(path), path) if path.exists() else ()


# -- of a run directory, a file for each checkpoint that has some ----------------------------------


def save_of_step(
    calibrators: Sequence[Calibrator], run_dir: Path, step: int, *, checkpoint: str, log: str
) -> None:
    """Write those of a run's checkpoint. None at all says that its scores are to stay as they are.

    Args:
        calibrators: one for each label.
        run_dir: the run directory.
        step: of the checkpoint.
        checkpoint: its fingerprint.
        log: the fingerprint of the prepared log to whose valid part they were fitted.
    """
    settings = {"checkpoint": checkpoint, "log": log, "labels": _plain(calibrators)}
    try:
        (run_dir / FOLDER).mkdir(exist_ok=True)
    except OSError as error:
        raise cannot_write(run_dir / FOLDER, error) from error
    header = f"What the scores of step {step} pass through, for each label."
    write_text(
        _file(run_dir, step), write_toml({"sha256": _seal(settings), **settings}, header=header)
    )


def load_of_step(
    run_dir: Path, step: int, *, checkpoint: str, kind: KINDS
) -> tuple[tuple[Calibrator, ...], str]:
    """Returns the calibrators of a run's checkpoint, and the fingerprint of the log to which they
    were fitted, or "".

    Args:
        run_dir: the run directory.
        step: of the checkpoint.
        checkpoint: its fingerprint.
        kind: what the run's settings ask for.

    Raises:
        UserError: when the file was changed, is of another checkpoint, or is absent where the run
            or another step has calibrators.
    """
    path = _file(run_dir, step)
    wanted = "KIND" if kind == "none" else kind
    command = f"sparrow calibrate {run_dir} {wanted} --checkpoint {step}"
    remedy_fit = f"fit it again: {command}"
    if not path.exists():
        steps = sorted(
            int(file.stem[5:])
            for file in path.parent.glob("step-*.toml")
            if file.stem[5:].isdigit()
        )
        if kind == "none" and not steps:
            return (), ""
        why = f"steps {steps} have one" if steps else f"its run asks for one (of the kind {kind})"
        remedy = (
            f"end the run with --resume, or fit one: {command} (or none in the place of {wanted})"
        )
        raise UserError(f"{path}: step {step} has no calibrator, and {why}; {remedy}")
    try:
        settings = read_toml(path)
    except UserError as error:
        raise UserError(f"{error}; {remedy_fit}") from None
    if settings.pop("sha256", None) != _seal(settings):
        raise UserError(f"{path}: changed since it was written; {remedy_fit}")
    if settings["checkpoint"] != checkpoint:
        raise UserError(
            f"{path}: fitted to another checkpoint of step {step} than is there; {remedy_fit}"
        )
    return _read(settings, path), settings["log"]


def _file(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step-{step:09d}.toml"


def _seal(settings: Mapping[str, Any]) -> str:
    # somebody may have written a date there
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(calibrators: Sequence[Calibrator]) -> Any:
    return to_dict(_Saved(labels=tuple(calibrators)))["labels"]


def _read(settings: Mapping[str, Any], path: Path) -> tuple[Calibrator, ...]:
    try:
        return from_dict(_Saved, settings).labels
    except UserError as error:
        raise UserError(f"{path}: {error}; fit the calibrators again") from None
