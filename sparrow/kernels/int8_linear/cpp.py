"""The compiled operators with the signatures of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparrow.kernels import missing

if TYPE_CHECKING:
    from sparrow.kernels.int8_linear import Packed, Shared, Static

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow
BLOCK, FOUR = 16, 4  # channels that stand together, and inputs of one of them


def packed(codes_OI: Tensor, sums_O: Tensor, channels_2O: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the codes as [blocks, I / FOUR, BLOCK, FOUR], filled up with 0 like the others."""
    outputs, inputs = codes_OI.shape
    more, fours = -outputs % BLOCK, (inputs + FOUR - 1) // FOUR
    blocks = pad(codes_OI, (0, -inputs % FOUR, 0, more)).view(
        (outputs + more) // BLOCK, BLOCK, fours, FOUR
    )
    return blocks.transpose(1, 2).contiguous(), pad(sums_O, (0, more)), pad(channels_2O, (0, more))


def linear(
    x_BI: Tensor, weight: Packed, static: Static | None, relu: bool, shared: Shared | None
) -> Tensor:
    """See the package."""
    scale, zero = (0.0, 0) if static is None else (static.scale, static.zero)  # 0: of each row
    plus, index = (None, None) if shared is None else (shared.sums_UO, shared.index_B)
    out_BO: Tensor = ops.int8_linear.default(
        x_BI.contiguous(),
        weight.codes,
        weight.sums_O,
        weight.channels_2O,
        weight.inputs,
        weight.outputs,
        scale,
        zero,
        relu,
        plus,
        index,
    )
    return out_BO


def sums(x_BI: Tensor, weight: Packed, static: Static) -> Tensor:
    """See the package."""
    out_BO: Tensor = ops.int8_sums.default(
        x_BI.contiguous(),
        weight.codes,
        weight.sums_O,
        weight.inputs,
        weight.outputs,
        static.scale,
        static.zero,
    )
    return out_BO


@torch.library.register_fake("sparrow::int8_linear")
def _(x, tiles, weight_sums, channels, inputs, outputs, scale, zero, relu, plus, index):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], outputs)


@torch.library.register_fake("sparrow::int8_sums")
def _(x, tiles, weight_sums, inputs, outputs, scale, zero):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], outputs, dtype=torch.int32)
