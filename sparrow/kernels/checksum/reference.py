"""The definition, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow.core.mixing import splitmix64


def mixed_sum(words: Tensor, first: int) -> int:
    """Returns the sum of words, each mixed with its place.

    So the sum of a file is the sum of those of its pieces.

    Args:
        words: int64 [n].
        first: the place of the first of them; the next one has the place after it, and so on.
    """
    keys = splitmix64(torch.arange(len(words)) + first)
    return int(splitmix64(words ^ keys).sum())


def joined(into: Tensor, parts: Sequence[Tensor], first: int) -> int:
    """Writes bytes one part after another, then zeros. Returns the `mixed_sum` of the words with
    bytes of parts.

    Args:
        into: uint8 [8 n], contiguous.
        parts: uint8, contiguous; at most 8 n bytes in all.
        first: the place of the first word of `into`.
    """
    length = sum(map(len, parts))
    torch.cat([*parts, torch.zeros(len(into) - length, dtype=torch.uint8)], out=into)
    return mixed_sum(into.view(torch.int64)[: -(-length // 8)], first)
