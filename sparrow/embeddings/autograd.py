"""The two doors between tables and autograd: a Function for eager code, and operators that `torch.compile` sees.

A compiled program cannot hold tables that change behind its back, nor gradients of a number of rows that is known
only when it runs. It holds the tables' number instead, and calls their methods through it; Python operators cost
too much per call to be the only door.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sparrow.kernels.embedding_bag import Bags, Lookups


class Learner(Protocol):
    """What `EmbeddingTables` offers here."""

    number: int
    version: int
    anchor: Tensor

    def slots(self, values_N: Tensor, bounds: Sequence[int], features: Sequence[int]) -> Tensor:
        """Rows of ids."""
        ...

    def slot_type(self, ids: torch.dtype, features: Sequence[int]) -> torch.dtype:
        """What `slots` makes of such ids."""
        ...

    def run_lookup(self, bags: Bags) -> list[Tensor]:
        """Every output."""
        ...

    def run_backward(self, grads: Sequence[Tensor], bags: Bags, version: int, needs_weights: bool) -> Tensor | None:
        """Learn; the gradient of the weights."""
        ...

    @property
    def dims(self) -> list[int]:
        """D of every table."""
        ...


_live: weakref.WeakValueDictionary[int, Learner] = weakref.WeakValueDictionary()
_next = 0


def register(tables: Learner) -> int:
    """A number of its own for these tables, for compiled programs."""
    global _next
    _next += 1
    _live[_next] = tables
    return _next


def slots(tables: Learner, values_N: Tensor, bounds: Sequence[int], features: Sequence[int]) -> Tensor:
    """`tables.slots`."""
    if torch.compiler.is_compiling():
        mapped_N: Tensor = _compiled_slots(values_N, list(bounds), list(features), tables.number)
        return mapped_N
    return tables.slots(values_N, bounds, features)


def lookup(tables: Learner, bags: Bags) -> list[Tensor]:
    """`tables.run_lookup`, whose backward is `tables.run_backward`."""
    if torch.compiler.is_compiling():
        *outputs, _ = _compiled_lookup(
            tables.anchor, bags.slots_N, bags.offsets_B1, bags.weights_N, list(bags.inverses), list(bags.bags),
            list(bags.bounds), bags.lookups.to_numbers(), tables.number,
        )  # fmt: skip
        return outputs
    return list(_Lookup.apply(tables.anchor, bags.weights_N, bags, tables))


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights_N: Tensor | None, bags: Bags, tables: Learner) -> tuple[Tensor, ...]:
        ctx.bags, ctx.tables, ctx.version = bags, tables, tables.version
        return tuple(tables.run_lookup(bags))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.tables.run_backward(grads, ctx.bags, ctx.version, ctx.needs_input_grad[1]), None, None


# -- for torch.compile -----------------------------------------------------------------------------------------------


def _bags(
    slots_N: Tensor, offsets_B1: Tensor, weights_N: Tensor | None, inverses: list[Tensor], bags: list[int],
    bounds: list[int], numbers: list[int],
) -> Bags:  # fmt: skip
    return Bags(
        slots_N=slots_N, offsets_B1=offsets_B1, weights_N=weights_N, inverses=inverses, bags=bags, bounds=bounds,
        lookups=Lookups.from_numbers(numbers),
    )  # fmt: skip


@torch.library.custom_op("sparrow::table_slots", mutates_args=())
def _compiled_slots(values_N: Tensor, bounds: list[int], features: list[int], number: int) -> Tensor:
    slots_N: Tensor = _live[number].slots(values_N, bounds, features)
    return slots_N.clone() if slots_N is values_N else slots_N  # an operator may not return what it was given


@_compiled_slots.register_fake
def _(values_N: Tensor, bounds: list[int], features: list[int], number: int) -> Tensor:
    return torch.empty_like(values_N, dtype=_live[number].slot_type(values_N.dtype, features))


@torch.library.custom_op("sparrow::table_lookup", mutates_args=())
def _compiled_lookup(
    anchor: Tensor, slots_N: Tensor, offsets_B1: Tensor, weights_N: Tensor | None, inverses: list[Tensor],
    bags: list[int], bounds: list[int], numbers: list[int], number: int,
) -> list[Tensor]:  # fmt: skip
    """Every output, and the tables' version."""
    tables = _live[number]
    outputs = tables.run_lookup(_bags(slots_N, offsets_B1, weights_N, inverses, bags, bounds, numbers))
    return [*outputs, torch.tensor(tables.version)]


@_compiled_lookup.register_fake
def _(
    anchor: Tensor, slots_N: Tensor, offsets_B1: Tensor, weights_N: Tensor | None, inverses: list[Tensor],
    bags: list[int], bounds: list[int], numbers: list[int], number: int,
) -> list[Tensor]:  # fmt: skip
    shapes = _bags(slots_N, offsets_B1, weights_N, inverses, bags, bounds, numbers).outputs(_live[number].dims)
    return [*(slots_N.new_empty(s, dtype=torch.float32) for s in shapes), torch.empty((), dtype=torch.int64)]


@torch.library.custom_op("sparrow::table_backward", mutates_args=())
def _compiled_backward(
    grads: list[Tensor], version: Tensor, slots_N: Tensor, offsets_B1: Tensor, weights_N: Tensor | None,
    inverses: list[Tensor], bags: list[int], bounds: list[int], numbers: list[int], number: int, needs_weights: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Zero for the anchor, which keeps this operator in the program, and the gradient of the weights."""
    batch = _bags(slots_N, offsets_B1, weights_N, inverses, bags, bounds, numbers)
    grad_N = _live[number].run_backward(grads, batch, int(version), needs_weights)
    return torch.zeros(()), slots_N.new_empty(0, dtype=torch.float32) if grad_N is None else grad_N


@_compiled_backward.register_fake
def _(
    grads: list[Tensor], version: Tensor, slots_N: Tensor, offsets_B1: Tensor, weights_N: Tensor | None,
    inverses: list[Tensor], bags: list[int], bounds: list[int], numbers: list[int], number: int, needs_weights: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty(()), slots_N.new_empty(slots_N.shape[0] if needs_weights else 0, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, slots_N, offsets_B1, weights_N, inverses, *ctx.rest = inputs
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
    return zero, None, None, grad_N if needs else None, [None] * len(inverses), *[None] * len(ctx.rest)


_compiled_lookup.register_autograd(_learn, setup_context=_save)
