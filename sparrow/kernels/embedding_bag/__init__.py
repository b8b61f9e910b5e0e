"""Bags of slots in one table: the operator under every lookup and every row update.

Shapes, the same in every function: weight_RD float32, the rows; slots_N int32 or int64, which rows; offsets_B1
int64, rising from 0 to N, bag b being slots_N[offsets_B1[b] : offsets_B1[b + 1]]; weights_N float32, one per
lookup, 1 unless given; scale_B float32, one per bag, 1 unless given (a mean passes 1 / length). impl: see
`sparrow.kernels`. A slot outside the table and offsets that fall raise a ValueError (the reference does not look on
a GPU). No autograd here: `embeddings/` supplies it.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from sparrow.kernels import Impl, resolve
from sparrow.kernels.embedding_bag import reference
from sparrow.kernels.rules import RowRule


def _implementation(impl: Impl, tensor: Tensor) -> ModuleType:
    if resolve(impl, tensor.device) == "reference":
        return reference
    from sparrow.kernels.embedding_bag import cpp  # can be imported only once the library is loaded

    return cpp


def lookup(
    weight_RD: Tensor,
    slots_N: Tensor,
    offsets_B1: Tensor,
    weights_N: Tensor | None = None,
    scale_B: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Pooled rows [B, D]: out_b = scale_b * sum of weights_n * weight_RD[slots_n] over the bag; 0 for an empty bag."""
    out_BD: Tensor = _implementation(impl, weight_RD).lookup(weight_RD, slots_N, offsets_B1, weights_N, scale_B)
    return out_BD


def row_gradients(
    grad_BD: Tensor,
    slots_N: Tensor,
    offsets_B1: Tensor,
    weights_N: Tensor | None = None,
    scale_B: Tensor | None = None,
    *,
    num_rows: int,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """The rows in the batch, int64 [U] ascending, and the sum of each one's gradients [U, D], in order of occurrence.

    grad_BD: gradient of `lookup`'s result. num_rows: of the table.
    """
    module = _implementation(impl, grad_BD)
    found: tuple[Tensor, Tensor] = module.row_gradients(grad_BD, slots_N, offsets_B1, weights_N, scale_B, num_rows)
    return found


def weight_gradients(
    grad_BD: Tensor,
    weight_RD: Tensor,
    slots_N: Tensor,
    offsets_B1: Tensor,
    scale_B: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """The gradient [N] of `weights_N`, given that of `lookup`'s result."""
    module = _implementation(impl, weight_RD)
    grad_N: Tensor = module.weight_gradients(grad_BD, weight_RD, slots_N, offsets_B1, scale_B)
    return grad_N


@torch.no_grad()
def update_rows(
    weight_RD: Tensor,
    state: dict[str, Tensor],
    touched_R: Tensor,
    rows_U: Tensor,
    grad_UD: Tensor,
    rule: RowRule,
    lr: Tensor,
    *,
    impl: Impl = "auto",
) -> None:
    """Apply the rule once to each row of rows_U, in place, and set its byte in touched_R.

    state: what `rule.init_state` made. touched_R: uint8. rows_U, grad_UD: as `row_gradients` gives them (ascending,
    no row twice). lr: float32, one element.
    """
    _implementation(impl, weight_RD).update_rows(weight_RD, state, touched_R, rows_U, grad_UD, rule, lr)


@torch.no_grad()
def fused_update(
    weight_RD: Tensor,
    state: dict[str, Tensor],
    touched_R: Tensor,
    grad_BD: Tensor,
    slots_N: Tensor,
    offsets_B1: Tensor,
    weights_N: Tensor | None,
    scale_B: Tensor | None,
    rule: RowRule,
    lr: Tensor,
    *,
    impl: Impl = "auto",
) -> None:
    """`row_gradients` and `update_rows` in one pass, in place; arguments as theirs."""
    module = _implementation(impl, weight_RD)
    module.fused_update(
        weight_RD, state, touched_R, grad_BD, slots_N, offsets_B1, weights_N, scale_B, rule, lr
    )  # fmt: skip


__all__ = ["fused_update", "lookup", "row_gradients", "update_rows", "weight_gradients"]
