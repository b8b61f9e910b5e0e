"""What kernels must know of features, as numbers: `bags.py` and `sums.py` name them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from sparrow.kernels.embedding_bag.arguments import Bags, Lookup

Vectors = tuple[int, int]
"""Address of the first of some vectors, and how many bytes lie between two of them."""


def columns_of(tensor: Tensor, column: int) -> Vectors:
    """Returns the vectors that begin with a column of float32 [B, D]."""
    return (
        tensor.data_ptr() + column * tensor.element_size(),
        tensor.stride(0) * tensor.element_size(),
    )


def alignment(addresses: Iterable[int]) -> int:
    """Returns how many bytes divide all addresses and strides, 16 at most."""
    return math.gcd(16, *addresses)


def numbers_of(bags: Bags, f: Lookup, table: int, vectors: Vectors) -> list[int]:
    """Returns the numbers of a feature, F_TABLE to F_STRIDE. table: its number in the group.
    vectors: of its bags.
    """
    is_none = f.pooling == "none"
    low, high = bags.bounds[f.key], bags.bounds[f.key + 1]
    first, count = sum(bags.bags[: f.key]), bags.bags[f.key]
    return [
        table,
        low,
        first,
        high - low if is_none else count,
        f.pooling == "mean",
        is_none,
        *vectors,
    ]
