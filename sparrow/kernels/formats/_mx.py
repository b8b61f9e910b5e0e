"""What the members in OCP's MX formats have in common (Rouhani et al., arXiv 2310.10537)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels.formats import Field, Rounding
from sparrow.numerics import blocks, rounding
from sparrow.numerics.formats import FORMATS, Format


@dataclass(frozen=True, kw_only=True)
class Mx:
    """A row is codes, packed with the low bits first, then a byte for each block of 32 columns; the
    last may be short.

    A value is element * 2**(byte - 127). A block that is not finite is NaN. Columns can be cut
    between blocks.

    rounding: "stochastic", whose mean is the number itself, or "nearest".
    scale: "ceil" is the least power of two under which nothing is cut off. "floor", which OCP
    describes, cuts up to a quarter (MXFP4) or an eighth (MXFP8) off the largest number of a block.
    So it has no stochastic rounding.

    Raises:
        UserError: for both "floor" and "stochastic".
    """

    rounding: Rounding = "stochastic"
    scale: Literal["ceil", "floor"] = "ceil"
    known: ClassVar[str]  # as which name in `numerics.FORMATS`

    def __post_init__(self) -> None:
        if self.scale == "floor" and self.rounding == "stochastic":
            raise UserError(
                "scale: 'floor' cuts off large numbers, so the mean of stochastic rounding would be"
                " too small; give rounding = 'nearest', or scale = 'ceil'"
            )

    @property
    def format(self) -> Format:
        """The number format."""
        return replace(FORMATS[self.known], rule=self.scale)

    def fields(self, dim: int) -> dict[str, Field]:
        """The only field is weight, bytes."""
        format = self.format
        assert isinstance(format.block, int)
        width, runs = format.bytes_row(dim), ((8, format.element.bits), (format.block, 1))
        return {"weight": Field(width=width, dtype=torch.uint8, across="cut", runs=runs)}

    def encode(self, values_UD: Tensor, noise_UD: Tensor | None) -> dict[str, Tensor]:
        """See `RowFormat.encode`."""
        how: rounding.Rounding = "nearest" if noise_UD is None else "stochastic"
        codes, scales, _ = blocks.encode(values_UD, self.format, rounding=how, noise=noise_UD)
        assert scales is not None
        return {"weight": torch.cat([codes, scales], 1)}

    def decode(self, fields: Mapping[str, Tensor], dim: int) -> Tensor:
        """See `RowFormat.decode`."""
        bytes_codes = -(-dim * self.format.element.bits // 8)
        codes, scales = fields["weight"].tensor_split([bytes_codes], 1)
        return blocks.decode(blocks.Packed(codes, scales, None), self.format, dim)

    exact = decode

    def cpp(self) -> str:
        """See `RowFormat.cpp`."""
        return self.known if self.scale == "ceil" else f"{self.known}_floor"
