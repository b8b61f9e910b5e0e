"""How many floating-point operations the matrix products of a call are.

Importing this module teaches torch's `FlopCounterMode` the operators that it does not know: ours,
oneDNN's, and those of torch that it leaves out. A multiply-add counts as two operations, and an
operator counts what it executes, so what samples share counts once. The counter does not see into
what `torch.compile` made.

The counter's import takes 0.9 s and loads triton, so nothing that trains or serves by default may
import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from sparrow.kernels import missing

Shape = Sequence[int]


def count_flops(call: Callable[[], object]) -> int:
    """Returns the floating-point operations of all matrix products that a call runs, forward and
    backward.
    """
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def product_flops(rows: float, inputs: int, outputs: int) -> float:
    """Returns the floating-point operations of the product of [rows, inputs] and [inputs,
    outputs].
    """
    return 2 * rows * inputs * outputs


def _product(x: Shape, *_: Any, out_shape: Shape, **__: Any) -> float:
    """x [..., K] times [..., K, N], or times a vector [K]."""
    return product_flops(prod(out_shape), x[-1], 1)


def _product_and_sum(added: Shape, x: Shape, *_: Any, out_shape: Shape, **__: Any) -> float:
    """A product to which something is added."""
    return _product(x, out_shape=out_shape)


def _weight_gradient(grad_BN: Shape, x_BK: Shape, **_: Any) -> float:
    return product_flops(grad_BN[1], grad_BN[0], x_BK[1])


def _project(
    x_BE: Shape, weights: Sequence[Shape], parts: Sequence[int], *_: Any, **__: Any
) -> float:
    """See `kernels.project`; parts are four numbers each, the last of which names a weight."""
    used = [weights[number] for number in parts[3::4] if number >= 0]
    return sum(product_flops(x_BE[0], *weight) for weight in used)


def _project_backward(grad: Shape, *forward_shapes: Any, **_: Any) -> float:
    """Both gradients are computed."""
    return 2 * _project(*forward_shapes)


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> float:
    """Of all positions, as torch counts its other kernels: also those that a causal one skips."""
    rows, keys = prod(query[:-1]), key[-2]
    return product_flops(rows, query[-1], keys) + product_flops(rows, keys, value[-1])


def _attention_backward(
    grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any
) -> float:
    """Gradients of four operands; the scores are computed again."""
    scores = product_flops(prod(query[:-1]), query[-1], key[-2])
    return scores + 2 * _attention(query, key, value)


def _register(formula: Callable[..., float], operators: Any, names: Iterable[str]) -> None:
    """Add the formula of those operators that there are, and that torch has none for."""
    for name in names:
        operator = getattr(operators, name, None)
        if operator is not None and operator not in flop_registry:
            register_flop_formula(operator)(formula)


missing()  # loads our operators where they are built
_register(_product, torch.ops.aten, ("mv", "dot", "_int_mm", "_scaled_mm_v2"))
_register(
    _product_and_sum, torch.ops.aten, ("addmm_", "baddbmm_", "addmv", "addmv_", "_addmm_activation")
)
_register(_attention, torch.ops.aten, ("_scaled_dot_product_flash_attention_for_cpu",))
_register(
    _attention_backward,
    torch.ops.aten,
    ("_scaled_dot_product_flash_attention_for_cpu_backward",),
)
_register(_product, torch.ops.mkldnn, ("_linear_pointwise",))
_register(_product, torch.ops.sparrow, ("int8_linear", "int8_sums"))
_register(_weight_gradient, torch.ops.sparrow, ("weight_gradient",))
_register(_project, torch.ops.sparrow, ("project",))
_register(_project_backward, torch.ops.sparrow, ("project_backward",))

__all__ = ["count_flops", "product_flops"]
