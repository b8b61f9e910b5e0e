"""A store of two levels in which no row has the slot of its number, and there are more slots than
rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparrow.embeddings.spec import Component
from sparrow.embeddings.stores.store import At, RowStore, level_of
from sparrow.kernels.embedding_bag import Rows, Table

SPARE = 3  # slots of no row, at the end of the first level


class Scattered(RowStore):
    """Odd rows on the first level, even ones on the second, each backwards."""

    slots_are_rows = False

    @property
    def is_allocated(self) -> bool:
        return True

    def __init__(self, component: Component, rows: int, dim: int) -> None:
        super().__init__()
        self.component, self.rows, self.dim = component, rows, dim
        sizes = (rows // 2 + SPARE, rows - rows // 2)
        self.fields = [
            {
                n: torch.full(f.shape(size), 77, dtype=f.dtype)
                for n, f in component.fields_of(dim).items()
            }
            for size in sizes
        ]
        odd_R = torch.arange(rows) % 2 == 1
        order_R = torch.arange(rows).flip(0) // 2
        self.slots_R = torch.where(odd_R, order_R, sizes[0] + order_R)
        assert (
            len(self.slots_R.unique()) == rows
            and not bool((self.slots_R == torch.arange(rows)).all())
        ) or rows < 2

    @property
    def levels(self) -> tuple[Rows, ...]:
        return tuple(level_of(self.component, fields) for fields in self.fields)

    def slots_of(self, rows_N: Tensor) -> Tensor:
        return self.slots_R[rows_N]

    def admit(self, rows_N: Tensor, table: Table) -> Tensor:
        return self.slots_of(rows_N)

    def pinned(self, rows_N: Tensor) -> Tensor:
        return self.slots_of(rows_N)

    def settle(self) -> None:
        pass

    def _places(self, at: At) -> tuple[Tensor, Tensor]:
        slots_U = self.slots_R[at]
        first = len(self.fields[0]["touched"])
        return slots_U - torch.where(slots_U >= first, first, 0), slots_U >= first

    def read(self, at: At) -> dict[str, Tensor]:
        places_U, second_U = self._places(at)
        found = {}
        for name, field in self.component.fields_of(self.dim).items():
            found[name] = torch.empty(field.shape(len(places_U)), dtype=field.dtype)
            for level, here_U in enumerate((~second_U, second_U)):
                found[name][here_U] = self.fields[level][name][places_U[here_U]]
        return found

    @torch.no_grad()
    def write(self, at: At, fields: Mapping[str, Tensor], columns: slice = slice(None)) -> None:
        places_U, second_U = self._places(at)
        for name, values in fields.items():
            of = self.component.fields_of(self.dim)[name]
            for level, here_U in enumerate((~second_U, second_U)):
                into = self.fields[level][name]
                of.put(into, places_U[here_U], values[here_U], columns, self.dim)
