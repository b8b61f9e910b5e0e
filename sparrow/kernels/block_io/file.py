"""The file under a block store: its head, its lock, and what is said when something is wrong with
it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparrow.core.errors import UserError
from sparrow.kernels.block_io.layout import BlockMap, Layout

MAGIC = b"sparrow blocks 1"
# the magic, then the file's number, rows, bytes of a record, bytes of a block
HEAD = struct.Struct("<16sQQQQ")
PATIENCE = 3.0  # seconds
STEPS = 1 << 12  # of generations, which are below 2**31
GOES_ON = "a run goes on from its last checkpoint with --resume"
_warned: set[str] = set()


@dataclass
class Counts:
    """See `Blocks.counters`."""

    blocks_read: int = 0
    blocks_written: int = 0
    rows_from_queue: int = 0


@dataclass(frozen=True, kw_only=True)
class File:
    """An open file of blocks. Place 0 is its head, so that no block of the table is there.

    Args:
        path: where it is.
        table: whose rows it holds, for messages.
        layout: how they lie.
        number: see `BlockMap.file`.
        fd: the open file, which has the lock.
        is_direct: whether reads and writes pass by the page cache.
        step: by how much a block's generation grows when it is written. It is another one each time
            the file is opened. So what a killed process wrote is not taken for what the next one
            writes at the same place.
    """

    path: Path
    table: str
    layout: Layout
    number: int
    fd: int
    is_direct: bool
    step: int

    def rows_of(self, block: int) -> str:
        """The rows of a block, for messages."""
        first = block * self.layout.per_block
        return f"rows {first} to {min(first + self.layout.per_block, self.layout.rows) - 1}"

    def cut(self, block: int, place: int) -> UserError:
        """What is raised when the file ends before a block does."""
        return self._damaged(block, f"it ends within block {place}")

    def wrong_checksum(self, block: int, place: int) -> UserError:
        """What is raised when a block is not what was written."""
        return self._damaged(block, f"the checksum of block {place} is wrong")

    def wrong_block(
        self, block: int, place: int, seal: tuple[int, int], generation: int
    ) -> UserError:
        """What is raised when a block is another one, or an older one. seal: the number and the
        generation that it has.
        """
        number, older = seal
        damage = (
            f"block {place} is number {number}, generation {older} instead of {block}, {generation}"
        )
        return self._damaged(block, damage)

    def _damaged(self, block: int, damage: str) -> UserError:
        return UserError(
            f"table {self.table}, {self.rows_of(block)}: {self.path} is damaged ({damage}); go back"
            " to a checkpoint whose file is whole, or train the table again"
        )

    def failed(self, block: int | None, code: int, doing: str) -> UserError:
        """What is raised when the system refuses to read or write a block, or all (None). code: its
        errno.
        """
        rows = "" if block is None else f", {self.rows_of(block)}"
        remedy = {
            errno.ENOSPC: f"make room there; {GOES_ON}",
            errno.EDQUOT: f"raise the quota; {GOES_ON}",
            errno.EFBIG: f"raise the limit for files (ulimit -f); {GOES_ON}",
        }.get(code, f"check the device; {GOES_ON}")
        return UserError(
            f"table {self.table}{rows}: cannot {doing} {self.path}: {os.strerror(code)}; {remedy}"
        )


def create(path: Path, table: str, layout: Layout) -> File:
    """Returns a new file without blocks.

    Raises:
        UserError: when there is one already, or the system refuses.
    """
    number = secrets.randbits(63)
    head = HEAD.pack(MAGIC, number, layout.rows, layout.record_bytes, layout.block).ljust(
        layout.block, b"\0"
    )
    try:
        with open(path, "xb") as file:
            file.write(head)
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # a map on the disk means that the file's name is there too
        os.close(folder)
    except FileExistsError:
        raise UserError(
            f"table {table}: {path} exists already; name another folder, or remove it"
        ) from None
    except OSError as error:
        raise UserError(
            f"table {table}: cannot make {path}: {error.strerror}; name another folder"
        ) from None
    return _open(path, table, layout, number, is_written=True)


def open_file(path: Path, table: str, layout: Layout, map: BlockMap, is_written: bool) -> File:
    """Returns the file of a map.

    Raises:
        UserError: when it is missing, cut, of another run or table, or written by another process.
    """
    opened = _open(path, table, layout, map.file, is_written)
    try:
        check(opened, map)
    except UserError:
        os.close(opened.fd)
        raise
    return opened


def _open(path: Path, table: str, layout: Layout, number: int, is_written: bool) -> File:
    flags = os.O_RDWR if is_written else os.O_RDONLY
    try:
        fd, is_direct = _descriptor(path, flags, layout.block)
    except FileNotFoundError:
        remedy = "bring it back to there, or go back to a checkpoint that is whole"
        raise UserError(f"table {table}: {path} is missing; {remedy}") from None
    except OSError as error:
        raise UserError(
            f"table {table}: cannot open {path}: {error.strerror}; check its permissions"
        ) from None
    if is_written and not _locked(fd):
        os.close(fd)
        raise UserError(
            f"table {table}: {path} is in use by another process; end it, or name another folder"
        )
    step = 1 + secrets.randbelow(STEPS)
    return File(
        path=path, table=table, layout=layout, number=number, fd=fd, is_direct=is_direct, step=step
    )


def remove(path: Path) -> None:
    """Remove a file of blocks, unless a process has it open to write."""
    with suppress(OSError), open(path, "rb+") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if opened.read(len(MAGIC)) == MAGIC:
            path.unlink()


def _locked(fd: int) -> bool:
    """Returns whether the file has the lock of its writer now.

    Linux ends what a killed process began on io_uring a little later, and has the lock until then.
    So nothing is written behind the back of who comes next.
    """
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)


def _descriptor(path: Path, flags: int, block: int) -> tuple[int, bool]:
    """Returns the open file, and whether it passes by the page cache: the first read shows whether
    it can.
    """
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            fd = os.open(path, flags | direct)
            try:
                with (
                    mmap.mmap(-1, max(block, mmap.PAGESIZE)) as memory,
                    memoryview(memory)[:block] as aligned,
                ):
                    os.preadv(fd, [aligned], 0)
                return fd, True
            except OSError:
                os.close(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    fd = os.open(path, flags)
    if hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return fd, True
    say(
        f"{path.parent} has no O_DIRECT for blocks of {block} bytes: the system's page cache holds"
        " table rows as well"
    )
    return fd, False


def check(file: File, map: BlockMap) -> None:
    """Check that a map is of a file, and that the file is as long as the map says.

    Raises:
        UserError: names what differs.
    """
    layout = file.layout
    with open(file.path, "rb") as opened:
        head = opened.read(HEAD.size)
    magic, number, *shape = HEAD.unpack(head.ljust(HEAD.size, b"\0"))
    if magic != MAGIC:
        remedy = "bring back the whole file, or go back to an earlier checkpoint"
        raise UserError(
            f"table {file.table}: {file.path} is no file of blocks, or its head is damaged;"
            f" {remedy}"
        )
    if number != map.file:
        raise UserError(
            f"table {file.table}: {file.path} is of another run; bring back the one of this"
            " checkpoint"
        )
    is_same = shape == [layout.rows, layout.record_bytes, layout.block]
    if not is_same or len(map.places_K) != layout.blocks:
        rows, record, block = shape
        raise UserError(
            f"table {file.table}: {file.path} has {rows} rows of {record} bytes in blocks of"
            f" {block}, and the run {layout.rows} of {layout.record_bytes} in {layout.block}; give"
            " it the settings that made the file"
        )
    places = os.fstat(file.fd).st_size // layout.block
    for place in map.places_K.aminmax() if len(map.places_K) else ():
        if not 0 <= int(place) < places:
            raise UserError(
                f"table {file.table}: {file.path} is cut: it has {places} blocks and its map names"
                f" block {int(place)}; bring back the whole file, or go back to an earlier"
                " checkpoint"
            )


def say(problem: str) -> None:
    """Warn of a problem, once."""
    if problem not in _warned:
        _warned.add(problem)
        warnings.warn(problem, stacklevel=4)
