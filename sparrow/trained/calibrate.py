"""The calibrators of a run's checkpoint: fitted to the valid part, judged on test, kept in the run directory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparrow import checkpoint, data
from sparrow.core.errors import UserError
from sparrow.core.files import to_json, write_text
from sparrow.core.progress import Progress
from sparrow.metrics import Streaming
from sparrow.metrics.intervals import estimates
from sparrow.trained.build import check_schema
from sparrow.trained.calibrators import KINDS, Calibrator, fitted, passed, save_of_step
from sparrow.trained.parts import Scores, scored
from sparrow.trained.scorer import restore

RESULTS = "results.json"


def calibrate(
    run_dir: str | Path,
    kind: KINDS,
    *,
    which: str = "best",
    device: str | None = None,
    told: Progress | None = None,
) -> dict[str, Any]:
    """Fit calibrators to a checkpoint of a run. From now on its scores pass through them wherever it is restored.

    The run's number of threads scores the rows, so that the same checkpoint gets the same bits on one machine.

    Args:
        run_dir: the run directory.
        kind: "logistic", "isotonic", or "none" for scores as they are.
        which: the checkpoint, see `restore`.
        device: see `restore`.
        told: is told how far it is.

    Returns:
        What results.json has too: kind, step, and test: label -> "before" and "after" -> auc, gauc (with groups),
        logloss, ne, calibration, ece and examples, of the test part where there is one.

    Raises:
        UserError: when the run or its log cannot be read, see also `check_valid` and `fitted`.
    """
    told, run_dir = told or (lambda what, done, total: None), Path(run_dir)
    found = restore(run_dir, which=which, device=device, calibrated=False)
    dataset = data.open(found.run.data.path)
    check_schema(found.schema, dataset.schema, dataset.path)
    with _threads(found.run.threads or torch.get_num_threads()):
        calibrators = fitted_to_valid(found, dataset, kind, told)
        test = _before_and_after(found, dataset, calibrators, told) if calibrators else {}
    saved = checkpoint.load(run_dir / "checkpoints", found.step)
    save_of_step(calibrators, run_dir, found.step, checkpoint=saved.fingerprint, log=dataset.fingerprint)
    results = {"kind": kind, "step": found.step, "test": test}
    with suppress(OSError, ValueError):  # a run that has not ended has no results yet
        before = json.loads((run_dir / RESULTS).read_text(encoding="utf-8"))
        write_text(run_dir / RESULTS, to_json({**before, "calibrated": results}, indent=1))
    return results


def fitted_to_valid(found: Scores, dataset: data.Dataset, kind: KINDS, told: Progress) -> tuple[Calibrator, ...]:
    """Returns what is fitted to the valid part, for each label; nothing for the kind "none".

    found: the model, with scores that pass through nothing yet. The others are as for `calibrate`.

    Raises:
        UserError: see `check_valid` and `fitted`.
    """
    if kind == "none":
        return ()
    check_valid(dataset)
    scores_BT, labels_BT, weights_B, _ = scored(found, dataset, "valid", told)
    return fitted(kind, scores_BT, labels_BT, weights_B, found.schema.labels)


def check_valid(dataset: data.Dataset) -> None:
    """Check that calibrators can be fitted to a prepared log, before it takes long to find out.

    Raises:
        UserError: when it has no valid part, or one with a label that is the same in all rows.
    """
    remedy = "prepare with a larger valid part (--valid), or leave --calibrate out"
    if not dataset.rows("valid"):
        raise UserError(f"--calibrate: {dataset.path} has no valid part to fit to; {remedy}")
    for name, mean in dataset.manifest["label_mean"]["valid"].items():
        is_known = mean is not None and not math.isnan(mean)
        if not is_known or mean in (0, 1):
            what = f"label {name!r} is {f'{mean:g}' if is_known else 'missing'} in all rows of the valid part"
            raise UserError(f"--calibrate: {what} of {dataset.path}; {remedy}")


def _before_and_after(
    found: Scores, dataset: data.Dataset, calibrators: tuple[Calibrator, ...], told: Progress
) -> dict[str, Any]:
    """Returns label -> "before" and "after" -> metrics of the test part, to which nothing is fitted."""
    if not dataset.rows("test"):
        return {}
    scores_BT, labels_BT, weights_B, session_B = scored(found, dataset, "test", told)
    parts = scores_BT.split(8192)  # isotonic needs memory for each row and point
    sides = {"before": scores_BT, "after": torch.cat([passed(part_BT, calibrators) for part_BT in parts])}
    judged = {}
    for t, label in enumerate(found.schema.labels):
        there_B = ~labels_BT[:, t].isnan()  # a label may be missing
        beside = [None if of is None else of[there_B] for of in (weights_B, session_B)]
        judged[label] = {side: _judged(of[there_B, t], labels_BT[there_B, t], *beside) for side, of in sides.items()}
    return judged


def _judged(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None, session_B: Tensor | None) -> dict[str, float]:
    """Returns metrics, among them ece: by how much groups of like scores differ from their labels, on average."""
    stream = Streaming()
    stream.update(scores_B, labels_B, weights_B)
    points = stream.reliability()
    apart_Q = (points.predictions_Q - points.labels_Q).abs()
    values = {name: of.value for name, of in estimates(scores_B, labels_B, weights_B, session_B).items()}
    ece = float(points.weights_Q @ apart_Q / points.weights_Q.sum())
    return {**values, "ece": ece, "examples": float(len(scores_B))}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
