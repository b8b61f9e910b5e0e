"""Vectors <-> the bytes of one message, by a codec, block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow.distributed import Codec

Shape = tuple[int, tuple[int, ...]]
"""Of a matrix: its rows, and the columns of each of its blocks (one table's vectors) from left to right."""


def pack(codec: Codec, matrices: Sequence[Tensor], shapes: Sequence[Shape], step: int, forward: bool) -> Tensor:
    """The bytes of matrices; where the codec's blocks have no fixed size, their sizes come first, int64."""
    cut = _cut(codec, shapes)
    pairs = zip(matrices, cut, strict=True)
    blocks = [b for m, (_, widths) in pairs for b in (m.split(list(widths), 1) if len(widths) > 1 else [m])]
    parts = [codec.encode(block, step, forward) for block in blocks if block.numel()]
    if not is_fixed(codec):
        parts.insert(0, torch.tensor([part.numel() for part in parts], device=matrices[0].device).view(torch.uint8))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=matrices[0].device)


def is_fixed(codec: Codec) -> bool:
    """Whether the shape of a block tells its bytes."""
    return codec.size(1, 1) is not None


def size(codec: Codec, shapes: Sequence[Shape]) -> int:
    """Bytes of the message of such matrices, by a codec for which that is known."""
    return sum(codec.size(*shape) or 0 for shape in _blocks(_cut(codec, shapes)))


def unpack(codec: Codec, data: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The matrices, float32."""
    shapes = _cut(codec, shapes)
    blocks = _blocks(shapes)
    if is_fixed(codec):
        sizes = [codec.size(*shape) or 0 for shape in blocks]
    else:
        head = len(blocks) * 8
        sizes, data = data[:head].clone().view(torch.int64).tolist(), data[head:]  # a clone is aligned
    parts = zip(data.split(sizes), blocks, strict=True) if blocks else ()
    found = iter([codec.decode(part if part.data_ptr() % 8 == 0 else part.clone(), *s) for part, s in parts])
    matrices = []
    for rows, widths in shapes:
        columns = [next(found) for width in widths if rows and width]
        matrices.append(torch.cat(columns, 1) if columns else torch.zeros(rows, sum(widths), device=data.device))
    return matrices


def _cut(codec: Codec, shapes: Sequence[Shape]) -> Sequence[Shape]:
    """The blocks that a codec is given: whole matrices where numbers do not depend on each other."""
    return [(rows, (sum(widths),)) for rows, widths in shapes] if codec.elementwise else shapes


def _blocks(shapes: Sequence[Shape]) -> list[tuple[int, int]]:
    return [(rows, width) for rows, widths in shapes for width in widths if rows and width]
