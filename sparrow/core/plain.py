"""Tensors that know more than their numbers, and how to get the plain tensor of one."""

from __future__ import annotations

from torch import Tensor


class Informed(Tensor):
    """A tensor that knows something of its numbers; `Repeated` knows which of them samples share.

    Whoever only asks whether a tensor is one loads nothing of what such a tensor can do.

    whole: the same tensor, plain.
    """

    whole: Tensor


def plain(x: Tensor) -> Tensor:
    """Returns the same tensor without what is known of it."""
    return x.whole if isinstance(x, Informed) else x
