"""Slots of rows that lie on two levels: all rows on the one below, and newer records of some on the one above.

The rows above are searched. So they may be those of a mapped file, and a process has no memory of its own for them. A
lookup of U rows above costs log2(U) steps. impl: see `sparrow.kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from sparrow.kernels import Impl, resolve
from sparrow.kernels.row_levels import reference


def slots_of(
    rows_N: Tensor, bounds: Sequence[int], above: Sequence[Tensor], below: Sequence[int], *, impl: Impl = "auto"
) -> Tensor:
    """Returns slots int64 [N]: a row that is above has the number of rows below + its place there, others their own.

    Args:
        rows_N: int32 or int64, key by key.
        bounds: where the rows of each key begin, and where the last key's end.
        above: for each key int64 [U], the rows above, ascending; none if its slots are rows.
        below: for each key, how many rows are below.
        impl: see `sparrow.kernels`.
    """
    slots_N: Tensor = _implementation(impl, rows_N).slots_of(rows_N, bounds, above, below)
    return slots_N


def _implementation(impl: Impl, tensor: Tensor) -> ModuleType:
    if resolve(impl, tensor.device) == "reference":
        return reference
    from sparrow.kernels.row_levels import cpp  # can be imported only once the library is loaded

    return cpp


__all__ = ["slots_of"]
