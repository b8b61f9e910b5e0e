"""Rows on an SSD as a checkpoint has them: a map of blocks, and the rows that are newer than these,
in two files.

The rows are one file (safetensors), written from its beginning to its end: their numbers, then
field after field. They come in the order of their frames, so that nothing has to be sorted while
training waits. Whoever reads them sorts. The counts of all rows come last, a byte each, where the
policy counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparrow.checkpoint import Checkpoint, load, steps
from sparrow.core import Chunk, UserError
from sparrow.core.chunk import as_bytes
from sparrow.core.config import from_dict, to_dict
from sparrow.embeddings import Placement, RowRecords
from sparrow.embeddings.spec import Component
from sparrow.embeddings.stores.store import At, First, RowStore
from sparrow.extensions.tiers import pieces
from sparrow.kernels.block_io import BlockMap, Blocks, Layout
from sparrow.kernels.embedding_bag import Rows, Table
from sparrow.kernels.formats import Field

WINDOW, PIECE = 128 << 20, 16 << 20  # bytes
PASSES = 16  # at most, through the newer rows
# of the newer rows: their numbers, and for how many batches nobody used them; no fields
ROW = "row"
AGE = "age"
COUNTS = "counts"  # of all rows, where the policy counts
_LONG = 1 << 20  # batches: the age of all rows of format 4, which has none
_CODES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
} | {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Saved:
    """A part of a component, on an SSD. See `External`.

    Args:
        path: the file of its blocks.
        map: which block is where.
        bounds: 0, and where the rows of the cache, those of frames that stand by, and those that
            wait to be written end among the newer rows, which frames and queue hold.
        counts_R: uint8 [R]: how often batches used each row, see `row_cache.Frames`; [0] if nobody
            counts. It is there for a moment.
        batches: the number of the last batch that learnt, and of the last one whose uses are
            counted, which may have been looked at ahead.
        field: (name, first, last) -> a field of those of the newer rows, [last - first, ...], for a
            moment. Of `ROW` it is int32: their numbers, counted in the part, each once; -1 stands
            for a frame that is empty. Of `AGE` it is int32, and only for rows in frames: how many
            batches before the last one that learnt used them. It is negative for a batch that was
            looked at ahead.
        component: whose rows these are.
        seed: of the first values, which rows have that are nowhere.
        rows: the first row of the part and the one after its last.
        columns: its first dimension and the one after its last.
        find_maps: returns the maps of all checkpoints that have blocks of this file, this one's
            too, by step.
    """

    path: Path
    map: BlockMap
    bounds: tuple[int, int, int, int]
    counts_R: Tensor
    batches: tuple[int, int]
    field: Callable[[str, int, int], Tensor]
    component: Component
    seed: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    find_maps: Callable[[], Mapping[int, BlockMap]] = dict

    @property
    def layout(self) -> Layout:
        """How its rows lie in blocks."""
        fields = self.component.fields_of(self.columns[1] - self.columns[0])
        return Layout(fields=fields, rows=self.rows[1] - self.rows[0])

    def copied(self) -> Saved:
        """Returns one that holds the newer rows, and the counts of all, in memory of its own."""
        _, _, aged, count = self.bounds
        step = max(1, PIECE // self.layout.record_bytes)
        fields = empty(self.layout.fields, count)
        fields |= {
            ROW: torch.empty(count, dtype=torch.int32),
            AGE: torch.empty(aged, dtype=torch.int32),
        }
        for name, values in fields.items():
            for first in range(0, len(values), step):
                last = min(first + step, len(values))
                values[first:last] = self.field(name, first, last)
        counts_R = self.counts_R.clone()
        return replace(
            self, counts_R=counts_R, field=lambda name, first, last: fields[name][first:last]
        )

    def fields(self, first: int, last: int) -> dict[str, Tensor]:
        """Returns all fields of some of the newer rows."""
        return {name: self.field(name, first, last) for name in self.layout.fields}

    def entry(self) -> dict[str, Any]:
        """Returns what the manifest says of the map, as plain data that `read` takes."""
        place = {
            "table": self.component.name,
            "rows": list(self.rows),
            "columns": list(self.columns),
        }
        blocks = {
            "path": str(self.path),
            "file": self.map.file,
            "seed": self.seed,
            "cached": self.bounds[1],
        }
        blocks["batches"] = list(self.batches)
        return {**place, "blocks": {**blocks, "component": to_dict(self.component)}}

    def places(self) -> dict[str, Tensor]:
        """Returns the map as tensors."""
        return {"places": self.map.places_K, "generations": self.map.generations_K}

    def write_newer(self, path: Path) -> dict[str, Any]:
        """Writes the file of the rows that are newer. Returns its size and checksum.

        Raises:
            OSError: when it cannot be written.
        """
        return write_rows(path, self)

    def chunks(
        self, wanted: Sequence[tuple[int, int]], max_bytes: int = 64 << 20
    ) -> Iterator[Chunk]:
        """Yields all rows as ordinary chunks, in their order, but for those that lie in no wanted
        range.

        Raises:
            UserError: when the file of blocks is missing, cut, damaged or another one.
        """
        placement = Placement(store=lambda component, rows, dim: SavedStore(self))
        record = RowRecords(self.component, self.seed, self.rows, self.columns, placement)
        assert isinstance(record.store, SavedStore)
        with closing(record.store):
            yield from record.chunks(max_bytes, wanted)


class SavedStore(RowStore):
    """Reads the rows of a checkpoint in their order. Only pieces of them are ever in memory.

    The newer rows are in another order. So those of `WINDOW` bytes, or of a share of all, are read
    at a time, in one pass through all.

    Args:
        saved: what the checkpoint has.

    Raises:
        UserError: when the file of blocks is missing, cut or another one.
    """

    slots_are_rows = False

    def __init__(self, saved: Saved) -> None:
        super().__init__()
        self.first: First | None = None  # see `begin_with`
        self._saved = saved
        self._rows_U, order_U = saved.field(ROW, 0, saved.bounds[-1]).sort()
        self._order_U = order_U.int()
        self._window = range(0)
        self._newer = dict[str, Tensor]()
        self._blocks = Blocks(
            saved.path, saved.layout, table=saved.component.name, map=saved.map, is_written=False
        )

    def read(self, at: At) -> dict[str, Tensor]:
        """Returns all fields of the rows of a slice."""
        assert isinstance(at, slice) and self.first is not None
        rows_U = torch.arange(at.start, at.stop)
        fields = self._blocks.layout.fields
        records = empty(fields, len(rows_U))
        never_U = self._blocks.wait(self._blocks.fetch(rows_U, records, rows_U - at.start))
        low, high = torch.searchsorted(
            self._rows_U, torch.tensor([at.start, at.stop], dtype=self._rows_U.dtype)
        ).tolist()
        newer_V = self._rows_U[low:high] - at.start
        never_U[newer_V] = False
        if never_U.any():
            put_into(records, never_U.nonzero()[:, 0], self.first(rows_U[never_U]))
        put_into(records, newer_V, self._newest(low, high))
        return records

    def _newest(self, low: int, high: int) -> dict[str, Tensor]:
        """Returns all fields of some of the newer rows, counted in their order."""
        if not self._newer or low < self._window.start or high > self._window.stop:
            self._newer.clear()
            size = max(WINDOW, len(self._rows_U) * self._blocks.layout.record_bytes // PASSES)
            count = max(high - low, size // self._blocks.layout.record_bytes)
            self._window = range(low, min(low + count, len(self._rows_U)))
            self._newer = self._gathered(self._order_U[self._window.start : self._window.stop])
        place = slice(low - self._window.start, high - self._window.start)
        return take_rows(self._newer, place)

    def _gathered(self, at_V: Tensor) -> dict[str, Tensor]:
        """Returns all fields of some of the newer rows, which are at these places, in one pass."""
        fields = self._blocks.layout.fields
        step = max(1, PIECE // self._blocks.layout.record_bytes)
        records = empty(fields, len(at_V))
        ordered_V, to_V = at_V.sort()
        for name, values in records.items():
            for first in range(0, len(self._rows_U), step):
                last = min(first + step, len(self._rows_U))
                low, high = torch.searchsorted(ordered_V, torch.tensor([first, last])).tolist()
                if low < high:
                    piece = self._saved.field(name, first, last)
                    values[to_V[low:high]] = piece[ordered_V[low:high] - first]
        return records

    def close(self) -> None:
        """Let go of the file."""
        self._blocks.close()

    # -- what is not asked of rows that are only read ----------------------------------------------

    @property
    def levels(self) -> tuple[Rows, ...]:
        """None."""
        return ()

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Fails."""
        raise AssertionError("these rows are only read")

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        """Fails."""
        raise AssertionError("these rows are only read")

    def pinned(self, rows_N: Tensor) -> Tensor:
        """Fails."""
        raise AssertionError("these rows are only read")

    def begin_with(self, first: First) -> None:
        """Have rows that are in no block begin so."""
        self.first = first

    def settle(self) -> None:
        """Fails."""
        raise AssertionError("these rows are only read")

    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Fails."""
        raise AssertionError("these rows are only read")


def empty(
    fields: Mapping[str, Field], rows: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Returns memory for so many rows, field by field."""
    return {
        name: torch.empty(field.shape(rows), dtype=field.dtype, device=device)
        for name, field in fields.items()
    }


