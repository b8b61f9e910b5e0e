"""Calibrators are fitted by their kind: what the library asks of it."""

from __future__ import annotations

from typing import Protocol, cast

from sparrow.core.progress import Progress
from sparrow.data import Dataset
from sparrow.trained.calibrators import FAMILY, KINDS, Calibrator
from sparrow.trained.parts import Scores


class Kind(Protocol):
    """What a kind's `Config` offers as a class."""

    def check_valid(self, dataset: Dataset) -> None:
        """Check that calibrators can be fitted to a prepared log."""
        ...

    def fit_to_valid(
        self, scorer: Scores, dataset: Dataset, progress: Progress
    ) -> tuple[Calibrator, ...]:
        """Returns a calibrator for each label."""
        ...


def check_valid(kind: KINDS, dataset: Dataset) -> None:
    """Check that calibrators can be fitted to a prepared log, before it takes long to find out.

    Raises:
        UserError: when it has no valid part, or one with a label that is the same in nearly all
            rows.
    """
    if kind != "none":
        _kind(kind).check_valid(dataset)


def fit_to_valid(
    kind: KINDS, scorer: Scores, dataset: Dataset, progress: Progress
) -> tuple[Calibrator, ...]:
    """Returns what is fitted to the valid part, for each label; nothing for the kind "none".

    Args:
        kind: of calibrators.
        scorer: the model, with scores that pass through nothing yet.
        dataset: the prepared log.
        progress: is told how far it is.

    Raises:
        UserError: see `check_valid`, and when calibrators make scores worse.
    """
    return () if kind == "none" else _kind(kind).fit_to_valid(scorer, dataset, progress)


def _kind(name: KINDS) -> Kind:
    return cast(Kind, FAMILY.config(name, "calibration"))
