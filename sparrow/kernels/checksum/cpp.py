"""The compiled operators with the signatures of the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow.kernels import missing

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow


def mixed_sum(words: Tensor, first: int) -> int:
    """See the package."""
    total: int = ops.block_io_mixed_sum(words, first)
    return total


def joined(into: Tensor, parts: Sequence[Tensor], first: int) -> int:
    """See the package."""
    total: int = ops.block_io_joined(into, list(parts), first)
    return total
