"""How records lie in blocks."""

from __future__ import annotations

import pytest
import torch

from sparrow.core import UserError
from sparrow.kernels.block_io import joined, mixed_sum
from sparrow.kernels.block_io.layout import HEAD, Layout, checksum
from sparrow.kernels.formats import Field


@pytest.mark.parametrize("block", [512, 1024, 4096, 65536])
@pytest.mark.parametrize("width", [1, 2, 3, 7, 69, 100, 490])
def test_as_many_records_as_fit(block: int, width: int) -> None:
    layout = Layout(fields={"w": Field(width=width, dtype=torch.uint8, across="cut")}, rows=1001, block=block)

    def bytes_of(records: int) -> int:
        return HEAD + -(-records // 8) + records * width

    assert bytes_of(layout.per_block) <= block < bytes_of(layout.per_block + 1)
    assert layout.start + layout.per_block * layout.record_bytes == bytes_of(layout.per_block)
    assert (layout.blocks - 1) * layout.per_block < 1001 <= layout.blocks * layout.per_block


def test_a_row_of_16_columns_with_its_state() -> None:
    fields = {"values": Field(width=16, across="cut"), "state": Field(), "bit": Field(dtype=torch.uint8)}
    layout = Layout(fields=fields, rows=10**9)
    assert (layout.record_bytes, layout.per_block, layout.blocks) == (69, 59, 16_949_153)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 500}, "block: 500 bytes; give a power of two of 512 to 65536"),
        ({"block": 256}, "block: 256 bytes"),
        ({"block": 131072}, "block: 131072 bytes"),
        ({"block": 512}, "block: a row of 4096 bytes does not fit in 512; give 8192"),
    ],
)
def test_what_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Layout(fields={"w": Field(width=1024, across="cut")}, rows=5, **options)


@pytest.mark.parametrize(("width", "block"), [(16, 4096), (1019, 4096), (1020, 8192), (16000, 65536)])
def test_a_block_is_as_large_as_a_record_needs(width: int, block: int) -> None:
    assert Layout(fields={"w": Field(width=width, across="cut")}, rows=5).block == block


def test_a_record_above_all_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="a row of 80000 bytes does not fit in 65536; lower the dim of its table"):
        Layout(fields={"w": Field(width=20_000, across="cut")}, rows=5)


def test_any_change_of_a_block_changes_its_checksum() -> None:
    words = torch.randint(1 << 62, (64,), generator=torch.Generator().manual_seed(1))
    sums = {checksum(words, 5), checksum(words, 6)}
    for word in range(1, 64):
        for bit in range(64):
            changed = words.clone()
            changed[word] ^= 1 << bit if bit < 63 else -(1 << 63)
            sums.add(checksum(changed, 5))
    swapped = words.clone()
    swapped[[3, 4]] = words[[4, 3]]
    assert len(sums | {checksum(swapped, 5)}) == 2 + 63 * 64 + 1


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


@pytest.mark.parametrize("lengths", [[], [0, 3], [8, 1, 0, 200_003], [5, 7, 4], [100_000], [65_536, 16]])
def test_parts_are_joined_and_summed(lengths: list[int]) -> None:
    random = torch.Generator().manual_seed(0)
    parts = [torch.randint(256, (length,), dtype=torch.uint8, generator=random) for length in lengths]
    made = [torch.full((-(-sum(lengths) // 8) * 8 + 64,), 7, dtype=torch.uint8) for _ in range(2)]
    sums = [joined(into, parts, 9, impl=impl) for into, impl in zip(made, ("auto", "reference"), strict=True)]
    assert sums[0] == sums[1] and torch.equal(*made)
    whole = b"".join(part.numpy().tobytes() for part in parts)
    assert made[0].numpy().tobytes() == whole.ljust(len(made[0]), b"\0")
