"""Rows that a loss compares come in one batch, as far as the log has them side by side."""

from __future__ import annotations

from collections.abc import Callable

from sparrow.core import UserError
from sparrow.core.config import Family
from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.loader import Loader
from sparrow.trained.run import Run


def keep_groups_together(
    loader: Loader, run: Run, dataset: Dataset, say: Callable[[str], None]
) -> Loader:
    """Returns the loader, whose batches hold the rows of a group together if the loss compares
    them.

    Args:
        loader: of the training part.
        run: its settings.
        dataset: its log.
        say: is told how many groups are in pieces all the same.

    Raises:
        UserError: when the log has no groups.
    """
    if not run.loss.compares:
        return loader
    group = dataset.schema.role("group")
    if group is None:
        name = Family("sparrow.losses").name_of(run.loss)
        problem = (
            f"loss.name: {name!r} compares the rows of a group, and the log has no column of kind"
            " group"
        )
        raise UserError(f"{problem}; declare one, or use bce")
    loader.with_groups()
    groups, cut, rows = loader.groups_cut()
    if cut:
        say(
            f"loss: {cut:,} of {groups:,} groups among {rows:,} training rows are in pieces, each"
            f" compared by itself; prepare with --cluster-by {group} puts rows side by side, a"
            " larger data.batch_size cuts fewer"
        )
    return loader
