"""Sums that tell whether bytes changed, taken piece by piece. impl: see `sparrow.kernels`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparrow.kernels import Impl, Operator

_operator = Operator(__name__)


def mixed_sum(words: Tensor, first: int, *, impl: Impl = "auto") -> int:
    """Returns the sum modulo 2**64, as an int64, of words that are each mixed with their places.

    Mixing is a bijection. So a change of one word is always found, any other but for a chance of
    2**-64. The sum of a file is the sum of those of its pieces.

    Args:
        words: int64 [n], contiguous.
        first: the place of the first of them in the file; the next one has the place after it, and
            so on.
        impl: see `sparrow.kernels`.
    """
    total: int = _operator.choose(impl, words.device).mixed_sum(words, first)
    return total


def joined(into: Tensor, parts: Sequence[Tensor], first: int, *, impl: Impl = "auto") -> int:
    """Write bytes one part after another, then zeros to the end. Returns the `mixed_sum` of words
    with bytes of parts.

    Args:
        into: uint8 [8 n], contiguous.
        parts: uint8, contiguous, at most 8 n bytes in all.
        first: the place in the file of the first word of `into`.
        impl: see `sparrow.kernels`.
    """
    total: int = _operator.choose(impl, into.device).joined(into, parts, first)
    return total


__all__ = ["joined", "mixed_sum"]
