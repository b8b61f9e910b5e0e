"""Bags of slots in tables: the operators of every lookup and every row update, for many tables in
one call.

`Tables` and `Bags` (arguments.py) say the shapes. impl: see `sparrow.kernels`. Slots outside a
table and offsets that decrease raise a ValueError before anything is written. (On a GPU the
reference does not check them.) There is no autograd here: `embeddings/` adds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels import Impl, Operator
from sparrow.kernels.embedding_bag.arguments import (
    Bags,
    Lookup,
    Lookups,
    Pooling,
    Rows,
    Table,
    Tables,
)

if TYPE_CHECKING:
    from sparrow.kernels.embedding_bag.single import bags_of, fp32_table, tables_of

_operator = Operator(__name__, has_triton=True)


def __getattr__(name: str) -> Any:  # a model has many tables
    if name not in ("bags_of", "fp32_table", "tables_of"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.single"), name)


def _implementation(impl: Impl, tensor: Tensor, tables: Tables | None = None) -> ModuleType:
    is_known = tables is None or tables.is_compiled
    if not is_known and impl in ("cpp", "triton"):
        raise UserError(
            f"impl: {impl!r}, but a table's row format is none that these kernels know; use"
            " impl='auto'"
        )
    if not is_known:
        return _operator.load("reference")
    implementation = _operator.choose(impl, tensor.device)
    if impl == "auto" and tables is not None and not implementation.knows(tables):
        # who asks for an implementation is told what it does not know
        return _operator.load("reference")
    return implementation


def lookup(tables: Tables, bags: Bags, *, impl: Impl = "auto") -> list[Tensor]:
    """Returns the outputs, each [samples, sum of dims]: the pooled rows of its features, 0 for an
    empty bag.

    Args:
        tables: T tables.
        bags: of slots; says which output each feature is part of.
        impl: see `sparrow.kernels`.

    Raises:
        ValueError: for slots or offsets that do not fit.
    """
    out: list[Tensor] = _implementation(impl, bags.slots_N, tables).lookup(tables, bags)
    return out


def row_gradients(
    tables: Tables, grads: Sequence[Tensor], bags: Bags, *, impl: Impl = "auto"
) -> list[tuple[Tensor, Tensor]]:
    """Returns for each table (rows_U, grad_UD): the rows that the batch uses, and the sum of the
    gradients of each.

    rows_U is int64 [U], ascending. A row's gradients are added in the order in which they occur.

    Args:
        tables: T tables.
        grads: the gradients of what `lookup` returned; their rows may lie apart (strides).
        bags: of row numbers.
        impl: see `sparrow.kernels`.
    """
    gradients: list[tuple[Tensor, Tensor]] = _implementation(impl, bags.slots_N).row_gradients(
        tables, grads, bags
    )
    return gradients


def weight_gradients(
    tables: Tables, grads: Sequence[Tensor], bags: Bags, *, impl: Impl = "auto"
) -> Tensor:
    """Returns the gradient [N] of `bags.weights_N`. grads: the gradients of what `lookup`
    returned.
    """
    grad_N: Tensor = _implementation(impl, bags.slots_N, tables).weight_gradients(
        tables, grads, bags
    )
    return grad_N


@torch.no_grad()
def update_rows(
    tables: Tables,
    gradients: Sequence[tuple[Tensor, Tensor]],
    lr_T: Tensor,
    n: Tensor | int = 0,
    *,
    impl: Impl = "auto",
) -> None:
    """Apply each table's rule once to each of its rows_U, in place, and set their touched bytes.

    The bits of what is rounded stochastically depend on key and place of its table, its row, its
    column and n.

    Args:
        tables: T tables.
        gradients: (slots_U, grad_UD) per table: slots int64 [U], ascending and none twice;
            gradients float32 [U, D].
        lr_T: a learning rate per table, float32 [T].
        n: the number of this update, a tensor where a captured graph is to run it again.
        impl: see `sparrow.kernels`.
    """
    _implementation(impl, tables.touched[0] if tables else lr_T, tables).update_rows(
        tables, gradients, lr_T, n
    )


@torch.no_grad()
def fused_update(
    tables: Tables,
    grads: Sequence[Tensor],
    bags: Bags,
    lr_T: Tensor,
    n: Tensor | int = 0,
    *,
    impl: Impl = "auto",
) -> None:
    """Do what `row_gradients` and `update_rows` do, in one pass, in place.

    Args:
        tables: T tables.
        grads: the gradients of what `lookup` returned.
        bags: of slots.
        lr_T: a learning rate per table, float32 [T].
        n: the number of this update, see `update_rows`.
        impl: see `sparrow.kernels`.
    """
    _implementation(impl, bags.slots_N, tables).fused_update(tables, grads, bags, lr_T, n)


@torch.no_grad()
def replace_rows(
    tables: Tables, frames_L: Tensor, rows_L: Tensor, old_L: Tensor, *, impl: Impl = "auto"
) -> None:
    """Let rows of a table into its frames, and put back those that were there if they were updated
    there.

    A row that is put back is rounded with the number of its last update. One that was not updated
    is not written.

    Args:
        tables: one table, whose first level are frames.
        frames_L: frames, int64 [L], none of them twice.
        rows_L: the rows that enter them.
        old_L: the rows that were there, -1 for none. Rows count on the levels beneath the frames.
        impl: see `sparrow.kernels`.
    """
    _implementation(impl, frames_L, tables).replace_rows(tables, frames_L, rows_L, old_L)


def count_outside(
    slots_N: Tensor, bounds: Sequence[int], rows: Sequence[int], *, impl: Impl = "auto"
) -> Tensor:
    """Returns for each key how many of its slots are outside [0, rows), int64 [keys].

    Args:
        slots_N: the slots of all keys, key by key, [N].
        bounds: where the slots of each key begin, and where the last key's end.
        rows: of each key's table; -1 for a key that is not to be checked.
        impl: see `sparrow.kernels`.
    """
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
    "replace_rows",
    "row_gradients",
    "tables_of",
    "update_rows",
    "weight_gradients",
]
