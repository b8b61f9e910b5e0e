"""The compiled store with the signatures of the reference."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels import close, missing
from sparrow.kernels.block_io.file import Counts, File
from sparrow.kernels.block_io.layout import BlockMap

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow
READ, SHORT, CHECKSUM, OTHER, WRITE, SYNC = range(1, 7)  # the kinds of errors, see store.h


@dataclass(eq=False)
class Reading:
    """A fetch under way."""

    ticket: int
    never_U: Tensor


class Store:
    """What `Blocks` says, for one file. See there.

    Raises:
        BlockingIOError: when io_uring cannot be used here.
    """

    def __init__(
        self,
        file: File,
        map: BlockMap | None,
        bytes_queue: int,
        way: Literal["io_uring", "threads"],
    ) -> None:
        self._file, layout = file, file.layout
        settings = [
            file.fd,
            file.number,
            layout.block,
            layout.per_block,
            layout.start,
            layout.rows,
            bytes_queue,
        ]
        settings += [os.fstat(file.fd).st_size // layout.block, file.step]
        settings += [field.bytes_row for field in layout.fields.values()]
        nothing_K = torch.zeros(layout.blocks if map is None else 0, dtype=torch.int32)
        maps = (nothing_K, nothing_K) if map is None else (map.places_K, map.generations_K)
        self.handle = ops.block_io_open(torch.tensor(settings), *maps, way == "io_uring")
        if not self.handle:
            raise BlockingIOError

    def fetch(self, rows_U: Tensor, into: Mapping[str, Tensor], at_U: Tensor) -> Reading:
        """See `Blocks`."""
        never_U = torch.zeros(len(rows_U), dtype=torch.bool)
        tensors = [into[name] for name in self._file.layout.fields]
        ticket = ops.block_io_fetch(
            self.handle, rows_U.contiguous(), tensors, at_U.contiguous(), never_U
        )
        return Reading(ticket=ticket, never_U=never_U)

    def wait(self, reading: Reading) -> Tensor:
        """See `Blocks`."""
        self._raise(ops.block_io_wait(self.handle, reading.ticket))
        return reading.never_U

    def put(self, rows_U: Tensor, fields: Mapping[str, Tensor]) -> None:
        """See `Blocks`."""
        tensors = [fields[name].contiguous() for name in self._file.layout.fields]
        self._raise(ops.block_io_put(self.handle, rows_U.contiguous(), tensors))

    def fill(self, first: int, fields: Mapping[str, Tensor]) -> None:
        """See `Blocks`."""
        tensors = [fields[name].contiguous() for name in self._file.layout.fields]
        self._raise(ops.block_io_fill(self.handle, first, tensors))

    def known(self, first: int, last: int) -> Tensor:
        """See `Blocks`."""
        rows_U: Tensor = ops.block_io_known(self.handle, first, last)
        return rows_U

    def sync(self) -> BlockMap:
        """See `Blocks`."""
        self._raise(ops.block_io_sync(self.handle))
        places_K, generations_K = torch.empty(2, self._file.layout.blocks, dtype=torch.int32)
        ops.block_io_map(self.handle, places_K, generations_K)
        return BlockMap(file=self._file.number, places_K=places_K, generations_K=generations_K)

    def snapshot(self) -> tuple[BlockMap, Tensor, Tensor]:
        """See `Blocks`; the records are uint8 [U, bytes]."""
        blocks = self._file.layout.blocks
        places_K = torch.empty(blocks, dtype=torch.int32)
        generations_K = torch.empty(blocks, dtype=torch.int32)
        map = BlockMap(file=self._file.number, places_K=places_K, generations_K=generations_K)
        report, rows_U, records_UB = ops.block_io_snapshot(self.handle, places_K, generations_K)
        try:
            self._raise(report)
        except UserError:
            self.drop(places_K)
            raise
        return map, rows_U, records_UB

    def keep(self, map: BlockMap) -> None:
        """See `Blocks`."""
        ops.block_io_use(self.handle, map.places_K, True)

    def drop(self, places_K: Tensor) -> None:
        """See `Blocks`."""
        ops.block_io_use(self.handle, places_K, False)

    @property
    def counts(self) -> Counts:
        """See `Blocks.counters`."""
        return Counts(*ops.block_io_counts(self.handle).tolist())

    def close(self) -> None:
        """See `Blocks`."""
        close(ops.block_io_close, self.handle)
        os.close(self._file.fd)

    def error_of(self, report: list[int]) -> UserError | None:
        """See `Blocks`."""
        kind, code, block, place, number, generation, expected = report
        if not kind:
            return None
        return self._error(kind, code, block, place, (number, generation, expected))

    def _raise(self, report: Tensor) -> None:
        if error := self.error_of(report.tolist()):
            raise error

    def _error(
        self, kind: int, code: int, block: int, place: int, numbers: tuple[int, int, int]
    ) -> UserError:
        file = self._file
        if kind == READ:
            return file.failed(block, code, "read")
        if kind in (WRITE, SYNC):
            return file.failed(None if kind == SYNC else block, code, "write")
        if kind == SHORT:
            return file.cut(block, place)
        if kind == CHECKSUM:
            return file.wrong_checksum(block, place)
        number, generation, expected = numbers
        return file.wrong_block(block, place, (number, generation), expected)
