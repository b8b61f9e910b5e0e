from __future__ import annotations

import math
import mmap
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparrow.core import UserError
from sparrow.embeddings.spec import Component
from sparrow.embeddings.tiers.store import At, chosen_device, level_of
from sparrow.kernels.embedding_bag import Rows, Table

HUGE = 4 << 20  # bytes from which pages of 2 MiB are asked for


def empty_rows(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Returns uninitialised memory for rows that are read at random, in pages of 2 MiB where the system offers them.

    With pages of 4 KiB most of a lookup in a large table is spent on finding the page (measured: docs/LOG.md).

    Args:
        shape: of the rows.
        dtype: of their numbers.
        device: where they are; the pages are those of a host.
    """
    count = math.prod(shape)
    bytes_rows = count * dtype.itemsize
    if device != "cpu" or bytes_rows < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, bytes_rows, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)  # keeps the memory alive


class MemoryStore(nn.Module):
    """Rows in plain memory of a device, at first that of `rows_on`. Slots are rows, on one level.

    Args:
        component: whose rows these are.
        rows: how many of its rows are here.
        dim: how many of its dimensions are here.
        device: "meta" for no memory at all.

    Raises:
        UserError: when a GPU has too little memory.
    """

    slots_are_rows = True

    def __init__(self, component: Component, rows: int, dim: int, device: str | None = None) -> None:
        super().__init__()
        device = device or chosen_device()
        self.component = component
        self.names = tuple(component.fields_of(dim))
        self._across = {name: field.across for name, field in component.fields_of(dim).items()}
        for name, field in component.fields_of(dim).items():
            try:
                made = empty_rows(*field.shape(rows), dtype=field.dtype, device=device)
            except torch.OutOfMemoryError:
                size = f"its rows take {component.bytes_of(rows, dim) / 1e9:.2f} GB"
                free = f"{torch.cuda.mem_get_info(device)[0] / 1e9:.2f} GB of {device} are free"
                remedy = "choose a smaller --tables.format.name, such as int8, a smaller --model.dim, or more GPUs"
                raise UserError(f"table {component.name!r}: {size} and {free}; {remedy}") from None
            # not persistent: a state_dict holds the dense weights, tables travel as chunks
            self.register_buffer(name, made, persistent=False)

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

    def settle(self) -> None:
        """Do nothing."""

    def read(self, at: At) -> dict[str, Tensor]:
        """Returns what `RowStore.read` says."""
        return {name: self.get_buffer(name)[at] for name in self.names}

    @torch.no_grad()
    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Do what `RowStore.write` says. Rows and entries may be on another device."""
        for name, given in fields.items():
            buffer = self.get_buffer(name)
            values = given.to(buffer.device)
            at = at if isinstance(at, slice) else at.to(buffer.device)
            if self._across[name] == "cut":
                buffer[at, columns] = values
            else:
                buffer[at] = values
