"""Where the rows of a component are kept. A table, a checkpoint or a plan knows them by row number
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sparrow.core import Chunk
from sparrow.embeddings.spec import Component
from sparrow.kernels.embedding_bag import Bags, Rows, Table

At = slice | Tensor
"""Some row numbers: a slice, or int64 [U] without repetition."""

First = Callable[[At], dict[str, Tensor]]
"""Rows -> the fields with which they begin. A slice has both ends and no step."""


class External(Protocol):
    """A part of a component whose rows stay where they lie. A checkpoint says where, and has those
    that are newer.
    """

    @property
    def component(self) -> Component:
        """Whose rows these are."""

    @property
    def seed(self) -> int:
        """Of the first values, which rows have that are nowhere."""

    @property
    def rows(self) -> tuple[int, int]:
        """The first row of the part and the one after its last."""

    @property
    def columns(self) -> tuple[int, int]:
        """Its first dimension and the one after its last."""

    def copied(self) -> External:
        """Returns one that does not change while training goes on."""

    def chunks(self, wanted: Sequence[tuple[int, int]]) -> Iterator[Chunk]:
        """Yields all rows as ordinary chunks, in their order, but for those that lie in no wanted
        range.
        """

    def entry(self) -> dict[str, Any]:
        """Returns what the manifest of a checkpoint says of the part, as plain data."""

    def places(self) -> dict[str, Tensor]:
        """Returns tensors that say where the rows are."""

    def write_newer(self, path: Path) -> dict[str, Any]:
        """Writes the file of the rows that are newer. Returns its size and checksum."""


class InTransit(Protocol):
    """The batches of training whose rows are on their way into frames of some stores, which are
    known by number.
    """

    stores: Mapping[int, Any]

    def fetch(self, bags: Bags) -> None:
        """Begin to read the rows of a batch, once."""

    def begin(self, bags: Bags) -> None:
        """Have all rows of a batch in frames. It is looked up now."""

    def give_up(self, bags: Bags) -> None:
        """Forget a batch that nobody will look up."""

    def settle(self) -> None:
        """Hear that all batches that were looked up have learnt, or never will."""

    def land(self) -> None:
        """Wait for all rows that are under way."""


class RowStore(nn.Module):
    """Holds row records 0 <= row < R. It moves to a device with its model.

    Kernels read and write rows by slot. Slots number the rows of all levels in turn. A store says
    which slot a row has, and it may have more slots than rows.

    slots_are_rows: whether `slots_of` returns what it is given.
    exact_bytes: of an exact row above these, with what belongs to it; 0 where there are none.
    """

    slots_are_rows: bool
    exact_bytes: int = 0

    @property
    def is_allocated(self) -> bool:
        """Whether there is memory for all rows. If so, they get their first values."""
        return False

    @property
    def levels(self) -> tuple[Rows, ...]:
        """The rows as kernels take them, one for each kind of memory."""
        raise NotImplementedError

    @property
    def second_level(self) -> tuple[Tensor, int] | None:
        """How `row_levels` finds the rows of a second level, for many tables at once; None where it
        does not.

        These are the places, and how many rows are below that level.
        """
        return None

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Returns the slots [N] of rows [N], as they are now."""
        raise NotImplementedError

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        """Begin a batch of training. Returns the slots [N] of its rows.

        Args:
            rows_N: the rows that it uses.
            table: these rows as the operators take them.
        """
        raise NotImplementedError

    def pinned(self, rows_N: Tensor) -> Tensor:
        """Returns the slots [N] of rows that learn now.

        Raises:
            UserError: when no batch of training has one.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Hear that the rows of all batches so far have learnt, or that what they would have learnt
        is forgotten.
        """
        raise NotImplementedError

    def read(self, at: At) -> dict[str, Tensor]:
        """Returns field -> its entries in some rows, [U, ...]. They are views where the rows lie
        so.
        """
        raise NotImplementedError

    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Overwrite some fields of some rows.

        Args:
            at: the rows.
            fields: field -> its new entries, [U, ...], or [1, ...] where all rows get the same.
            columns: what is overwritten of fields that have columns; by default all of them.
        """
        raise NotImplementedError

    def begin_with(self, first: First) -> None:
        """Have a row that was never written begin with what `first` makes. Of a store that has all
        rows: nothing.
        """

    # -- rows that are not all in memory

    @property
    def transit(self) -> Callable[[Mapping[int, Any]], InTransit] | None:
        """What brings rows of coming batches into frames of such stores; None where all rows have
        slots.
        """
        return None

    def external(
        self, seed: int, rows: tuple[int, int], columns: tuple[int, int]
    ) -> External | None:
        """Returns the rows as they are now, to be kept where they lie; None where a checkpoint has
        to copy them.

        Args:
            seed: of their first values.
            rows: which they are of their component, the first one and the one after the last.
            columns: its dimensions that are here, likewise.
        """
        return None

    def adopt(self, part: External, learns: bool) -> bool:
        """Have the rows of a checkpoint where they lie, if this store can. Returns whether it does.

        Args:
            part: the same rows and columns as here.
            learns: whether they are to change.
        """
        return False

    def in_order(self) -> Any | None:
        """Returns what reads slices of rows in less time than `read`, until something changes; None
        where all do.
        """
        return None

    # -- exact rows above these, of a store that is a cache of them

    def exact_rows(self, first: int = 0, last: int | None = None) -> dict[str, Tensor] | None:
        """Returns the exact rows between two rows, see `CachedStore`; None where there are none."""
        return None

    def restore(self, rows_U: Tensor, fields: Mapping[str, Tensor], batch: int) -> Tensor:
        """Take back exact rows that were saved. Returns which of them found no place, bool [U]."""
        return torch.ones(len(rows_U), dtype=torch.bool)

    def recount(self, saved: Mapping[str, Tensor], first: int) -> None:
        """Take back how often some rows were used, as `exact_rows` gave it. The first of them is
        row `first` here.
        """


class Beneath(RowStore):
    """A store over which a cache of exact rows can stand."""

    def overwritten(self, rows_U: Tensor) -> AbstractContextManager[Tensor]:
        """Rows have slots [U] in this context, to which whole records are written."""
        raise NotImplementedError


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
    payload = component.format.fields(component.dim)
    state = component.rule.fields(component.dim)
    return Rows(
        format=component.format,
        payload={name: fields[name] for name in payload},
        touched_R=fields["touched"],
        state={name: fields[name] for name in state},
        changed_R=changed_R,
        rows_R=rows_R,
    )
