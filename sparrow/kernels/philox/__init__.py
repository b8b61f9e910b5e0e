"""Random numbers by place: a number depends only on its key, row and column, not on what else is
drawn.

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). impl: see
`sparrow.kernels`.
"""

from __future__ import annotations

import hashlib

from torch import Tensor

from sparrow.kernels import Impl, Operator, resolve

_operator = Operator(__name__)


def key_of(seed: int, name: str) -> int:
    """Returns a key of 64 bits for what is drawn under a name."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")


def uniform_(
    out_RD: Tensor,
    key: int,
    scale: float,
    *,
    row: int = 0,
    column: int = 0,
    rows_R: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Fill a matrix with random numbers of [-scale, scale); there are 2**24 values, all equally
    likely.

    Args:
        out_RD: float32 [R, D].
        key: see `key_of`.
        scale: the bound of the numbers.
        row, column: the place of out_RD[0, 0] in the whole matrix. A part gets the numbers that it
            has in the whole. Rows count to 2**63, columns to 2**34.
        rows_R: int64 [R], the row of each of them in the whole, where they are no neighbours.
        impl: see `sparrow.kernels`.
    """
    if not out_RD.numel():
        return
    implementation = _operator.load(
        resolve(impl, out_RD.device) if out_RD.is_contiguous() else "reference"
    )
    implementation.uniform_(out_RD, key, scale, row, column, rows_R)


__all__ = ["key_of", "uniform_"]
