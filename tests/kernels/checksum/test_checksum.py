"""Sums that tell whether bytes changed."""

from __future__ import annotations

import pytest
import torch

from sparrow.kernels.checksum import joined, mixed_sum


def test_the_sum_of_a_file_is_that_of_its_pieces() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (1001,), generator=torch.Generator().manual_seed(0))
    found = mixed_sum(words, 5)
    assert found == mixed_sum(words, 5, impl="reference") != mixed_sum(words, 6)
    parts = mixed_sum(words[:300], 5) + mixed_sum(words[300:], 305)
    assert (parts - found) % 2**64 == 0
    swapped = words.clone()
    swapped[[3, 700]] = words[[700, 3]]
    assert mixed_sum(swapped, 5) != found
    assert mixed_sum(words[:0], 0) == mixed_sum(words[:0], 0, impl="reference") == 0


@pytest.mark.parametrize(
    "lengths", [[], [0, 3], [8, 1, 0, 200_003], [5, 7, 4], [100_000], [65_536, 16]]
)
def test_parts_are_joined_and_summed(lengths: list[int]) -> None:
    random = torch.Generator().manual_seed(0)
    parts = [
        torch.randint(256, (length,), dtype=torch.uint8, generator=random) for length in lengths
    ]
    made = [torch.full((-(-sum(lengths) // 8) * 8 + 64,), 7, dtype=torch.uint8) for _ in range(2)]
    sums = [
        joined(into, parts, 9, impl=impl)
        for into, impl in zip(made, ("auto", "reference"), strict=True)
    ]
    assert sums[0] == sums[1] and torch.equal(*made)
    whole = b"".join(part.numpy().tobytes() for part in parts)
    assert made[0].numpy().tobytes() == whole.ljust(len(made[0]), b"\0")
