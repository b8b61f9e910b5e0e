from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow.core import UserError
from sparrow.embeddings import Direct, Hashed

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
