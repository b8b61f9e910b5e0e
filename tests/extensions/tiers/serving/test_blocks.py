from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparrow.core import UserError
from sparrow.extensions.tiers.serving import blocks as module
from sparrow.extensions.tiers.serving.blocks import MAP, ROWS, open_blocks
from sparrow.kernels.block_io import Blocks, Layout
from sparrow.kernels.formats import Field

LAYOUT = Layout(fields={"weight": Field(width=16, across="cut")}, rows=5000)
FIELDS = {"weight": torch.randn(5000, 16)}


def read(blocks: Blocks) -> torch.Tensor:
    into = {"weight": torch.zeros(5000, 16)}
    blocks.wait(blocks.fetch(torch.arange(5000), into, torch.arange(5000)))
    blocks.close()
    return into["weight"]


def test_a_table_is_written_once(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "t"
    assert read(open_blocks(place, LAYOUT, "t", FIELDS, "auto")).equal(FIELDS["weight"])
    before = (place / ROWS).stat()
    none = {"weight": torch.zeros(5000, 16)}
    assert read(open_blocks(place, LAYOUT, "t", none, "auto")).equal(FIELDS["weight"])
    assert (place / ROWS).stat() == before or (
        place / ROWS
    ).stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in place.parent.iterdir()] == ["t"]


def test_rows_of_zeros_take_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEP", 10_000)  # several steps, one of zeros alone
    few = {"weight": FIELDS["weight"].clone()}
    few["weight"][1000:4000] = 0
    few["weight"][1500] = -0.0  # its bits are not those of 0
    blocks = open_blocks(tmp_path / "t", LAYOUT, "t", few, "auto")
    into = {"weight": torch.zeros(5000, 16)}
    never_U = blocks.wait(blocks.fetch(torch.arange(5000), into, torch.arange(5000)))
    assert int(never_U.sum()) == 2999
    found = into["weight"]
    assert found.view(torch.int32).equal(few["weight"].view(torch.int32))
    # at the ends of what is written
    assert 2000 / 64 < blocks.counters["blocks_read"] < 2001 / 63 + 5


def test_several_may_write_it_at_the_same_time(tmp_path: Path) -> None:
    found: list[torch.Tensor] = []

    def work() -> None:
        found.append(read(open_blocks(tmp_path / "t", LAYOUT, "t", FIELDS, "auto")))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(of.equal(FIELDS["weight"]) for of in found)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:8000])


def exchanged(path: Path) -> None:
    other = path.parent.with_name("other")
    open_blocks(other, LAYOUT, "t", FIELDS, "auto").close()
    shutil.copy(other / path.name, path)


@pytest.mark.parametrize(
    ("harm", "name", "says"),
    [
        (flipped, MAP, r"map: damaged \(its checksum differs\)"),
        (Path.unlink, MAP, "map: missing or damaged"),
        (exchanged, MAP, "is of another run"),
        (Path.unlink, ROWS, "rows.blocks is missing"),
        (cut, ROWS, "rows.blocks is cut"),
        (exchanged, ROWS, "is of another run"),
    ],
)
def test_what_is_damaged_is_refused(
    harm: Callable[[Path], None], name: str, says: str, tmp_path: Path
) -> None:
    place = tmp_path / "t"
    open_blocks(place, LAYOUT, "t", FIELDS, "auto").close()
    harm(place / name)
    with pytest.raises(UserError, match=rf"{says}.*; remove {place} and load the model again"):
        open_blocks(place, LAYOUT, "t", FIELDS, "auto")


def test_a_full_disk_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage: Any = lambda path: SimpleNamespace(free=1000)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(
        UserError, match=r"table 't' takes 0.00 GB there as blocks, and 0.00 GB are free; make room"
    ):
        open_blocks(tmp_path / "t", LAYOUT, "t", FIELDS, "auto")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy is one of serving: nothing trains here."""

    def full(self: Blocks) -> None:
        raise self.file.failed(None, errno.ENOSPC, "write")

    monkeypatch.setattr(Blocks, "sync", full)
    with pytest.raises(
        UserError, match=r"No space left on device; make room there, or name another folder$"
    ):
        open_blocks(tmp_path / "t", LAYOUT, "t", FIELDS, "auto")
    assert not (tmp_path / "t").exists()
