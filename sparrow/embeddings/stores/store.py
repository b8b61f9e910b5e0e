"""Where the rows of a component are kept. A table, a checkpoint or a plan knows them by row number alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

from torch import Tensor

from sparrow.embeddings.spec import Component, Folder
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

    def pinned(self, rows_N: Tensor) -> Tensor:
        """Returns the slots [N] of rows that learn now.

        Raises:
            UserError: when no batch of training has one.
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
            fields: field -> its new entries, [U, ...], or [1, ...] where all rows get the same.
            columns: what is overwritten of fields that have columns; by default all of them.
        """
        ...


class Beneath(RowStore, Protocol):
    """A store over which a cache of exact rows can stand."""

    def overwritten(self, rows_U: Tensor) -> AbstractContextManager[Tensor]:
        """Rows have slots [U] in this context, to which whole records are written."""
        ...


def level_of(
    component: Component,
    fields: Mapping[str, Tensor],
    changed_R: Tensor | None = None,
    rows_R: Tensor | None = None,
) -> Rows:
    """Returns a level of a component's rows.

    Args:
        component: whose rows these are.
        fields: field -> its entries in these rows, for all fields.
        changed_R: see `Rows`.
        rows_R: see `Rows`.
    """
    payload, state = component.format.fields(component.dim), component.rule.fields(component.dim)
    return Rows(
        format=component.format,
        payload={name: fields[name] for name in payload},
        touched_R=fields["touched"],
        state={name: fields[name] for name in state},
        changed_R=changed_R,
        rows_R=rows_R,
    )


MakeStore = Callable[[Component, int, int], RowStore]
"""(component, rows, columns) -> a store for so many of its rows and columns."""

T = TypeVar("T")


@contextmanager
def _within(choice: ContextVar[T], value: T) -> Iterator[None]:
    token = choice.set(value)
    try:
        yield
    finally:
        choice.reset(token)


_make: ContextVar[MakeStore | None] = ContextVar("_make", default=None)


def chosen_store() -> MakeStore | None:
    """Returns what `stored_in` chose, or None."""
    return _make.get()


def stored_in(make: MakeStore) -> AbstractContextManager[None]:
    """Tables that are made within this context keep their rows in stores that `make` returns."""
    return _within(_make, make)


_folder: ContextVar[Folder | None] = ContextVar("_folder", default=None)


def chosen_folder() -> Folder | None:
    """Returns what `on_ssd` chose, or None."""
    return _folder.get()


def on_ssd(folder: Folder | None) -> AbstractContextManager[None]:
    """Tables that are made within this context and whose tier needs a folder have files of their rows there."""
    return _within(_folder, folder)


_place: ContextVar[str] = ContextVar("_place", default="cpu")


def chosen_device() -> str:
    """Returns the device that `rows_on` chose, or "cpu"."""
    return _place.get()


def rows_on(device: str) -> AbstractContextManager[None]:
    """Tables that are made within this context have their rows on a device. The host never holds a whole table."""
    return _within(_place, device)
