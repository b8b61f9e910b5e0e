"""Where the rows of a component are kept. A table, a checkpoint or a plan knows them by row number alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor, nn

from sparrow.core import UserError
from sparrow.embeddings.memory import empty_rows
from sparrow.embeddings.spec import Component
from sparrow.kernels.embedding_bag import Rows, Table

At = slice | Tensor
"""Some row numbers: a slice, or int64 [U] without repetition."""


class RowStore(Protocol):
    """Holds row records 0 <= row < R. It is a Module, so that it moves to a device with its model.

    Kernels read and write rows by slot. Slots number the rows of all levels in turn. A store says which slot a row has,
    and it may have more slots than rows.
    """

    @property
    def levels(self) -> tuple[Rows, ...]:
        """The rows as kernels take them, one for each kind of memory."""
        ...

    @property
    def slots_are_rows(self) -> bool:
        """Whether `slots_of` returns what it is given."""
        ...

    @property
    def is_allocated(self) -> bool:
        """Whether there is memory for all rows. If so, they get their first values."""
        ...

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Returns the slots [N] of rows [N], as they are now."""
        ...

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        """Begin a batch of training. Returns the slots [N] of its rows.

        Args:
            rows_N: the rows that it uses.
            table: these rows as the operators take them.
        """
        ...

    def settle(self) -> None:
        """Hear that the rows of all batches so far have learnt, or that what they would have learnt is forgotten."""
        ...

    def read(self, at: At) -> dict[str, Tensor]:
        """Returns field -> its entries in some rows, [U, ...]. They are views where the rows lie so."""
        ...

    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Overwrite some fields of some rows.

        Args:
            at: the rows.
            fields: field -> its new entries, [U, ...].
            columns: what is overwritten of fields that have columns; by default all of them.
        """
        ...


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


class FoldedStore(nn.Module):
    """All rows share a few that are zero. It is for callers that need the shapes of a lookup and not its values."""

    slots_are_rows = False
    is_allocated = False
    FEW = 16

    def __init__(self, component: Component, rows: int, dim: int) -> None:
        super().__init__()
        self.held = MemoryStore(component, min(rows, self.FEW), dim)
        for name in self.held.names:
            self.held.get_buffer(name).zero_()

    @property
    def levels(self) -> tuple[Rows, ...]:
        """One level: the few rows."""
        return self.held.levels

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Returns the slots of the few rows, in turn."""
        return rows_N % len(self.held.get_buffer("touched"))

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        """Returns the slots: every row has its place."""
        return self.slots_of(rows_N)

    def settle(self) -> None:
        """Do nothing."""

    def read(self, at: At) -> dict[str, Tensor]:
        """Raises NotImplementedError: nothing is kept of a row."""
        raise NotImplementedError

    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Raises NotImplementedError: nothing is kept of a row."""
        raise NotImplementedError


def level_of(component: Component, fields: Mapping[str, Tensor], changed_R: Tensor | None = None) -> Rows:
    """Returns a level of a component's rows.

    Args:
        component: whose rows these are.
        fields: field -> its entries in these rows, for all fields.
        changed_R: see `Rows`.
    """
    payload, state = component.format.fields(component.dim), component.rule.fields(component.dim)
    return Rows(
        format=component.format,
        payload={name: fields[name] for name in payload},
        touched_R=fields["touched"],
        state={name: fields[name] for name in state},
        changed_R=changed_R,
    )


MakeStore = Callable[[Component, int, int], RowStore]
"""(component, rows, columns) -> a store for so many of its rows and columns."""

_make: ContextVar[MakeStore | None] = ContextVar("_make", default=None)


def chosen_store() -> MakeStore | None:
    """Returns what `stored_in` chose, or None."""
    return _make.get()


@contextmanager
def stored_in(make: MakeStore) -> Iterator[None]:
    """Tables that are made within this context keep their rows in stores that `make` returns."""
    token = _make.set(make)
    try:
        yield
    finally:
        _make.reset(token)


_place: ContextVar[str] = ContextVar("_place", default="cpu")


def chosen_device() -> str:
    """Returns the device that `rows_on` chose, or "cpu"."""
    return _place.get()


@contextmanager
def rows_on(device: str) -> Iterator[None]:
    """Tables that are made within this context have their rows on a device. The host never holds a whole table."""
    token = _place.set(device)
    try:
        yield
    finally:
        _place.reset(token)


def unallocated() -> AbstractContextManager[None]:
    """Tables that are made within this context have no memory. Who shards a model puts parts in their place."""
    return stored_in(lambda component, rows, dim: MemoryStore(component, rows, dim, "meta"))
