"""Large files, written and read in pieces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sparrow.checkpoint import pieces
from sparrow.kernels.block_io import mixed_sum


@pytest.mark.parametrize("sizes", [[], [0], [1], [8192], [8193], [3, 0, 50_000, 8192 * 5 - 3, 7], [200_000]])
@pytest.mark.parametrize("is_direct", [True, False])
def test_a_file_is_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int], is_direct: bool
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 8192)
    if not is_direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    random = torch.Generator().manual_seed(0)
    parts = [torch.randint(256, (size,), dtype=torch.uint8, generator=random) for size in sizes]
    memory = torch.zeros(max(sizes, default=0), dtype=torch.uint8)

    def given():  # one after the other in the same memory
        for part in parts:
            memory[: len(part)] = part
            yield memory[: len(part)]

    path, data = tmp_path / "file", b"".join(part.numpy().tobytes() for part in parts)
    path.write_bytes(b"x" * 300_000)  # what was there is gone
    entry = pieces.write(path, given())
    assert path.read_bytes() == data
    words = torch.frombuffer(bytearray(data + bytes(-len(data) % 8 or 8)), dtype=torch.int64)[: -(-len(data) // 8)]
    assert entry == {"bytes": len(data), "mixed_sum": mixed_sum(words, 0, impl="reference") % 2**64}
    with open(path, "rb") as file:
        assert pieces.sum_of(file) == entry["mixed_sum"]
    for at in {0, len(data) // 2, len(data) - 1} if data else ():
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with open(path, "rb") as file:
            assert pieces.sum_of(file) != entry["mixed_sum"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_a_full_disk() -> None:
    with pytest.raises(OSError, match="No space left"):
        pieces.write(Path("/dev/full"), [torch.ones(100, dtype=torch.uint8)])


def test_a_part_that_cannot_be_read(tmp_path: Path) -> None:
    def given():
        yield torch.ones(100, dtype=torch.uint8)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pieces.write(tmp_path / "file", given())
