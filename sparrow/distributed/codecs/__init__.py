"""How vectors travel between ranks. One file per codec: its `Config` is the codec.

A codec's gradient is straight-through: what is sent back is the gradient of what arrived, encoded
by the codec that was chosen for the way back.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

Unit = int | Literal["message", "table"]


class Codec(Protocol):
    """What a member's `Config` offers."""

    @property
    def unit(self) -> Unit:
        """What is encoded by itself: a number says so many neighbouring columns of a vector,
        beginning with its first. "message" is all that goes to a rank, and "table" the part of a
        table in it.

        Where a number divides the columns of all tables in a message, the message is given as one
        block with so many columns, and those of all ranks may be joined.
        """
        ...

    def encode(self, block_ND: Tensor, step: int, forward: bool) -> Tensor:
        """Returns the bytes of one table's vectors for one rank, uint8 [any].

        Args:
            block_ND: the vectors, float32.
            step: the number of the training step.
            forward: whether these are vectors, and not their gradients.
        """
        ...

    def decode(self, data: Tensor, rows: int, dim: int) -> Tensor:
        """Returns the vectors float32 [rows, dim], from their bytes only."""
        ...

    def size(self, rows: int, dim: int) -> int | None:
        """Returns how many bytes a block of this shape takes.

        None if that depends on the numbers. Then sizes are sent first. Only codecs of a "table" may
        say so.
        """
        ...

    def error(self, block_ND: Tensor) -> Tensor:
        """Returns a bound on |decoded - block|, [N, D] or a shape that broadcasts to it."""
        ...


__all__ = ["Codec", "Unit"]
