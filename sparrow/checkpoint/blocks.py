"""What a checkpoint writes and reads of tables on an SSD: a map of blocks, and the rows that are newer, in two files.

The rows are one file (safetensors), written from its beginning to its end: their numbers, then field after field. They
come in the order of their frames, so that nothing has to be sorted while training waits. Whoever reads them sorts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import safe_open

from sparrow.checkpoint import pieces
from sparrow.core import Chunk
from sparrow.core.config import from_dict, to_dict
from sparrow.embeddings import Component, RowRecords, stored_in
from sparrow.embeddings.tiers import Saved, SavedStore
from sparrow.kernels.block_io import BlockMap

PIECE = 64 << 20  # bytes
ROW, AGE = "row", "age"  # of the newer rows: their numbers, and for how many batches nobody used them; no fields
_LONG = 1 << 20  # batches: the age of all rows of format 4, which has none
_CODES = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"} | {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"
}  # fmt: skip


def name_of(saved: Saved) -> str:
    """Returns what its two files are called, after their kind."""
    return f"{quote(saved.component.name, safe='')}-{saved.rows[0]:012d}-{saved.columns[0]:06d}.safetensors"


def entry_of(saved: Saved) -> dict[str, Any]:
    """Returns what the manifest says of the map, as plain data that `read` takes."""
    place = {"table": saved.component.name, "rows": list(saved.rows), "columns": list(saved.columns)}
    blocks = {"path": str(saved.path), "file": saved.map.file, "seed": saved.seed, "cached": saved.cached}
    return {**place, "blocks": {**blocks, "component": to_dict(saved.component)}}


def map_of(entry: dict[str, Any], tensors: dict[str, torch.Tensor]) -> BlockMap:
    """Returns a map. entry: what the manifest says of it."""
    return BlockMap(file=entry["blocks"]["file"], places_K=tensors["places"], generations_K=tensors["generations"])


def read(entry: dict[str, Any], tensors: dict[str, torch.Tensor], newer: Path) -> Saved:
    """Returns a part of a table.

    Args:
        entry: what the manifest says of its map.
        tensors: the map.
        newer: the file of the rows that are newer.
    """
    blocks = entry["blocks"]

    def field(name: str, first: int, last: int) -> torch.Tensor:
        with safe_open(newer, "pt") as file:
            found: torch.Tensor = file.get_slice(name)[first:last]
        return found

    with safe_open(newer, "pt") as file:
        rows_U = file.get_tensor(ROW).int()
        ages_H = file.get_tensor(AGE) if "cached" in blocks else torch.full_like(rows_U, _LONG)

    return Saved(
        path=Path(blocks["path"]),
        map=map_of(entry, tensors),
        rows_U=rows_U,
        ages_H=ages_H,
        cached=blocks.get("cached", len(rows_U)),
        field=field,
        component=from_dict(Component, blocks["component"]),
        seed=blocks["seed"],
        rows=tuple(entry["rows"]),
        columns=tuple(entry["columns"]),
    )


def chunks(saved: Saved, wanted: Sequence[tuple[int, int]], max_bytes: int = 64 << 20) -> Iterator[Chunk]:
    """Yields all rows of a part as ordinary chunks, in their order, but for those that lie in no wanted range.

    Raises:
        UserError: when the file of blocks is missing, cut, damaged or another one.
    """
    with stored_in(lambda component, rows, dim: SavedStore(saved)):
        record = RowRecords(saved.component, saved.seed, saved.rows, saved.columns)
    assert isinstance(record.store, SavedStore)
    with closing(record.store):
        yield from record.chunks(max_bytes, wanted)


def write_rows(path: Path, saved: Saved) -> dict[str, Any]:
    """Write the file of the rows that are newer. Returns its size and checksum.

    Raises:
        OSError: when it cannot be written.
    """
    count, step = len(saved.rows_U), max(1, PIECE // saved.layout.record_bytes)
    kinds = {ROW: (torch.int32, [count]), AGE: (torch.int32, [len(saved.ages_H)])}
    kinds |= {name: (of.dtype, list(of.shape(count))) for name, of in saved.layout.fields.items()}
    header, end = {}, 0
    for name, (dtype, shape) in kinds.items():
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head = head.ljust(-(-len(head) // 8) * 8)

    def parts() -> Iterator[torch.Tensor]:
        yield torch.frombuffer(bytearray(len(head).to_bytes(8, "little") + head), dtype=torch.uint8)
        for whole in (saved.rows_U, saved.ages_H):
            yield whole.view(torch.uint8)
        for name in saved.layout.fields:
            for first in range(0, count, step):
                yield saved.field(name, first, min(first + step, count)).flatten().view(torch.uint8)

    return pieces.write(path, parts())
