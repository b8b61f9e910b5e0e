"""Damaged, cut, missing and full files, and files of others: one line with table, rows, file and
remedy.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow.core import UserError
from sparrow.kernels.block_io import BlockMap, Layout, file, remove
from tests.kernels.block_io.answered import fed, run_answered
from tests.kernels.block_io.stores import (
    FIELDS,
    LAYOUT,
    ROWS,
    WAYS,
    check,
    empty,
    make,
    read,
    records,
)
from tests.kernels.embedding_bag.cases import built
from tests.small_disk import on_small_disk

BLOCK, OTHER = 3, 5  # of the table
ROWS_OF_BLOCK = "table ads, rows 18 to 23: .*rows is damaged"
each_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "PATIENCE", 0.1)


def written(path: Path, way: Any, versions: int = 1) -> BlockMap:
    """A file in which all rows were put."""
    with make(path, way) as blocks:
        for version in range(versions):
            blocks.put(torch.arange(ROWS), records(torch.arange(ROWS), version))
            map = blocks.sync()
            blocks.keep(map)
    return map


def at(map: BlockMap, block: int) -> slice:
    """Where a block is in its file."""
    start = int(map.places_K[block]) * LAYOUT.block
    return slice(start, start + LAYOUT.block)


def damage(path: Path, change: Any) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def expect(path: Path, way: Any, map: BlockMap, message: str) -> None:
    """That reading the block and writing to it say so, and that all else can be read."""
    with make(path, way, map=map) as blocks:
        rows_U, into = torch.tensor([20]), empty()
        with pytest.raises(UserError, match=message) as told:
            blocks.wait(blocks.fetch(rows_U, into, rows_U))
        assert "\n" not in str(told.value) and "; " in str(told.value)
        assert all((tensor == 77).all() for tensor in into.values()), "a damaged row was given"
        with pytest.raises(UserError, match=message):
            read(blocks)  # it lies among others
        others_U = torch.cat([torch.arange(18), torch.arange(24, ROWS)])
        blocks.wait(blocks.fetch(others_U, into, others_U))
        assert all(
            torch.equal(into[n][others_U], values) for n, values in records(others_U, 0).items()
        )
        blocks.put(rows_U, records(rows_U, 9))
        with pytest.raises(UserError, match=message):
            blocks.sync()
        blocks.wait(blocks.fetch(rows_U, into, rows_U))  # it waits in the queue
        assert all(torch.equal(into[n][rows_U], values) for n, values in records(rows_U, 9).items())


@each_way
@pytest.mark.parametrize("byte", [0, 7, 8, 12, 16, 17, 200, 510])
def test_a_flipped_bit(tmp_path: Path, way: Any, byte: int) -> None:
    map = written(tmp_path / "rows", way)

    def flip(content: bytearray) -> None:
        content[at(map, BLOCK).start + byte] ^= 4

    damage(tmp_path / "rows", flip)
    expect(
        tmp_path / "rows",
        way,
        map,
        f"{ROWS_OF_BLOCK} .the checksum of block {int(map.places_K[BLOCK])} is wrong",
    )


@each_way
def test_a_misplaced_block(tmp_path: Path, way: Any) -> None:
    map = written(tmp_path / "rows", way)

    def copy(content: bytearray) -> None:
        content[at(map, BLOCK)] = content[at(map, OTHER)]

    damage(tmp_path / "rows", copy)
    told = (
        f"is number 5, generation {map.generations_K[OTHER]} instead of 3,"
        f" {map.generations_K[BLOCK]}"
    )
    expect(tmp_path / "rows", way, map, f"{ROWS_OF_BLOCK} .block .* {told}")


@each_way
def test_a_stale_block(tmp_path: Path, way: Any) -> None:
    map = written(tmp_path / "rows", way)
    with make(tmp_path / "rows", way, map=map) as blocks:
        blocks.keep(map)
        blocks.put(torch.arange(ROWS), records(torch.arange(ROWS), 0))
        newer = blocks.sync()

    def go_back(content: bytearray) -> None:
        content[at(newer, BLOCK)] = content[at(map, BLOCK)]

    damage(tmp_path / "rows", go_back)
    told = (
        f"is number 3, generation {map.generations_K[BLOCK]} instead of 3,"
        f" {newer.generations_K[BLOCK]}"
    )
    assert map.generations_K[BLOCK] < newer.generations_K[BLOCK]
    expect(tmp_path / "rows", way, newer, f"{ROWS_OF_BLOCK} .block .* {told}")


@each_way
def test_what_a_killed_process_wrote_is_not_taken_for_what_the_next_one_did(
    tmp_path: Path, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both go on from the same map, and write the same block at the same place. The second write is
    lost.
    """
    map, path = written(tmp_path / "rows", way), tmp_path / "rows"
    steps = iter([6, 2])
    monkeypatch.setattr(file.secrets, "randbelow", lambda most: next(steps))  # type: ignore[attr-defined]
    found = []
    for version in (1, 2):
        with make(path, way, map=map) as blocks:
            blocks.keep(map)
            blocks.put(torch.arange(18, 24), records(torch.arange(18, 24), version))
            found.append(blocks.sync())
        if version == 1:
            killed = path.read_bytes()[at(found[0], BLOCK)]
    assert found[0].places_K[BLOCK] == found[1].places_K[BLOCK] != map.places_K[BLOCK]

    def lose(content: bytearray) -> None:
        content[at(found[1], BLOCK)] = killed

    damage(path, lose)
    monkeypatch.undo()
    expect(
        path, way, found[1], f"{ROWS_OF_BLOCK} .block .* is number 3, generation .* instead of 3, "
    )


