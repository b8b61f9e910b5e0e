"""How far numbers lie from what they should be."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

TAU = 0.01  # see `Errors`


class Errors(NamedTuple):
    """How far outputs o lie from references r.

    mere: the mean of |o - r| / max(|r|, tau rms(r)). raw: the mean of |o - r| / |r| where r is not
    0. numbers: of how many it is, as LoKA has it (arXiv 2605.10886). relative: ||o - r|| / ||r||.

    The raw mean has no expectation for outputs whose density around 0 is not 0: it grows with the
    logarithm of their number. With a bound below the denominator it has one.
    """

    mere: float
    raw: float
    numbers: int
    relative: float


def errors(out: Tensor, exact: Tensor) -> Errors:
    """Returns how far outputs lie from references of the same shape.

    Where both are 0 throughout, all are 0. Where only the references are, all are infinite.
    """
    exact = exact.double()
    apart = (out.double() - exact).abs()
    size = exact.abs()
    if not size.any():
        nowhere = 0.0 if not apart.any() else math.inf
        return Errors(nowhere, nowhere, 0, nowhere)
    known = size > 0
    return Errors(
        mere=float((apart / size.clamp(min=TAU * float(size.square().mean().sqrt()))).mean()),
        raw=float((apart[known] / size[known]).mean()),
        numbers=int(known.sum()),
        relative=float(torch.linalg.vector_norm(apart) / torch.linalg.vector_norm(size)),
    )


def qsnr(x: Tensor, rounded: Tensor) -> float:
    """Returns decibels of signal over error, 10 log10 (||x||^2 / ||rounded - x||^2); infinite where
    nothing differs.
    """
    signal = float(x.double().square().sum())
    noise = float((rounded.double() - x.double()).square().sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
