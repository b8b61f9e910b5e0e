"""The sums of the leaves that rows fall into, over all trees of a forest. impl: see
`sparrow.kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparrow.kernels import Impl, Operator

_operator = Operator(__name__)


class Trees(NamedTuple):
    """M nodes of G trees.

    A node takes the left branch if its input is at most the threshold or, where the input is an id,
    in the node's set. A leaf is its own branch.

    Args:
        input_M: int64, which input a node reads.
        threshold_M: float64.
        left_M: int64, a node.
        right_M: int64, a node.
        value_MT: float32 [M, T], of leaves.
        set_M: int64, which of the sets a node has, or -1.
        sets_SW: uint8 [S, W], whether an id below W is in a set. Greater ids are taken as W - 1.
        root_G: int64, a node each.
    """

    input_M: Tensor
    threshold_M: Tensor
    left_M: Tensor
    right_M: Tensor
    value_MT: Tensor
    set_M: Tensor
    sets_SW: Tensor
    root_G: Tensor


def sum_of_leaves(trees: Trees, inputs_BX: Tensor, depth: int, *, impl: Impl = "auto") -> Tensor:
    """Returns the sums of the values of leaves, float32 [B, T]. They are added in float64.

    Args:
        trees: the forest.
        inputs_BX: float64 [B, X].
        depth: branches on the longest way from a root to a leaf.
        impl: see `sparrow.kernels`.

    Raises:
        ValueError: when a node reads an input, or leads to a node, that is not there; of the
            compiled kernel alone.
    """
    out: Tensor = _operator.choose(impl, inputs_BX.device).sum_of_leaves(trees, inputs_BX, depth)
    return out


__all__ = ["Trees", "sum_of_leaves"]
