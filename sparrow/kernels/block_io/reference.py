"""The definition, in plain Python, a block at a time.

What the others do beside their caller, this one does in steps that wait in a list. A step runs when
a call needs it, or by chance where `chance` is given, so that tests see reads and writes end in any
order.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels.block_io.file import Counts, File
from sparrow.kernels.block_io.layout import BlockMap, checksum


@dataclass(eq=False)
class Reading:
    """A fetch under way."""

    never_U: Tensor
    open: int = 0  # blocks that are still to be read
    error: UserError | None = None


@dataclass
class Step:
    """What is to be done. A write has two steps: its block is read, then written."""

    run: Callable[[], None]
    reading: Reading | None  # None: it is of a write


@dataclass
class Store:
    """What `Blocks` says, for one file."""

    file: File
    map: BlockMap | None
    bytes_queue: int
    chance: Random | None = None
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        blocks = self.file.layout.blocks
        memory = mmap.mmap(-1, max(self.file.layout.block, mmap.PAGESIZE))  # O_DIRECT needs pages
        self.buffer = memoryview(memory)[: self.file.layout.block]
        self.places = self.map.places_K.tolist() if self.map else [0] * blocks
        self.generations = self.map.generations_K.tolist() if self.map else [0] * blocks
        size = os.fstat(self.file.fd).st_size // self.file.layout.block
        # place -> how many maps name it, and how many reads of it are under way
        self.users = [0] * max(1, size)
        self.users[0] = 1  # the head
        for place in self.places:
            self._hold(place)
        self.queued: dict[int, dict[int, bytes]] = {}  # block -> row -> its record
        self.written: dict[int, dict[int, bytes]] = {}  # those whose block is being written
        self.steps: list[Step] = []
        self.write_error: UserError | None = None

    # -- what `Blocks` calls ----------------------------------------------------------------------

    def fetch(self, rows_U: Tensor, into: Mapping[str, Tensor], at_U: Tensor) -> Reading:
        """See `Blocks`."""
        self._check(rows_U, self.file.layout.rows)
        assert bool((rows_U[1:] > rows_U[:-1]).all()), "rows are not ascending"
        for tensor in into.values():
            self._check(at_U, len(tensor))
        reading = Reading(never_U=torch.zeros(len(rows_U), dtype=torch.bool))
        blocks: dict[int, list[int]] = {}
        for u, row in enumerate(rows_U.tolist()):
            block = row // self.file.layout.per_block
            record = self.queued.get(block, {}).get(row) or self.written.get(block, {}).get(row)
            if record is not None:
                self.counts.rows_from_queue += 1
                self._scatter(record, into, int(at_U[u]))
            elif not self.places[block]:
                reading.never_U[u] = True
            else:
                blocks.setdefault(block, []).append(u)
        for block, us in blocks.items():
            place, generation = self.places[block], self.generations[block]
            self._hold(place)  # nothing is written there until it is read
            reading.open += 1

            def read(
                block: int = block,
                place: int = place,
                generation: int = generation,
                us: list[int] = us,
            ) -> None:
                try:
                    records = self._read(block, place, generation)
                except UserError as error:
                    reading.error = error
                else:
                    for u in us:
                        record = records.get(int(rows_U[u]))
                        if record is None:
                            reading.never_U[u] = True
                        else:
                            self._scatter(record, into, int(at_U[u]))
                self._release(place)
                reading.open -= 1

            self.steps.append(Step(run=read, reading=reading))
        self._run_some()
        return reading

    def wait(self, reading: Reading) -> Tensor:
        """See `Blocks`."""
        while reading.open:
            self._run(next(i for i, step in enumerate(self.steps) if step.reading is reading))
        if reading.error:
            raise reading.error
        return reading.never_U

    def put(self, rows_U: Tensor, fields: Mapping[str, Tensor]) -> None:
        """See `Blocks`."""
        self._check(rows_U, self.file.layout.rows)
        record = self.file.layout.record_bytes
        while self._has_queued() and self._bytes_queued() + len(rows_U) * record > self.bytes_queue:
            self._advance()
        for row, bytes_ in zip(rows_U.tolist(), self._gathered(fields, len(rows_U)), strict=True):
            self.queued.setdefault(row // self.file.layout.per_block, {})[row] = bytes_
        self._run_some()

    def fill(self, first: int, fields: Mapping[str, Tensor]) -> None:
        """See `Blocks`."""
        per_block, blocks = self.file.layout.per_block, dict[int, dict[int, bytes]]()
        for row, record in enumerate(
            self._gathered(fields, len(next(iter(fields.values())))), first
        ):
            if any(record):
                blocks.setdefault(row // per_block, {})[row] = record
        assert not any(map(self._is_known, blocks)), "records of a block were put before"
        for block, rows in blocks.items():
            self.written[block], self.write_error = rows, None
            self._write(block, rows)
            if self.write_error:
                del self.queued[block]
                raise self.write_error

    def known(self, first: int, last: int) -> Tensor:
        """See `Blocks`."""
        return torch.tensor(
            [r for r in range(first, last) if self._is_known(r // self.file.layout.per_block)]
        ).long()

    def _is_known(self, block: int) -> bool:
        return bool(self.places[block]) or block in self.queued or block in self.written

    def sync(self) -> BlockMap:
        """See `Blocks`."""
        while self._has_queued():
            self._advance()
        return self._map()

    def snapshot(self) -> tuple[BlockMap, Tensor, Tensor]:
        """See `Blocks`; the records are uint8 [U, bytes]."""
        waiting: dict[int, bytes] = {}
        for rows in (*self.written.values(), *self.queued.values()):
            waiting |= rows
        records = torch.tensor([*b"".join(waiting.values())], dtype=torch.uint8)
        map = self._map()
        self.keep(map)
        return (
            map,
            torch.tensor([*waiting]).long(),
            records.view(len(waiting), self.file.layout.record_bytes),
        )

    def _map(self) -> BlockMap:
        try:
            os.fsync(self.file.fd)
        except OSError as error:
            raise self.file.failed(None, error.errno or 0, "write") from None
        places_K, generations_K = (
            torch.tensor(x, dtype=torch.int32) for x in (self.places, self.generations)
        )
        return BlockMap(file=self.file.number, places_K=places_K, generations_K=generations_K)

    def keep(self, map: BlockMap) -> None:
        """See `Blocks`."""
        for place in map.places_K.tolist():
            self._hold(place)

    def drop(self, places_K: Tensor) -> None:
        """See `Blocks`."""
        for place in places_K.tolist():
            self._release(place)

    def close(self) -> None:
        """See `Blocks`."""
        self.steps.clear()
        os.close(self.file.fd)

    # -- steps ------------------------------------------------------------------------------------

    def _has_queued(self) -> bool:
        return bool(self.queued or self.written)

    def _bytes_queued(self) -> int:
        rows = sum(map(len, [*self.queued.values(), *self.written.values()]))
        return rows * self.file.layout.record_bytes

    def _run(self, step: int) -> None:
        self.steps.pop(step).run()

    def _run_some(self) -> None:
        """What others do in the meantime: nothing, or by chance a few steps."""
        if self.chance:
            for _ in range(self.chance.randrange(6)):
                if self.queued and self.chance.random() < 0.3:
                    self._begin_write(self.chance.choice(sorted(self.queued)))
                elif self.steps:
                    self._run(self.chance.randrange(len(self.steps)))

    def _advance(self) -> None:
        """One step towards an empty queue."""
        self.write_error = None
        writes = [i for i, step in enumerate(self.steps) if step.reading is None]
        if writes:
            self._run(writes[0])
        else:
            self._begin_write(min(self.queued))
        if self.write_error:
            raise self.write_error

    def _begin_write(self, block: int) -> None:
        if block in self.written:  # one write of a block at a time
            return
        rows = self.written[block] = self.queued.pop(block)

        def read() -> None:
            old: dict[int, bytes] = {}
            first = block * self.file.layout.per_block
            full = min(self.file.layout.per_block, self.file.layout.rows - first)
            try:
                if self.places[block] and len(rows) < full:
                    old = self._read(block, self.places[block], self.generations[block])
            except UserError as error:
                self._end_write(block, error)
            else:
                self.steps.append(Step(run=lambda: self._write(block, old | rows), reading=None))

        self.steps.append(Step(run=read, reading=None))

    def _write(self, block: int, records: dict[int, bytes]) -> None:
        layout = self.file.layout
        generation = (self.generations[block] + self.file.step) & 0x7FFFFFFF
        content = bytearray(layout.block)
        content[8:16] = block.to_bytes(4, "little") + generation.to_bytes(4, "little")
        for row, record in records.items():
            r = row - block * layout.per_block
            content[16 + r // 8] |= 1 << r % 8
            at = layout.start + r * layout.record_bytes
            content[at : at + layout.record_bytes] = record
        sum = checksum(torch.frombuffer(content, dtype=torch.int64), self.file.number)
        content[:8] = sum.to_bytes(8, "little", signed=True)
        place = next(
            (place for place, users in enumerate(self.users) if not users), len(self.users)
        )
        try:
            self.buffer[:] = content
            if self._move_block(os.pwritev, place) < layout.block:
                raise OSError(errno.ENOSPC, "a part was written")
        except OSError as error:
            self._end_write(block, self.file.failed(block, error.errno or 0, "write"))
            return
        self._hold(place)
        self._release(self.places[block])
        self.places[block], self.generations[block] = place, generation
        self.counts.blocks_written += 1
        self._end_write(block, None)

    def _end_write(self, block: int, error: UserError | None) -> None:
        rows = self.written.pop(block)
        if error:  # they wait again, behind what was put since
            self.queued[block] = rows | self.queued.get(block, {})
            self.write_error = error

    # -- blocks -----------------------------------------------------------------------------------

    def _hold(self, place: int) -> None:
        if place:
            self.users.extend([0] * (place + 1 - len(self.users)))
            self.users[place] += 1

    def _release(self, place: int) -> None:
        if place:
            self.users[place] -= 1
            assert self.users[place] >= 0, "a map is dropped that was not kept"

    def _read(self, block: int, place: int, generation: int) -> dict[int, bytes]:
        """Returns row -> record of those that were ever put in a block."""
        layout = self.file.layout
        try:
            size = self._move_block(os.preadv, place)
        except OSError as error:
            raise self.file.failed(block, error.errno or 0, "read") from None
        self.counts.blocks_read += 1
        if size < layout.block:
            raise self.file.cut(block, place)
        content = bytes(self.buffer)
        words = torch.frombuffer(bytearray(content), dtype=torch.int64)
        if int(words[0]) != checksum(words, self.file.number):
            raise self.file.wrong_checksum(block, place)
        seal = int.from_bytes(content[8:12], "little"), int.from_bytes(content[12:16], "little")
        if seal != (block, generation):
            raise self.file.wrong_block(block, place, seal, generation)
        records = {}
        for r in range(layout.per_block):
            if content[16 + r // 8] >> r % 8 & 1:
                at = layout.start + r * layout.record_bytes
                records[block * layout.per_block + r] = content[at : at + layout.record_bytes]
        return records

    def _move_block(self, move: Callable[..., int], place: int) -> int:
        """Read or write a block, though the system may do a part of it at a time. Returns how many
        bytes there were.
        """
        moved = 0
        block = self.file.layout.block
        while moved < block:
            more = move(self.file.fd, [self.buffer[moved:]], place * block + moved)
            if not more:
                break
            moved += more
        return moved

    @staticmethod
    def _check(numbers_U: Tensor, limit: int) -> None:
        assert not len(numbers_U) or (int(numbers_U.min()) >= 0 and int(numbers_U.max()) < limit), (
            "not in the table"
        )

    # -- records ----------------------------------------------------------------------------------

    def _gathered(self, fields: Mapping[str, Tensor], rows: int) -> list[bytes]:
        parts = []
        for name, kind in self.file.layout.fields.items():
            entries = 1 if kind.width is None else kind.width
            parts.append(fields[name].contiguous().view(rows, entries).view(torch.uint8))
        return [record.numpy().tobytes() for record in torch.cat(parts, 1)]

    def _scatter(self, record: bytes, into: Mapping[str, Tensor], at: int) -> None:
        start = 0
        for name, field_ in self.file.layout.fields.items():
            part = torch.frombuffer(
                bytearray(record[start : start + field_.bytes_row]), dtype=field_.dtype
            )
            into[name][at] = part if field_.width is not None else part[0]
            start += field_.bytes_row
