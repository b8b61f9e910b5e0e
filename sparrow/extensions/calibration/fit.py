"""A kind of calibrator, fitted to the valid part of a log: honest about rows that are too few, and
about harm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy

from sparrow import data
from sparrow.core.errors import UserError
from sparrow.core.progress import Progress
from sparrow.trained.calibrators import FAMILY, Calibrator
from sparrow.trained.parts import Scores, score_split

Fit = Callable[[Tensor, Tensor, Tensor], Calibrator]
"""(scores_B, labels_B, weights_B), all float64 -> the calibrator of a label."""

LEAST = 10  # of each kind of label, below which a curve is fitted to chance
FOLDS = 5
REMEDY = (
    "prepare with a larger valid part (--valid), or take another kind: logistic bends scores less"
    " than isotonic, and none leaves them as they are"
)


def check_valid(dataset: data.Dataset) -> None:
    """Check that calibrators can be fitted to the valid part of a prepared log."""
    rows = dataset.rows("valid")
    are_counts = dataset.schema.role("impressions") is not None
    if not rows:
        raise UserError(f"calibration: {dataset.path} has no valid part to fit to; {REMEDY}")
    if not dataset.counts("valid"):
        raise UserError(
            f"calibration: the weights of all rows of the valid part of {dataset.path} are 0;"
            f" {REMEDY}"
        )
    for name, mean in dataset.manifest["label_mean"]["valid"].items():
        is_known = mean is not None and not math.isnan(mean)
        if not is_known or mean in (0, 1):
            value = f"{mean:g}" if is_known else "missing"
            raise UserError(
                f"calibration: label {name!r} is {value} in all rows of the valid part of"
                f" {dataset.path}; {REMEDY}"
            )
        if not are_counts and rows * min(mean, 1 - mean) < LEAST:
            raise UserError(
                f"calibration: label {name!r} is {mean:.3g} on average in {rows:,} rows of the"
                f" valid part of {dataset.path}, and {LEAST} of each kind are the least; {REMEDY}"
            )


def fit_to_valid(
    kind: str, scorer: Scores, dataset: data.Dataset, progress: Progress
) -> tuple[Calibrator, ...]:
    """Returns a calibrator for each label. kind: a member's name."""
    check_valid(dataset)
    scores_BT, labels_BT, weights_B, _ = score_split(scorer, dataset, "valid", progress)
    are_counts = scorer.schema.role("impressions") is not None
    return fit_calibrators(
        kind, scores_BT, labels_BT, weights_B, scorer.schema.labels, are_counts=are_counts
    )


class WorseError(UserError):
    """A calibrator makes scores worse."""


def fit_calibrators(
    kind: str,
    scores_BT: Tensor,
    labels_BT: Tensor,
    weights_B: Tensor | None,
    names: Sequence[str],
    *,
    are_counts: bool = False,
) -> tuple[Calibrator, ...]:
    """Returns a calibrator for each label.

    Args:
        kind: a member's name, such as "logistic".
        scores_BT: probabilities, of rows that the model did not learn from.
        labels_BT: in 0..1, NaN where one is missing.
        weights_B: of the rows. Their scale means nothing, unless they count.
        names: of the labels.
        are_counts: whether weights say how many showings a row stands for.

    Raises:
        UserError: when the labels of one are all alike or nearly, and for a score that is not
            finite.
        WorseError: when scores are worse afterwards, in rows to which the calibrator was not
            fitted.
    """
    member: Any = import_module(FAMILY.config(kind, "calibration").__module__)
    weights_B = torch.ones(len(scores_BT)) if weights_B is None else weights_B
    calibrators = []
    for name, scores_B, labels_B in zip(
        names, scores_BT.double().T, labels_BT.double().T, strict=True
    ):
        place = f"calibration: label {name!r}"
        bad = (~torch.isfinite(scores_B)).nonzero()[:, 0].tolist()
        if bad:
            score = f"the score of row {bad[0]} of the valid part is {scores_B[bad[0]]}"
            raise UserError(f"{place}: {score}; the model diverged: use an earlier --checkpoint")
        is_known_B = ~labels_B.isnan()
        p_B = scores_B[is_known_B]
        y_B = labels_B[is_known_B]
        w_B = weights_B.double()[is_known_B]
        if not are_counts:
            w_B = w_B * (len(w_B) / w_B.sum())
        _check_labels(y_B, w_B, place)
        _check_better(member.fit_config, p_B, y_B, w_B, f"{place}: {kind}")
        calibrators.append(member.fit_config(p_B, y_B, w_B))
    return tuple(calibrators)


def _check_labels(labels_B: Tensor, weights_B: Tensor, place: str) -> None:
    """Check that there are rows of both kinds, and that no few of them have nearly all of the
    weight.
    """
    sides = (labels_B, 1 - labels_B)
    rows = [int(((weights_B > 0) & (side_B > 0)).sum()) for side_B in sides]
    masses = [float(weights_B @ side_B) for side_B in sides]
    if not all(rows):
        raise UserError(f"{place} is the same in all rows of the valid part; {REMEDY}")
    if min(*rows, *masses) < LEAST:
        raise UserError(
            f"{place} counts as {masses[0]:,.1f} positives and {masses[1]:,.1f} negatives in"
            f" {rows[0]:,} and {rows[1]:,} rows of the valid part, where {LEAST} are the least;"
            f" {REMEDY}"
        )


def _check_better(
    fit: Fit,
    scores_B: Tensor,
    labels_B: Tensor,
    weights_B: Tensor,
    place: str,
) -> None:
    """Check that scores are not worse in rows that a calibrator has not seen, beyond two standard
    errors.

    It is fitted once for each fold of the rows, without them. All folds have the same share of
    labels.
    """
    fold_B = torch.empty(len(scores_B), dtype=torch.int64)
    fold_B[labels_B.argsort(stable=True)] = torch.arange(len(scores_B)) % FOLDS
    after_B = torch.empty_like(scores_B)
    for fold in range(FOLDS):
        held_B = fold_B == fold
        calibrator = fit(scores_B[~held_B], labels_B[~held_B], weights_B[~held_B])
        parts = scores_B[held_B].split(8192)  # isotonic needs memory for each row and point
        after_B[held_B] = torch.cat([calibrator(part_B) for part_B in parts])
    loss_B = binary_cross_entropy(scores_B, labels_B, reduction="none")
    loss_after_B = binary_cross_entropy(after_B, labels_B, reduction="none")
    worse_B = weights_B * (loss_after_B - loss_B)
    error = float((worse_B - worse_B.mean()).square().sum().sqrt())
    if not float(worse_B.sum()) <= 2 * error:
        before = float(weights_B @ loss_B / weights_B.sum())
        after = float(weights_B @ loss_after_B / weights_B.sum())
        raise WorseError(
            f"{place} makes scores worse (log loss {before:.5g} becomes {after:.5g} in rows of the"
            f" valid part to which it was not fitted); {REMEDY}"
        )
