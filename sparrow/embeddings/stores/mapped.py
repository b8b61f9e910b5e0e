"""`MappedStore`: rows in files, for models that no longer learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sparrow.core import UserError
from sparrow.embeddings.spec import Component
from sparrow.embeddings.stores.store import At, RowStore, level_of
from sparrow.kernels import row_levels
from sparrow.kernels.embedding_bag import Rows, Table


@dataclass(frozen=True, kw_only=True, eq=False)
class LeveledRows:
    """Row records 0 <= row < R that are never written, such as those of mapped files: all, and
    newer ones of some.

    The newer ones lie on a second level, on which `row_levels` finds a row.

    Args:
        fields: field -> its entries in the rows of the first level, [rows, ...].
        rows_U: int64 [U], the rows of the second level, ascending. All from the end of the first on
            are among them.
        above: field -> its entries in these rows, [U, ...].
    """

    fields: Mapping[str, Tensor]
    rows_U: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    above: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def below(self) -> int:
        """How many rows the first level has."""
        return len(next(iter(self.fields.values())))

    @property
    def count(self) -> int:
        """R."""
        return max(self.below, int(self.rows_U[-1]) + 1 if len(self.rows_U) else 0)

    @cached_property
    def places(self) -> Tensor:
        """Where rows are on the second level, see `row_levels.places_of`."""
        return row_levels.places_of(self.rows_U, self.count)

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Returns the slots of rows. `ComponentTables` asks for those of many tables at once."""
        return row_levels.slots_of(rows_N, (0, len(rows_N)), self.places, (0,), (self.below,))

    def read(self, name: str, at: At) -> Tensor:
        """Returns the entries of a field in some rows, [N, ...]. They are a view where there is one
        level.
        """
        below = self.fields[name]
        if not len(self.rows_U):
            return below[at]
        rows_N = torch.arange(*at.indices(self.count)) if isinstance(at, slice) else at
        slots_N = self.slots_of(rows_N)
        is_below_N = slots_N < self.below
        entries = below.new_empty(len(slots_N), *below.shape[1:])
        entries[is_below_N] = below[slots_N[is_below_N]]
        entries[~is_below_N] = self.above[name][slots_N[~is_below_N] - self.below]
        return entries

    def updated(self, rows_V: Tensor, fields: Mapping[str, Tensor]) -> LeveledRows:
        """Returns these rows with still newer records of some, which stay where they are if there
        was one level.

        Those that were newer before are merged with them in memory, so that there are never more
        than two levels.

        Args:
            rows_V: int64 [V], ascending.
            fields: field -> its entries in these rows, [V, ...].
        """
        if not len(rows_V):
            return self
        if not len(self.rows_U):
            return LeveledRows(fields=self.fields, rows_U=rows_V, above=fields)
        stay_U = ~torch.isin(self.rows_U, rows_V, assume_unique=True)
        rows_W, order_W = torch.cat([self.rows_U[stay_U], rows_V]).sort()
        above = {
            name: torch.cat([values[stay_U], fields[name]])[order_W]
            for name, values in self.above.items()
        }
        return LeveledRows(fields=self.fields, rows_U=rows_W, above=above)


class MappedStore(RowStore):
    """Rows that are never written. Processes that map the same files share their memory.

    Args:
        component: whose rows these are, with a rule that keeps nothing of a row.
        rows: its rows, with the fields of its format.
    """

    def __init__(self, component: Component, rows: LeveledRows) -> None:
        super().__init__()
        self.component = component
        self.rows = rows
        self.slots_are_rows = not len(rows.rows_U)

    @property
    def levels(self) -> tuple[Rows, ...]:
        """All rows, and newer records of some."""
        levels = (self.rows.fields,) if self.slots_are_rows else (self.rows.fields, self.rows.above)
        return tuple(level_of(self.component, _untouched(fields)) for fields in levels)

    @property
    def second_level(self) -> tuple[Tensor, int] | None:
        """The newer records of some rows, if there are any."""
        return None if self.slots_are_rows else (self.rows.places, self.rows.below)

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Returns the slots of rows."""
        return self.rows.slots_of(rows_N)

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        """Refuse: no row learns."""
        raise UserError(
            f"table {self.component.name!r}: a model that was exported does not learn; train"
            " its run"
        )

    def pinned(self, rows_N: Tensor) -> Tensor:
        """Refuse, as `admit` does."""
        return self.admit(rows_N, None)  # type: ignore[arg-type]

    def settle(self) -> None:
        """Do nothing."""

    def read(self, at: At) -> dict[str, Tensor]:
        """Returns all fields of some rows."""
        return _untouched({name: self.rows.read(name, at) for name in self.rows.fields})

    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Refuse, as `admit` does."""
        self.admit(torch.empty(0), None)  # type: ignore[arg-type]


def _untouched(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns fields of rows that never learn, with a byte for all that says so."""
    count = len(next(iter(fields.values())))
    return {**fields, "touched": torch.zeros(1, dtype=torch.uint8).expand(count)}
