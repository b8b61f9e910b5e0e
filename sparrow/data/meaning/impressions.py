"""Logs whose rows stand for many showings."""

from __future__ import annotations

from collections.abc import Sequence

from sparrow.core.errors import UserError, suggest
from sparrow.data.meaning.labels import OUTCOME, is_probability
from sparrow.data.meaning.names import CLICKS, IMPRESSIONS
from sparrow.data.meaning.sample import SampledColumn
from sparrow.features.schema import Column


def count_columns(
    sampled: dict[str, SampledColumn], names: Sequence[str], impressions: str
) -> dict[str, Column]:
    """Returns the columns of the labels and of the showings that these count."""
    if not names:
        remedy = "name the column that counts what came of them, such as --label clicks"
        raise UserError(f"impressions: {impressions!r} says how many showings there were; {remedy}")
    for name in (*names, impressions):
        if name not in sampled:
            option = "label" if name in names else "impressions"
            raise UserError(f"{option}: no column {name!r}{suggest(name, sampled)}")
    if impressions in names:
        raise UserError(
            f"impressions: {impressions!r} is the label; name the column of what the label is"
            " out of"
        )
    note = f"{OUTCOME}, unknown before {names[0]}; make it kind 'label' to train both"
    counts = [s.name for s in sampled.values() if s.called in (*CLICKS, *IMPRESSIONS)]
    columns = {name: Column(kind="ignore", note=note) for name in counts}
    columns[impressions] = Column(kind="impressions")
    for label in names:
        columns[label] = Column(kind="label")
        if is_probability(sampled[label]):
            note = f"numbers in 0..1, taken for probabilities; each counts as {impressions} says"
            columns[label] = Column(kind="label", probability=True, note=note)
    return columns
