"""Rows in blocks on a disk: all ways against a dict, in any order of calls, with kills between
them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from safetensors.torch import load_file, save_file

from sparrow.core import UserError
from sparrow.kernels import missing
from sparrow.kernels.block_io import BlockMap, Layout
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

SOME_ROWS = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=30, unique=True)
RUNNING = ["reference"] if missing() else ["reference", "threads", "io_uring"]


class Machine(RuleBasedStateMachine):
    """The same calls to a store of each way, whose rows a dict knows."""

    @initialize(seed=st.integers(0, 1 << 30), rows_queue=st.integers(1, 40))
    def begin(self, seed: int, rows_queue: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.options = {"bytes_queue": rows_queue * LAYOUT.record_bytes}
        self.random = Random(seed)
        self.versions: dict[int, int] = {}  # row -> version
        self.version = 0
        self.snapshots: list[tuple[dict[str, BlockMap], dict[str, set[int]], dict[int, int]]] = []
        self.kept: list[tuple[dict[str, BlockMap], dict[int, int]]] = []
        self.open({})

    def open(self, maps: dict[str, BlockMap]) -> None:
        self.reads: list[Any] = []
        self.stores = {}
        for way in RUNNING:
            chance = Random(self.random.random()) if way == "reference" else None
            path = Path(self.folder.name) / way
            self.stores[way] = make(path, way, map=maps.get(way), chance=chance, **self.options)

    @rule(rows=SOME_ROWS)
    def put(self, rows: list[int]) -> None:
        self.version += 1
        for store in self.stores.values():
            store.put(torch.tensor(rows), records(torch.tensor(rows), self.version))
        self.versions |= dict.fromkeys(rows, self.version)

    @rule(which=st.randoms(use_true_random=False))
    def fill(self, which: Random) -> None:
        """Whole blocks of which no record was put, some records of which are 0. The others were
        perhaps put.
        """
        known = {row // LAYOUT.per_block for row in self.versions}
        bounds = [
            (k * LAYOUT.per_block, min((k + 1) * LAYOUT.per_block, ROWS))
            for k in range(LAYOUT.blocks)
        ]
        low, high = sorted((which.randrange(ROWS), which.randrange(ROWS)))
        expected = [row for k in sorted(known) for row in range(*bounds[k]) if low <= row < high]
        for way, store in self.stores.items():
            assert store.known(low, high).tolist() == expected, way
        free = [k for k in range(LAYOUT.blocks) if k not in known]
        if not free:
            return
        begin = end = which.choice(free)
        while end in free and end - begin < 3:
            end += 1
        self.version += 1
        rows_U = torch.arange(bounds[begin][0], bounds[end - 1][1])
        given, stays_U = (
            records(rows_U, self.version),
            torch.tensor([which.random() < 0.7 for _ in rows_U]),
        )
        for of in given.values():
            of[~stays_U] = 0
        for store in self.stores.values():
            store.fill(bounds[begin][0], given)
        self.versions |= dict.fromkeys(rows_U[stays_U].tolist(), self.version)

    @rule(rows=SOME_ROWS)
    def fetch(self, rows: list[int]) -> None:
        rows_U = torch.tensor(sorted(rows))
        at_U = torch.randperm(
            ROWS, generator=torch.Generator().manual_seed(self.random.randrange(1000))
        )[: len(rows)]
        tickets = {}
        for way, store in self.stores.items():
            into = empty()
            tickets[way] = into, store.fetch(rows_U, into, at_U)
        self.reads.append((rows_U, at_U, dict(self.versions), tickets))

    @precondition(lambda self: self.reads)
    @rule(which=st.randoms(use_true_random=False))
    def wait(self, which: Random) -> None:
        rows_U, at_U, versions, tickets = self.reads.pop(which.randrange(len(self.reads)))
        for way, (into, ticket) in tickets.items():
            never_U = self.stores[way].wait(ticket)
            assert never_U.tolist() == [row not in versions for row in rows_U.tolist()], way
            expected = empty()
            for row, at in zip(rows_U.tolist(), at_U.tolist(), strict=True):
                if row in versions:
                    for name, values in records(torch.tensor([row]), versions[row]).items():
                        expected[name][at] = values[0]
            assert all(torch.equal(into[name], expected[name]) for name in FIELDS), way

    @rule()
    def sync(self) -> None:
        maps = {way: store.sync() for way, store in self.stores.items()}
        for way, store in self.stores.items():
            store.keep(maps[way])
        self.kept.append((maps, dict(self.versions)))

    @rule()
    def snapshot(self) -> None:
        """It is what `sync` gives once the rows that wait are put."""
        maps, rows = {}, {}
        for way, store in self.stores.items():
            maps[way], rows_U, fields = store.snapshot()
            rows[way] = set(rows_U.tolist())
            for u, row in enumerate(rows_U.tolist()):
                expected = records(torch.tensor([row]), self.versions[row])
                assert all(
                    torch.equal(fields[name][u], values[0]) for name, values in expected.items()
                ), way
        self.snapshots.append((maps, rows, dict(self.versions)))

    @precondition(lambda self: self.kept)
    @rule(which=st.randoms(use_true_random=False))
    def drop(self, which: Random) -> None:
        maps, _ = self.kept.pop(which.randrange(len(self.kept)))
        for way, store in self.stores.items():
            store.drop(maps[way].places_K)

    @precondition(lambda self: self.kept)
    @rule(which=st.randoms(use_true_random=False))
    def kill_and_reopen(self, which: Random) -> None:
        for store in self.stores.values():
            store.close()
        maps, versions = which.choice(self.kept)
        self.versions = dict(versions)
        self.open(maps)
        for way, store in self.stores.items():
            for kept in (*self.kept, *self.snapshots):
                store.keep(kept[0][way])

    def teardown(self) -> None:
        if not hasattr(self, "stores"):
            return
        for store in self.stores.values():
            check(store, self.versions)
            store.close()
        for maps, versions in self.kept:
            for way in self.stores:
                store = make(Path(self.folder.name) / way, way, map=maps[way], is_written=False)
                check(store, versions)
                store.close()
        for maps, rows, versions in self.snapshots:
            for way in self.stores:
                with make(
                    Path(self.folder.name) / way, way, map=maps[way], is_written=False
                ) as store:
                    into, never_R = read(store)
                    for row in set(versions) - rows[way]:
                        expected = records(torch.tensor([row]), versions[row])
                        assert not never_R[row], way
                        assert all(
                            torch.equal(into[name][row], values[0])
                            for name, values in expected.items()
                        ), way
        self.folder.cleanup()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("way", WAYS)
def test_a_block_is_written_once_for_all_its_rows_that_wait(tmp_path: Path, way: Any) -> None:
    blocks = make(tmp_path / "rows", way, chance=None)
    for row in (0, 3, 1, 3, 66):
        blocks.put(torch.tensor([row]), records(torch.tensor([row]), row))
    assert blocks.counters["blocks_written"] == 0
    check(blocks, {0: 0, 3: 3, 1: 1, 66: 66})
    assert blocks.counters == {
        "blocks_read": 0,
        "blocks_written": 0,
        "bytes_read": 0,
        "bytes_written": 0,
        "rows_from_queue": 4,
    }
    blocks.sync()
    assert blocks.counters["blocks_written"] == 2 and blocks.counters["bytes_written"] == 1024
    check(blocks, {0: 0, 3: 3, 1: 1, 66: 66})
    assert blocks.counters["blocks_read"] == 2, "blocks that nobody wrote are not read"
    blocks.put(torch.arange(6), records(torch.arange(6), 5))
    blocks.sync()
    assert blocks.counters["blocks_read"] == 2, (
        "a block of which all rows wait is not read before it is written"
    )
    blocks.put(torch.tensor([0]), records(torch.tensor([0]), 1))
    blocks.sync()
    assert blocks.counters["blocks_read"] == 3
    blocks.close()


@pytest.mark.parametrize("way", WAYS)
def test_blocks_that_are_filled_are_whole_and_new(tmp_path: Path, way: Any) -> None:
    """Else `fill` would have to read others, or lose them. A row of which a single bit is set is no
    row of zeros.
    """
    blocks = make(tmp_path / "rows", way)
    for first, count in ((3, 9), (0, 5), (60, 8)):
        with pytest.raises(AssertionError):
            blocks.fill(first, records(torch.arange(count), 1))
    blocks.put(torch.tensor([7]), records(torch.tensor([7]), 1))
    with pytest.raises((AssertionError, ValueError), match="records of a block were put before"):
        blocks.fill(0, records(torch.arange(12), 2))
    nothing = {name: torch.zeros_like(of) for name, of in records(torch.arange(7), 1).items()}
    nothing["bits"][4, 2] = 128
    blocks.fill(60, nothing)
    never_R = read(blocks)[1]
    assert [row for row in range(ROWS) if not never_R[row]] == [7, 64]
    assert blocks.known(0, ROWS).tolist() == [*range(6, 12), *range(60, 66)]
    blocks.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_fetch_has_the_rows_of_its_moment(tmp_path: Path, way: Any) -> None:
    blocks = make(tmp_path / "rows", way, bytes_queue=1)
    all_R = torch.arange(ROWS)
    blocks.put(all_R, records(all_R, 0))
    blocks.sync()
    into = [empty() for _ in range(20)]
    tickets = []
    for version in range(20):  # no place is used again while it is read
        tickets.append(blocks.fetch(all_R, into[version], all_R))
        blocks.put(all_R, records(all_R, version + 1))
        blocks.sync()
    for version in reversed(range(20)):
        assert not blocks.wait(tickets[version]).any()
        assert all(
            torch.equal(into[version][name], values)
            for name, values in records(all_R, version).items()
        )
    blocks.close()


@pytest.mark.parametrize("way", WAYS)
def test_places_are_used_again(tmp_path: Path, way: Any) -> None:
    path, all_R = tmp_path / "rows", torch.arange(ROWS)
    blocks = make(path, way)
    kept = None
    for version in range(30):
        blocks.put(all_R, records(all_R, version))
        map = blocks.sync()
        blocks.keep(map)
        if kept:
            blocks.drop(kept.places_K)
        kept = map
    assert path.stat().st_size <= (1 + 4 * LAYOUT.blocks) * 512, (
        "the file grows although places are free"
    )
    check(blocks, dict.fromkeys(range(ROWS), 29))
    blocks.close()


@pytest.mark.parametrize("way", WAYS)
def test_no_rows(tmp_path: Path, way: Any) -> None:
    blocks, none = make(tmp_path / "rows", way), torch.zeros(0, dtype=torch.int64)
    blocks.put(none, records(none, 0))
    assert len(blocks.wait(blocks.fetch(none, empty(), none))) == 0
    check(blocks, {})
    assert blocks.sync().places_K.tolist() == [0] * LAYOUT.blocks
    blocks.close()


@pytest.mark.parametrize("way", WAYS)
def test_what_callers_must_not_do(tmp_path: Path, way: Any) -> None:
    blocks, into = make(tmp_path / "rows", way), empty()
    for rows in ([3, 2], [2, 2], [-1], [ROWS]):
        with pytest.raises((AssertionError, ValueError)):
            blocks.fetch(torch.tensor(rows), into, torch.arange(len(rows)))
    with pytest.raises((AssertionError, ValueError)):
        blocks.fetch(torch.tensor([0]), into, torch.tensor([ROWS]))
    with pytest.raises(AssertionError):
        blocks.put(
            torch.tensor([0]),
            records(torch.tensor([0]), 0) | {"state": torch.zeros(1, dtype=torch.float64)},
        )
    map = blocks.sync()
    blocks.close()
    with (
        make(tmp_path / "rows", way, map=map, is_written=False) as reader,
        pytest.raises(AssertionError),
    ):
        reader.put(torch.tensor([0]), records(torch.tensor([0]), 0))
    with pytest.raises(UserError, match="way: 'fast' is not one of auto, io_uring"):
        make(tmp_path / "rows2", "fast")


@built
def test_an_engine_serves_many_tables(tmp_path: Path) -> None:
    for way in ("threads", "io_uring"):
        stores = [make(tmp_path / f"{way}{n}", way, bytes_queue=2000) for n in range(9)]
        all_R = torch.arange(ROWS)
        for version in range(5):
            for n, store in enumerate(stores):
                store.put(all_R, records(all_R, version + n))
        for n, store in enumerate(stores):
            check(store, dict.fromkeys(range(ROWS), 4 + n))
            store.sync()
            check(store, dict.fromkeys(range(ROWS), 4 + n))
            assert store.way == way
            store.close()


@built
@pytest.mark.parametrize("block", [512, 4096, 16384])
def test_any_way_reads_what_another_wrote(tmp_path: Path, block: int) -> None:
    layout = Layout(fields=FIELDS, rows=3000, block=block)
    rows_U = torch.randperm(3000, generator=torch.Generator().manual_seed(1))[:2000]
    for one in RUNNING:
        blocks = make(tmp_path / one, one, layout)
        blocks.put(rows_U, records(rows_U, 3))
        map = blocks.sync()
        blocks.close()
        for other in RUNNING:
            with make(tmp_path / one, other, layout, map=map) as blocks:
                into, never_R = read(blocks, 3000)
                assert torch.equal((~never_R).nonzero()[:, 0], rows_U.sort()[0])
                assert all(
                    torch.equal(into[n][rows_U], values) for n, values in records(rows_U, 3).items()
                )


# -- kills -----------------------------------------------------------------------------------------


def keep_writing(folder: Path, way: Any) -> None:
    """Writes versions of rows and their maps until it is killed; the process of `test_kill`."""
    found = sorted(folder.glob("map*"))
    map = read_map(found[-1]) if found else None
    blocks = make(folder / "rows", way, bytes_queue=1000, map=map)
    version = int(found[-1].name[3:]) if found else 0
    if map:
        check(blocks, expected(version))
        blocks.keep(map)
    while True:
        version += 1
        rows_U = rows_of(version)
        blocks.put(rows_U, records(rows_U, version))
        if version % 3 == 0:
            map, old = blocks.sync(), map
            blocks.keep(map)
            tensors = {
                "places": map.places_K,
                "generations": map.generations_K,
                "file": torch.tensor(map.file),
            }
            save_file(tensors, folder / "new")
            os.replace(folder / "new", folder / f"map{version:08}")
            if old:
                blocks.drop(old.places_K)
                for path in sorted(folder.glob("map*"))[:-1]:
                    path.unlink()


def rows_of(version: int) -> torch.Tensor:
    """The rows that are put as one version."""
    random = torch.Generator().manual_seed(version)
    return torch.randperm(ROWS, generator=random)[: 1 + version * 7 % 30]


def expected(version: int) -> dict[int, int]:
    """What the rows are after it."""
    return {row: v for v in range(1, version + 1) for row in rows_of(v).tolist()}


def read_map(path: Path) -> BlockMap:
    """A map that was saved."""
    tensors = load_file(path)
    return BlockMap(
        file=int(tensors["file"]), places_K=tensors["places"], generations_K=tensors["generations"]
    )


def kill(folder: Path, way: str, times: int) -> None:
    random, code = (
        Random(5),
        "import sys; from pathlib import Path; from tests.kernels.block_io import test_block_io\n",
    )
    code += "test_block_io.keep_writing(Path(sys.argv[1]), sys.argv[2])"
    last = 0
    for _ in range(times):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder), way], stderr=subprocess.PIPE, text=True
        )
        found = sorted(folder.glob("map*"))
        while process.poll() is None and sorted(folder.glob("map*")) == found:
            time.sleep(0.01)
        time.sleep(random.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.communicate()[1]
        process.communicate()
        path = sorted(folder.glob("map*"))[-1]
        version = int(path.name[3:])
        assert version > last
        with make(folder / "rows", way, map=read_map(path)) as blocks:
            check(blocks, expected(version))
        last = version


@built
@pytest.mark.multi
def test_kill(tmp_path: Path) -> None:
    kill(tmp_path, "io_uring", 2)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("way", WAYS)
def test_kill_often(tmp_path: Path, way: Any) -> None:
    kill(tmp_path, way, 34)


FORBIDDEN = r"""
import ctypes, struct, sys, warnings
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
filter = b"".join(struct.pack("=HBBI", *line) for line in [
    (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50000 | 1), (0x06, 0, 0, 0x7FFF0000)])  # io_uring_setup: EPERM
