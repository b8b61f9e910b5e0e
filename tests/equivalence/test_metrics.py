"""Metrics of rows on many ranks = metrics of the rows together."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from sparrow.distributed import World
from tests.equivalence import cases
from tests.equivalence.pool import Pool

pytestmark = pytest.mark.multi
KINDS = (
    "plain", "ties", "equal scores", "one class", "no weight", "one group", "groups by the ranks",
    "rows without a group", "a NaN", "few rows", "shares", "a label that rows lack",
    "a label that all rows lack",
)  # fmt: skip


@pytest.mark.parametrize(
    ("size", "weighted", "exacts"),
    [  # quick: with weights each kind in both ways
        (2, True, [(True,)]), (3, False, [(True,), (False,)]), (5, True, [(False,)]),
        *(
            pytest.param(size, weighted, [(True, False)], marks=pytest.mark.slow)
            for size in (2, 3, 5) for weighted in (False, True)
        ),
    ],
)  # fmt: skip
def test_every_rank_gets_the_metrics_of_all_rows(
    ranks: Callable[[int], Pool], size: int, weighted: bool, exacts: list[tuple[bool, ...]]
) -> None:
    """exacts: those of each kind in turn."""
    for kind, of_kind in zip(KINDS, itertools.cycle(exacts), strict=False):
        for exact in of_kind:
            want, *_ = cases.evaluated(World(), kind, weighted, exact)
            found = ranks(size).run(cases.evaluated, kind, weighted, exact)
            for got, *_ in found:
                assert repr(got) == repr(found[0][0])  # to the bit, so that all decide alike
                for one, other in zip(got, want, strict=True):
                    assert one == pytest.approx(other, rel=1e-12, nan_ok=True), kind


@pytest.mark.parametrize("size", [2, 3])
def test_a_stream_that_was_stopped_anywhere_ends_in_the_same_bits(
    ranks: Callable[[int], Pool], size: int
) -> None:
    whole, *_ = ranks(size).run(cases.judged_in_parts, [5])
    for stops in ([], [3, 5], [0, 1, 2, 8]):
        for found in ranks(size).run(cases.judged_in_parts, stops):
            assert found == whole


def test_bytes_are_those_of_the_rows_that_go_elsewhere(ranks: Callable[[int], Pool]) -> None:
    """Scores are spread evenly over ranges, so half of the rows go to the other rank, in 12 bytes
    for each label; with their group in 20.
    """
    found = ranks(2).run(cases.evaluated, "plain", True, True)
    sums = 2 * 3 * 8 // 2  # what each range won
    auc, gauc = (sum(one[i] for one in found) for i in (1, 2))
    assert auc - 2 * 2 * sums == pytest.approx(2 * 400 / 2 * 12, rel=0.1)
    assert gauc == pytest.approx(2 * 400 / 2 * 20, rel=0.2)
    sums = 2 * 4 * 8 // 2  # of groups, and whether a label lies between 0 and 1
    assert (gauc - 2 * 2 * sums) % 20 == 0