@each_way
def test_a_block_of_another_file(tmp_path: Path, way: Any) -> None:
    map, other = written(tmp_path / "rows", way), written(tmp_path / "other", way)
    theirs = (tmp_path / "other").read_bytes()[at(other, BLOCK)]

    def copy(content: bytearray) -> None:
        content[at(map, BLOCK)] = theirs

    damage(tmp_path / "rows", copy)
    expect(tmp_path / "rows", way, map, f"{ROWS_OF_BLOCK} .the checksum of block")


@each_way
@pytest.mark.parametrize("left", [0, 1, 511])
def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path, way: Any, left: int) -> None:
    """Reads of a block end early, alone and among its neighbours."""
    map = written(tmp_path / "rows", way)
    with make(tmp_path / "rows", way, map=map) as blocks:
        os.truncate(tmp_path / "rows", at(map, BLOCK).start + left)
        with pytest.raises(UserError, match=f"{ROWS_OF_BLOCK} .it ends within block"):
            blocks.wait(blocks.fetch(torch.tensor([20]), empty(), torch.tensor([20])))
        with pytest.raises(UserError, match="table ads, rows .* is damaged .it ends within block"):
            read(blocks)


@pytest.mark.parametrize("ends", [False, True])
@built
def test_a_ring_reads_on_after_a_part_of_a_block(tmp_path: Path, ends: bool) -> None:
    """Where the file ends within the block, it says so."""
    map = written(tmp_path / "rows", "reference")
    content, row, into = (
        (tmp_path / "rows").read_bytes()[at(map, BLOCK)],
        torch.tensor([20]),
        empty(),
    )
    with make(tmp_path / "rows", "io_uring", map=map) as blocks:
        with fed(blocks) as feed:
            ticket = blocks.fetch(row, into, row)
            for part in (content[:1], content[1:300], *([] if ends else [content[300:]])):
                feed(part)
        if ends:
            with pytest.raises(
                UserError, match=f"{ROWS_OF_BLOCK} .it ends within block {map.places_K[BLOCK]}"
            ):
                blocks.wait(ticket)
            return
        assert not blocks.wait(ticket).any()
    assert all(torch.equal(into[name][row], of) for name, of in records(row, 0).items())


