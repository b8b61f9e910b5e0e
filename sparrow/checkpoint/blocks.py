"""What a checkpoint writes and reads of tables on an SSD: a map of blocks, and the rows that are newer, in two files.

The rows are one file, written from its beginning to its end: their numbers, then their records (safetensors).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import safe_open

from sparrow.core import Chunk
from sparrow.core.config import from_dict, to_dict
from sparrow.embeddings import Component, RowRecords, stored_in
from sparrow.embeddings.tiers import Saved, SavedStore
from sparrow.kernels.block_io import BlockMap

PIECE_BYTES = 16 << 20


def name_of(saved: Saved) -> str:
    """Returns what its two files are called, after their kind."""
    return f"{quote(saved.component.name, safe='')}-{saved.rows[0]:012d}-{saved.columns[0]:06d}.safetensors"


def entry_of(saved: Saved) -> dict[str, Any]:
    """Returns what the manifest says of the map, as plain data that `read` takes."""
    place = {"table": saved.component.name, "rows": list(saved.rows), "columns": list(saved.columns)}
    blocks = {"path": str(saved.path), "file": saved.map.file, "seed": saved.seed}
    return {**place, "blocks": {**blocks, "component": to_dict(saved.component)}}


def read(entry: dict[str, Any], tensors: dict[str, torch.Tensor], newer: Path) -> Saved:
    """Returns a part of a table.

    Args:
        entry: what the manifest says of its map.
        tensors: the map.
        newer: the file of the rows that are newer.
    """
    blocks = entry["blocks"]
    with safe_open(newer, "pt") as file:
        rows_U = file.get_tensor("row")

    def records(first: int, last: int) -> torch.Tensor:
        with safe_open(newer, "pt") as file:
            found: torch.Tensor = file.get_slice("record")[first:last]
        return found

    return Saved(
        path=Path(blocks["path"]),
        map=BlockMap(file=blocks["file"], places_K=tensors["places"], generations_K=tensors["generations"]),
        rows_U=rows_U,
        records=records,
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
    count, width = len(saved.rows_U), saved.records(0, 0).shape[1]
    ends = [0, 8 * count, (8 + width) * count]
    kinds = {"row": ("I64", [count]), "record": ("U8", [count, width])}
    header = json.dumps(
        {
            name: {"dtype": kind, "shape": shape, "data_offsets": ends[n : n + 2]}
            for n, (name, (kind, shape)) in enumerate(kinds.items())
        }
    ).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    digest, step = hashlib.sha256(), max(1, PIECE_BYTES // width)

    def pieces() -> Iterator[Any]:
        yield len(header).to_bytes(8, "little") + header
        for rows_V in saved.rows_U.split(PIECE_BYTES // 8):
            yield rows_V.numpy().data
        for first in range(0, count, step):
            yield saved.records(first, min(first + step, count)).numpy().data

    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        hashed = beside.submit(lambda: None)
        for piece in pieces():
            hashed.result()
            hashed = beside.submit(digest.update, piece)  # it takes as long as to write
            _write_all(file.fileno(), memoryview(piece).cast("B") if len(piece) else b"")
        hashed.result()
        os.fsync(file.fileno())
    return {"bytes": 8 + len(header) + ends[-1], "sha256": digest.hexdigest()}


def _write_all(fd: int, data: memoryview | bytes) -> None:
    while len(data):
        data = data[os.write(fd, data) :]
