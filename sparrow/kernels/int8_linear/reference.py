"""The definition, in plain torch, for any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparrow.core.errors import UserError

if TYPE_CHECKING:
    from sparrow.kernels.int8_linear import Packed, Shared, Static

LEAST_SCALE = 2.0**-126  # the reciprocal of a smaller one may be infinite
NOT_FINITE = -(2**31)


def quantised(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """See the package."""
    most_O = (
        weight_OI.float().abs().amax(1)
        if weight_OI.shape[1]
        else weight_OI.new_zeros(len(weight_OI)).float()
    )
    scale_O = (most_O / torch.full_like(most_O, 127.0)).clamp(min=LEAST_SCALE)
    return (weight_OI.float() / scale_O[:, None]).round().clamp(-127, 127).to(torch.int8), scale_O


def packed(codes_OI: Tensor, sums_O: Tensor, channels_2O: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns them as they are."""
    return codes_OI, sums_O, channels_2O


def scale_and_zero(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scale and zero point of ranges that include 0, both float32. low, high: float32, of
    one shape.
    """
    steps = torch.full_like(low, 255.0)  # by a number torch may take its reciprocal
    scale = (high / steps - low / steps).clamp(min=LEAST_SCALE)  # the range itself may be infinite
    return scale, (-low * scale.reciprocal()).round().clamp(0, 255)


def codes(x_BI: Tensor, static: Static | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the codes of x [B, I], and scale and zero point of each row [B, 1], all float32.

    A row with a number that is not finite has the code 0 everywhere, the zero point 0 and NaN as
    its scale.
    """
    is_finite_B1 = x_BI.isfinite().all(1, keepdim=True)
    x_BI = torch.where(is_finite_B1, x_BI, 0.0)
    if static is None:
        with_0 = torch.cat([x_BI, torch.zeros_like(x_BI[:, :0]).sum(1, keepdim=True)], 1)
        scale_B1, zero_B1 = scale_and_zero(
            with_0.amin(1, keepdim=True), with_0.amax(1, keepdim=True)
        )
    else:
        scale_B1 = torch.full_like(is_finite_B1, static.scale, dtype=torch.float32)
        zero_B1 = torch.full_like(scale_B1, static.zero)
    zero_B1 = torch.where(is_finite_B1, zero_B1, 0.0)
    codes_BI = ((x_BI * scale_B1.reciprocal()).round() + zero_B1).clamp(0, 255)
    return codes_BI, torch.where(is_finite_B1, scale_B1, torch.nan), zero_B1


def linear(
    x_BI: Tensor, weight: Packed, static: Static | None, relu: bool, shared: Shared | None
) -> Tensor:
    """See the package."""
    sums_BO, scale_B1 = _sums(x_BI, weight, static)
    scale_O, bias_O = weight.channels_2O
    if shared is not None:
        _fits(shared.index_B.shape == x_BI.shape[:1] and shared.sums_UO.shape[1:] == scale_O.shape)
        plus_BO = shared.sums_UO[shared.index_B]
        scale_B1 = torch.where((plus_BO == NOT_FINITE).any(1, keepdim=True), torch.nan, scale_B1)
        sums_BO = sums_BO + plus_BO
    y_BO = sums_BO.float() * (scale_B1 * scale_O) + bias_O
    return torch.where(y_BO < 0, 0.0, y_BO) if relu else y_BO


def sums(x_BI: Tensor, weight: Packed, static: Static) -> Tensor:
    """See the package."""
    sums_BO, scale_B1 = _sums(x_BI, weight, static)
    return torch.where(scale_B1.isnan(), NOT_FINITE, sums_BO)


def _sums(x_BI: Tensor, weight: Packed, static: Static | None) -> tuple[Tensor, Tensor]:
    """Returns the sums, int32 [B, O], and the scale of each row [B, 1]."""
    _fits(x_BI.dtype == torch.float32 and x_BI.dim() == 2 and x_BI.shape[1] == weight.inputs)
    codes_BI, scale_B1, zero_B1 = codes(x_BI, static)
    # whole numbers below 2**53 are exact in any order
    products_BO = codes_BI.double() @ weight.codes.t().double()
    return (products_BO - zero_B1.double() * weight.sums_O).to(torch.int32), scale_B1


def _fits(fine: bool) -> None:
    if not fine:
        raise UserError(
            "x: expected float32 [B, I], I being the weight's inputs, and `shared` of as many rows"
        )
