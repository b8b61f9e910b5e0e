from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sparrow.distributed.codecs import Unit
from sparrow.kernels import quantise
from sparrow.numerics.blocks import Packed
from sparrow.numerics.formats import FORMATS, Format

BLOCK = 32
_FORMATS = {
    name: replace(FORMATS[name], rule="ceil") for name in ("mxint8", "mxfp8", "mxfp6", "mxfp4")
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Rounds vectors to nearest in one of OCP's MX formats (arXiv 2310.10537): codes, and a byte
    for each 32 columns.

    A block's scale is the least power of two under which no number of it is cut off. A block with
    NaN or infinity is NaN throughout.

    format: "mxint8" and "mxfp8" (E4M3) take 33 bytes for 32 columns, "mxfp6" (E2M3) 25, and "mxfp4"
    (E2M1) 17.
    """

    format: Literal["mxint8", "mxfp8", "mxfp6", "mxfp4"] = "mxfp8"

    @property
    def unit(self) -> Unit:
        """See `Codec`."""
        return BLOCK

    @property
    def _format(self) -> Format:
        return _FORMATS[self.format]

    def encode(self, block_ND: Tensor, step: int, forward: bool) -> Tensor:
        """See `Codec`."""
        rows, dim = block_ND.shape
        # whole blocks are encoded as those of one row: rows of a block each take five times as long
        codes, scales, _ = quantise.encode(
            block_ND if dim % BLOCK else block_ND.reshape(1, -1), self._format
        )
        assert scales is not None
        blocks = -(-dim // BLOCK)
        codes = codes.view(rows, self._format.bytes_row(dim) - blocks)
        return torch.cat([codes, scales.view(rows, blocks)], 1).flatten()

    def decode(self, data: Tensor, rows: int, dim: int) -> Tensor:
        """See `Codec`."""
        bytes_row = self._format.bytes_row(dim)
        blocks = -(-dim // BLOCK)
        codes, scales = data.view(rows, bytes_row).split([bytes_row - blocks, blocks], 1)
        return quantise.decode(Packed(codes, scales, None), self._format, dim)

    def size(self, rows: int, dim: int) -> int:
        """See `Codec`."""
        return rows * self._format.bytes_row(dim)

    def error(self, block_ND: Tensor) -> Tensor:
        """See `Codec`. It is half a unit in the last place of each number, or half of the block's
        smallest step, and what lies beyond the largest number under the largest scale.
        """
        element = self._format.element
        scales = quantise.encode(block_ND, self._format).scales
        assert scales is not None
        scale_ND = torch.exp2(scales.double() - 127).repeat_interleave(BLOCK, 1)[
            :, : block_ND.shape[1]
        ]
        size_ND = block_ND.abs().double()
        bits = element.mantissa_bits + 1
        beyond_ND = (size_ND - element.largest * scale_ND).clamp(min=0)
        return size_ND * 2.0**-bits + scale_ND * 2.0 ** (element.least_exponent - bits) + beyond_ND
