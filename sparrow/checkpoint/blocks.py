"""What a checkpoint writes and reads of tables on an SSD: a map of blocks, and the rows that are newer, in two files.

The rows are one file (safetensors), written from its beginning to its end: their numbers, then field after field. They
come in the order of their frames, so that nothing has to be sorted while training waits. Whoever reads them sorts. The
counts of all rows come last, a byte each, where the policy counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError, safe_open

from sparrow.checkpoint import pieces
from sparrow.core import Chunk, UserError
from sparrow.core.config import from_dict, to_dict
from sparrow.embeddings import Component, RowRecords, stored_in
from sparrow.embeddings.stores import Saved, SavedStore
from sparrow.embeddings.stores.saved import AGE, ROW
from sparrow.kernels.block_io import BlockMap

COUNTS = "counts"  # of all rows, where the policy counts
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
    blocks = {"path": str(saved.path), "file": saved.map.file, "seed": saved.seed, "cached": saved.bounds[1]}
    blocks["batches"] = list(saved.batches)
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
        if name == AGE and "cached" not in blocks:
            return torch.full((last - first,), _LONG, dtype=torch.int32)
        try:
            with safe_open(newer, "pt") as file:
                found: torch.Tensor = file.get_slice(name)[first:last]
        except (OSError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{newer}: removed or damaged since it was checked ({error}); try again") from None
        return found.int() if name == ROW else found

    with safe_open(newer, "pt") as file:
        (count,) = file.get_slice(ROW).get_shape()
        (aged,) = file.get_slice(AGE).get_shape() if "cached" in blocks else (count,)
        counts_R = file.get_tensor(COUNTS) if "batches" in blocks else torch.zeros(0, dtype=torch.uint8)

    return Saved(
        path=Path(blocks["path"]),
        map=map_of(entry, tensors),
        bounds=(0, blocks.get("cached", count), aged, count),
        counts_R=counts_R,
        batches=tuple(blocks.get("batches", (0, 0))),
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
    _, _, aged, count = saved.bounds
    kinds = {ROW: (torch.int32, [count]), AGE: (torch.int32, [aged])}
    kinds |= {name: (of.dtype, list(of.shape(count))) for name, of in saved.layout.fields.items()}
    kinds[COUNTS] = (torch.uint8, [len(saved.counts_R)])  # the last: numbers of more bytes begin at a multiple of them
    header, bounds = {}, [0]
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
        low, high = first // width, -(-last // width)
        of = saved.counts_R[low:high] if name == COUNTS else saved.field(name, low, high)
        return of.flatten().view(torch.uint8)[first - low * width : last - low * width]

    def parts(first: int, last: int) -> Iterator[torch.Tensor]:
        if first < len(head_N):
            yield head_N[first:last]
        for name, (start, end) in zip(kinds, pairwise(len(head_N) + bound for bound in bounds), strict=True):
            low, high = max(start, first), min(end, last)
            if low < high:
                yield bytes_of(name, low - start, high - start)

    return pieces.write(path, len(head_N) + bounds[-1], parts)
