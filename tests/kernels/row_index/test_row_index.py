from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparrow.core import UserError
from sparrow.core.mixing import unmix63
from sparrow.kernels import Impl, missing, row_index
from sparrow.kernels.row_index import FREE, SHARED, Index, Policy

built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
IMPLS: list[Any] = ["reference", pytest.param("cpp", marks=built)]
FIELDS = ("ids_R", "times_R", "counts_R", "sightings_RC")
MOST = (1 << 63) - 2


def index_of(policy: Policy, rows: tuple[int, int] | None = None) -> Index:
    first, last = rows or (0, policy.rows)
    count = last - first
    made = Index(
        policy=policy,
        first=first,
        key=12345 + (1 << 63),
        ids_R=torch.zeros(count, dtype=torch.int64),
        times_R=torch.zeros(count, dtype=torch.int64),
        counts_R=torch.zeros(count),
        sightings_RC=torch.zeros(count, 4, dtype=torch.uint8),
    )
    made.begin()
    return made


def use(
    index: Index, ids: list[int], now: int, batch: int = 0, settled: int = -1, impl: Impl = "auto"
) -> Any:
    """Admit a batch. By default it is number `now`, and all before it have learnt."""
    batch = batch or now
    keys_N = row_index.keys_of(torch.tensor(ids, dtype=torch.int64))
    return row_index.admit(
        index, keys_N, now, batch, batch - 1 if settled < 0 else settled, impl=impl
    )


def held(index: Index) -> set[int]:
    return {id for id in index.ids_R.tolist() if id > 0}


def rows_of(index: Index, ids: list[int], now: int = 0, impl: Impl = "auto") -> list[int]:
    found: list[int] = row_index.find(
        index, row_index.keys_of(torch.tensor(ids)), now, impl=impl
    ).tolist()
    return found


policies = st.builds(
    lambda lfu, half, **given: Policy(
        evict="lfu" if lfu else "lru", half_life=half if lfu else None, **given
    ),
    lfu=st.booleans(),
    half=st.sampled_from([None, 3.0, 10.0]),
    capacity=st.sampled_from([1, 4, 17, 40]),
    buckets=st.sampled_from([1, 2, 4]),
    after=st.sampled_from([1, 1, 2, 3]),
    probability=st.sampled_from([1.0, 1.0, 0.5]),
    ttl=st.sampled_from([None, 2, 5, 20]),
)
ids_of_a_batch = st.lists(st.one_of(st.integers(0, 60), st.integers(0, MOST)), max_size=25)
batches = st.lists(
    st.tuples(ids_of_a_batch, st.integers(0, 3), st.booleans()), min_size=1, max_size=25
)


@built
@settings(max_examples=150, deadline=None)
@given(
    policy=policies, steps=batches, parts=st.sampled_from([1, 2, 3, 5]), forget=st.integers(0, 25)
)
def test_kernels_and_parts_do_the_same(
    policy: Policy, steps: list[tuple[list[int], int, bool]], parts: int, forget: int
) -> None:
    """Whatever the ids: both kernels, buckets in parts, and an index that is made anew from its
    rows.
    """
    one, other, anew = index_of(policy), index_of(policy), index_of(policy)
    cut = [
        (index_of(policy, rows), keys) for rows, keys in policy.blocks(parts) if rows[0] < rows[1]
    ]
    now = settled = 0
    for batch, (ids, passes, learns) in enumerate(steps, 1):
        now += passes
        want = use(one, ids, now, batch, settled, "reference")
        got = use(other, ids[::-1] * 2, now, batch, settled, "cpp")
        again = use(anew, ids, now, batch, settled)
        assert torch.equal(got.rows_N[: len(ids)].flip(0), want.rows_N)
        assert torch.equal(again.rows_N, want.rows_N)
        assert sorted(got.freed_F.tolist()) == sorted(want.freed_F.tolist())
        twice = {"looked_up": 2 * want.counts["looked_up"], "live": 2 * want.counts["live"]}
        assert got.counts == want.counts | twice
        assert dict(zip(got.begun_L.tolist(), got.ids_L.tolist(), strict=True)) == dict(
            zip(want.begun_L.tolist(), want.ids_L.tolist(), strict=True)
        )
        keys_N = row_index.keys_of(torch.tensor(ids, dtype=torch.int64))
        for part, (low, high) in cut:
            mine_N = (keys_N >= low) & (keys_N <= high - 1)
            found = row_index.admit(part, keys_N[mine_N] - low, now, batch, settled)
            assert torch.equal(found.rows_N + part.first, want.rows_N[mine_N])
        for name in FIELDS:
            assert torch.equal(getattr(one, name), getattr(other, name)), name
            assert torch.equal(getattr(one, name), getattr(anew, name)), name
            assert torch.equal(
                torch.cat([getattr(part, name) for part, _ in cut]), getattr(one, name)
            ), name
        asked = torch.tensor([*ids, *range(10), MOST])
        both = [
            row_index.find(i, row_index.keys_of(asked), now, impl=k)
            for i, k in ((one, "reference"), (other, "cpp"))
        ]
        assert torch.equal(*both)
        settled = batch if learns else settled
        if batch == forget:
            settled, anew.work = batch, None


