"""Rows put aside: in memory while they are few, else in a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

T = TypeVar("T")


class Spool:
    """Record batches of one schema, read as often as need be: up to `memory` bytes held, else all
    in the file `path`.

    `drop` deletes the file. rows, bytes: that it holds, bytes as in memory.
    """

    def __init__(self, path: Path, memory: int) -> None:
        self._path = path
        self._left = memory
        self._held: list[pa.RecordBatch] = []
        self._writer: pa.RecordBatchStreamWriter | None = None
        self.rows = self.bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Puts a batch after the others."""
        self.rows = self.rows + batch.num_rows
        self.bytes = self.bytes + batch.nbytes
        if self._writer is None:
            self._held.append(_own(batch))
            self._left -= batch.nbytes
            if self._left >= 0:
                return
            # A stream, because a file of Arrow's has one dictionary for a column and each batch
            # brings its own.
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writer = pa.ipc.new_stream(
                pa.OSFile(str(self._path), "wb"), batch.schema, options=options
            )
            self._held, held = [], self._held
            for batch in held:
                self._writer.write_batch(batch)
        else:
            self._writer.write_batch(batch)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        if self._writer is None:
            yield from self._held
            return
        self._writer.close()
        with pa.OSFile(str(self._path)) as file, pa.ipc.open_stream(file) as stream:
            yield from stream

    def drop(self) -> None:
        """Forgets all rows."""
        self._held = []
        if self._writer is not None:
            self._writer.close()
            self._path.unlink(missing_ok=True)


def _own(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows; a copy, if they are a small part of what they keep in memory."""
    if 2 * batch.nbytes >= sum(column.get_total_buffer_size() for column in batch.columns):
        return batch
    return pa.RecordBatch.from_arrays(
        [pa.concat_arrays([column]) for column in batch.columns], schema=batch.schema
    )


def gathered(batches: Iterable[pa.RecordBatch], rows: int, size: int) -> Iterator[pa.RecordBatch]:
    """Yields the same rows in batches of at least so many rows or bytes. The last batch may be
    smaller.
    """
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(b.num_rows for b in held) >= rows or sum(b.nbytes for b in held) >= size:
            yield _concatenated(held)
            held = []
    if held:
        yield _concatenated(held)


def _concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
