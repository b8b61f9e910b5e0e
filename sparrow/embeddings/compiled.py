"""Lookups in programs of `torch.compile`: operators that call through the number of a `Door` or a
`Mapper`.

A compiled program can hold neither tables that change between its calls, nor gradients of a number
of rows that is known only when it runs. So it holds a number. Operators defined in Python cost too
much per call to be the only way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparrow.embeddings.autograd import registered
from sparrow.kernels.embedding_bag import Bags, Lookups


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
def map_ids(values_N: Tensor, bounds: list[int], keys: list[int], number: int) -> Tensor:
    """Returns the rows of ids, see `Mapper`. number: of the mapper."""
    rows_N: Tensor = registered[number].ids.map_ids(values_N, bounds, keys)
    # an operator may not return what it was given
    return rows_N.clone() if rows_N is values_N else rows_N


@map_ids.register_fake
def _(values_N: Tensor, bounds: list[int], keys: list[int], number: int) -> Tensor:
    count, kind = registered[number].ids.shape_of_rows(values_N.dtype, bounds, keys)
    return values_N.new_empty(count, dtype=kind)


@torch.library.custom_op("sparrow::table_lookup", mutates_args=())
def lookup(
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
    """Returns every output, and the version of the rows, see `Door`. number: of the door."""
    door = registered[number]
    batch = _bags(slots_N, offsets_B1, weights_N, inverses, bags, bounds, numbers)
    outputs = door.rows.run_lookup(replace(batch, moment=(moment[0], moment[1])))
    return [*outputs, torch.tensor(door.version)]


@lookup.register_fake
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
    shapes = _bags(slots_N, offsets_B1, weights_N, inverses, bags, bounds, numbers).outputs(
        registered[number].dims
    )
    return [
        *(slots_N.new_empty(s, dtype=torch.float32) for s in shapes),
        torch.empty((), dtype=torch.int64),
    ]


@torch.library.custom_op("sparrow::table_backward", mutates_args=())
def run_backward(
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
    """Returns zero for the anchor, which keeps this operator in the program, and the gradient of
    the weights.
    """
    batch = _bags(slots_N, offsets_B1, weights_N, inverses, bags, bounds, numbers)
    grad_N = registered[number].rows.run_backward(grads, batch, int(version), needs_weights)
    return torch.zeros(()), slots_N.new_empty(0, dtype=torch.float32) if grad_N is None else grad_N


@run_backward.register_fake
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
    return torch.empty(()), slots_N.new_empty(
        slots_N.shape[0] if needs_weights else 0, dtype=torch.float32
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, slots_N, offsets_B1, weights_N, inverses, *ctx.rest, _ = inputs
    ctx.weighted = weights_N is not None
    ctx.save_for_backward(
        output[-1], slots_N, offsets_B1, *([weights_N] if ctx.weighted else []), *inverses
    )
    ctx.shapes = [output[i].shape for i in range(len(output) - 1)]


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    version, slots_N, offsets_B1, *rest = ctx.saved_tensors
    weights_N, inverses = (rest[0], rest[1:]) if ctx.weighted else (None, rest)
    full_grads = [
        slots_N.new_zeros(shape, dtype=torch.float32) if grad is None else grad
        for grad, shape in zip(grads, ctx.shapes, strict=False)
    ]
    needs_weights = bool(ctx.needs_input_grad[3])
    zero, grad_N = run_backward(
        full_grads, version, slots_N, offsets_B1, weights_N, inverses, *ctx.rest, needs_weights
    )
    return (
        zero,
        None,
        None,
        grad_N if needs_weights else None,
        [None] * len(inverses),
        *[None] * (len(ctx.rest) + 1),
    )


lookup.register_autograd(_differentiate, setup_context=_save)