def take_rows(fields: Mapping[str, Tensor], at: Tensor | slice) -> dict[str, Tensor]:
    """Returns some rows of fields [U, ...], field by field."""
    return {name: values[at] for name, values in fields.items()}


def put_into(held: Mapping[str, Tensor], at_U: Tensor, fields: Mapping[str, Tensor]) -> None:
    """Write fields [U, ...] into some rows of others."""
    for name, values in held.items():
        values[at_U] = fields[name].to(values)


def read(checkpoint: Checkpoint, file: str) -> Saved:
    """Returns a part of a table of a checkpoint. Its rows are read when they are asked for.

    Args:
        checkpoint: the checkpoint.
        file: the name of the file of its map.

    Raises:
        UserError: when a file is damaged.
    """
    entry = checkpoint.files[file]
    with checkpoint.opened(entry["newer"]):
        return _read(checkpoint, entry, checkpoint.tensors(file))


def _read(checkpoint: Checkpoint, entry: dict[str, Any], tensors: dict[str, Tensor]) -> Saved:
    blocks = entry["blocks"]
    newer = checkpoint.path / entry["newer"]

    def field(name: str, first: int, last: int) -> Tensor:
        if name == AGE and "cached" not in blocks:
            return torch.full((last - first,), _LONG, dtype=torch.int32)
        try:
            with safe_open(newer, "pt") as file:
                values: Tensor = file.get_slice(name)[first:last]
        except (OSError, RuntimeError, SafetensorError) as error:
            raise UserError(
                f"{newer}: removed or damaged since it was checked ({error}); try again"
            ) from None
        return values.int() if name == ROW else values

    with safe_open(newer, "pt") as file:
        (count,) = file.get_slice(ROW).get_shape()
        (aged,) = file.get_slice(AGE).get_shape() if "cached" in blocks else (count,)
        counts_R = (
            file.get_tensor(COUNTS) if "batches" in blocks else torch.zeros(0, dtype=torch.uint8)
        )

    return Saved(
        path=Path(blocks["path"]),
        map=_map_of(entry, tensors),
        bounds=(0, blocks.get("cached", count), aged, count),
        counts_R=counts_R,
        batches=tuple(blocks.get("batches", (0, 0))),
        field=field,
        component=from_dict(Component, blocks["component"]),
        seed=blocks["seed"],
        rows=tuple(entry["rows"]),
        columns=tuple(entry["columns"]),
        find_maps=lambda: maps_beside(checkpoint, Path(blocks["path"])),
    )