def test_the_reference_goes_on_after_a_part_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it reads, and when it writes."""
    layout = Layout(fields=FIELDS, rows=ROWS, block=1 << 14)
    moved: list[int] = []

    def a_part(move: Any) -> Any:
        return lambda fd, buffers, at: moved.append(at) or move(fd, [buffers[0][:4096]], at)

    monkeypatch.setattr(os, "preadv", a_part(os.preadv))
    monkeypatch.setattr(os, "pwritev", a_part(os.pwritev))
    with make(tmp_path / "rows", "reference", layout) as blocks:
        moved.clear()  # one was tried when the file was opened
        blocks.put(torch.arange(ROWS), records(torch.arange(ROWS), 3))
        blocks.sync()
        check(blocks, dict.fromkeys(range(ROWS), 3))
    assert moved == [*range(1 << 14, 1 << 15, 4096)] * 2


PARTS = r"""
import re, sys
from pathlib import Path
import torch
from sparrow.core import UserError
from tests.kernels.block_io.answered import listen
from tests.kernels.block_io.stores import LAYOUT, ROWS, check, make, records
from tests.kernels.block_io.test_file import BLOCK, ROWS_OF_BLOCK, at, written
path = Path(sys.argv[1])
map = written(path, "reference")
content, asked, end = path.read_bytes(), [], len(path.read_bytes())

def hear(of):
    asked.append(of.count)
    of.answer(content[of.at : min(of.at + min(of.count, 300), end)])

listen(str(path), hear)
with make(path, "threads", map=map) as blocks:
    check(blocks, dict.fromkeys(range(ROWS), 0))
    assert len(asked) * 300 >= LAYOUT.block * len(map.places_K)
    end = at(map, BLOCK).start + 400
    row = torch.tensor([20])
    try: blocks.wait(blocks.fetch(row, records(torch.arange(ROWS), 0), row))
    except UserError as error: assert re.search(f"{ROWS_OF_BLOCK} .it ends within", str(error)), error
    else: raise AssertionError
"""


@built
@pytest.mark.multi
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp is Linux'")
def test_threads_read_on_after_a_part_of_a_block(tmp_path: Path) -> None:
    """Every read of the process gives 300 bytes at most."""
    run_answered(PARTS, tmp_path / "rows")


@each_way
@pytest.mark.usefixtures("fsync")
def test_a_device_that_fails(tmp_path: Path, way: Any) -> None:
    """A folder in the file's place refuses to be read or written."""
    map = written(tmp_path / "rows", way)
    blocks = make(tmp_path / "rows", way, map=map)
    folder = os.open(tmp_path, os.O_RDONLY)
    whole = os.dup(blocks.file.fd)
    os.dup2(folder, blocks.file.fd)
    row = torch.tensor([20])
    with pytest.raises(
        UserError, match="table ads, rows 18 to 23: cannot read .*rows: .*; check the device"
    ):
        blocks.wait(blocks.fetch(row, empty(), row))
    all_R = torch.arange(ROWS)
    for value in range(1, 31):
        os.dup2(folder, blocks.file.fd)
        blocks.put(all_R, records(all_R, value))
        with pytest.raises(
            UserError, match="table ads, rows .* cannot write .*rows: .*; check the device"
        ):
            blocks.sync()
        # it works again, and writes that were under way do not fail it later
        os.dup2(whole, blocks.file.fd)
        blocks.sync()
        check(blocks, dict.fromkeys(range(ROWS), value))
    read_end, write_end = os.pipe()
    os.dup2(write_end, blocks.file.fd)
    for call in (blocks.sync, blocks.snapshot):  # neither gives a map that is not on the disk
        with pytest.raises(
            UserError, match="table ads: cannot write .*rows: Invalid argument; check the device"
        ):
            call()
    os.close(read_end), os.close(write_end)
    blocks.close()
    for fd in (folder, whole):
        os.close(fd)


