"""How records lie in blocks."""

from __future__ import annotations

import pytest
import torch

from sparrow.core import UserError
from sparrow.kernels.block_io.layout import HEAD, Layout, checksum
from sparrow.kernels.formats import Field


@pytest.mark.parametrize("block", [512, 1024, 4096, 65536])
@pytest.mark.parametrize("width", [1, 2, 3, 7, 69, 100, 490])
def test_as_many_records_as_fit(block: int, width: int) -> None:
    layout = Layout(
        fields={"w": Field(width=width, dtype=torch.uint8, across="cut")}, rows=1001, block=block
    )

    def bytes_of(records: int) -> int:
        return HEAD + -(-records // 8) + records * width

    assert bytes_of(layout.per_block) <= block < bytes_of(layout.per_block + 1)
    assert layout.start + layout.per_block * layout.record_bytes == bytes_of(layout.per_block)
    assert (layout.blocks - 1) * layout.per_block < 1001 <= layout.blocks * layout.per_block


def test_a_row_of_16_columns_with_its_state() -> None:
    fields = {
        "values": Field(width=16, across="cut"),
        "state": Field(),
        "bit": Field(dtype=torch.uint8),
    }
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


@pytest.mark.parametrize(
    ("width", "block"), [(16, 4096), (1019, 4096), (1020, 8192), (16000, 65536)]
)
def test_a_block_is_as_large_as_a_record_needs(width: int, block: int) -> None:
    assert Layout(fields={"w": Field(width=width, across="cut")}, rows=5).block == block


def test_a_record_above_all_blocks_is_refused() -> None:
    with pytest.raises(
        UserError, match="a row of 80000 bytes does not fit in 65536; lower the dim of its table"
    ):
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
