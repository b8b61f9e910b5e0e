"""How vectors travel between ranks. One file per codec: its `Config` is the codec.

A codec's gradient is straight through: what is sent back is the gradient of what arrived, by the codec chosen for the
way back.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

Unit = Literal["number", "message", "table"]


class Codec(Protocol):
    """What a member's `Config` offers."""

    @property
    def unit(self) -> Unit:
        """What is encoded by itself: a "number", all that goes to a rank (a "message"), or a "table"'s part of it.

        Blocks of the first two may come together as one: those of all ranks, or of one.
        """
        ...

    def encode(self, block_ND: Tensor, step: int, forward: bool) -> Tensor:
        """The bytes, uint8 [any], of one table's float32 vectors [N, D] for one rank; step and direction may matter."""
        ...

    def decode(self, data: Tensor, rows: int, dim: int) -> Tensor:
        """The vectors float32 [rows, dim] of such bytes, from them alone."""
        ...

    def size(self, rows: int, dim: int) -> int | None:
        """Bytes of every block of this shape; None when they depend on the numbers (sizes then travel first)."""
        ...

    def error(self, block_ND: Tensor) -> Tensor:
        """A bound on |decoded - block|, [N, D] or what broadcasts to it."""
        ...


__all__ = ["Codec", "Unit"]
