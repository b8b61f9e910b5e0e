"""Random numbers of places: a number depends on its key, row and column alone, whoever draws it and what else is drawn.

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). impl: see `sparrow.kernels`.
"""

from __future__ import annotations

import hashlib

from torch import Tensor

from sparrow.kernels import Impl, resolve
from sparrow.kernels.philox import reference


def key_of(seed: int, name: str) -> int:
    """A key of 64 bits for what is drawn under a name."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")


def uniform_(out_RD: Tensor, key: int, scale: float, *, row: int = 0, column: int = 0, impl: Impl = "auto") -> None:
    """Fill float32 [R, D] with numbers of [-scale, scale), each of 2**24 equally likely ones.

    row, column: the place in the whole matrix of out_RD[0, 0]: a part gets the numbers that it has in the whole. Rows
    count to 2**63, columns to 2**34.
    """
    if not out_RD.numel():
        return
    if resolve(impl, out_RD.device) == "cpp" and out_RD.is_contiguous():
        from sparrow.kernels.philox import cpp  # can be imported only once the library is loaded

        cpp.uniform_(out_RD, key, scale, row, column)
    else:
        reference.uniform_(out_RD, key, scale, row, column)


__all__ = ["key_of", "uniform_"]