@built
def test_threads_do_the_same(threads: Callable[[int], None]) -> None:
    """20,000 lookups are work for several threads, and most ids are in a batch more than once."""
    policy = Policy(capacity=6000, buckets=4, evict="lfu", half_life=10.0, ttl=3)
    one, three, random = index_of(policy), index_of(policy), torch.Generator().manual_seed(0)
    total = Counter[str]()
    for batch in range(1, 12):
        ids = (6000 * torch.rand(20_000, generator=random) ** 3).long() + 500 * batch
        threads(1)
        want = use(one, ids.tolist(), batch)
        threads(3)
        got = use(three, ids.tolist(), batch)
        assert got.counts == want.counts
        total += Counter(want.counts)
        for name in ("rows_N", "begun_L", "ids_L", "freed_F"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        for name in FIELDS:
            assert torch.equal(getattr(one, name), getattr(three, name)), name
        assert torch.equal(
            *(row_index.find(index, row_index.keys_of(ids), batch) for index in (one, three))
        )
    assert min(total[of] for of in ("hits", "admitted", "evicted", "expired")) > 100, total


@settings(max_examples=80, deadline=None)
@given(policy=policies, steps=batches)
def test_two_ids_never_share_a_row_and_nothing_leaves_a_bucket_with_room(
    policy: Policy, steps: list[tuple[list[int], int, bool]]
) -> None:
    index, now, settled = index_of(policy), 0, 0
    for batch, (ids, passes, learns) in enumerate(steps, 1):
        now += passes
        before = held(index)
        found = use(index, ids, now, batch, settled)
        live = {
            id: row
            for id, row in zip(ids, found.rows_N.tolist(), strict=True)
            if int(index.ids_R[row]) >= 0
        }
        assert all(int(index.ids_R[row]) == id for id, row in live.items())
        assert len(set(live.values())) == len(live)
        assert len(held(index)) == int((index.ids_R > 0).sum()), "an id has two rows"
        assert sorted(found.begun_L.tolist()) == sorted(set(found.begun_L.tolist()))
        if policy.ttl is None:
            for bucket in range(policy.buckets):
                own = index.ids_R[index.starts_B1[bucket] : index.starts_B1[bucket + 1]]
                keys = row_index.keys_of(
                    torch.tensor(sorted(before - held(index)), dtype=torch.int64)
                )
                assert not bool((own == FREE).any()) or not bool(
                    (keys >> policy.shift == bucket).any()
                )
        settled = batch if learns else settled


@pytest.mark.parametrize("impl", IMPLS)
def test_the_least_recent_or_the_least_frequent_gives_way(impl: Impl) -> None:
    lru, lfu = index_of(Policy(capacity=3)), index_of(Policy(capacity=3, evict="lfu"))
    for index in (lru, lfu):
        for now, ids in enumerate([[1, 2], [1, 3], [1], [2], [2], [3]], 1):
            use(index, ids, now, impl=impl)
    assert use(lru, [4], 7, impl=impl).counts["evicted"] == 1 and held(lru) == {2, 3, 4}
    assert use(lfu, [4], 7, impl=impl).counts["evicted"] == 1 and held(lfu) == {1, 2, 4}
    assert use(lfu, [5], 8, impl=impl).counts["evicted"] == 1 and held(lfu) == {1, 2, 5}


@pytest.mark.parametrize("impl", IMPLS)
def test_counts_grow_old(impl: Impl) -> None:
    """Used 8 times long ago is less than twice now, if a count halves with each unit of time."""
    index = index_of(Policy(capacity=2, evict="lfu", half_life=1.0))
    for now in range(1, 9):
        use(index, [1], now, impl=impl)
    for now in (20, 21):
        use(index, [2], now, impl=impl)
    (row,) = rows_of(index, [2], impl=impl)
    assert float(index.counts_R[row]) == 1.5
    use(index, [3], 22, impl=impl)
    assert held(index) == {2, 3}


@pytest.mark.parametrize("impl", IMPLS)
def test_an_id_is_admitted_with_its_third_sighting(impl: Impl) -> None:
    index = index_of(Policy(capacity=100, after=3))
    for now in (1, 2):
        found = use(index, [7, 7, 7], now, impl=impl)  # three times in a batch is one sighting
        assert found.rows_N.tolist() == [0, 0, 0] and found.counts["waiting"] == 1
    assert int(index.ids_R[use(index, [7], 3, impl=impl).rows_N]) == 7
    for now in range(4, 4 + 40):  # sightings of as many ids as there are rows halve the counts
        use(index, [1000 + 3 * now, 1001 + 3 * now, 1002 + 3 * now], now, impl=impl)
    assert int(index.counts_R[0]) < 102


def test_sightings_of_few_ids_are_counted_exactly_and_of_many_never_too_few() -> None:
    index, early = index_of(Policy(capacity=4096, after=4)), 0
    for now in range(1, 4):
        found = use(index, list(range(1, 1001)), now)
        early += found.counts["admitted"]
    assert early <= 10  # what the sketch counts too many
    assert use(index, list(range(1, 1001)), 4).counts["waiting"] == 0


@pytest.mark.parametrize("impl", IMPLS)
def test_a_probability_admits_that_share_of_sightings_and_again_the_same(impl: Impl) -> None:
    policy, count = Policy(capacity=4000, probability=0.3), 2000 if impl == "cpp" else 300
    one, other = index_of(policy), index_of(policy)
    first = use(one, list(range(1, count + 1)), 1, impl=impl)
    spread = math.sqrt(0.3 * 0.7 * count)
    assert abs(first.counts["admitted"] - 0.3 * count) < 4 * spread
    use(other, list(range(count, 0, -1)), 1, impl=impl)
    assert held(one) == held(other)
    second = use(one, list(range(1, count + 1)), 2, impl=impl)  # others have luck in the next batch
    assert abs(second.counts["admitted"] - 0.21 * count) < 4 * spread


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_that_are_too_old_are_not_found_and_leave_first(impl: Impl) -> None:
    index = index_of(Policy(capacity=3, evict="lfu", ttl=10))
    for now in range(1, 6):
        use(index, [1, 2], now, impl=impl)
    use(index, [3], 14, impl=impl)
    assert rows_of(index, [1], 15, impl)[0] != 0
    assert rows_of(index, [1, 3], 16, impl)[0] == 0 and rows_of(index, [1, 3], 16, impl)[1] != 0
    found = use(index, [4, 5], 16, impl=impl)  # though 3 was used least often
    assert held(index) == {3, 4, 5}
    assert (found.counts["expired"], found.counts["evicted"], len(found.freed_F)) == (2, 0, 2)
    found = use(index, [3], 27, impl=impl)  # it comes again, as a new id
    assert found.counts["expired"] == 1 and found.ids_L.tolist() == [3]


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_batches_that_have_not_learnt_stay(impl: Impl) -> None:
    index = index_of(Policy(capacity=3))
    use(index, [1, 2], 1, 1, 0, impl)
    use(index, [2, 3], 2, 2, 0, impl)
    found = use(index, [4, 5], 3, 3, 0, impl)
    assert (
        found.counts["crowded"] == 2
        and found.rows_N.tolist() == [0, 0]
        and held(index) == {1, 2, 3}
    )
    found = use(index, [4, 5], 4, 4, 1, impl)  # the first batch has learnt: 1 may go
    assert found.counts["crowded"] == 1 and held(index) >= {2, 3}
    found = use(index, [1, 2, 3, 4, 5, 6], 5, 5, 4, impl)
    assert found.counts["crowded"] == 3 and len(held(index)) == 3


@pytest.mark.parametrize("impl", IMPLS)
def test_missing_ids_keep_their_row(impl: Impl) -> None:
    index = index_of(Policy(capacity=2, buckets=2, ttl=1, after=2))
    for now in range(1, 30):
        found = use(index, [0, 100 + now], now, impl=impl)
        assert found.rows_N[0] == 1 and int(index.ids_R[1]) == 0
    assert index.ids_R[index.starts_B1[:-1]].tolist() == [SHARED, SHARED]
    assert rows_of(index, [0], 1000, impl) == [1]


def test_an_index_says_what_is_wrong_with_its_rows() -> None:
    index = index_of(Policy(capacity=8))
    use(index, [3, 4], 1, impl="cpp" if not missing() else "reference")
    if not missing():
        index.ids_R[2:4] = 3
        index.work = None
        with pytest.raises(ValueError, match="two rows"):
            use(index, [5], 2, impl="cpp")


@built
def test_it_is_full_before_anything_leaves() -> None:
    """Buckets of 8,192 rows and more: the first id leaves when 95 % of the rows are in use, or
    later.
    """
    policy = Policy(capacity=1_000_000, buckets=64)
    index, random = index_of(policy), torch.Generator().manual_seed(0)
    now, kept = 0, 0
    while True:
        now += 1
        ids_N = torch.randint(0, MOST, (8192,), generator=random)
        found = row_index.admit(index, row_index.keys_of(ids_N), now, now, now - 1)
        if found.counts["evicted"]:
            break
        kept += found.counts["admitted"]
    assert kept > 0.95 * policy.capacity


@built
def test_memory_stays_where_ids_drift() -> None:
    """Half a million ids through a thousand rows: no tensor grows, and the table holds the last
    ones.
    """
    index = index_of(Policy(capacity=1000))
    for now in range(1, 501):
        row_index.admit(
            index, row_index.keys_of(torch.arange(1000 * now, 1000 * now + 1000)), now, now, now - 1
        )
    assert held(index) == set(range(500_000, 501_000))
    assert index.work.nbytes == index.policy.index_bytes(index.policy.rows)


def test_keys_are_a_bijection() -> None:
    ids_N = torch.cat(
        [torch.arange(1000), MOST - torch.arange(1000), torch.randint(0, MOST, (1000,))]
    )
    for impl in ("reference", "auto"):
        keys_N: Tensor = row_index.keys_of(ids_N, impl=impl)  # type: ignore[arg-type]
        assert torch.equal(unmix63(keys_N), ids_N) and bool((keys_N >= 0).all())
    assert int(row_index.keys_of(torch.tensor([0]))) == 0
    # of neighbours: even
    counts = torch.bincount(row_index.keys_of(torch.arange(1, 64_001)) >> 57, minlength=64)
    assert float(((counts - 1000.0) ** 2 / 1000).sum()) < 110


@pytest.mark.parametrize(
    "wrong",
    [{"capacity": 0}, {"capacity": 1 << 31}, {"capacity": 1 << 24}, {"after": 0}, {"after": 256}, {"probability": 0.0},
     {"probability": 1.5}, {"ttl": 0}, {"half_life": 3.0}, {"half_life": -1.0, "evict": "lfu"}],
)  # fmt: skip
def test_policies_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Policy(**{"capacity": 10, **wrong})


@pytest.mark.parametrize("buckets", [1, 2, 8])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 16])
def test_blocks_are_whole_buckets_and_all_of_them(buckets: int, parts: int) -> None:
    policy = Policy(capacity=1001, buckets=buckets)
    blocks = policy.blocks(parts)
    assert len(blocks) == parts
    rows = [at for at, _ in blocks]
    assert rows[0][0] == 0 and rows[-1][1] == policy.rows == 1001 + buckets + 1
    assert all(one[1] == other[0] for one, other in pairwise(rows))
    starts = {policy.start(bucket) for bucket in range(buckets + 1)}
    assert {edge for at in rows for edge in at} <= starts
