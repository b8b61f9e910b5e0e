"""Bags of slots in tables: the operators under every lookup and every row update, for many tables in one call.

`Tables` and `Bags` (arguments.py) give the shapes. impl: see `sparrow.kernels`. Slots outside a table and offsets that
fall raise a ValueError before anything is written (the reference does not look on a GPU). No autograd here:
`embeddings/` supplies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels import Impl, resolve
from sparrow.kernels.embedding_bag import reference
from sparrow.kernels.embedding_bag.arguments import (
    Bags,
    Lookup,
    Lookups,
    Pooling,
    Rows,
    Table,
    Tables,
    bags_of,
    fp32_table,
    tables_of,
)


def _implementation(impl: Impl, tensor: Tensor, tables: Tables | None = None) -> ModuleType:
    is_known = tables is None or tables.is_compiled
    if not is_known and impl == "cpp":
        raise UserError("impl: 'cpp', but a table's row format is none that the C++ kernels know; use impl='auto'")
    if not is_known or resolve(impl, tensor.device) == "reference":
        return reference
    from sparrow.kernels.embedding_bag import cpp  # can be imported only once the library is loaded

    return cpp


def lookup(tables: Tables, bags: Bags, *, impl: Impl = "auto") -> list[Tensor]:
    """Every output, [samples, sum of dims]: pooled rows, 0 for an empty bag."""
    out: list[Tensor] = _implementation(impl, bags.slots_N, tables).lookup(tables, bags)
    return out


def row_gradients(
    tables: Tables, grads: Sequence[Tensor], bags: Bags, *, impl: Impl = "auto"
) -> list[tuple[Tensor, Tensor]]:
    """For each table the rows in the batch, int64 [U] ascending, and the sum of each one's gradients [U, D], in order.

    grads: of `lookup`'s outputs; their rows may lie apart (strides).
    """
    found: list[tuple[Tensor, Tensor]] = _implementation(impl, bags.slots_N).row_gradients(tables, grads, bags)
    return found


def weight_gradients(tables: Tables, grads: Sequence[Tensor], bags: Bags, *, impl: Impl = "auto") -> Tensor:
    """The gradient [N] of `bags.weights_N`, given those of `lookup`'s outputs."""
    grad_N: Tensor = _implementation(impl, bags.slots_N, tables).weight_gradients(tables, grads, bags)
    return grad_N


@torch.no_grad()
def update_rows(
    tables: Tables, gradients: Sequence[tuple[Tensor, Tensor]], lr_T: Tensor, *, impl: Impl = "auto"
) -> None:
    """Apply each table's rule once to each of its rows_U, in place, and set their touched bytes.

    gradients: (rows_U, grad_UD) per table as `row_gradients` gives them (ascending, no row twice). lr_T: float32, a
    learning rate per table.
    """
    _implementation(impl, lr_T, tables).update_rows(tables, gradients, lr_T)


@torch.no_grad()
def fused_update(tables: Tables, grads: Sequence[Tensor], bags: Bags, lr_T: Tensor, *, impl: Impl = "auto") -> None:
    """`row_gradients` and `update_rows` in one pass, in place; arguments as theirs."""
    _implementation(impl, bags.slots_N, tables).fused_update(tables, grads, bags, lr_T)


def count_outside(slots_N: Tensor, bounds: Sequence[int], rows: Sequence[int], *, impl: Impl = "auto") -> Tensor:
    """int64 [keys]: how many of a key's slots lie outside [0, rows of its table); rows -1 for a key not looked at."""
    counts_K: Tensor = _implementation(impl, slots_N).count_outside(slots_N, bounds, rows)
    return counts_K


__all__ = [
    "Bags",
    "Lookup",
    "Lookups",
    "Pooling",
    "Rows",
    "Table",
    "Tables",
    "bags_of",
    "count_outside",
    "fp32_table",
    "fused_update",
    "lookup",
    "row_gradients",
    "tables_of",
    "update_rows",
    "weight_gradients",
]
