from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparrow.core import UserError
from sparrow.embeddings import Direct, Hashed, LogTable, Numbering
from sparrow.embeddings.addressing import (
    Size,
    coprime,
    cut,
    hashed,
    mixed_dimension,
    path,
    quotient_remainder,
)
from sparrow.embeddings.addressing.mixed_dimension import popularity_dims
from sparrow.extensions.dynamic_ids import addressing as dynamic

MASK = (1 << 64) - 1


def splitmix(x: int, seed: int, rows: int) -> int:
    """The definition, in Python's unbounded integers."""
    if x == 0:
        return 0
    h = (x + (seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % (1 << 63)) & MASK
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & MASK
    return 1 + ((h ^ (h >> 31)) & ((1 << 63) - 1)) % (rows - 1) if rows > 1 else 0


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    st.integers(0, 5),
    st.integers(1, 10**7),
)
def test_hashed_is_its_definition(ids: list[int], seed: int, rows: int) -> None:
    slots = Hashed(rows, seed).rows_of(torch.tensor(ids, dtype=torch.int64))[0]
    assert slots.tolist() == [splitmix(i, seed, rows) for i in ids]


def test_hashed_spreads_evenly() -> None:
    counts = torch.bincount(Hashed(101).rows_of(torch.arange(100_001))[0], minlength=101)
    assert counts[0] == 1  # a missing id shares its row with none
    counts = counts[1:]
    chi2 = float(((counts - 1000.0) ** 2 / 1000).sum())
    assert chi2 < 160  # 99 degrees of freedom: beyond the 99.99th percentile is no accident


def test_direct_is_the_identity() -> None:
    assert Direct(5).rows_of(torch.tensor([4, 0]))[0].tolist() == [4, 0]


@pytest.mark.parametrize("kind", [Direct, Hashed])
def test_no_rows(kind: type) -> None:
    with pytest.raises(UserError, match="rows: 0 is out of range; give a number of 1 or more"):
        kind(0)


# -- complementary partitions ----------------------------------------------------------------------


def digits(i: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Mixed radix, in Python's integers."""
    found = []
    for size in sizes[:-1]:
        found.append(i % size)
        i //= size
    return (*found, i)


PARTITIONS: dict[str, quotient_remainder.Config | coprime.Config] = {
    "quotient and remainder": quotient_remainder.Config(),
    "60 ids a row": quotient_remainder.Config(collisions=60),
    "three digits": quotient_remainder.Config(parts=3, collisions=16),
    "four equal digits": quotient_remainder.Config(parts=4, collisions=0),
    "coprime": coprime.Config(),
    "three coprime": coprime.Config(parts=3, collisions=60),
    "three of a size": coprime.Config(parts=3, collisions=0),
}


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 30, 97, 1000, 4097])
def test_partitions_are_their_definition_and_tell_all_ids_apart(name: str, rows: int) -> None:
    made = PARTITIONS[name].build(Numbering(rows))
    parts = made.rows_of(torch.arange(rows))
    combined = list(zip(*(part.tolist() for part in parts), strict=True))
    if made.split is quotient_remainder.digits:
        assert combined == [digits(i, made.sizes) for i in range(rows)]
    else:
        assert combined == [tuple(i % size for size in made.sizes) for i in range(rows)]
    assert len(set(combined)) == rows
    assert all(
        int(part.min()) >= 0 and int(part.max()) < size
        for part, size in zip(parts, made.sizes, strict=True)
    )
    assert [(size.name, size.rows, size.begin) for size in made.components(8)] == [
        (part, size, 1.0 if number else None)
        for number, (part, size) in enumerate(zip(made.names, made.sizes, strict=True))
    ]


@pytest.mark.parametrize("name", PARTITIONS)
def test_partitions_beyond_what_a_float_holds(name: str) -> None:
    rows = 2**40
    made = PARTITIONS[name].build(Numbering(rows))
    ids = [0, 2**24 - 1, 2**24, 2**24 + 1, 2**26 + 3, 2**31 - 1, 2**31, 2**33 + 5, rows - 1]
    combined = list(zip(*(part.tolist() for part in made.rows_of(torch.tensor(ids))), strict=True))
    told = [
        (
            digits(i, made.sizes)
            if made.split is quotient_remainder.digits
            else tuple(i % m for m in made.sizes)
        )
        for i in ids
    ]
    assert combined == told and len(set(combined)) == len(ids)