@contextmanager
def file_limit(bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@each_way
def test_a_file_that_cannot_grow(tmp_path: Path, way: Any) -> None:
    map, path, all_R = written(tmp_path / "rows", way), tmp_path / "rows", torch.arange(ROWS)
    with make(path, way, map=map) as blocks:
        blocks.keep(map)
        with file_limit(path.stat().st_size):
            with pytest.raises(
                UserError, match="ads, rows .*: cannot write .*: File too large; raise the limit"
            ):
                for version in range(1, 40):
                    blocks.put(all_R, records(all_R, version))
                    blocks.keep(blocks.sync())
            with pytest.raises(UserError, match="File too large"):
                blocks.sync()
            check(blocks, dict.fromkeys(range(ROWS), version))
        blocks.sync()
        check(blocks, dict.fromkeys(range(ROWS), version))
    with make(path, way, map=map) as blocks:
        check(blocks, dict.fromkeys(range(ROWS), 0))


@each_way
def test_a_block_of_which_a_part_was_written(tmp_path: Path, way: Any) -> None:
    """The system writes what fits below its limit, and refuses the rest, which is asked for
    next.
    """
    map, path, all_R = written(tmp_path / "rows", way), tmp_path / "rows", torch.arange(ROWS)
    end = (int(map.places_K.max()) + 1) * LAYOUT.block
    with open(path, "r+b") as file:
        file.truncate(end + 64 * LAYOUT.block)  # so that it need not grow
    with make(path, way, map=map) as blocks:
        blocks.keep(map)
        blocks.put(all_R, records(all_R, 1))
        with (
            file_limit(end + 512),
            pytest.raises(UserError, match="ads, rows .*: cannot write .*: File too large"),
        ):
            blocks.sync()
        check(blocks, dict.fromkeys(range(ROWS), 1))
        assert any(path.read_bytes()[end : end + 512]), "a part was written"
        blocks.sync()
        check(blocks, dict.fromkeys(range(ROWS), 1))
    with make(path, way, map=map) as blocks:
        check(blocks, dict.fromkeys(range(ROWS), 0))


@each_way
def test_a_full_queue_that_cannot_be_written(tmp_path: Path, way: Any) -> None:
    """`put` takes nothing then, and a later one goes on."""
    row, kept = torch.tensor([0]), {}
    with make(tmp_path / "rows", way, bytes_queue=2600, chance=None) as blocks:
        with file_limit(512):
            with pytest.raises(UserError, match="File too large"):
                for number in range(ROWS):
                    row = torch.tensor([number])
                    blocks.put(row, records(row, 7))
                    kept[number] = 7
            assert kept, "the first rows find room in the queue"
            check(blocks, kept)
        blocks.put(row, records(row, 8))
        kept[int(row)] = 8
        check(blocks, kept)


FULL = """
import sys, torch, os
from pathlib import Path
from sparrow.core import UserError
from tests.kernels.block_io.stores import ROWS, check, make, records
folder, way = Path(sys.argv[1]), sys.argv[2]
all_R = torch.arange(ROWS)
blocks = make(folder / "rows", way)
blocks.put(all_R, records(all_R, 0))
map = blocks.sync()
blocks.keep(map)
(folder / "other").write_bytes(b"x" * 4096 * 4)
told = 0
for version in range(1, 40):
    blocks.put(all_R, records(all_R, version))
    try:
        blocks.keep(blocks.sync())
    except UserError as error:
        assert "No space left on device; make room there" in str(error) and "table ads, rows" in str(error), error
        told += 1
        break
assert told
try: blocks.sync()
except UserError: told += 1
assert told == 2
check(blocks, dict.fromkeys(range(ROWS), version))  # what could not be written waits
os.remove(folder / "other")
blocks.sync()
check(blocks, dict.fromkeys(range(ROWS), version))
blocks.close()
with make(folder / "rows", way, map=map) as blocks:
    check(blocks, dict.fromkeys(range(ROWS), 0))
"""


@each_way
@pytest.mark.multi
def test_a_full_disk(tmp_path: Path, way: Any) -> None:
    run = [sys.executable, "-W", "ignore", "-c", FULL, str(tmp_path), way]
    done = subprocess.run([*on_small_disk(tmp_path, "96k"), *run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- files of others -------------------------------------------------------------------------------


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """Readers are not, while what they read is kept."""
    path, refused = (
        tmp_path / "rows",
        "table ads: .*rows is in use by another process; end it, or name another folder",
    )
    map = written(path, "reference")
    with (
        make(path, "auto", map=map) as first,
        make(path, "auto", map=map, is_written=False) as reader,
    ):
        with pytest.raises(UserError, match=refused):
            make(path, "auto", map=map)
        first.keep(map)
        for version in range(1, 4):
            first.put(torch.arange(ROWS), records(torch.arange(ROWS), version))
            first.sync()
            check(reader, dict.fromkeys(range(ROWS), 0))
        first.drop(map.places_K)
        for version in range(4, 7):
            first.put(torch.arange(ROWS), records(torch.arange(ROWS), version))
            first.sync()
        with pytest.raises(UserError, match="is damaged"):
            read(reader)


def test_a_file_is_removed_unless_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    map = written(path, "reference")
    with make(path, "auto", map=map):
        remove(path)
        assert path.exists()
    remove(path)
    remove(path)
    (tmp_path / "other").write_text("mine")
    remove(tmp_path / "other")
    assert [found.name for found in tmp_path.iterdir()] == ["other"]


def test_files_that_do_not_fit_their_map(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    map, other = written(path, "reference"), written(tmp_path / "other", "reference")

    def refused(
        message: str, where: Path = path, layout: Layout = LAYOUT, of: BlockMap | None = map
    ) -> None:
        with pytest.raises(UserError, match=f"table ads: .*{message}") as told:
            make(where, "auto", layout, map=of)
        assert "\n" not in str(told.value)

    refused("rows exists already; name another folder", of=None)
    refused(
        "nothing is missing; bring it back to there, or go back to a checkpoint",
        tmp_path / "nothing",
    )
    refused("cannot open", tmp_path)
    refused("cannot make .*: No such file or directory", tmp_path / "no" / "rows", of=None)
    refused("rows is of another run; bring back", of=other)
    longer = Layout(fields=FIELDS, rows=ROWS + 1, block=512)
    refused(
        "rows has 67 rows of 73 bytes in blocks of 512, and the run 68 of 73 in 512", layout=longer
    )
    os.truncate(path, int(map.places_K.max()) * 512 + 511)
    refused("rows is cut: it has .* blocks and its map names block")
    damage(path, lambda content: content.__setitem__(3, 0))
    refused("rows is no file of blocks, or its head is damaged; bring back the whole file, or")
    path.write_bytes(b"")
    refused("rows is no file of blocks")


@pytest.mark.parametrize("byte", range(file.HEAD.size))
def test_a_flipped_bit_in_the_head(tmp_path: Path, byte: int) -> None:
    map = written(tmp_path / "rows", "reference")
    damage(
        tmp_path / "rows", lambda content: content.__setitem__(byte, content[byte] ^ 1 << byte % 8)
    )
    with pytest.raises(
        UserError,
        match="^table ads: .*rows (is no file of blocks|is of another run|has .* rows).*; ",
    ):
        make(tmp_path / "rows", "auto", map=map)


def test_a_map_that_is_damaged(tmp_path: Path) -> None:
    map = written(tmp_path / "rows", "reference")
    places_K = map.places_K.clone()
    places_K[2] = -5
    with pytest.raises(UserError, match="names block -5"):
        make(
            tmp_path / "rows",
            "auto",
            map=BlockMap(file=map.file, places_K=places_K, generations_K=map.generations_K),
        )


@each_way
def test_without_direct_reads_it_says_so_once(
    tmp_path: Path, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_warned", set())
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            map = written(tmp_path / "rows", way)
            with make(tmp_path / "rows", way, map=map) as blocks:
                assert not blocks.file.is_direct
                check(blocks, dict.fromkeys(range(ROWS), 0))
            os.remove(tmp_path / "rows")
    assert [str(w.message) for w in told] == [
        f"{tmp_path} has no O_DIRECT for blocks of 512 bytes: the system's page cache holds table"
        " rows as well"
    ]
