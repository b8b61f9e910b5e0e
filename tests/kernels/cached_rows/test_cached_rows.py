from __future__ import annotations

import ctypes
import errno
import gc
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from sparrow.core import UserError
from sparrow.kernels import cached_rows as module
from sparrow.kernels.block_io import BlockMap, Blocks, Layout, Way
from sparrow.kernels.cached_rows import Cached, cached, get
from sparrow.kernels.formats import Field
from sparrow.kernels.row_cache import WAYS
from tests.kernels.block_io.answered import fed, run_answered
from tests.kernels.embedding_bag.cases import built

ROWS = 3000
LAYOUT = Layout(
    fields={"weight": Field(width=5, across="cut"), "low": Field(dtype=torch.uint8)}, rows=ROWS
)
WAYS_OF_READING = ["io_uring", "threads", "reference"]


@pytest.fixture(scope="module")
def fields() -> dict[str, Tensor]:
    """Of all rows. Half were never written: whole blocks, and rows among others."""
    found = {
        "weight": torch.randn(ROWS, 5),
        "low": torch.randint(1, 255, (ROWS,), dtype=torch.uint8),
    }
    for of in found.values():
        of[500:1700] = 0
        of[2000::3] = 0
    return found


@pytest.fixture
def written(tmp_path: Path, fields: dict[str, Tensor]) -> tuple[Path, BlockMap]:
    path, rows_U = tmp_path / "rows", (fields["low"] != 0).nonzero()[:, 0]
    with Blocks(path, LAYOUT, table="t") as blocks:
        blocks.put(rows_U, {name: of[rows_U] for name, of in fields.items()})
        return path, blocks.sync()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, if the system has such."""
    place = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=place if place.is_dir() else None) as folder:
        yield Path(folder)


def rows_of(
    written: tuple[Path, BlockMap], way: Any, sets: int = 2, last: int = module.LAST
) -> Cached:
    try:
        blocks = Blocks(written[0], LAYOUT, table="t", map=written[1], way=way, is_written=False)
    except UserError as error:  # without a compiler, or where io_uring is forbidden
        pytest.skip(str(error))
    return cached(blocks, sets, last)


def got(of: Cached, rows_N: Tensor) -> dict[str, Tensor]:
    ((fields, error),) = get([(of, rows_N)])
    assert error is None
    return fields


@pytest.mark.parametrize("way", WAYS_OF_READING[:2])
def test_all_ways_give_the_same_and_keep_the_same(
    way: Way, written: tuple[Path, BlockMap], fields: dict[str, Tensor]
) -> None:
    """Rows that come again, rows twice in a call, rows outside the table, no rows; numbers of calls
    begin again.
    """
    one, other = (rows_of(written, of, last=40) for of in (way, "reference"))
    random = torch.Generator().manual_seed(0)
    for step in range(60):
        rows_N = (torch.rand(step * 3, generator=random) ** 4 * ROWS * 1.1).long() - 20
        found = got(one, rows_N)
        for name, of in got(other, rows_N).items():
            is_row_N = (rows_N >= 0) & (rows_N < ROWS)
            assert of[is_row_N].equal(fields[name][rows_N[is_row_N]]) and not of[~is_row_N].any()
            assert found[name].equal(of)
        assert one.rows_F.equal(other.rows_F) and one.stamps_F.equal(other.stamps_F)
        assert one.counts_4[:3].equal(other.counts_4[:3])
    assert 0 < int(one.stamps_F.max()) <= 40 and bool((one.rows_F >= 0).all())
    counts = one.blocks.counters, other.blocks.counters
    assert counts[0]["blocks_read"] == counts[1]["blocks_read"]


@pytest.mark.parametrize("way", WAYS_OF_READING)
def test_who_enters_and_who_leaves(way: Way, written: tuple[Path, BlockMap]) -> None:
    of = rows_of(written, way, sets=1)
    got(of, torch.arange(32))
    got(of, torch.arange(16))
    got(of, torch.arange(100, 116))
    # the least recently used have left
    assert set(of.rows_F.tolist()) == {*range(16), *range(100, 116)}
    hot = torch.tensor([100, 101])
    for first in range(0, 2900, 4):
        got(of, torch.cat([hot, torch.arange(first, first + 4)]))
    assert {100, 101} <= set(of.rows_F.tolist())


def flip(of: Cached, place: int) -> None:
    path = of.blocks.file.path
    content = bytearray(path.read_bytes())
    content[place * LAYOUT.block + 900] ^= 4
    path.write_bytes(content)


def cut(of: Cached, place: int) -> None:
    os.truncate(of.blocks.file.path, place * LAYOUT.block + 900)


def fail(of: Cached, place: int) -> None:
    """Have reads end with EIO: they are of memory that the process does not have."""
    if not sys.platform.startswith("linux"):
        pytest.skip("other systems have no /proc/self/mem")
    other = os.open("/proc/self/mem", os.O_RDONLY)
    os.dup2(other, of.blocks.file.fd)
    os.close(other)


FAULTS = {
    flip: "is damaged .the checksum of",
    cut: "is damaged .it ends within",
    fail: ": Input/output error; check",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS_OF_READING)
def test_several_tables_and_one_that_is_damaged(
    way: Way,
    written: tuple[Path, BlockMap],
    fields: dict[str, Tensor],
    fault: Callable[[Cached, int], None],
) -> None:
    """The others are right, and nothing of a read that failed is kept, not even of its whole
    blocks.
    """
    bad, good = rows_of(written, way), rows_of(written, way)
    got(bad, torch.arange(10))
    fault(bad, int(written[1].places_K[2]))
    (_, error), (found, none) = get([(bad, torch.arange(1000)), (good, torch.arange(10, 60))])
    assert re.search(f"^table t, rows .*{FAULTS[fault]}.*", str(error))
    assert none is None and found["weight"].equal(fields["weight"][10:60])
    assert set(bad.rows_F.tolist()) - {-1} == set(range(10))
    assert got(bad, torch.arange(10))["low"].equal(fields["low"][:10])


# rows of as many blocks that do not lie side by side
BLOCKS_APART = torch.tensor([0, 400, 1800, 2999])


def test_a_ring_awaits_all_tables_at_once(
    written: tuple[Path, BlockMap], fields: dict[str, Tensor]
) -> None:
    """Whichever is answered first, and though it is answered in parts."""
    content = written[0].read_bytes()
    start = int(written[1].places_K[0]) * LAYOUT.block
    parts = [content[start : start + 700], content[start + 700 : start + LAYOUT.block]]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        asked = [
            (rows_of(written, "io_uring"), torch.arange(5) + 3 * number) for number in range(3)
        ]
        with ThreadPoolExecutor(1) as pool, ExitStack() as pipes:
            feeds = [pipes.enter_context(fed(of.blocks)) for of, _ in asked]
            found = pool.submit(get, asked)
            for number in order:
                assert not found.done()
                for part in parts:
                    feeds[number](part)
            for (_, rows_N), (of, error) in zip(asked, found.result(20), strict=True):
                assert error is None and all(
                    of[name].equal(fields[name][rows_N]) for name in fields
                )


AT_ONCE = r"""
import sys
from pathlib import Path
import torch
from tests.kernels.block_io.answered import listen
from tests.kernels.cached_rows.test_cached_rows import BLOCKS_APART, LAYOUT, ROWS
from sparrow.kernels.block_io import Blocks
from sparrow.kernels.cached_rows import cached, get
path, all_R = Path(sys.argv[1]), torch.arange(ROWS)
fields = {"weight": torch.randn(ROWS, 5), "low": torch.ones(ROWS, dtype=torch.uint8)}
with Blocks(path, LAYOUT, table="t", way="reference") as blocks:
    blocks.put(all_R, fields)
    map = blocks.sync()
