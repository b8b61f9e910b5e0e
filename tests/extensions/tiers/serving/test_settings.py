from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparrow.core import UserError
from sparrow.extensions.tiers.serving import Ssd

SIZES = {
    "user": 9_000_000_000,
    "item.quotient": 70_000_000,
    "item.remainder": 64_000_000,
    "cat": 63_999_999,
}


def test_which_tables_are_on_the_ssd() -> None:
    """A table's parts go with it, and a table whose name only begins so does not."""
    assert Ssd(folder=Path("x")).chosen(SIZES) == ["user", "item.quotient", "item.remainder"]
    assert Ssd(folder=Path("x"), in_memory=("item",)).chosen(SIZES) == ["user"]
    assert Ssd(folder=Path("x"), in_memory=("item",), least_mb=0).chosen({**SIZES, "items": 1}) == [
        "user", "cat", "items"
    ]  # fmt: skip
    with pytest.raises(UserError, match="in_memory: no table 'use'; did you mean 'user'"):
        Ssd(folder=Path("x"), in_memory=("use",)).chosen(SIZES)


def test_workers_divide_the_caches() -> None:
    part = Ssd(folder=Path("x"), cache_mb=900, pooled_mb=30).divided(3)
    assert (part.cache_mb, part.pooled_mb) == (300, 10)


@pytest.mark.parametrize(
    "wrong", [{"cache_mb": -1.0}, {"least_mb": float("nan")}, {"pooled_length": 0}]
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Ssd(folder=Path("x"), **wrong)