def test_sizes_of_partitions() -> None:
    assert PARTITIONS["quotient and remainder"].build(Numbering(1000)).sizes == (250, 4)
    assert PARTITIONS["four equal digits"].build(Numbering(10_001)).sizes == (11, 10, 10, 10)
    assert PARTITIONS["three of a size"].build(Numbering(1000)).sizes == (10, 11, 13)
    given = quotient_remainder.Config(sizes=(5, 3, 4)).build(Numbering(60))
    assert given.sizes == (5, 3, 4) and given.names == ("digit0", "digit1", "digit2")
    assert [
        s.dim
        for s in coprime.Config(parts=3, operation="concat").build(Numbering(99)).components(16)
    ] == [5, 5, 6]
    assert [
        s.begin for s in coprime.Config(operation="add").build(Numbering(99)).components(16)
    ] == [None, 0.0]


@pytest.mark.parametrize(
    ("config", "ids", "told"),
    [
        (
            quotient_remainder.Config(sizes=(5, 3)),
            Numbering(16),
            "sizes: 5 x 3 tell 15 ids apart, and there are 16",
        ),
        (coprime.Config(sizes=(6, 9)), Numbering(20), "sizes: 6 and 9 have the divisor 3"),
        (coprime.Config(), Numbering(20, "hash"), "the log's ids are hashes; set fold = true"),
        (path.Config(), Numbering(20, "hash"), "path: the log's ids are hashes"),
        (
            cut.Config(rows=5),
            Numbering(20, "value"),
            "cut: ids must be numbered by frequency, and the log's are numbered by value; prepare",
        ),
    ],
)
def test_what_cannot_be_partitioned(config: Any, ids: Numbering, told: str) -> None:
    with pytest.raises(UserError, match=told):
        config.build(ids)


