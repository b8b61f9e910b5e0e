"""Probabilities that are right on average: what a trained model's scores pass through last.

One file per kind: file `x.py` has a dataclass `Config` with what was fitted, and `fitted`, which fits it. No kind turns
the order of two scores. A model folder has those of its model, a run directory those of each checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from sparrow.core import Batch
from sparrow.core.config import Family, from_dict, read_toml, to_dict, write_toml
from sparrow.core.errors import UserError
from sparrow.core.files import cannot_write, write_text

FILE = "calibrator.toml"  # of a model folder
FOLDER = "calibrators"  # of a run directory
KINDS = Literal["none", "logistic", "isotonic"]
Scores = Callable[[Batch], Tensor]

_FAMILY = Family("sparrow.trained.calibrators")


class Calibrator(Protocol):
    """What a kind's `Config` offers."""

    def __call__(self, scores_B: Tensor) -> Tensor:
        """Returns probabilities [B] of the log on which it was fitted."""
        ...


def fitted(
    kind: str, scores_BT: Tensor, labels_BT: Tensor, weights_B: Tensor | None, names: Sequence[str]
) -> tuple[Calibrator, ...]:
    """Returns a calibrator for each label.

    Args:
        kind: "logistic" or "isotonic".
        scores_BT: probabilities, of rows that the model did not learn from.
        labels_BT: 0 or 1, NaN where one is missing.
        weights_B: of the rows.
        names: of the labels.

    Raises:
        UserError: when the labels of one are all alike, and for a score that is not finite.
    """
    fit: Any = import_module(f"{__name__}.{kind}")
    weights_B = torch.ones(len(scores_BT)) if weights_B is None else weights_B
    made = []
    for name, scores_B, labels_B in zip(names, scores_BT.double().T, labels_BT.double().T, strict=True):
        bad = (~torch.isfinite(scores_B)).nonzero()[:, 0].tolist()
        if bad:
            place = f"--calibrate: label {name!r}: the score of row {bad[0]} of the valid part is {scores_B[bad[0]]}"
            raise UserError(f"{place}; the model diverged: use an earlier --checkpoint")
        there_B = ~labels_B.isnan()
        p_B, y_B, w_B = scores_B[there_B], labels_B[there_B], weights_B.double()[there_B]
        if not 0 < float((w_B * y_B).sum()) < float(w_B.sum()):
            raise UserError(
                f"--calibrate: label {name!r} is the same in all rows of the valid part; prepare with a larger valid "
                "part, or leave --calibrate out"
            )
        made.append(fit.fitted(p_B, y_B, w_B))
    return tuple(made)


def passed(scores_BT: Tensor, calibrators: Sequence[Calibrator]) -> Tensor:
    """Returns scores [B, T] as they are after calibrators, one for each label; as they were where there are none."""
    if not calibrators:
        return scores_BT
    return torch.stack([of(scores_B) for of, scores_B in zip(calibrators, scores_BT.T, strict=True)], 1)


def calibrated(score: Scores, calibrators: Sequence[Calibrator]) -> Scores:
    """Returns a function that scores a batch, [B, T], through calibrators."""
    return (lambda batch: passed(score(batch), calibrators)) if calibrators else score


def kind_of(calibrators: Sequence[Calibrator]) -> KINDS:
    """Returns of what kind they are."""
    return cast(KINDS, _FAMILY.name_of(calibrators[0]) if calibrators else "none")


# -- of a model folder, whose manifest knows the bytes of its files ---------------------------------------------------


def save(calibrators: Sequence[Calibrator], folder: Path) -> None:
    """Write a folder's file, if there are any."""
    if calibrators:
        text = write_toml({"labels": _plain(calibrators)}, header="What scores pass through, for each label.")
        write_text(folder / FILE, text)


def load(folder: Path) -> tuple[Calibrator, ...]:
    """Returns those of a folder.

    Raises:
        UserError: when the file cannot be read as such.
    """
    path = folder / FILE
    return _made(read_toml(path)["labels"], path) if path.exists() else ()


# -- of a run directory, a file for each checkpoint that has some -----------------------------------------------------


def save_of_step(calibrators: Sequence[Calibrator], run_dir: Path, step: int, *, checkpoint: str, log: str) -> None:
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
    write_text(_file(run_dir, step), write_toml({"sha256": _seal(settings), **settings}, header=header))


def load_of_step(run_dir: Path, step: int, *, checkpoint: str, kind: KINDS) -> tuple[tuple[Calibrator, ...], str]:
    """Returns those of a run's checkpoint, and the fingerprint of the log to which they were fitted, or "".

    Args:
        run_dir: the run directory.
        step: of the checkpoint.
        checkpoint: its fingerprint.
        kind: what the run's settings ask for.

    Raises:
        UserError: when the file was changed, is of another checkpoint, or is absent where the run or another step has
            calibrators.
    """
    path = _file(run_dir, step)
    wanted = "KIND" if kind == "none" else kind
    command = f"sparrow calibrate {run_dir} {wanted} --checkpoint {step}"
    again = f"fit it again: {command}"
    if not path.exists():
        others = sorted(int(one.stem[5:]) for one in path.parent.glob("step-*.toml") if one.stem[5:].isdigit())
        if kind == "none" and not others:
            return (), ""
        why = f"steps {others} have one" if others else f"its run asks for one (calibrate = {kind!r})"
        remedy = f"end the run with --resume, or fit one: {command} (or none in the place of {wanted})"
        raise UserError(f"{path}: step {step} has no calibrator, and {why}; {remedy}")
    try:
        settings = read_toml(path)
    except UserError as error:
        raise UserError(f"{error}; {again}") from None
    if settings.pop("sha256", None) != _seal(settings):
        raise UserError(f"{path}: changed since it was written; {again}")
    if settings["checkpoint"] != checkpoint:
        raise UserError(f"{path}: fitted to another checkpoint of step {step} than is there; {again}")
    return _made(settings["labels"], path), settings["log"]


def _file(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step-{step:09d}.toml"


def _seal(settings: Mapping[str, Any]) -> str:
    text = json.dumps(settings, sort_keys=True, default=str)  # somebody may have written a date there
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(calibrators: Sequence[Calibrator]) -> list[dict[str, Any]]:
    return [{"name": _FAMILY.name_of(of), **to_dict(of)} for of in calibrators]


def _made(plain: Sequence[Mapping[str, Any]], path: Path) -> tuple[Calibrator, ...]:
    made: list[Calibrator] = []
    for number, settings in enumerate(plain):
        place, settings = f"{path}: labels[{number}]", dict(settings)
        made.append(from_dict(_FAMILY.config(settings.pop("name")), settings, place))
    return tuple(made)
