"""`MappedStore`: rows in files, for models that no longer learn."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparrow.core import UserError
from sparrow.embeddings.spec import Component
from sparrow.embeddings.tiers.store import At, level_of
from sparrow.kernels import row_levels
from sparrow.kernels.embedding_bag import Rows, Table


class MappedStore(nn.Module):
    """Rows that are never written, such as those of mapped files. Processes that map the same files share their memory.

    Newer records of some rows may lie on a second level, where a row is searched. That takes no memory beside them; a
    map of all rows would take four bytes a row in each process.

    Args:
        component: whose rows these are, with a rule that keeps nothing of a row.
        fields: field -> its entries in rows 0 <= row < R, [R, ...].
        rows_U: int64 [U], which rows are on the second level, ascending; all rows from R on are among them.
        above: field -> its entries in these rows, [U, ...].
    """

    is_allocated = False  # nobody has to give the rows first values

    def __init__(
        self, component: Component, fields: Mapping[str, Tensor], rows_U: Tensor, above: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.component = component
        self.rows_U = rows_U
        self.slots_are_rows = not len(rows_U)
        self._levels = [_untouched(fields), *([] if self.slots_are_rows else [_untouched(above)])]

    @property
    def below(self) -> int:
        """How many rows are on the first level."""
        return len(self._levels[0]["touched"])

    @property
    def levels(self) -> tuple[Rows, ...]:
        """All rows, and newer records of some."""
        return tuple(level_of(self.component, fields) for fields in self._levels)

    def slots_of(self, rows_N: Tensor) -> Tensor:
        """Returns the slots of rows. Many tables at once are asked for in `ComponentTables`."""
        return row_levels.slots_of(rows_N, (0, len(rows_N)), (self.rows_U,), (self.below,))

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        """Refuse: no row learns."""
        raise UserError(f"table {self.component.name!r}: a model that was exported does not learn; train its run")

    def settle(self) -> None:
        """Do nothing."""

    def read(self, at: At) -> dict[str, Tensor]:
        """Returns what `RowStore.read` says."""
        if self.slots_are_rows:
            return {name: tensor[at] for name, tensor in self._levels[0].items()}
        slots_N = self.slots_of(torch.arange(*at.indices(self.component.rows)) if isinstance(at, slice) else at)
        return {name: gathered(*(of[name] for of in self._levels), slots_N) for name in self._levels[0]}

    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        """Refuse, as `admit` does."""
        self.admit(torch.empty(0), None)  # type: ignore[arg-type]


def gathered(below: Tensor, above: Tensor, slots_N: Tensor) -> Tensor:
    """Returns the entries of slots [N, ...] on two levels."""
    is_below_N = slots_N < len(below)
    found = below.new_empty(len(slots_N), *below.shape[1:])
    found[is_below_N] = below[slots_N[is_below_N]]
    found[~is_below_N] = above[slots_N[~is_below_N] - len(below)]
    return found


def _untouched(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns fields of rows that never learn, with a byte for all that says so."""
    count = len(next(iter(fields.values())))
    return {**fields, "touched": torch.zeros(1, dtype=torch.uint8).expand(count)}
