"""How autograd sees tables: a `Door` to rows that learn in backward, and a `Mapper` of ids to rows.

`torch.compile` sees them as operators that call through the number of a door
(`sparrow/embeddings/compiled.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from sparrow import embeddings
from sparrow.core.functions import applied
from sparrow.kernels.embedding_bag import Bags

registered: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Number -> the door or mapper that has it, by which compiled programs call it."""
_numbers = count(1)


class Rows(Protocol):
    """What a door leads to."""

    def run_lookup(self, bags: Bags) -> list[Tensor]:
        """Returns the outputs of a batch."""
        ...

    def run_backward(
        self, grads: Sequence[Tensor], bags: Bags, version: int, needs_weights: bool
    ) -> Tensor | None:
        """Change the rows. Returns the gradient of the weights of the ids, or None if it is not
        needed.

        Args:
            grads: the gradients of the outputs.
            bags: as they were looked up.
            version: of the rows that was looked up.
            needs_weights: whether the gradient of the weights is needed.
        """
        ...


class Door:
    """Between autograd and some rows, which it does not keep alive.

    dims: D of every table. version: counts changes of rows, so that a backward through rows that
    have changed is noticed.
    """

    def __init__(self, rows: Rows, dims: Sequence[int]) -> None:
        self._rows = weakref.ref(rows)
        self.dims = list(dims)
        self.version = 0
        # gives autograd a reason to call the rows' backward
        self.anchor = torch.zeros((), requires_grad=True)
        self.number = _register(self)

    @property
    def rows(self) -> Rows:
        """The rows that it leads to."""
        rows = self._rows()
        assert rows is not None
        return rows

    def __call__(self, bags: Bags) -> list[Tensor]:
        """Returns the outputs of a batch, in whose backward the rows learn."""
        if torch.compiler.is_compiling():
            *outputs, _ = embeddings.compiled.lookup(
                self.anchor,
                bags.slots_N,
                bags.offsets_B1,
                bags.weights_N,
                list(bags.inverses),
                list(bags.bags),
                list(bags.bounds),
                bags.lookups.to_numbers(),
                self.number,
                list(bags.moment),
            )
            return outputs
        return list(applied(_Lookup, self.anchor, bags.weights_N, bags, self, self.rows))


class Ids(Protocol):
    """What maps ids to rows, may raise and counts."""

    def map_ids(self, values_N: Tensor, bounds: Sequence[int], keys: Sequence[int]) -> Tensor:
        """Returns the rows of ids.

        Args:
            values_N: the ids [N], key by key.
            bounds: where the ids of each key begin, and where the last ones end.
            keys: a number for each key.
        """
        ...

    def shape_of_rows(
        self, ids: torch.dtype, bounds: Sequence[int], keys: Sequence[int]
    ) -> tuple[int, torch.dtype]:
        """Returns how many rows there are, and their type."""
        ...


class Mapper:
    """Ids -> rows, not for `torch.compile` to look into. It does not keep alive what it asks."""

    def __init__(self, ids: Ids) -> None:
        self._ids = weakref.ref(ids)
        self.number = _register(self)

    @property
    def ids(self) -> Ids:
        """What it asks."""
        ids = self._ids()
        assert ids is not None
        return ids

    def __call__(self, values_N: Tensor, bounds: Sequence[int], keys: Sequence[int]) -> Tensor:
        """Returns the rows of ids, see `Ids.map_ids`."""
        if torch.compiler.is_compiling():
            rows_N: Tensor = embeddings.compiled.map_ids(
                values_N, list(bounds), list(keys), self.number
            )
            return rows_N
        return self.ids.map_ids(values_N, bounds, keys)


def _register(callee: Any) -> int:
    number = next(_numbers)
    registered[number] = callee
    return number


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, weights_N: Tensor | None, bags: Bags, door: Door, rows: Rows
    ) -> tuple[Tensor, ...]:
        ctx.bags = bags
        ctx.rows = rows  # alive until backward
        ctx.version = door.version
        return tuple(rows.run_lookup(bags))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_N = ctx.rows.run_backward(grads, ctx.bags, ctx.version, ctx.needs_input_grad[1])
        return None, grad_N, None, None, None
