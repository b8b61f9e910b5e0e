from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from sparrow.core import UserError
from sparrow.core.pages import empty_rows
from sparrow.embeddings.sizes import memory_bytes
from sparrow.embeddings.spec import Component
from sparrow.embeddings.stores.store import At, Beneath, level_of
from sparrow.kernels import row_write
from sparrow.kernels.embedding_bag import Rows, Table


class MemoryStore(Beneath):
    """Rows in plain memory of a device. Slots are rows, on one level.

    Args:
        component: whose rows these are.
        rows: how many of its rows are here.
        dim: how many of its dimensions are here.
        device: at first; "meta" for no memory at all.

    Raises:
        UserError: when a GPU has too little memory.
    """

    slots_are_rows = True

    def __init__(self, component: Component, rows: int, dim: int, device: str = "cpu") -> None:
        super().__init__()
        self.component = component
        self.dim = dim
        self._fields = component.fields_of(dim)
        self.names = tuple(self._fields)
        for name, field in self._fields.items():
            try:
                entries = empty_rows(*field.shape(rows), dtype=field.dtype, device=device)
            except torch.OutOfMemoryError:
                size = f"its rows take {memory_bytes(component, rows, dim) / 1e9:.2f} GB"
                free = f"{torch.cuda.mem_get_info(device)[0] / 1e9:.2f} GB of {device} are free"
                remedy = (
                    "choose a smaller --tables.format.name, such as int8, a smaller --model.dim, or"
                    " more GPUs"
                )
                raise UserError(f"table {component.name!r}: {size} and {free}; {remedy}") from None
            # not persistent: a state_dict holds the dense weights, tables travel as chunks
            self.register_buffer(name, entries, persistent=False)

    @property
    def is_allocated(self) -> bool:
        """Whether there is memory for the rows."""
        return not self.get_buffer("touched").is_meta

    @property
    def levels(self) -> tuple[Rows, ...]:
        """One level: all rows."""
        fields = {name: self.get_buffer(name) for name in self.names}
        return (level_of(self.component, fields),)

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Returns the rows themselves."""
        return rows_N

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        """Returns the rows themselves: every row has its place."""
        return rows_N

    def pinned(self, rows_N: Tensor) -> Tensor:
        """Returns the rows themselves."""
        return rows_N

    def overwritten(self, rows_U: Tensor) -> AbstractContextManager[Tensor]:
        """Returns a context with the rows themselves."""
        return nullcontext(rows_U)

    def settle(self) -> None:
        """Do nothing."""

    def read(self, at: At) -> dict[str, Tensor]:
        """Returns all fields of some rows."""
        return {name: self.get_buffer(name)[at] for name in self.names}

    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Write some fields of some rows. Rows and entries may be on another device."""
        # get_buffer is slow
        buffers = [buffer for name in fields if (buffer := self._buffers[name]) is not None]
        if not isinstance(at, slice) and columns == slice(None) and buffers[0].is_cpu and at.is_cpu:
            converted = [
                entries.to(buffer.dtype)
                for buffer, entries in zip(buffers, fields.values(), strict=True)
            ]
            row_write.write(buffers, converted, at)
            return
        with torch.no_grad():
            for buffer, (name, entries) in zip(buffers, fields.items(), strict=True):
                values = entries.to(buffer.device)
                at = at if isinstance(at, slice) else at.to(buffer.device)
                self._fields[name].put(buffer, at, values, columns, self.dim)
