"""The compiled operators with the signatures of the reference, and what `torch.compile` must know
about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels import missing
from sparrow.kernels.embedding_bag.arguments import Bags, Lookups, Tables

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow


def knows(tables: Tables) -> bool:
    """Returns whether these operators have a codec for every row format."""
    return tables.is_compiled


def lookup(tables: Tables, bags: Bags) -> list[Tensor]:
    """See `reference.lookup`."""
    out: list[Tensor] = ops.lookup(*_payload(tables), *_batch(bags))
    return out


def row_gradients(
    tables: Tables, grads: Sequence[Tensor], bags: Bags
) -> list[tuple[Tensor, Tensor]]:
    """See `reference.row_gradients`."""
    return _row_gradients(tables, grads, bags, bags.lookups.products)


def _row_gradients(
    tables: Tables, grads: Sequence[Tensor], bags: Bags, products: list[int]
) -> list[tuple[Tensor, Tensor]]:
    payload = _payload(tables) if products else ([], "", [], [])
    flat = ops.row_gradients(_sides(grads), tables.sizes, *payload, *_batch(bags, products))
    return list(zip(flat[::2], flat[1::2], strict=True))


def weight_gradients(tables: Tables, grads: Sequence[Tensor], bags: Bags) -> Tensor:
    """See `reference.weight_gradients`."""
    if bags.lookups.products:
        raise UserError("weights_N: those of products have no gradient here; use impl='reference'")
    slots_N, offsets_B1, _, *rest, _ = _batch(bags)
    grad_N: Tensor = ops.weight_gradients(
        _sides(grads), *_payload(tables), slots_N, offsets_B1, *rest
    )
    return grad_N


def update_rows(
    tables: Tables, gradients: Sequence[tuple[Tensor, Tensor]], lr_T: Tensor, n: Tensor | int
) -> None:
    """See `reference.update_rows`."""
    rows = [rows_U.contiguous() for rows_U, _ in gradients]
    grads = [grad_UD.contiguous() for _, grad_UD in gradients]
    ops.update_rows(*_records(tables), rows, grads, *_rules(tables, lr_T, int(n)))


def fused_update(
    tables: Tables, grads: Sequence[Tensor], bags: Bags, lr_T: Tensor, n: Tensor | int
) -> None:
    """See `reference.fused_update`. Each row's gradient goes through the rule at once, so [U, D]
    never exists.

    That of a row that multiplies others is summed before they change, and applied after.
    """
    second = bags.lookups.second
    first, products = bags.lookups.sides if second else ([], [])
    if any(f.table in second for f in bags.lookups):
        raise UserError(
            "features: a table multiplies others and is looked up itself; use impl='reference'"
        )
    gradients = _row_gradients(tables, grads, bags, products) if second else []
    ops.fused_update(
        *_records(tables), _sides(grads), *_batch(bags, first), *_rules(tables, lr_T, int(n))
    )
    if second:
        update_rows(tables, gradients, lr_T, n)


def replace_rows(tables: Tables, frames_L: Tensor, rows_L: Tensor, old_L: Tensor) -> None:
    """See `reference.replace_rows`."""
    ops.replace_rows(*_records(tables), frames_L, rows_L, old_L, *_rules(tables, torch.zeros(1), 0))


def count_outside(slots_N: Tensor, bounds: Sequence[int], rows: Sequence[int]) -> Tensor:
    """See `reference.count_outside`."""
    counts_K: Tensor = ops.count_outside(slots_N.contiguous(), bounds, rows)
    return counts_K


def processor(name: str = "") -> str:
    """Returns which loops run: "avx512", "avx2" or "portable". name: chooses them; "best" is the
    default choice.
    """
    chosen: str = ops.processor(name)
    return chosen


def _payload(tables: Tables) -> tuple[Any, ...]:
    return tables.payload, tables.formats, tables.level_counts, tables.dims


def _records(tables: Tables) -> tuple[Any, ...]:
    return *_payload(tables), tables.state, tables.touched, tables.changed, tables.row_numbers


def _rules(tables: Tables, lr_T: Tensor, n: int) -> tuple[Any, ...]:
    names, numbers = tables.rules
    return names, lr_T, numbers, tables.rounding_T, n


def _batch(bags: Bags, products: list[int] | None = None) -> tuple[Any, ...]:
    weights_N = None if bags.weights_N is None else bags.weights_N.contiguous()
    inverses = [inverse.contiguous() for inverse in bags.inverses]
    return (
        bags.slots_N.contiguous(),
        bags.offsets_B1.contiguous(),
        weights_N,
        inverses,
        bags.bags,
        bags.bounds,
        bags.lookups.numbers,
        bags.lookups.products if products is None else products,
    )


def _sides(grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients with the columns of a row side by side; rows may lie apart."""
    return [
        grad if grad.stride(1) == 1 or grad.shape[1] == 1 else grad.contiguous() for grad in grads
    ]


# -- for torch.compile -----------------------------------------------------------------------------


@torch.library.register_fake("sparrow::lookup")
def _(  # type: ignore[no-untyped-def]
    payload,
    formats,
    levels,
    dims,
    slots,
    offsets,
    weights_n,
    inverses,
    bags,
    bounds,
    features,
    products,
):
    batch = Bags(
        slots_N=slots,
        offsets_B1=offsets,
        inverses=inverses,
        bags=bags,
        bounds=bounds,
        lookups=Lookups.from_numbers(features),
    )
    return [payload[0].new_empty(shape, dtype=torch.float32) for shape in batch.outputs(dims)]


@torch.library.register_fake("sparrow::row_gradients")
def _(grads, sizes, payload, formats, levels, dims, slots, *batch):  # type: ignore[no-untyped-def]
    outputs = []
    for dim in sizes[1::2]:
        unique = torch.library.get_ctx().new_dynamic_size()
        outputs += [
            slots.new_empty(unique, dtype=torch.int64),
            slots.new_empty(unique, dim, dtype=torch.float32),
        ]
    return outputs


@torch.library.register_fake("sparrow::weight_gradients")
def _(grads, payload, formats, levels, dims, slots, offsets, inverses, bags, bounds, features):  # type: ignore[no-untyped-def]
    return slots.new_empty(slots.shape[0], dtype=torch.float32)


@torch.library.register_fake("sparrow::count_outside")
def _(slots, bounds, rows):  # type: ignore[no-untyped-def]
    return slots.new_empty(len(rows), dtype=torch.int64)


@torch.library.register_fake("sparrow::update_rows")
def _(*arguments):  # type: ignore[no-untyped-def]
    pass


@torch.library.register_fake("sparrow::fused_update")
def _(*arguments):  # type: ignore[no-untyped-def]
    pass
