"""The compiled operators with the signatures of the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels import missing
from sparrow.kernels.block_io import Blocks
from sparrow.kernels.cached_rows import Cached

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow


def opened(blocks: Blocks, memory_W: Tensor, counts_4: Tensor, settings: Sequence[int]) -> int:
    """Returns a handle of a cache.

    Args:
        blocks: the rows.
        memory_W: int32: a head, and sets of as many words each. A set is the rows of its frames, their stamps, and
            their records.
        counts_4: see `Cached`.
        settings: rows, multiplier, the highest number of a call, sets, and whether nothing was written there yet.
    """
    handle: int = ops.cached_rows_open(blocks.handle, memory_W, counts_4, list(settings))
    return handle


def get(asked: Sequence[tuple[Cached, Tensor]]) -> list[tuple[dict[str, Tensor], UserError | None]]:
    """See the package."""
    fields = [
        {name: torch.empty(of.shape(len(rows_N)), dtype=of.dtype) for name, of in cached.blocks.layout.fields.items()}
        for cached, rows_N in asked
    ]
    into = [tensor for of in fields for tensor in of.values()]
    rows = [rows_N.contiguous() for _, rows_N in asked]
    told_T7 = ops.cached_rows_get([_handle(cached) for cached, _ in asked], rows, into).tolist()
    errors = [cached.blocks.error_of(told) for (cached, _), told in zip(asked, told_T7, strict=True)]
    return list(zip(fields, errors, strict=True))


def _handle(cached: Cached) -> int:
    assert isinstance(cached.of, tuple), "it is the reference's"
    return cached.of[0]
