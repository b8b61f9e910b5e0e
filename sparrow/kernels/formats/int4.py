from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels.formats import Field, Rounding
from sparrow.numerics.rounding import to_whole

META = 4  # bytes of scale and bias
BINS, CUT = 200, 32  # steps of a row's range; as many may be cut off its ends, 16 %


@dataclass(frozen=True, kw_only=True)
class Config:
    """A row is four bits a column, the low half of a byte first, then scale and bias in float16:
    ceil(D/2) + 4 bytes.

    A value is code * scale + bias (arXiv 2010.11305). The table cannot be cut by columns. rounding:
    "stochastic", whose mean is the number itself: the bias is rounded down and the scale up, so
    that no value lies outside the codes. Or "nearest", whose rows are FBGEMM's fused 4-bit rows to
    the byte: scale and bias are rounded to nearest too, which cuts off an end of most rows.

    search: "greedy" cuts further off the ends of a row while that makes the squared error smaller
    (arXiv 1911.02079). It is for trained rows that are converted, to nearest. A table cannot have
    it: an update that rounds to nearest would ask for the search again. It is read as one with
    "min-max".
    """

    rounding: Rounding = "stochastic"
    search: Literal["min-max", "greedy"] = "min-max"

    def __post_init__(self) -> None:
        if self.search == "greedy" and self.rounding != "nearest":
            raise UserError(
                "search: 'greedy' is for rows that are converted; give rounding = 'nearest' too"
            )

    def fields(self, dim: int) -> dict[str, Field]:
        """The only field is weight [ceil(D / 2) + 4]."""
        return {"weight": Field(width=(dim + 1) // 2 + META, dtype=torch.uint8, across="whole")}

    def encode(self, values_UD: Tensor, noise_UD: Tensor | None) -> dict[str, Tensor]:
        """See `RowFormat.encode`."""
        # adding 0 makes 0 of -0
        low_U1 = values_UD.amin(1, keepdim=True) + 0.0
        high_U1 = values_UD.amax(1, keepdim=True) + 0.0
        if self.search == "greedy":
            low_U1, high_U1 = _searched(values_UD, low_U1, high_U1)
        if noise_UD is None:
            codes_UD, scale_U1, bias_U1 = _to_nearest(values_UD, low_U1, high_U1)
        else:
            bias_U1 = _below(low_U1)
            scale_U1 = _scale(bias_U1, high_U1)
            # rounding was to nearest: at most one step too low, and a second of the sum below
            for _ in range(2):
                cut = bias_U1.float() + 15.0 * scale_U1.float() < high_U1
                scale_U1 = torch.where(cut, _next(scale_U1), scale_U1)
            codes_UD = to_whole(
                ((values_UD - bias_U1.float()) / scale_U1.float()).clamp(0.0, 15.0), noise_UD
            )
        codes_UD = codes_UD.nan_to_num(0.0).clamp(0, 15).to(torch.uint8)
        if codes_UD.shape[1] % 2:
            codes_UD = torch.cat([codes_UD, torch.zeros_like(codes_UD[:, :1])], 1)
        pairs = codes_UD[:, ::2] | codes_UD[:, 1::2] << 4
        return {
            "weight": torch.cat([pairs, torch.cat([scale_U1, bias_U1], 1).view(torch.uint8)], 1)
        }

    def decode(self, fields: Mapping[str, Tensor], dim: int) -> Tensor:
        """See `RowFormat.decode`."""
        pairs, meta = fields["weight"].split([(dim + 1) // 2, META], 1)
        scale_U1, bias_U1 = (
            meta.clone(memory_format=torch.contiguous_format)
            .view(torch.float16)
            .float()
            .split(1, 1)
        )
        codes_UD = torch.stack([pairs & 15, pairs >> 4], 2).flatten(1)[:, :dim]
        return codes_UD.float() * scale_U1 + bias_U1

    exact = decode

    def cpp(self) -> str:
        """See `RowFormat.cpp`."""
        return "int4"


def _scale(bias_U1: Tensor, high_U1: Tensor) -> Tensor:
    """Returns a fifteenth of the range, float16 [U, 1]; 1 for an empty one."""
    range_U1 = high_U1 - bias_U1.float()
    return (torch.where(range_U1 == 0, 15.0, range_U1) / torch.full_like(range_U1, 15.0)).half()


def _to_nearest(
    values_UD: Tensor, low_U1: Tensor, high_U1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes, which may be outside 0 to 15, and scale and bias in float16, of rows that
    begin and end there.
    """
    bias_U1 = low_U1.half()
    scale_U1 = _scale(bias_U1, high_U1)
    scale_U1 = torch.where((scale_U1 == 0) | (1.0 / scale_U1.float()).isinf(), 1.0, scale_U1)
    codes_UD = (values_UD - bias_U1.float()).mul_(1.0 / scale_U1.float()).round_()
    return codes_UD, scale_U1, bias_U1


def _searched(values_UD: Tensor, low_U1: Tensor, high_U1: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where rows should begin and end: of the ends that a greedy search passes, those of
    the least error.

    The search moves the end whose move leaves the smaller error, by a step at a time.
    """
    step_U1 = (high_U1 - low_U1) / BINS
    best_U1 = _error(values_UD, low_U1, high_U1)
    first_U1 = low_U1
    last_U1 = high_U1
    for _ in range(CUT):
        begin_U1 = low_U1 + step_U1
        end_U1 = high_U1 - step_U1
        cut_low_U1 = _error(values_UD, begin_U1, high_U1)
        cut_high_U1 = _error(values_UD, low_U1, end_U1)
        is_low_U1 = cut_low_U1 < cut_high_U1
        low_U1 = torch.where(is_low_U1, begin_U1, low_U1)
        high_U1 = torch.where(is_low_U1, high_U1, end_U1)
        error_U1 = torch.minimum(cut_low_U1, cut_high_U1)
        is_best_U1 = error_U1 < best_U1
        best_U1 = torch.minimum(error_U1, best_U1)
        first_U1 = torch.where(is_best_U1, low_U1, first_U1)
        last_U1 = torch.where(is_best_U1, high_U1, last_U1)
    return first_U1, last_U1


def _error(values_UD: Tensor, low_U1: Tensor, high_U1: Tensor) -> Tensor:
    """Returns the squared error of rows to nearest, float64 [U, 1]; infinity where a row is not
    finite.
    """
    codes_UD, scale_U1, bias_U1 = _to_nearest(values_UD, low_U1, high_U1)
    read_UD = codes_UD.clamp_(0, 15).mul_(scale_U1.float()).add_(bias_U1.float())
    error_U1 = read_UD.sub_(values_UD).double().square_().sum(1, keepdim=True)
    return error_U1.nan_to_num_(torch.inf)


def _below(x: Tensor) -> Tensor:
    """Returns the largest float16 that is not above x."""
    near = x.half()
    lower = torch.where(near > 0, _bits(near) - 1, torch.where(near == 0, -0x7FFF, _bits(near) + 1))
    return torch.where(near.float() > x, lower.to(torch.int16).view(torch.float16), near)


def _next(x: Tensor) -> Tensor:
    """Returns the float16 after x >= 0."""
    return (_bits(x) + 1).to(torch.int16).view(torch.float16)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16).int()