content, held = path.read_bytes(), []

def hear(asked):
    held.append(asked)
    if len(held) == 3 * len(BLOCKS_APART):
        for of in reversed(held):
            of.answer(content[of.at : of.at + of.count])

listen(str(path), hear)
opened = [Blocks(path, LAYOUT, table="t", map=map, way="threads", is_written=False) for _ in range(3)]
for of, error in get([(cached(blocks, 2), BLOCKS_APART) for blocks in opened]):
    assert error is None and all(of[name].equal(fields[name][BLOCKS_APART]) for name in fields)
assert len(held) == 3 * len(BLOCKS_APART)
"""


@built
@pytest.mark.multi
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp is Linux'")
def test_threads_await_all_tables_at_once(tmp_path: Path) -> None:
    """No read is answered before all blocks of all tables are asked for."""
    run_answered(AT_ONCE, tmp_path / "rows")


@pytest.mark.parametrize("way", WAYS_OF_READING)
def test_threads_share_it(
    way: Way, written: tuple[Path, BlockMap], fields: dict[str, Tensor]
) -> None:
    """One set of frames: threads take them from each other all the time, and some read the same
    rows at once.
    """
    of, failed = rows_of(written, way, sets=1), []

    def work(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        for _ in range(20 if way == "reference" else 300):
            rows_N = torch.randint(0, 200, (60,), generator=random)
            for name, found in got(of, rows_N).items():
                failed.extend([name] * (not found.equal(fields[name][rows_N])))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tags = [row for row in of.rows_F.tolist() if row >= 0]
    assert not failed and len(tags) == len(set(tags)) <= WAYS


def test_many_blocks_are_read_by_a_ring_of_few(
    written: tuple[Path, BlockMap], tmp_path: Path
) -> None:
    """More reads than may be under way, of blocks that lie apart, so that none are read
    together.
    """
    layout = Layout(fields={"weight": Field(width=16, across="cut")}, rows=60_000)
    weight_RD = torch.randn(60_000, 16)
    with Blocks(tmp_path / "many", layout, table="t") as blocks:
        for rows_U in torch.arange(60_000).split(10_000):
            blocks.put(rows_U, {"weight": weight_RD[rows_U]})
        map = blocks.sync()
    of = cached(Blocks(tmp_path / "many", layout, table="t", map=map, is_written=False), 1)
    rows_N = torch.arange(0, 60_000, 2 * layout.per_block).flip(0)
    assert got(of, rows_N)["weight"].equal(weight_RD[rows_N]) and len(rows_N) > 300


@pytest.mark.parametrize("way", WAYS_OF_READING)
def test_garbage_that_is_freed_in_a_trace_is_no_part_of_it(
    way: Way, written: tuple[Path, BlockMap]
) -> None:
    of = rows_of(written, way)
    get([(of, torch.tensor([3]))])
    freed = weakref.ref(of)
    cycle: list[Any] = [of]
    cycle.append(cycle)

    def program(x: Tensor) -> Tensor:
        gc.collect()
        return x + 1

    gc.disable()
    try:
        del of, cycle
        nodes = make_fx(program)(torch.ones(3)).graph.nodes
    finally:
        gc.enable()
    assert freed() is None
    assert [node.op for node in nodes] == ["placeholder", "call_function", "output"]


def shares(path: str, map: dict[str, Any], file: str, order: str) -> None:
    """A process that shares a cache: reads rows, says what it hit, and is killed while it holds the
    cache if told.
    """
    blocks = Blocks(Path(path), LAYOUT, table="t", map=BlockMap(**map), is_written=False)
    of = cached(blocks, 2, shared=Path(file))
    ((fields, error),) = get([(of, torch.arange(40))])
    assert error is None
    torch.save((fields, of.counts_4), f"{file}.{order}")
    if order == "killed":
        assert isinstance(of.state, tuple)
        libc = ctypes.CDLL(None)
        assert libc.pthread_mutex_lock(ctypes.c_void_p(of.state[1].data_ptr())) == 0
        of.state[1][module.HEAD + 2 * WAYS :] = 7  # as if all records were half written
        os.kill(os.getpid(), signal.SIGKILL)


@built
@pytest.mark.multi
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere caches are not shared")
def test_processes_share_a_cache(
    written: tuple[Path, BlockMap], fields: dict[str, Tensor], tmp_path: Path, memory: Path
) -> None:
    """One reads what another has read. One that is killed while it writes there costs rows, and
    gives no wrong ones.
    """
    place, map = written
    mine = cached(
        Blocks(place, LAYOUT, table="t", map=map, is_written=False), 2, shared=memory / "cache"
    )
    everything = torch.arange(40)
    for order in ("reads", "killed"):
        args = (str(place), vars(map), str(memory / "cache"), order)
        process = multiprocessing.get_context("spawn").Process(target=shares, args=args)
        process.start()
        process.join()
        assert process.exitcode == (0 if order == "reads" else -signal.SIGKILL)
        theirs, counts_4 = torch.load(f"{memory / 'cache'}.{order}")
        assert all(theirs[name].equal(of[everything]) for name, of in fields.items())
        assert counts_4[module.HITS : module.WAITED].tolist() == (
            [0, 40] if order == "reads" else [40, 0]
        )
        again = got(mine, everything)
        assert all(again[name].equal(of[everything]) for name, of in fields.items()), order
        assert mine.counts_4[module.HITS] == 40, "after the kill nothing is known"
    assert mine.counts_4[module.MISSES] == 40
    assert (memory / "cache").exists()
    del mine
    gc.collect()
    assert not (memory / "cache").exists(), "the last one removes it"


@built
def test_a_shared_cache_needs_room(
    written: tuple[Path, BlockMap], memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, first: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    blocks = Blocks(written[0], LAYOUT, table="t", map=written[1], is_written=False)
    with pytest.raises(OSError, match="No space"):
        cached(blocks, 2, shared=memory / "cache")
    assert not list(memory.iterdir())
