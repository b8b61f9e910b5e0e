from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.kernels import Impl, missing, row_cache
from sparrow.kernels.row_cache import WAYS, Frames
from sparrow.kernels.row_cache.policies import POLICIES, lfu, policy_of

built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
IMPLS: list[Any] = ["reference", pytest.param("cpp", marks=built)]


def frames(rows: int, sets: int, policy: str = "lru") -> Frames:
    of = policy_of(policy)
    return Frames(
        rows=rows,
        tags_F=torch.full((sets * WAYS,), -1, dtype=torch.int32),
        stamps_F=torch.zeros(sets * WAYS, dtype=torch.int32),
        counts_R=torch.zeros(rows * of.bytes_row, dtype=torch.uint8),
        policy=of,
    )


def content(of: Frames) -> dict[int, int]:
    return {
        row: stamp
        for row, stamp in zip(of.tags_F.tolist(), of.stamps_F.tolist(), strict=True)
        if row >= 0
    }


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 1000, 4096, 99_991, 2**20])
def test_every_row_has_a_way_where_there_is_a_frame_for_each(rows: int) -> None:
    sets = -(-rows // WAYS)
    of = frames(rows, sets)
    assert torch.bincount(of.sets_of(torch.arange(rows)), minlength=sets).max() <= WAYS
    moves = row_cache.admit(of, torch.arange(rows), 1, 0)
    assert len(moves.rows_L) == rows and (moves.old_L == -1).all()
    slots = row_cache.slots_of(of, torch.arange(rows))
    assert len(slots.unique()) == rows and bool((slots < sets * WAYS).all())


@built
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    policy=st.sampled_from(POLICIES.names()),
    sets=st.integers(1, 3),
    protect=st.integers(1, 3),
)
def test_both_kernels_do_the_same(
    data: st.DataObject, policy: str, sets: int, protect: int
) -> None:
    rows = 400
    mine, its = frames(rows, sets, policy), frames(rows, sets, policy)
    seeds = data.draw(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=12))
    # counts grow old on the way; batches before a checkpoint are below 0
    start = data.draw(st.sampled_from([250, -8]))
    for batch, seed in enumerate(seeds, start):
        g = torch.Generator().manual_seed(seed)
        rows_N = (torch.rand(90, generator=g) ** 2 * rows).to(
            torch.int32 if seed % 2 else torch.int64
        )
        one = row_cache.admit(mine, rows_N, batch, batch - protect, impl="cpp")
        other = row_cache.admit(its, rows_N.flip(0), batch, batch - protect, impl="reference")
        order, its_order = one.rows_L.argsort(), other.rows_L.argsort()
        for name in ("frames_L", "rows_L", "old_L"):
            assert torch.equal(getattr(one, name)[order], getattr(other, name)[its_order]), name
        assert (one.hits, one.unique) == (other.hits, other.unique)
        for name in ("tags_F", "stamps_F", "counts_R"):
            assert torch.equal(getattr(mine, name), getattr(its, name)), name
        everything = torch.arange(rows)
        assert torch.equal(
            row_cache.slots_of(mine, everything, impl="cpp"),
            row_cache.slots_of(mine, everything, impl="reference"),
        )


@built
@pytest.mark.parametrize("policy", POLICIES.names())
def test_threads_change_nothing(threads: Callable[[int], None], policy: str) -> None:
    """From 8,192 ids on they share a batch. Who enters, who leaves and the order of it are as with
    one thread.
    """
    rows, sets = 20_000, 128
    of = {count: frames(rows, sets, policy) for count in (0, 1, 2, 4)}  # 0 has the reference's
    g, left = torch.Generator().manual_seed(0), 0
    for batch in range(253, 258):  # counts grow old on the way
        rows_N = (torch.rand(20_000, generator=g) ** 3 * rows).long() * 7919 % rows
        made = {}
        for count, its in of.items():
            threads(max(count, 1))
            made[count] = row_cache.admit(
                its, rows_N, batch, batch - 1, impl="cpp" if count else "reference"
            )
        want = made.pop(0)
        order = want.rows_L.argsort()
        left += int((want.old_L >= 0).sum())
        for count, moves in made.items():
            # in one order, in which those that leave are written
            assert torch.equal(moves.rows_L, made[1].rows_L)
            mine = moves.rows_L.argsort()
            for name in ("frames_L", "rows_L", "old_L"):
                assert torch.equal(getattr(moves, name)[mine], getattr(want, name)[order]), (
                    count,
                    name,
                )
            assert torch.equal(moves.slots_N, want.slots_N)
            assert (moves.hits, moves.unique) == (want.hits, want.unique)
            for name in ("tags_F", "stamps_F", "counts_R"):
                assert torch.equal(getattr(of[count], name), getattr(of[0], name)), (count, name)
    assert left > 1000


