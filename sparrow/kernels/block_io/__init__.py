"""A table's records on a disk, in blocks that hold some rows each. It is beneath a row cache.

`Blocks` reads and writes beside its caller: `fetch` and `put` return at once. A block is never
overwritten. It is written again at another place, with a higher generation, and a map in memory
says where each block is. So a map that was synced is a snapshot of the table, which costs nothing
until blocks change (copy-on-write).

Three ways do the same. "io_uring" asks Linux for many reads at a time. "threads" has threads that
each wait for one read; it runs where io_uring is forbidden, as in Docker's containers, and on
macOS. "reference" is the definition, in Python. "auto" takes the first that can run.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels import Operator, resolve
from sparrow.kernels.block_io import file
from sparrow.kernels.block_io.file import remove
from sparrow.kernels.block_io.layout import BlockMap, Layout

_operator = Operator(__name__)

CPU = torch.device("cpu")
Way = Literal["auto", "io_uring", "threads", "reference"]


@dataclass(frozen=True, eq=False)
class Ticket:
    """A fetch that was begun, for `Blocks.wait`."""

    reading: Any


class Blocks:
    """The records of one table, in one file.

    Not for several threads at once, but for `fill`. One process at most opens it to write. Others
    may read what a kept map names: a block that was written again since is found by its checksum,
    number and generation.

    Args:
        path: the file. Without a map it is made, and must not exist. With one it must.
        layout: how rows lie in it.
        table: the table's name, for messages.
        map: what the file holds. All that it does not name is free. To keep the map whole when
            blocks are written after, call `keep` as well, before the first `put`.
        way: see the package.
        bytes_queue: how many bytes of records may wait to be written. Half of them wait always, and
            `sync` writes them.
        is_written: False for a file that is only read.
        chance: for "reference", in which random order reads and writes end; None for their own.

    Raises:
        UserError: when the file is missing, cut, of another run or table, or in use; or when the
            way cannot run.
    """

    def __init__(
        self,
        path: Path,
        layout: Layout,
        *,
        table: str,
        map: BlockMap | None = None,
        way: Way = "auto",
        bytes_queue: int = 8 << 20,
        is_written: bool = True,
        chance: Random | None = None,
    ) -> None:
        if way not in get_args(Way):
            raise UserError(f"way: {way!r} is not one of {', '.join(get_args(Way))}")
        self.layout = layout
        if map is None:
            self.file = file.create(path, table, layout)
        else:
            self.file = file.open_file(path, table, layout, map, is_written)
        self._is_written = is_written
        try:
            self.way, self._store = _store(way, self.file, map, bytes_queue, chance)
        except UserError:
            os.close(self.file.fd)
            if map is None:
                path.unlink()
            raise
        # at the latest when the process ends
        self._close = weakref.finalize(self, self._store.close)

    def fetch(self, rows_U: Tensor, into: Mapping[str, Tensor], at_U: Tensor) -> Ticket:
        """Begin to read some rows, as they are after all `put`s so far. Later `put`s change nothing
        of it.

        Args:
            rows_U: int64 [U], ascending, each once.
            into: field -> [S, ...], contiguous on the CPU. They are written until `wait` returns.
            at_U: int64 [U], each once: row rows_U[u] goes to into[name][at_U[u]].
        """
        self._check_fields(into, None)
        assert (
            rows_U.dtype == at_U.dtype == torch.int64
            and rows_U.dim() == 1
            and at_U.shape == rows_U.shape
        )
        return Ticket(self._store.fetch(rows_U, into, at_U))

    def wait(self, ticket: Ticket) -> Tensor:
        """Returns which rows of a fetch were never put, bool [U]; nothing was written for them.
        Once for each ticket.

        Raises:
            UserError: when a block cannot be read, is damaged, stale or of another place.
        """
        return self._store.wait(ticket.reading)

    def put(self, rows_U: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Have whole records written some time before `sync` returns. They are copied now.

        It waits until the queue has room for all of them; if there are more than it can hold, until
        it is empty. After an error none of these records were taken.

        Args:
            rows_U: int64 [U], each once, in any order.
            fields: field -> [U, ...].

        Raises:
            UserError: when the queue is full and cannot be written. What waits stays there, and a
                later call tries again.
        """
        assert self._is_written, "it was opened to be read"
        assert rows_U.dtype == torch.int64 and rows_U.dim() == 1
        self._check_fields(fields, len(rows_U))
        self._store.put(rows_U, fields)

    def fill(self, first: int, fields: Mapping[str, Tensor]) -> None:
        """Write the records of neighbouring rows now, as whole blocks, of which none was put
        before.

        Records whose bytes are all 0 are left out, as if nobody had put them. It takes much less
        time than `put`, since nothing waits in the queue. Several threads may call it at once,
        except on the reference. Like `put`, it is safe on the disk only after `sync`. After an
        error those of some of the blocks were written.

        Args:
            first: the first row, with which a block begins.
            fields: field -> [U, ...] of it and those behind it, up to the end of a block or of the
                table.

        Raises:
            UserError: when they cannot be written.
        """
        assert self._is_written, "it was opened to be read"
        count = len(next(iter(fields.values())))
        self._check_fields(fields, count)
        ends = {first, first + count} - {self.layout.rows}
        assert first + count <= self.layout.rows and not any(
            end % self.layout.per_block for end in ends
        )
        self._store.fill(first, fields)

    def known(self, first: int, last: int) -> Tensor:
        """Returns which rows of a range were perhaps put, int64, ascending: all of a block of which
        one was.
        """
        return self._store.known(first, last)

    def sync(self) -> BlockMap:
        """Returns the map of all that was put, once it is safely on the disk.

        Raises:
            UserError: when records cannot be written; they stay in the queue, and a later call
                tries again.
        """
        return self._store.sync()

    def snapshot(self) -> tuple[BlockMap, Tensor, dict[str, Tensor]]:
        """Returns a map of what is written, kept already, and the rows that still wait: int64 [U]
        and their fields.

        So a checkpoint need not wait until the queue is written. Both together are all that was
        put.

        Raises:
            UserError: when the disk fails.
        """
        map, rows_U, records_UB = self._store.snapshot()
        parts = records_UB.split([field.bytes_row for field in self.layout.fields.values()], 1)
        fields = {
            name: part.flatten().clone().view(field.dtype).view(field.shape(len(rows_U)))
            for (name, field), part in zip(self.layout.fields.items(), parts, strict=True)
        }
        return map, rows_U, fields

    def keep(self, map: BlockMap) -> None:
        """Never overwrite what a map names. It is a map of `sync` or of this file's opening, and is
        told at once.

        At once: before the next `put`, or its blocks may have changed. So maps that an earlier
        process kept are told as soon as the file is opened.

        Raises:
            UserError: when it is a map of another file, or the file lacks blocks that it names.
        """
        file.check(self.file, map)
        self._store.keep(map)

    def drop(self, places_K: Tensor) -> None:
        """Take back one `keep` of the map with these places."""
        self._store.drop(places_K)

    @property
    def handle(self) -> int:
        """Names it to other compiled operators. Those that use it end before `close`."""
        return int(self._store.handle)

    def error_of(self, report: list[int]) -> UserError | None:
        """Returns the error that a compiled operator tells of these blocks, if it does."""
        error: UserError | None = self._store.error_of(report)
        return error

    @property
    def counters(self) -> dict[str, int]:
        """Since it was opened: blocks_read, blocks_written, bytes_read, bytes_written,
        rows_from_queue.
        """
        counts, block = self._store.counts, self.layout.block
        return {
            "blocks_read": counts.blocks_read,
            "blocks_written": counts.blocks_written,
            "bytes_read": counts.blocks_read * block,
            "bytes_written": counts.blocks_written * block,
            "rows_from_queue": counts.rows_from_queue,
        }

    def close(self) -> None:
        """Let go of the file. What was put since the last `sync` may be lost."""
        self._close()

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_fields(self, fields: Mapping[str, Tensor], rows: int | None) -> None:
        for name, field in self.layout.fields.items():
            tensor = fields[name]
            assert tensor.dtype == field.dtype and tensor.shape[1:] == field.shape(0)[1:], name
            assert rows is None or len(tensor) == rows, name


def _store(
    way: Way, opened: file.File, map: BlockMap | None, bytes_queue: int, chance: Random | None
) -> tuple[Way, Any]:
    """Returns the way that runs, and its store."""
    chosen = resolve("auto" if way == "auto" else "reference" if way == "reference" else "cpp", CPU)
    implementation = _operator.load(chosen)
    if chosen == "reference":
        return "reference", implementation.Store(
            file=opened, map=map, bytes_queue=bytes_queue, chance=chance
        )
    if way in ("auto", "io_uring"):
        try:
            return "io_uring", implementation.Store(opened, map, bytes_queue, "io_uring")
        except BlockingIOError:
            problem = "io_uring is not allowed or not known on this system"
            if way == "io_uring":
                raise UserError(f"way: 'io_uring', but {problem}; use 'auto'") from None
            file.say(f"{problem}: threads read and write the rows on disk")
    return "threads", implementation.Store(opened, map, bytes_queue, "threads")


__all__ = ["BlockMap", "Blocks", "Layout", "Ticket", "Way", "remove"]
