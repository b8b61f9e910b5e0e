"""A table's rows as blocks on an SSD: written once, and then only read.

A model folder keeps each field of its rows in one piece, under one checksum for the file. Blocks of
4 KiB have all fields of some rows, and a checksum each. So a row takes one read, which knows
whether it is right.
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

ROWS = "rows.blocks"
MAP = "map"
_STEP = 1 << 22  # bytes of blocks that are written at a time, in each thread
_THREADS = min(4, os.cpu_count() or 1)
_SEAL = hashlib.sha256().digest_size


Fields = Mapping[str, Tensor]


def open_blocks(
    place: Path,
    layout: Layout,
    table: str,
    fields: Fields,
    way: Way,
    convert: Callable[[Fields], Fields] | None = None,
) -> Blocks:
    """Returns the blocks of a table, which are written if they are not there.

    Args:
        place: their folder.
        layout: how rows lie in them.
        table: the table's name, for messages.
        fields: field -> its entries in all rows.
        way: see `block_io`.
        convert: makes what is written of the fields of some rows; by default it is they.

    Raises:
        UserError: when they cannot be written, or are damaged.
    """
    if not place.exists():
        _write(place, layout, table, fields, way, convert)
    try:
        return Blocks(
            place / ROWS,
            layout,
            table=table,
            map=_map(place / MAP, layout),
            way=way,
            is_written=False,
        )
    except UserError as error:
        raise UserError(mended(error, place)) from None


def mended(error: UserError, place: Path) -> str:
    """Returns the message of an error about blocks, with what helps here."""
    return (
        f"{str(error).partition(';')[0]}; remove {place} and load the model again, which writes it"
        " anew"
    )


def _write(
    place: Path,
    layout: Layout,
    table: str,
    fields: Fields,
    way: Way,
    convert: Callable[[Fields], Fields] | None,
) -> None:
    size = (layout.blocks + 1) * layout.block
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place.parent).free
    except OSError as error:
        raise cannot_write(place, error) from error
    if free < size:
        message = (
            f"table {table!r} takes {size / 1e9:.2f} GB there as blocks, and {free / 1e9:.2f} GB"
            " are free"
        )
        raise UserError(f"{place.parent}: {message}; make room, or name another folder")
    with workplace(place) as (work, _):
        try:
            folder = work / "new"
            folder.mkdir()
            blocks = Blocks(folder / ROWS, layout, table=table, way=way)
            try:
                step = max(1, _STEP // layout.block) * layout.per_block

                def fill(first: int) -> None:
                    piece: Fields = {
                        name: entries[first : first + step] for name, entries in fields.items()
                    }
                    # rows of zeros take no room
                    blocks.fill(first, convert(piece) if convert else piece)

                with ThreadPoolExecutor(1 if blocks.way == "reference" else _THREADS) as pool:
                    list(pool.map(fill, range(0, layout.rows, step)))
                map = blocks.sync()
            finally:
                blocks.close()
            map_tensors = {
                "file": torch.tensor([map.file]),
                "places": map.places_K,
                "generations": map.generations_K,
            }
            body = safetensors.torch.save(map_tensors)
            (folder / MAP).write_bytes(body + hashlib.sha256(body).digest())
            sync(folder / MAP)
            sync(folder)
            try:
                folder.rename(place)
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
        body = data[:-_SEAL]
        seal = data[-_SEAL:]
        if hashlib.sha256(body).digest() != seal:
            raise UserError(f"{path}: damaged (its checksum differs)")
        tensors = safetensors.torch.load(body)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: missing or damaged ({error})") from None
    if len(tensors["places"]) != layout.blocks:
        raise UserError(
            f"{path}: of {len(tensors['places'])} blocks, where the table has {layout.blocks}"
        )
    return BlockMap(
        file=int(tensors["file"]), places_K=tensors["places"], generations_K=tensors["generations"]
    )