@pytest.mark.parametrize("impl", IMPLS)
def test_one_set_is_an_ordered_dict(impl: Impl) -> None:
    """LRU with one row a batch, as the standard library's."""
    of, model = frames(200, 1), OrderedDict[int, None]()
    g = torch.Generator().manual_seed(0)
    for batch in range(1, 600):
        row = int(torch.rand(1, generator=g) ** 3 * 200)
        row_cache.admit(of, torch.tensor([row]), batch, batch - 1, impl=impl)
        model[row] = None
        model.move_to_end(row)
        if len(model) > WAYS:
            model.popitem(last=False)
        assert content(of).keys() == model.keys()


@pytest.mark.parametrize("impl", IMPLS)
def test_lfu_lets_in_who_was_used_more_often(impl: Impl) -> None:
    of = frames(100, 1, "lfu")
    for batch in range(1, 4):
        row_cache.admit(of, torch.arange(WAYS), batch, batch - 1, impl=impl)
    for batch in range(4, 7):  # used once, twice, three times: not more often than those
        assert not len(row_cache.admit(of, torch.tensor([50]), batch, batch - 1, impl=impl).rows_L)
    moves = row_cache.admit(of, torch.tensor([50]), 7, 6, impl=impl)
    assert moves.rows_L.tolist() == [50] and moves.old_L.tolist() == [0]  # the least of equals


@pytest.mark.parametrize("impl", IMPLS)
def test_a_batch_that_does_not_count_lets_rows_in_as_one_that_does(impl: Impl) -> None:
    """And counts stay, also where they would be halved."""
    made = [frames(100, 1, "lfu") for _ in range(2)]
    for of in made:
        row_cache.admit(of, torch.arange(WAYS), 1, 0, impl=impl)
        row_cache.admit(of, torch.tensor([60, 61, 62]), 2, 1, impl=impl)
        of.counts_R[3] = 255
    before_R, rows_N = made[1].counts_R.clone(), torch.tensor([3, 60, 61, 60, 62])
    one, other = (
        row_cache.admit(of, rows_N, 3, 2, counts=counts, impl=impl)
        for of, counts in zip(made, (True, False), strict=True)
    )
    for name in ("frames_L", "rows_L", "old_L", "slots_N"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert len(one.rows_L) == 3 and int(made[0].counts_R[60]) == 2
    row_cache.admit(made[1], rows_N, lfu.Config.halved, 3, counts=False, impl=impl)
    assert torch.equal(made[1].counts_R, before_R)


@pytest.mark.parametrize("impl", IMPLS)
def test_protected_rows_stay(impl: Impl) -> None:
    of = frames(100, 1)
    row_cache.admit(of, torch.arange(WAYS), 1, 0, impl=impl)
    assert not len(row_cache.admit(of, torch.tensor([40]), 2, 0, impl=impl).rows_L)
    assert row_cache.admit(of, torch.tensor([41]), 3, 1, impl=impl).old_L.tolist() == [0]
    assert row_cache.slots_of(of, torch.tensor([0, 40]), impl=impl).tolist() == [WAYS, WAYS + 40]


def test_free_frames_are_those_of_the_rows_sets() -> None:
    of = frames(400, 4)
    row_cache.admit(of, torch.arange(0, 400, 9), 1, 0)
    out = torch.tensor([row for row in range(400) if row % 9])
    found = row_cache.free_frames(of, out)
    fits = found >= 0
    assert len(found[fits].unique()) == int(fits.sum()) == 4 * WAYS - 45
    assert torch.equal(found[fits] // WAYS, of.sets_of(out[fits]))
    assert (of.tags_F[found[fits]] == -1).all()


@built
def test_rows_outside_are_refused() -> None:
    of = frames(100, 1)
    for rows in ([100], [-1], [5, 2**40]):
        with pytest.raises(ValueError, match=r"a row is outside \[0, 100\)"):
            row_cache.slots_of(of, torch.tensor(rows))
        with pytest.raises(ValueError, match=r"a row is outside \[0, 100\)"):
            row_cache.admit(of, torch.tensor(rows), 1, 0)
    assert (of.tags_F == -1).all()
