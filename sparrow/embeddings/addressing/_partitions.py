"""Complementary partitions: any two ids differ in the row of some component (arXiv 1909.02107,
section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor, nn

from sparrow.core.errors import UserError, require
from sparrow.embeddings.addressing._size import Numbering, Size, Traits
from sparrow.embeddings.addressing.hashed import Hashed

Operation = Literal["mult", "add", "concat", "features"]
_IDENTITY: dict[Operation, float | None] = {
    "mult": 1.0,
    "add": 0.0,
    "concat": None,
    "features": None,
}


class Combined(nn.Module):
    """One vector of those of all components: their product, their sum, or one beside the other.

    A product is not linear: the sum of products is not the product of sums.
    """

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation

    @property
    def is_linear(self) -> bool:
        """Whether sums of vectors may be combined instead of each id's vectors."""
        return not self.is_product

    @property
    def is_product(self) -> bool:
        """Whether vectors are multiplied."""
        return self.operation == "mult"

    def parts(self, dims: Sequence[int]) -> list[tuple[int, Tensor | None]]:
        """Returns the place and the weight of each component's vectors, see `Combine.parts`."""
        if self.operation == "add":
            return [(0, None) for _ in dims]
        return [(first, None) for first in accumulate(dims[:-1], initial=0)]

    def forward(self, vectors: Sequence[Tensor], ids_N: Tensor | None) -> Tensor:
        """Returns the combined vectors, float32 [N, D]."""
        if self.operation in ("concat", "features"):
            return torch.cat(list(vectors), 1)
        return reduce(torch.mul if self.operation == "mult" else torch.add, vectors)


@dataclass(frozen=True)
class Partitions:
    """Ids 0 <= id < rows, each with a row in every one of several components.

    The first component is the large one. Where vectors are multiplied or added the others begin at
    the identity of that operation, so that a table begins as one whose ids share the rows of the
    first.

    Args:
        rows: how many ids there are.
        sizes: the rows of each component.
        names: of the components.
        operation: what becomes of an id's vectors.
        split: returns the row in each component of ids 0 <= id < rows, for these sizes.
        is_folded: whether ids are hashes, which are taken modulo the rows first, as by `Hashed`.
    """

    rows: int
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    operation: Operation
    split: Callable[[Tensor, tuple[int, ...]], tuple[Tensor, ...]]
    is_folded: bool = False

    @property
    def ids(self) -> int | None:
        """As many ids as rows; None where they are hashes."""
        return None if self.is_folded else self.rows

    @property
    def traits(self) -> Traits:
        """An id has a vector for each component where these are features."""
        return Traits(vectors=len(self.sizes) if self.operation == "features" else 1)

    def components(self, dim: int) -> tuple[Size, ...]:
        """Returns one component for each partition. Vectors that stand beside each other share the
        columns.
        """
        count = len(self.sizes)
        is_cut = self.operation in ("concat", "features")
        if is_cut and dim < count:
            raise UserError(
                f"parts: {count} parts cannot share {dim} columns; give {dim} or fewer, or raise"
                " model.dim"
            )
        require(least=1, dim=dim)
        edges = [dim * i // count for i in range(count + 1)]
        begin = _IDENTITY[self.operation]
        return tuple(
            Size(name, rows, edges[i + 1] - edges[i] if is_cut else dim, begin if i else None)
            for i, (name, rows) in enumerate(zip(self.names, self.sizes, strict=True))
        )

    def rows_of(self, ids_N: Tensor) -> tuple[Tensor, ...]:
        """Returns the row of each id in each component, int64 [N]."""
        return self.split(
            Hashed(self.rows).rows_of(ids_N)[0] if self.is_folded else ids_N, self.sizes
        )

    def combine(self, dim: int) -> nn.Module:
        """Returns a new `Combined`."""
        return Combined(self.operation)


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """The settings that all partitions have; the members say what they mean."""

    collisions: int = 4
    parts: int = 2
    operation: Operation = "mult"
    sizes: tuple[int, ...] = ()
    fold: bool = False

    def __post_init__(self) -> None:
        require(least=0, collisions=self.collisions)
        require(least=2, parts=self.parts)
        for size in self.sizes:
            require(least=1, sizes=size)
        if self.sizes and len(self.sizes) < self.fewest_sizes:
            raise UserError(f"sizes: {len(self.sizes)} given; name {self.fewest_sizes} or more")

    @property
    def fewest_sizes(self) -> int:
        """How many of `sizes` are needed at least."""
        return 2

    def first_size(self, rows: int) -> int:
        """Returns the rows of the first component where none are given."""
        return -(-rows // self.collisions) if self.collisions else equal_size(rows, self.parts)


def require_distinct(sizes: tuple[int, ...], ids: Numbering, fold: bool) -> tuple[int, ...]:
    """Check that sizes of components tell all ids apart. Returns the same sizes.

    Raises:
        UserError: when they cannot tell the ids apart, or ids are hashes that may not be folded.
    """
    if not ids.is_numbered and not fold:
        raise UserError(
            "the log's ids are hashes; set fold = true, which takes them modulo its rows first"
        )
    if math.prod(sizes) < ids.rows:
        product = " x ".join(map(str, sizes))
        message = f"sizes: {product} tell {math.prod(sizes)} ids apart, and there are {ids.rows}"
        raise UserError(f"{message}; take sizes whose product is as large")
    return sizes


def equal_size(rows: int, parts: int) -> int:
    """Returns the least size with which `parts` partitions tell so many ids apart."""
    size = max(1, math.floor(rows ** (1 / parts)) - 1)
    while size**parts < rows:
        size += 1
    return size
