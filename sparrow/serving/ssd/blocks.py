"""A table's rows as blocks on an SSD: written once, and then only read.

A model folder keeps each field of its rows in one piece, under one checksum for the file. Blocks of 4 KiB have all
fields of some rows, and a checksum each. So a row takes one read, which knows whether it is right.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.core.files import cannot_write, sync
from sparrow.core.workplace import workplace
from sparrow.kernels.block_io import BlockMap, Blocks, Layout, Way

ROWS, MAP = "rows.blocks", "map"
_STEP = 1 << 22  # bytes of blocks that are written at a time, in each thread
_THREADS = min(4, os.cpu_count() or 1)
_SEAL = hashlib.sha256().digest_size


class UnreadableError(RuntimeError):
    """Rows cannot be read, or are not what was written. No request that asks for them has a score."""


Fields = Mapping[str, Tensor]


def opened(
    place: Path,
    layout: Layout,
    table: str,
    fields: Fields,
    way: Way,
    made_of: Callable[[Fields], Fields] | None = None,
) -> Blocks:
    """Returns the blocks of a table, which are written if they are not there.

    Args:
        place: their folder.
        layout: how rows lie in them.
        table: the table's name, for messages.
        fields: field -> its entries in all rows.
        way: see `block_io`.
        made_of: makes what is written of the fields of some rows; by default it is they.

    Raises:
        UserError: when they cannot be written, or are damaged.
    """
    if not place.exists():
        _write(place, layout, table, fields, way, made_of)
    try:
        return Blocks(place / ROWS, layout, table=table, map=_map(place / MAP, layout), way=way, is_written=False)
    except UserError as error:
        raise UserError(mended(error, place)) from None


def mended(error: UserError, place: Path) -> str:
    """Returns the message of an error about blocks, with what helps here."""
    return f"{str(error).partition(';')[0]}; remove {place} and load the model again, which writes it anew"


def _write(
    place: Path, layout: Layout, table: str, fields: Fields, way: Way, made_of: Callable[[Fields], Fields] | None
) -> None:
    size = (layout.blocks + 1) * layout.block
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place.parent).free
    except OSError as error:
        raise cannot_write(place, error) from error
    if free < size:
        told = f"table {table!r} takes {size / 1e9:.2f} GB there as blocks, and {free / 1e9:.2f} GB are free"
        raise UserError(f"{place.parent}: {told}; make room, or name another folder")
    with workplace(place) as (work, _):
        try:
            made = work / "new"
            made.mkdir()
            blocks = Blocks(made / ROWS, layout, table=table, way=way)
            try:
                step = max(1, _STEP // layout.block) * layout.per_block

                def fill(first: int) -> None:
                    some: Fields = {name: of[first : first + step] for name, of in fields.items()}
                    blocks.fill(first, made_of(some) if made_of else some)  # rows of zeros take no room

                with ThreadPoolExecutor(1 if blocks.way == "reference" else _THREADS) as pool:
                    list(pool.map(fill, range(0, layout.rows, step)))
                map = blocks.sync()
            finally:
                blocks.close()
            of_map = {"file": torch.tensor([map.file]), "places": map.places_K, "generations": map.generations_K}
            body = safetensors.torch.save(of_map)
            (made / MAP).write_bytes(body + hashlib.sha256(body).digest())
            sync(made / MAP)
            sync(made)
            try:
                made.rename(place)
            except OSError:
                if not place.exists():  # else another process has written the same
                    raise
            sync(place.parent)
        except OSError as error:
            raise cannot_write(place, error) from error
        except UserError as error:
            remedy = "make room there, or name another folder"
            raise UserError(f"{str(error).partition(';')[0]}; {remedy}") from None


def _map(path: Path, layout: Layout) -> BlockMap:
    """Returns where the blocks are.

    Raises:
        UserError: when it is missing or damaged.
    """
    try:
        data = path.read_bytes()
        body, seal = data[:-_SEAL], data[-_SEAL:]
        if hashlib.sha256(body).digest() != seal:
            raise UserError(f"{path}: damaged (its checksum differs)")
        found = safetensors.torch.load(body)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: missing or damaged ({error})") from None
    if len(found["places"]) != layout.blocks:
        raise UserError(f"{path}: of {len(found['places'])} blocks, where the table has {layout.blocks}")
    return BlockMap(file=int(found["file"]), places_K=found["places"], generations_K=found["generations"])