def _map_of(entry: dict[str, Any], tensors: dict[str, Tensor]) -> BlockMap:
    """Returns a map. entry: what the manifest says of it."""
    return BlockMap(
        file=entry["blocks"]["file"],
        places_K=tensors["places"],
        generations_K=tensors["generations"],
    )


def maps_beside(checkpoint: Checkpoint, path: Path) -> dict[int, BlockMap]:
    """Returns the maps of a file of blocks in a checkpoint and in all others of its run, by step.

    Those of a damaged checkpoint are left out.
    """
    maps = {}
    for step in steps(checkpoint.path.parent):
        with suppress(UserError):
            saved = load(checkpoint.path.parent, step)
            if file := saved.block_files.get(str(path)):
                maps[step] = _map_of(saved.files[file], saved.tensors(file))
    return maps


def write_rows(path: Path, saved: Saved) -> dict[str, Any]:
    """Write the file of the rows that are newer. Returns its size and checksum.

    Raises:
        OSError: when it cannot be written.
    """
    _, _, aged, count = saved.bounds
    kinds = {ROW: (torch.int32, [count]), AGE: (torch.int32, [aged])}
    for name, field in saved.layout.fields.items():
        kinds[name] = (field.dtype, list(field.shape(count)))
    # the last: numbers of more bytes begin at a multiple of them
    kinds[COUNTS] = (torch.uint8, [len(saved.counts_R)])
    header = {}
    bounds = [0]
    for name, (dtype, shape) in kinds.items():
        bounds.append(bounds[-1] + dtype.itemsize * math.prod(shape))
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": bounds[-2:]}
    head = json.dumps(header).encode()
    head = head.ljust(-(-len(head) // 8) * 8)
    head = len(head).to_bytes(8, "little") + head
    head_N = torch.frombuffer(bytearray(head), dtype=torch.uint8)

    def bytes_of(name: str, first: int, last: int) -> torch.Tensor:
        """Returns some bytes of a tensor of the file."""
        dtype, shape = kinds[name]
        width = dtype.itemsize * math.prod(shape[1:])
        low = first // width
        high = -(-last // width)
        values = saved.counts_R[low:high] if name == COUNTS else saved.field(name, low, high)
        return as_bytes(values)[first - low * width : last - low * width]

    def parts(first: int, last: int) -> Iterator[torch.Tensor]:
        if first < len(head_N):
            yield head_N[first:last]
        for name, (start, end) in zip(
            kinds, pairwise(len(head_N) + bound for bound in bounds), strict=True
        ):
            low = max(start, first)
            high = min(end, last)
            if low < high:
                yield bytes_of(name, low - start, high - start)

    return pieces.write(path, len(head_N) + bounds[-1], parts)