memory = ctypes.create_string_buffer(filter)
program = ctypes.create_string_buffer(struct.pack("=H6xQ", 4, ctypes.addressof(memory)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0
from tests.kernels.block_io.stores import check, make
from sparrow.core import UserError
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for name in "ab":
        with make(Path(sys.argv[1]) / name, "auto") as blocks:
            check(blocks, {})
            assert blocks.way == "threads"
    assert [str(w.message) for w in told] == [
        "io_uring is not allowed or not known on this system: threads read and write the rows on disk"], told
try:
    make(Path(sys.argv[1]) / "c", "io_uring")
except UserError as error:
    assert "way: 'io_uring', but" in str(error)
    assert not (Path(sys.argv[1]) / "c").exists(), "it is left behind"
else:
    raise AssertionError
"""


@built
@pytest.mark.multi
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp is Linux'")
def test_where_io_uring_is_forbidden_threads_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@built
@pytest.mark.multi
def test_after_a_fork_it_says_what_to_do(tmp_path: Path) -> None:
    code = (
        "import os, sys, torch; from pathlib import Path; from tests.kernels.block_io.stores import"
        " make, read\nblocks = make(Path(sys.argv[1]), 'auto')\nif os.fork() == 0:\n    try:"
        " read(blocks)\n    except ValueError as error: os._exit(0 if 'before a fork' in str(error)"
        " else 1)\n    os._exit(2)\nassert os.wait()[1] == 0; read(blocks); blocks.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "rows")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