@pytest.mark.parametrize(
    ("member", "settings", "told"),
    [
        (quotient_remainder, {"collisions": -1}, "collisions: -1 is out of range"),
        (quotient_remainder, {"parts": 1}, "parts: 1 is out of range"),
        (coprime, {"sizes": (7,)}, "sizes: 1 given; name 2 or more"),
        (coprime, {"sizes": (7, 0)}, "sizes: 0 is out of range"),
        (cut, {}, "rows, fraction: give one of the two"),
        (cut, {"rows": 5, "fraction": 0.5}, "rows, fraction: give one of the two"),
        (cut, {"fraction": 0.0}, "fraction: 0.0 is out of range"),
        (path, {"hidden": 0}, "hidden: 0 is out of range"),
    ],
)
def test_settings_out_of_range(member: Any, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        member.Config(**settings)


def test_more_columns_than_vectors_beside_each_other_can_share() -> None:
    with pytest.raises(
        UserError,
        match="parts: 2 parts cannot share 1 columns; give 1 or fewer, or raise model.dim",
    ):
        quotient_remainder.Config(operation="concat").build(Numbering(9)).components(1)


def test_folded_hashes_are_partitioned_as_their_rows() -> None:
    made = quotient_remainder.Config(fold=True).build(Numbering(101, "hash"))
    ids = torch.randint(-(2**63), 2**63 - 1, (1000,))
    assert made.ids is None
    for part, of_row in zip(
        made.rows_of(ids), made.split(Hashed(101).rows_of(ids)[0], made.sizes), strict=True
    ):
        assert torch.equal(part, of_row)


def test_cut_keeps_the_first_ids() -> None:
    made = cut.Config(rows=4).build(Numbering(10))
    assert made.rows_of(torch.arange(10))[0].tolist() == [0, 1, 2, 3 - 0, 3, 3, 3, 3, 3, 3]
    assert made.components(8) == (Size("", 4, 8),)
    assert cut.Config(rows=40).build(Numbering(10)).rows_of(torch.arange(10))[0].tolist() == list(
        range(10)
    )
    assert cut.Config(fraction=0.5).build(Numbering(10)).frequent == 4


def test_paths_tell_ids_apart_beyond_what_a_float_holds() -> None:
    """Ids of one row go through MLPs of their own, those of one bucket through the same."""
    made = path.Config(rows=2**30).build(Numbering(2**33))
    ids_N = torch.tensor(
        [2**24, 2**24 + 1, 2**30 + 2**24, 2**31 + 2**24, 2**32 + 2**24, 2**33 - 2**30 + 2**24]
    )
    assert made.rows_of(ids_N)[0].tolist() == [i % 2**30 for i in ids_N.tolist()]
    combine: Any = made.combine(2)
    for weight in combine.parameters():
        nn.init.uniform_(weight, 0.1, 1.0, generator=torch.Generator().manual_seed(weight.numel()))
    found = combine([torch.ones(6, 2)], ids_N).tolist()
    assert found[0] == found[1] and len({tuple(v) for v in found}) == 5


# -- mixed dimensions ------------------------------------------------------------------------------

# the 26 tables of Criteo Kaggle in the public DLRM script
KAGGLE = [
    1460,
    583,
    10131227,
    2202608,
    305,
    24,
    12517,
    633,
    3,
    93145,
    5683,
    8351593,
    3194,
    27,
    14992,
    5461306,
    10,
    5652,
    2173,
    4,
    7046547,
    18,
    15,
    286181,
    105,
    142572,
]


@pytest.mark.parametrize(
    ("power_of_two", "numbers"),
    [(False, 33_786_932), (True, 33_789_720)],
    ids=["whole", "powers of two"],
)
def test_dims_of_criteo_kaggle(power_of_two: bool, numbers: int) -> None:
    dims = popularity_dims(
        [1 / n for n in KAGGLE], KAGGLE, [16] * 26, 0.3, power_of_two=power_of_two
    )
    assert sum(n * d for n, d in zip(KAGGLE, dims, strict=True)) == numbers
    plain = [(16, n) for n in KAGGLE]
    bytes_ = [
        sum(n * (4 * d + 5) for d, n in of) for of in (plain, list(zip(dims, KAGGLE, strict=True)))
    ]
    # AdaGrad, touched
    assert round(16 * sum(KAGGLE) / numbers, 1) == 16.0 and round(bytes_[0] / bytes_[1], 1) == 7.7
    assert dims[KAGGLE.index(3)] == 16 and min(dims) == 1
    assert [d for _, d in sorted(zip(KAGGLE, dims, strict=True))] == sorted(dims, reverse=True)


@pytest.mark.parametrize(
    ("collisions", "rows", "fewest"), [(4, 8_440_878, 8_440_878), (60, 564_002, 563_988)]
)
def test_partitions_of_criteo_kaggle(collisions: int, rows: int, fewest: int) -> None:
    """With as many quotients as the public script has, and with as many as occur."""
    found = [[], []]  # type: ignore[var-annotated]
    for n in KAGGLE:
        sizes = (-(-n // collisions), collisions)
        for part, config in zip(found, ({"sizes": sizes}, {"collisions": collisions}), strict=True):
            made = quotient_remainder.Config(**config).build(Numbering(n)) if n > 200 else Direct(n)  # type: ignore[arg-type]
            part.append(sum(size.rows for size in made.components(16)))
    assert [sum(part) for part in found] == [rows, fewest]


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e3)), min_size=1, max_size=9),
    st.sampled_from([8, 16, 24]),
    st.floats(0, 1),
    st.floats(0.01, 1),
    st.booleans(),
)
def test_a_budget_of_numbers_is_kept_and_used(
    blocks: list[tuple[int, float]], dim: int, alpha: float, share: float, power_of_two: bool
) -> None:
    rows, popularity = [n for n, _ in blocks], [p for _, p in blocks]
    budget = max(share * dim * sum(rows), sum(rows))
    dims = popularity_dims(popularity, rows, [dim] * len(rows), alpha, budget, power_of_two)
    assert sum(n * d for n, d in zip(rows, dims, strict=True)) <= budget
    assert all(1 <= d <= dim for d in dims)
    falling = [d for _, d in sorted(zip(popularity, dims, strict=True))]
    assert falling == sorted(falling)
    if alpha == 0 and not power_of_two:
        assert (
            dims == [min(dim, int(budget // sum(rows) + 1e-9))] * len(rows) or len(set(dims)) == 1
        )


def test_blocks_of_equal_popularity() -> None:
    counts = torch.tensor([40, 20, 10, 10, 5, 5, 4, 3, 2, 1])
    tables = [
        LogTable(Numbering(10), 16, lambda: counts),
        LogTable(Numbering(10), 16, lambda: counts),
    ]
    made = mixed_dimension.Config(alpha=0.5, blocks=2).settled(tables)
    assert made[0] == made[1] and made[0].edges == (2,)
    # the 60 lookups of the first two rows are 30 each, and the 40 of the others 5 each
    assert made[0].dims == (16, round(16 * (5 / 30) ** 0.5))
    assert mixed_dimension.Config(alpha=0.0, blocks=4).settled(tables)[0].dims == (16,) * 4
    assert made[0].settled(tables)[0] == made[0]


def test_popularity_is_measured_over_all_tables() -> None:
    often, seldom = torch.full((10,), 100), torch.full((10,), 1)
    tables = [
        LogTable(Numbering(10), 16, lambda: often),
        LogTable(Numbering(10), 16, lambda: seldom),
    ]
    assert [one.dims for one in mixed_dimension.Config(alpha=0.3).settled(tables)] == [(16,), (4,)]
    halved = mixed_dimension.Config(alpha=0.3, budget=0.5).settled(tables)
    assert sum(one.dims[0] * 10 for one in halved) <= 0.5 * 320 and halved[0].dims > halved[1].dims


def test_a_budget_is_kept_where_tables_differ_in_dim() -> None:
    often, seldom = torch.full((10,), 10), torch.full((10,), 1)
    tables = [
        LogTable(Numbering(10), 16, lambda: seldom),
        LogTable(Numbering(10), 32, lambda: often),
    ]
    made = mixed_dimension.Config(alpha=1.0, budget=0.5).settled(tables)
    assert 0.5 * 480 - 20 < sum(10 * one.dims[0] for one in made) <= 0.5 * 480
    assert [one.dims for one in mixed_dimension.Config(alpha=0.0).settled(tables)] == [(16,), (32,)]


def test_blocks_need_ids_by_frequency() -> None:
    for order in ("value", "hash"):
        with pytest.raises(
            UserError, match="by frequency, and the log's .*; prepare it anew with kind"
        ):
            mixed_dimension.Config(blocks=2).settled(
                [LogTable(Numbering(9, order), 4, lambda: torch.ones(9))]
            )  # type: ignore[arg-type]
    with pytest.raises(UserError, match="dims: not settled"):
        mixed_dimension.Config().build(Numbering(9))
    with pytest.raises(UserError, match="dims: 8 is more than the 4 of the model's vectors"):
        mixed_dimension.Config(dims=(8,)).build(Numbering(9)).components(4)
    with pytest.raises(UserError, match="budget: 5 numbers are fewer than the rows, 9"):
        popularity_dims([1.0], [9], [4], 0.3, budget=5)
    with pytest.raises(UserError, match="edges: 9 is not below the 9 ids"):
        mixed_dimension.Config(dims=(2, 1), edges=(9,)).build(Numbering(9))


# -- sizes that stay -------------------------------------------------------------------------------

SETTLED: dict[str, Any] = {
    "hashed": hashed.Config(),
    "quotient": quotient_remainder.Config(),
    "digits": quotient_remainder.Config(parts=3, collisions=16),
    "path": path.Config(),
    "cut": cut.Config(fraction=0.3),
    "coprime": coprime.Config(sizes=(35, 3)),
    "dims": mixed_dimension.Config(),
    "blocks": mixed_dimension.Config(blocks=3),
    "dynamic": dynamic.Config(after=2),
}


@pytest.mark.parametrize("name", SETTLED)
def test_settled_sizes_make_the_same_rows_and_keep_them_when_the_log_grows(name: str) -> None:
    counts = torch.arange(100, 0, -1)
    table = LogTable(Numbering(100), 8, lambda: counts)
    (made,) = SETTLED[name].settled([table])
    assert made.settled([table]) == [made]
    ids = torch.arange(100)
    now, grown = made.build(Numbering(100)), made.build(Numbering(105))
    if name not in ("dims", "blocks"):
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                SETTLED[name].build(Numbering(100)).rows_of(ids), now.rows_of(ids), strict=False
            )
        )
    assert all(torch.equal(a, b) for a, b in zip(now.rows_of(ids), grown.rows_of(ids), strict=True))
    for one, other in zip(now.components(8), grown.components(8), strict=True):
        assert (one.name, one.dim) == (other.name, other.dim) and one.rows <= other.rows


def test_a_partition_that_cannot_grow() -> None:
    made = coprime.Config(sizes=(5, 21)).settled(
        [LogTable(Numbering(100), 8, lambda: torch.ones(100))]
    )[0]
    assert made.build(Numbering(105)).sizes == (5, 21)
    with pytest.raises(UserError, match="sizes: 5 x 21 tell 105 ids apart, and there are 106"):
        made.build(Numbering(106))
