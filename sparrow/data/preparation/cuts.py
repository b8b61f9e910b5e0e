"""Where a log that is split by time is cut: between two times, or within a time that is too coarse
for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparrow import features
from sparrow.data.batches.parts import PARTS
from sparrow.data.preparation.cutter import Cut
from sparrow.features.quantile import Ordered
from sparrow.features.schema import Schema, Split

# of the share asked for: where whole times make a part smaller or larger, rows are drawn
LEAST, MOST = 0.5, 2.0
NEVER = int(np.iinfo(np.int64).max)
CLOSE, FEW = 0.25, 5  # of the rows asked for, and rows: how far off a part may be without a word


class _Choice(NamedTuple):
    """A cut, and how many rows lie before it; where rows are drawn, about as many."""

    cut: Cut
    rows: int


def time_cuts(split: Split, times: Ordered) -> tuple[Cut, ...]:
    """Returns where valid and test begin, and what is left out where the split has an `until`.

    Rows of one time stay together where each part then gets LEAST to MOST times the share asked
    for: in a log of some days that tells days only, parts begin with a day. Where that cannot be,
    rows of the time at a cut are drawn.

    Args:
        split: says the shares.
        times: of all rows.
    """
    shares = _shares(split)
    count = len(times)
    choices = [
        _choices(times, round(count * (1 - sum(shares[part:])))) for part in range(1, len(shares))
    ]
    fewest_drawn = sorted(
        itertools.product(range(3), repeat=len(choices)), key=lambda numbers: numbers.count(2)
    )
    chosen = [choice[2] for choice in choices]
    for numbers in fewest_drawn:
        candidate = [choice[number] for choice, number in zip(choices, numbers, strict=True)]
        ends = [0, *(cut.rows for cut in candidate), count]
        sizes = [end - begin for begin, end in itertools.pairwise(ends)]
        if all(
            LEAST * share * count <= size <= MOST * share * count
            for share, size in zip(shares, sizes, strict=True)
        ):
            chosen = candidate
            break
    return tuple(choice.cut for choice in chosen)


def drawn_words(schema: Schema, cuts: Sequence[Cut]) -> str:
    """Returns what to say of the times whose rows are drawn in a split by time, if any are."""
    drawn = sorted({cut.first for cut in cuts if cut.before})
    if not drawn:
        return ""
    unit = f", all rows of one {schema.split_key} in one part" if schema.split_key else ""
    names = " and ".join(features.times.time_name(time) for time in drawn)
    return f"; times are coarse, so rows of {names} are drawn at random{unit}"


def share_words(split: Split, rows: Sequence[int]) -> str:
    """Returns what to say of the shares of train, valid and test, where they are not those asked
    for.

    Args:
        split: says the shares.
        rows: of train, valid and test.
    """
    shares = _shares(split)[:3]
    wanted = [sum(rows) * share / sum(shares) for share in shares]
    pairs = zip(rows, wanted, strict=True)
    if all(abs(count - want) <= max(CLOSE * want, FEW) for count, want in pairs):
        return ""
    parts = zip(PARTS, rows, strict=True)
    came = ", ".join(f"{part} {count / sum(rows):.1%}" for part, count in parts)
    wanted_shares = ", ".join(f"{share / sum(shares):.1%}" for share in shares)
    return f"; shares as they came out: {came}, where {wanted_shares} are asked"


def _shares(split: Split) -> list[float]:
    """The shares asked for of train, valid, test and, with an `until`, of what is left out."""
    later = 1 - (split.until or 1)
    shares = [1 - split.valid - split.test - later, split.valid, split.test]
    return [*shares, later] if later else shares


def _choices(times: Ordered, place: int) -> list[_Choice]:
    """Returns the cut before the time at a place of the order, that after it, and the one within
    it.
    """
    if place >= len(times):
        return [_Choice(Cut(NEVER), len(times))] * 3
    time = int(times.at([place])[0])
    low, high = times.below(time), int(times.up_to(np.array([time]))[0])
    after = int(times.at([high])[0]) if high < len(times) else NEVER
    within = Cut(time, (place - low) / (high - low))
    return [_Choice(Cut(time), low), _Choice(Cut(after), high), _Choice(within, place)]
