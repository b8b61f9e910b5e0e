"""How autograd and `torch.compile` see tables: a Function for eager code, and operators that a compiled program holds.

A compiled program can hold neither tables that change between its calls, nor gradients of a number of rows that is
known only when it runs. It holds the number of a `Door`, and the operators call through it. Operators defined in
Python cost too much per call to be the only way.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sparrow.core.functions import applied
from sparrow.kernels.embedding_bag import Bags, Lookups

_live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_made = 0


class Rows(Protocol):
    """What a door leads to."""

    def run_lookup(self, bags: Bags) -> list[Tensor]:
        """Returns the outputs of a batch."""
        ...

    def run_backward(self, grads: Sequence[Tensor], bags: Bags, version: int, needs_weights: bool) -> Tensor | None:
        """Change the rows. Returns the gradient of the weights of the ids, or None if it is not needed.

        Args:
            grads: the gradients of the outputs.
            bags: as they were looked up.
            version: of the rows that was looked up.
            needs_weights: whether the gradient of the weights is needed.
        """
        ...


class Door:
    """Between autograd and some rows, which it does not keep alive.

    dims: D of every table. version: counts changes of rows, so that a backward through rows that have changed is
    noticed.
    """

    def __init__(self, rows: Rows, dims: Sequence[int]) -> None:
        self._rows = weakref.ref(rows)
        self.dims = list(dims)
        self.version = 0
        self.anchor = torch.zeros((), requires_grad=True)  # gives autograd a reason to call the rows' backward
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
            *outputs, _ = _compiled_lookup(
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

    def shape_of_rows(self, ids: torch.dtype, bounds: Sequence[int], keys: Sequence[int]) -> tuple[int, torch.dtype]:
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
        """Returns what `Ids.map_ids` does."""
        if torch.compiler.is_compiling():
            rows_N: Tensor = _compiled_rows(values_N, list(bounds), list(keys), self.number)
            return rows_N
        return self.ids.map_ids(values_N, bounds, keys)


def _register(it: Any) -> int:
    global _made
    _made += 1
    _live[_made] = it
    return _made


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


# -- for torch.compile -----------------------------------------------------------------------------------------------


def _bags(
    slots_N: Tensor,
    offsets_B1: Tensor,
    weights_N: Tensor | None,
    inverses: list[Tensor],
    bags: list[int],
    bounds: list[int],
    numbers: list[int],
) -> Bags:
    return Bags(
        slots_N=slots_N,
        offsets_B1=offsets_B1,
        weights_N=weights_N,
        inverses=inverses,
        bags=bags,
        bounds=bounds,
        lookups=Lookups.from_numbers(numbers),
    )


@torch.library.custom_op("sparrow::table_rows", mutates_args=())
def _compiled_rows(values_N: Tensor, bounds: list[int], keys: list[int], number: int) -> Tensor:
    rows_N: Tensor = _live[number].ids.map_ids(values_N, bounds, keys)
    return rows_N.clone() if rows_N is values_N else rows_N  # an operator may not return what it was given


@_compiled_rows.register_fake
def _(values_N: Tensor, bounds: list[int], keys: list[int], number: int) -> Tensor:
    count, kind = _live[number].ids.shape_of_rows(values_N.dtype, bounds, keys)
    return values_N.new_empty(count, dtype=kind)


@torch.library.custom_op("sparrow::table_lookup", mutates_args=())
def _compiled_lookup(
    anchor: Tensor,
    slots_N: Tensor,
    offsets_B1: Tensor,
    weights_N: Tensor | None,
    inverses: list[Tensor],
    bags: list[int],
    bounds: list[int],
    numbers: list[int],
    number: int,
    moment: list[int],
) -> list[Tensor]:
    """Every output, and the tables' version."""
    door = _live[number]
    batch = _bags(slots_N, offsets_B1, weights_N, inverses, bags, bounds, numbers)
    outputs = door.rows.run_lookup(replace(batch, moment=(moment[0], moment[1])))
    return [*outputs, torch.tensor(door.version)]


@_compiled_lookup.register_fake
def _(
    anchor: Tensor,
    slots_N: Tensor,
    offsets_B1: Tensor,
    weights_N: Tensor | None,
    inverses: list[Tensor],
    bags: list[int],
    bounds: list[int],
    numbers: list[int],
    number: int,
    moment: list[int],
) -> list[Tensor]:
    shapes = _bags(slots_N, offsets_B1, weights_N, inverses, bags, bounds, numbers).outputs(_live[number].dims)
    return [*(slots_N.new_empty(s, dtype=torch.float32) for s in shapes), torch.empty((), dtype=torch.int64)]


@torch.library.custom_op("sparrow::table_backward", mutates_args=())
def _compiled_backward(
    grads: list[Tensor],
    version: Tensor,
    slots_N: Tensor,
    offsets_B1: Tensor,
    weights_N: Tensor | None,
    inverses: list[Tensor],
    bags: list[int],
    bounds: list[int],
    numbers: list[int],
    number: int,
    needs_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Zero for the anchor, which keeps this operator in the program, and the gradient of the weights."""
    batch = _bags(slots_N, offsets_B1, weights_N, inverses, bags, bounds, numbers)
    grad_N = _live[number].rows.run_backward(grads, batch, int(version), needs_weights)
    return torch.zeros(()), slots_N.new_empty(0, dtype=torch.float32) if grad_N is None else grad_N


@_compiled_backward.register_fake
def _(
    grads: list[Tensor],
    version: Tensor,
    slots_N: Tensor,
    offsets_B1: Tensor,
    weights_N: Tensor | None,
    inverses: list[Tensor],
    bags: list[int],
    bounds: list[int],
    numbers: list[int],
    number: int,
    needs_weights: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty(()), slots_N.new_empty(slots_N.shape[0] if needs_weights else 0, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, slots_N, offsets_B1, weights_N, inverses, *ctx.rest, _ = inputs
    ctx.weighted = weights_N is not None
    ctx.save_for_backward(output[-1], slots_N, offsets_B1, *([weights_N] if ctx.weighted else []), *inverses)
    ctx.shapes = [output[i].shape for i in range(len(output) - 1)]


def _learn(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    version, slots_N, offsets_B1, *more = ctx.saved_tensors
    weights_N, inverses = (more[0], more[1:]) if ctx.weighted else (None, more)
    whole = [
        slots_N.new_zeros(shape, dtype=torch.float32) if grad is None else grad
        for grad, shape in zip(grads, ctx.shapes, strict=False)
    ]
    needs = bool(ctx.needs_input_grad[3])
    zero, grad_N = _compiled_backward(whole, version, slots_N, offsets_B1, weights_N, inverses, *ctx.rest, needs)
    return zero, None, None, grad_N if needs else None, [None] * len(inverses), *[None] * (len(ctx.rest) + 1)


_compiled_lookup.register_autograd(_learn, setup_context=_save)
