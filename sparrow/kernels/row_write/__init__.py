"""Some rows of some tensors are overwritten at once. The compiled operator is in
`row_index/cpu.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparrow.kernels import Impl, Operator

_operator = Operator(__name__)


def write(
    fields: Sequence[Tensor], values: Sequence[Tensor], rows_L: Tensor, *, impl: Impl = "auto"
) -> None:
    """Overwrite some rows of some tensors.

    Args:
        fields: contiguous, [R] or [R, entries].
        values: for each its new rows, [L, ...], or [1, ...] where they are all alike.
        rows_L: int64 [L], which rows.
        impl: see `sparrow.kernels`.
    """
    _operator.choose(impl, rows_L.device).write(fields, values, rows_L)


__all__ = ["write"]
