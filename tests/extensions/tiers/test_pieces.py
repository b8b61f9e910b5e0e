"""Large files, written and read in pieces."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from sparrow.core import UserError
from sparrow.extensions.tiers import pieces
from sparrow.kernels.checksum import mixed_sum


@pytest.mark.parametrize("size", [0, 1, 7, 8192, 8193, 8192 * 9 - 3, 200_000])
@pytest.mark.parametrize("is_direct", [True, False])
def test_a_file_is_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, is_direct: bool
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 8192)
    if not is_direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    data = np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)

    def parts(first: int, last: int) -> Iterator[torch.Tensor]:
        time.sleep(0.01 * (first % 3))  # some come later than the next
        for low, high in pairwise([first, min(first + 5, last), last]):
            yield torch.from_numpy(data[low:high])

    path, wanted = tmp_path / "file", data.tobytes()
    path.write_bytes(b"x" * 300_000)  # what was there is gone
    entry = pieces.write(path, size, parts)
    assert path.read_bytes() == wanted
    words = torch.frombuffer(bytearray(wanted + bytes(-size % 8 or 8)), dtype=torch.int64)[
        : -(-size // 8)
    ]
    assert entry == {"bytes": size, "mixed_sum": mixed_sum(words, 0, impl="reference") % 2**64}
    with open(path, "rb") as file:
        assert pieces.sum_of(file) == entry["mixed_sum"]
    for at in {0, size // 2, size - 1} if size else ():
        path.write_bytes(wanted[:at] + bytes([wanted[at] ^ 1]) + wanted[at + 1 :])
        with open(path, "rb") as file:
            assert pieces.sum_of(file) != entry["mixed_sum"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_a_full_disk() -> None:
    with pytest.raises(OSError, match="No space left"):
        pieces.write(
            Path("/dev/full"),
            100,
            lambda first, last: [torch.ones(last - first, dtype=torch.uint8)],
        )


def test_a_piece_that_cannot_be_read(tmp_path: Path) -> None:
    def parts(first: int, last: int) -> Iterator[torch.Tensor]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pieces.write(tmp_path / "file", 100, parts)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="there is no file that fails")
def test_a_device_that_fails() -> None:
    told = (
        r"^/proc/self/mem: cannot be read \(Input/output error\); check the device, or delete the"
        r" checkpoint's"
    )
    with open("/proc/self/mem", "rb") as file, pytest.raises(UserError, match=told):
        pieces.sum_of(file)
