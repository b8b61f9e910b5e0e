"""Which rows does an id use? One file per answer: its `Config` is what a run's `[tables]` says of
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from sparrow.embeddings.addressing._size import LogTable, Numbering, Policy, Size, Traits
from sparrow.embeddings.addressing.direct import Direct
from sparrow.embeddings.addressing.hashed import Hashed


class Combine(Protocol):
    """Makes one vector of those that an id has in each component. It is a Module, which may have
    weights of its own.
    """

    @property
    def is_linear(self) -> bool:
        """Whether sums of vectors may be combined instead of each id's vectors; then pooling comes
        first.
        """
        ...

    def parts(self, dims: Sequence[int]) -> list[tuple[int, Tensor | None]]:
        """Returns, where it is linear, the first column of each component's vectors, and W [D, d]
        that makes them.

        Args:
            dims: d of the components. Without a W vectors stay as they are.
        """
        ...

    @property
    def is_product(self) -> bool:
        """Whether an id's vector is the product of those of all components."""
        ...

    def __call__(self, vectors: Sequence[Tensor], ids_N: Tensor | None) -> Tensor:
        """Returns vectors [N, D of the table].

        Args:
            vectors: [N, D of the component], one for each component.
            ids_N: int64, the legal ids whose vectors these are; None for sums of vectors.
        """
        ...


class Addressing(Protocol):
    """Says which components a table has, which row of each an id uses, and how their vectors become
    one.
    """

    @property
    def ids(self) -> int | None:
        """How many ids the table has: they are 0 <= id < ids. None where any int64 is an id."""
        ...

    @property
    def traits(self) -> Traits:
        """What those who use it have to know."""
        ...

    def components(self, dim: int) -> tuple[Size, ...]:
        """Returns the components of a table of D = dim."""
        ...

    def rows_of(self, ids_N: Tensor) -> tuple[Tensor, ...]:
        """Returns the rows int64 [N] in each component of legal ids int64 [N], -1 where an id has
        none.
        """
        ...

    def combine(self, dim: int) -> nn.Module | None:
        """Returns a new `Combine` for a table of D = dim, or None where there is one component."""
        ...


class AddressingConfig(Protocol):
    """What a member's `Config` offers."""

    def settled(self, tables: Sequence[LogTable]) -> Sequence[AddressingConfig]:
        """Returns for each of some tables the same settings with every size written out that stays
        when the log grows.

        Args:
            tables: all that have these settings.

        Raises:
            UserError: when their ids cannot be addressed so.
        """
        ...

    def build(self, ids: Numbering) -> Addressing:
        """Returns the addressing of a log's table.

        Args:
            ids: how they are numbered.

        Raises:
            UserError: when such ids cannot be addressed so.
        """
        ...


__all__ = [
    "Addressing",
    "AddressingConfig",
    "Combine",
    "Direct",
    "Hashed",
    "LogTable",
    "Numbering",
    "Policy",
    "Size",
    "Traits",
]
