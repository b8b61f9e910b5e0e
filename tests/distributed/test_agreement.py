from __future__ import annotations

from typing import Any

import pytest

from sparrow.core import UserError
from sparrow.distributed import World, agreement, said


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([1, 1, 1], ""),
        ([0, 0, 1], "seed: 1 on rank 2, 0 on the others"),
        ([0, 1], "seed: 0 on rank 0, 1 on rank 1"),
        ([1, 2, 2, 2, 3, 1, 1, 2], "seed: 3 on rank 4, 1 on ranks 0, 5 to 6, 2 on the others"),
        ([None, 0.1, 0.1], "seed: unset on rank 0, 0.1 on the others"),
    ],
)
def test_a_difference_in_words(values: list[Any], told: str) -> None:
    assert agreement._difference("seed", values) == told


def test_one_rank_says_it_to_itself() -> None:
    def fail() -> int:
        raise UserError("no")

    assert said(World(), "it", lambda: {"step": None}) == {"step": None}
    with pytest.raises(UserError, match="no"):
        said(World(), "it", fail)
