"""Ranges of a number that hold equally many training rows, and how far a number is through them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

Places = tuple[Tensor, Tensor]
"""Of each number, which range it is in, 0 to K - 1, and how far it is through it, 0 to 1; [B, C]
each.
"""


def choose_knots(dense_NC: Tensor, ranges: int) -> Tensor:
    """Returns where the ranges of each column begin and end, by its training rows, fp32 [C, K + 1].

    A column with fewer than K + 1 values has ranges of no width, at the end.

    Args:
        dense_NC: the numbers of the rows.
        ranges: K.
    """
    shares = torch.linspace(0, 1, ranges + 1)
    knots_CK1 = torch.zeros(dense_NC.shape[1], ranges + 1)
    for knots_K1, x_N in zip(knots_CK1, dense_NC.double().t(), strict=True):
        values = x_N.sort().values[(shares * (len(x_N) - 1)).round().long()].unique()
        knots_K1.copy_(F.pad(values, (0, len(shares) - len(values)), value=float(values[-1])))
    return knots_CK1


def locate(dense_BC: Tensor, knots_CK1: Tensor) -> Places:
    """Returns the places of numbers [B, C] in ranges that begin and end at knots [C, K + 1]."""
    x_CB = dense_BC.t().contiguous()
    if torch.compiler.is_exporting():  # ONNX has no search
        passed_CB = (knots_CK1[:, None] <= x_CB[:, :, None]).sum(2)
    else:
        passed_CB = torch.searchsorted(knots_CK1, x_CB, right=True)
    range_CB = (passed_CB - 1).clamp(0, knots_CK1.shape[1] - 2)
    low_CB = knots_CK1.gather(1, range_CB)
    high_CB = knots_CK1.gather(1, range_CB + 1)
    through_CB = torch.where(high_CB > low_CB, (x_CB - low_CB) / (high_CB - low_CB), 0.0)
    return range_CB.t(), through_CB.clamp(0, 1).t()
