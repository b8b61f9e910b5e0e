from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow.core import UserError
from sparrow.embeddings import Direct, Hashed, Numbering
from sparrow.embeddings.addressing import Size, coprime, cut, path, quotient_remainder
from sparrow.embeddings.addressing.quotient_remainder import QuotientRemainder

MASK = (1 << 64) - 1


def splitmix(x: int, seed: int, rows: int) -> int:
    """The definition, in Python's unbounded integers."""
    if x == 0:
        return 0
    h = (x + (seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % (1 << 63)) & MASK
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & MASK
    return 1 + ((h ^ (h >> 31)) & ((1 << 63) - 1)) % (rows - 1) if rows > 1 else 0


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), st.integers(0, 5), st.integers(1, 10**7))
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


# -- complementary partitions ---------------------------------------------------------------------------------------


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
    if isinstance(made, QuotientRemainder):
        assert combined == [digits(i, made.sizes) for i in range(rows)]
    else:
        assert combined == [tuple(i % size for size in made.sizes) for i in range(rows)]
    assert len(set(combined)) == rows
    assert all(int(part.min()) >= 0 and int(part.max()) < size for part, size in zip(parts, made.sizes, strict=True))
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
        digits(i, made.sizes) if isinstance(made, QuotientRemainder) else tuple(i % m for m in made.sizes) for i in ids
    ]
    assert combined == told and len(set(combined)) == len(ids)


def test_sizes_of_partitions() -> None:
    assert PARTITIONS["quotient and remainder"].build(Numbering(1000)).sizes == (250, 4)
    assert PARTITIONS["four equal digits"].build(Numbering(10_001)).sizes == (11, 10, 10, 10)
    assert PARTITIONS["three of a size"].build(Numbering(1000)).sizes == (10, 11, 13)
    given = quotient_remainder.Config(sizes=(5, 3, 4)).build(Numbering(60))
    assert given.sizes == (5, 3, 4) and given.names == ("digit0", "digit1", "digit2")
    assert [s.dim for s in coprime.Config(parts=3, operation="concat").build(Numbering(99)).components(16)] == [5, 5, 6]
    assert [s.begin for s in coprime.Config(operation="add").build(Numbering(99)).components(16)] == [None, 0.0]


@pytest.mark.parametrize(
    ("config", "ids", "told"),
    [
        (quotient_remainder.Config(sizes=(5, 3)), Numbering(16), "sizes: 5 x 3 tell 15 ids apart, and there are 16"),
        (coprime.Config(sizes=(6, 9)), Numbering(20), "sizes: 6 and 9 have the divisor 3"),
        (coprime.Config(), Numbering(20, "hash"), "the log's ids are hashes; set fold = true"),
        (path.Config(), Numbering(20, "hash"), "path: the log's ids are hashes"),
        (cut.Config(rows=5), Numbering(20, "value"), "cut: the log's ids are numbered by value, not by frequency"),
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
        (coprime, {"sizes": (7,)}, "sizes: one is given; name two or more"),
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
    with pytest.raises(UserError, match="dim: 1 is out of range; give a number of 2 or more"):
        quotient_remainder.Config(operation="concat").build(Numbering(9)).components(1)


def test_folded_hashes_are_partitioned_as_their_rows() -> None:
    made = quotient_remainder.Config(fold=True).build(Numbering(101, "hash"))
    ids = torch.randint(-(2**63), 2**63 - 1, (1000,))
    assert made.ids is None
    for part, of_row in zip(made.rows_of(ids), made.parts_of(Hashed(101).rows_of(ids)[0]), strict=True):
        assert torch.equal(part, of_row)


def test_cut_keeps_the_first_ids() -> None:
    made = cut.Config(rows=4).build(Numbering(10))
    assert made.rows_of(torch.arange(10))[0].tolist() == [0, 1, 2, 3 - 0, 3, 3, 3, 3, 3, 3]
    assert made.components(8) == (Size("", 4, 8),)
    assert cut.Config(rows=40).build(Numbering(10)).rows_of(torch.arange(10))[0].tolist() == list(range(10))
    assert cut.Config(fraction=0.5).build(Numbering(10)).kept == 4
