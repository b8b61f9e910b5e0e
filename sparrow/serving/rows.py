"""The rows of a component in the files of a model folder: mapped, compared and written, in
blocks.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparrow.core.chunk import as_bytes
from sparrow.core.errors import UserError
from sparrow.embeddings.stores import At
from sparrow.embeddings.stores.mapped import LeveledRows

ROW = ":row"  # in the file of a delta, beside the fields: int64 [U], which rows it has, ascending
_KINDS = {  # a safetensors name -> its type
    json.loads(safetensors.torch.save({"": torch.empty(0, dtype=kind)})[8:])[""]["dtype"]: kind
    for kind in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}
# else Linux maps no file that is larger than memory
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
BLOCK = 1 << 20  # bytes of a field that are in memory at a time, in a core's cache if it can be


class UnreadableError(UserError):
    """Rows cannot be read, or are not what was written. No request that asks for them has a
    score.
    """


def changed_rows(old: LeveledRows, new: LeveledRows) -> Tensor:
    """Returns the rows whose records differ in a byte, or that the old ones lack: int64, ascending.

    Both are read in blocks. The byte that says "touched" is not asked: it is set for good at a
    row's first update, so it says nothing of what has changed since a base.

    Args:
        old, new: rows with the same fields.
    """
    changed = [torch.zeros(0, dtype=torch.int64)]
    step = _step(new.fields)
    for first in range(0, new.count, step):
        last = min(first + step, new.count)
        shared = slice(first, max(first, min(last, old.count)))
        differs_N = torch.ones(last - first, dtype=torch.bool)
        pairs = [
            (words(old.read(name, shared)), words(new.read(name, shared))) for name in new.fields
        ]
        differs_N[: shared.stop - first] = torch.stack([(a != b).any(1) for a, b in pairs]).any(0)
        changed.append(differs_N.nonzero()[:, 0] + first)
    return torch.cat(changed)


def write_rows(
    file: Sink,
    rows: LeveledRows,
    only: Tensor | None = None,
    check: Callable[[At], None] | None = None,
) -> None:
    """Write rows as a safetensors file, in blocks.

    Args:
        file: where to.
        rows: they.
        only: int64 [U], ascending; only these rows are written, with their numbers as ROW, as a
            delta has them.
        check: is given all rows that are written, each block before it is read.
    """
    like = {name: tensor[:0] for name, tensor in rows.fields.items()}
    checked = next(iter(like))

    def read(name: str, at: slice) -> Tensor:
        if name == ROW:
            assert only is not None
            return only[at]
        rows_at = at if only is None else only[at]
        if check is not None and name == checked:
            check(rows_at)
        return rows.read(name, rows_at)

    if only is None:
        write_tensors(file, like, rows.count, read)
    else:
        write_tensors(file, {**like, ROW: only[:0]}, len(only), read)


class Sink(Protocol):
    """Where bytes go: a file, or what only counts them."""

    def write(self, data: memoryview | bytes, /) -> object:
        """Take some bytes."""
        ...


def write_tensors(
    file: Sink, like: Mapping[str, Tensor], count: int, read: Callable[[str, slice], Tensor]
) -> None:
    """Write tensors of one length as a safetensors file, to the byte as `safetensors.torch.save`
    does, in blocks.

    Args:
        file: where to.
        like: name -> a tensor [0, ...] of the same type and shape.
        count: how many entries each tensor has.
        read: returns some entries of a tensor.
    """
    # it knows the order and the names of types
    header = json.loads(safetensors.torch.save(dict(like))[8:])
    end = 0
    for name, entry in header.items():
        begin = end
        end = end + count * _row_bytes(like[name])
        entry |= {"shape": [count, *like[name].shape[1:]], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    step = _step(like)
    written = list[Future[object]]()
    with ThreadPoolExecutor(1) as pool:  # a block is read while the one before it is written
        for name in header:
            for first in range(0, count, step):
                values = read(name, slice(first, min(first + step, count))).contiguous()
                if written:
                    written.pop().result()
                written.append(pool.submit(file.write, as_bytes(values).numpy().data))
        for last in written:
            last.result()


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file, which is mapped. What is written to them is seen in this
    process alone.

    Raises:
        UserError: when it cannot be read.
    """
    try:
        with safe_open(path, "np"), open(path, "rb") as file:  # the former checks the header
            size = os.fstat(file.fileno()).st_size
            flags = mmap.MAP_PRIVATE | _NO_RESERVE
            memory = mmap.mmap(
                file.fileno(), size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
    except (OSError, SafetensorError) as error:
        remedies = {
            errno.EMFILE: "raise `ulimit -n`",
            errno.ENOMEM: "let the system map more than its memory holds",
        }
        if remedy := remedies.get(getattr(error, "errno", None) or 0):
            raise UserError(f"{path}: cannot be mapped ({error}); {remedy}") from None
        raise UserError(f"{path}: missing or damaged ({error}); export the model again") from None
    begin = 8 + int.from_bytes(memory[:8], "little")
    tensors = {}
    for name, entry in json.loads(memory[8:begin]).items():
        if name == "__metadata__":
            continue
        kind = _KINDS[entry["dtype"]]
        count = math.prod(entry["shape"])
        place = begin + entry["data_offsets"][0]
        if count:
            tensors[name] = torch.frombuffer(memory, dtype=kind, count=count, offset=place).view(
                entry["shape"]
            )
        else:
            tensors[name] = torch.empty(entry["shape"], dtype=kind)
    return tensors


def _row_bytes(tensor: Tensor) -> int:
    return tensor.element_size() * math.prod(tensor.shape[1:])


def _step(fields: Mapping[str, Tensor]) -> int:
    """How many rows are in memory at a time."""
    return max(1, BLOCK // max(map(_row_bytes, fields.values())))


def words(tensor: Tensor) -> Tensor:
    """Returns the bytes of each row [N, ...] as integers [N, words], as wide as they can be."""
    tensor = tensor.contiguous().reshape(len(tensor), math.prod(tensor.shape[1:]))
    size = _row_bytes(tensor)
    return tensor.view(
        torch.int64 if size % 8 == 0 else torch.int32 if size % 4 == 0 else torch.uint8
    )
