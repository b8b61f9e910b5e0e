from __future__ import annotations

from typing import Any

import pytest

from sparrow.distributed import disagreement


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([1, 1, 1], ""),
        ([0, 0, 1], "seed: 1 on rank 2, 0 on the others"),
        ([0, 1], "seed: 0 on rank 0, 1 on rank 1"),
        ([1, 2, 2, 2, 3, 1, 1, 2], "seed: 3 on rank 4, 1 on ranks 0, 5 to 6, 2 on the others"),
        ([None, 0.1, 0.1], "seed: unset on rank 0, 0.1 on the others"),
    ],
)
def test_a_difference_in_words(values: list[Any], line: str) -> None:
    assert disagreement._difference("seed", values) == line


def test_an_error_names_three_differences_and_counts_the_others() -> None:
    values_of_ranks = [dict.fromkeys("abcde", 0), dict.fromkeys("abcde", 1) | {"b": 0}]
    differences = "; ".join(f"{key}: 0 on rank 0, 1 on rank 1" for key in "acd")
    assert f"the same job: {differences}; and 1 more; start" in disagreement.describe(
        values_of_ranks
    )
