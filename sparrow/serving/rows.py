"""A component's rows in model folders: mapped, those of deltas above those of a full folder; compared and written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.embeddings.tiers import At
from sparrow.embeddings.tiers.mapped import gathered
from sparrow.kernels import row_levels

ROW = ":row"  # in the file of a delta, beside the fields: int64 [U], which rows it has, ascending
BLOCK = 1 << 22  # bytes of a field that are in memory at a time


def _none() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class FolderRows:
    """Row records 0 <= row < R: those of a full folder, and above them those that deltas changed or added.

    Args:
        fields: field -> its entries in the full folder's rows, [rows, ...].
        rows_U: int64 [U], the rows that deltas have, ascending. Those behind the full folder's are all among them.
        above: field -> its entries in these rows, [U, ...].
    """

    fields: Mapping[str, Tensor]
    rows_U: Tensor = field(default_factory=_none)
    above: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def below(self) -> int:
        """How many rows the full folder has."""
        return len(next(iter(self.fields.values())))

    @property
    def count(self) -> int:
        """R."""
        return max(self.below, int(self.rows_U[-1]) + 1 if len(self.rows_U) else 0)

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Returns the slots [N] of rows [N]: a row of the full folder has its number, those of deltas follow."""
        return row_levels.slots_of(rows_N, (0, len(rows_N)), (self.rows_U,), (self.below,))

    def read(self, name: str, at: At) -> Tensor:
        """Returns the entries of a field in some rows, [N, ...]. They are a view where no delta has rows."""
        if not len(self.rows_U):
            return self.fields[name][at]
        slots_N = self.slots_of(torch.arange(*at.indices(self.count)) if isinstance(at, slice) else at)
        return gathered(self.fields[name], self.above[name], slots_N)

    def updated(self, rows_V: Tensor, fields: Mapping[str, Tensor]) -> FolderRows:
        """Returns these rows with those of one more delta, which are what they were given if they are the first.

        Those of several deltas are merged in memory, so that a lookup searches once.

        Args:
            rows_V: int64 [V], ascending.
            fields: field -> its entries in these rows, [V, ...].
        """
        if not len(rows_V):
            return self
        if not len(self.rows_U):
            return FolderRows(fields=self.fields, rows_U=rows_V, above=fields)
        stay_U = ~torch.isin(self.rows_U, rows_V, assume_unique=True)
        rows_W, order_W = torch.cat([self.rows_U[stay_U], rows_V]).sort()
        above = {name: torch.cat([of[stay_U], fields[name]])[order_W] for name, of in self.above.items()}
        return FolderRows(fields=self.fields, rows_U=rows_W, above=above)

    def changed(self, new: FolderRows) -> Tensor:
        """Returns the rows whose records differ in a byte from those here, or that are not here: int64, ascending.

        Both are read in blocks. The byte that says "touched" is not asked: it is set for good at a row's first update,
        so it says nothing of what has changed since a base.

        Args:
            new: rows with the same fields.
        """
        found, step = [_none()], _step(self.fields)
        for first in range(0, new.count, step):
            last = min(first + step, new.count)
            differs_N = torch.ones(last - first, dtype=torch.bool)
            old = slice(first, min(last, self.count))
            if old.start < old.stop:
                pairs = [(_words(self.read(name, old)), _words(new.read(name, old))) for name in self.fields]
                differs_N[: old.stop - first] = torch.stack([(a != b).any(1) for a, b in pairs]).any(0)
            found.append(differs_N.nonzero()[:, 0] + first)
        return torch.cat(found)

    def write(self, file: Sink, only: Tensor | None = None) -> None:
        """Write the rows as a safetensors file, in blocks.

        Args:
            file: where to.
            only: int64 [U], ascending; only these rows are written, with their numbers as ROW, as a delta has them.
        """
        fields = {name: of[:0] for name, of in self.fields.items()}
        if only is None:
            write_tensors(file, fields, self.count, lambda name, at: self.read(name, at))
        else:
            rows_U = only
            write_tensors(
                file,
                {**fields, ROW: rows_U[:0]},
                len(rows_U),
                lambda name, at: rows_U[at] if name == ROW else self.read(name, rows_U[at]),
            )


class Sink(Protocol):
    """Where bytes go: a file, or what only counts them."""

    def write(self, data: memoryview | bytes, /) -> object:
        """Take some bytes."""
        ...


def write_tensors(file: Sink, like: Mapping[str, Tensor], count: int, read: Callable[[str, slice], Tensor]) -> None:
    """Write tensors of one length as a safetensors file, to the byte as `safetensors.torch.save` does, in blocks.

    Args:
        file: where to.
        like: name -> a tensor [0, ...] of the same type and shape.
        count: how many entries each tensor has.
        read: returns some entries of a tensor.
    """
    header = json.loads(safetensors.torch.save(dict(like))[8:])  # it knows the order and the names of types
    end = 0
    for name, of in header.items():
        begin, end = end, end + count * _row_bytes(like[name])
        of |= {"shape": [count, *like[name].shape[1:]], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    step = _step(like)
    for name in header:
        for first in range(0, count, step):
            values = read(name, slice(first, min(first + step, count))).contiguous()
            file.write(memoryview(values.reshape(-1).view(torch.uint8).numpy()))


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file, which is mapped.

    Raises:
        UserError: when it cannot be read.
    """
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: missing or damaged ({error}); export the model again") from None


def _row_bytes(of: Tensor) -> int:
    return of.element_size() * math.prod(of.shape[1:])


def _step(fields: Mapping[str, Tensor]) -> int:
    """How many rows are in memory at a time."""
    return max(1, BLOCK // max(map(_row_bytes, fields.values())))


def _words(of: Tensor) -> Tensor:
    """The bytes of each row [N, ...] as integers [N, words], as wide as they can be."""
    of = of.contiguous().reshape(len(of), math.prod(of.shape[1:]))
    size = _row_bytes(of)
    return of.view(torch.int64 if size % 8 == 0 else torch.int32 if size % 4 == 0 else torch.uint8)
