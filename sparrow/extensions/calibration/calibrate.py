"""The calibrators of a run's checkpoint: fitted to the valid part, judged on test, kept in the run
directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparrow import checkpoint, data
from sparrow.core.files import to_json, write_text
from sparrow.core.progress import Progress
from sparrow.extensions.calibration.fit import WorseError
from sparrow.metrics.intervals import estimates
from sparrow.trained.calibrate import fit_to_valid
from sparrow.trained.calibrator_files import save_of_step
from sparrow.trained.calibrators import KINDS, Calibrator, passed
from sparrow.trained.log import open_log
from sparrow.trained.parts import Scores, score_split
from sparrow.trained.scorer import restore

RESULTS = "results.json"


def calibrate(
    run_dir: str | Path,
    kind: KINDS,
    *,
    which: str = "best",
    device: str | None = None,
    data_dir: str | Path | None = None,
    else_none: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fit calibrators to a checkpoint of a run. From now on its scores pass through them wherever
    it is restored.

    The run's number of threads scores the rows, so that the same checkpoint gets the same bits on
    one machine.

    Args:
        run_dir: the run directory.
        kind: "logistic", "isotonic", or "none" for scores as they are.
        which: the checkpoint, see `restore`.
        device: see `restore`.
        data_dir: the prepared log; by default that of the run, see `restore`.
        else_none: whether scores stay as they are where calibrators make them worse. "refused" in
            the results says why.
        progress: is told how far it is.

    Returns:
        What results.json has too: kind, step, "refused" where they were, and test: label ->
        "before" and "after" -> auc, gauc (with groups), logloss, ne, calibration, ece and examples,
        of the test part where there is one.

    Raises:
        UserError: when the run or its log cannot be read, see also `fit_to_valid`.
    """
    refused: dict[str, str] = {}
    progress = progress or (lambda what, done, total: None)
    run_dir = Path(run_dir)
    restored = restore(run_dir, which=which, device=device, calibrated=False, data_dir=data_dir)
    dataset = open_log(restored)
    with _threads(restored.run.threads or torch.get_num_threads()):
        try:
            calibrators = fit_to_valid(kind, restored, dataset, progress)
        except WorseError as error:
            if not else_none:
                raise
            kind = "none"
            calibrators = ()
            refused = {"refused": str(error)}
        test = _before_and_after(restored, dataset, calibrators, progress) if calibrators else {}
    saved = checkpoint.load(run_dir / "checkpoints", restored.step)
    save_of_step(
        calibrators, run_dir, restored.step, checkpoint=saved.fingerprint, log=dataset.fingerprint
    )
    results = {"kind": kind, "step": restored.step, **refused, "test": test}
    with suppress(OSError, ValueError):  # a run that has not ended has no results yet
        before = json.loads((run_dir / RESULTS).read_text(encoding="utf-8"))
        write_text(run_dir / RESULTS, to_json({**before, "calibrated": results}, indent=1))
    return results


def _before_and_after(
    scorer: Scores, dataset: data.Dataset, calibrators: tuple[Calibrator, ...], progress: Progress
) -> dict[str, Any]:
    """Returns label -> "before" and "after" -> metrics of the test part, to which nothing is
    fitted.
    """
    if not dataset.rows("test"):
        return {}
    scores_BT, labels_BT, weights_B, session_B = score_split(scorer, dataset, "test", progress)
    parts = scores_BT.split(8192)  # isotonic needs memory for each row and point
    sides = {
        "before": scores_BT,
        "after": torch.cat([passed(part_BT, calibrators) for part_BT in parts]),
    }
    judged = {}
    for t, label in enumerate(scorer.schema.labels):
        is_known_B = ~labels_BT[:, t].isnan()  # a label may be missing
        known_weights_B = None if weights_B is None else weights_B[is_known_B]
        known_session_B = None if session_B is None else session_B[is_known_B]
        known_labels_B = labels_BT[is_known_B, t]
        judged[label] = {
            side: _judge(side_BT[is_known_B, t], known_labels_B, known_weights_B, known_session_B)
            for side, side_BT in sides.items()
        }
    return judged


def _judge(
    scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None, session_B: Tensor | None
) -> dict[str, float]:
    """Returns the metrics that have influences, and examples (the number of rows)."""
    judged = estimates(scores_B, labels_B, weights_B, session_B)
    values = {name: estimate.value for name, estimate in judged.items()}
    return {**values, "examples": float(len(scores_B))}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
