"""The compiled operators with the signatures of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels import missing
from sparrow.kernels.block_io import Blocks
from sparrow.kernels.cached_rows import Cached

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow


def open_cache(blocks: Blocks, memory_W: Tensor, counts_4: Tensor, settings: Sequence[int]) -> int:
    """Returns a handle of a cache.

    Args:
        blocks: the rows.
        memory_W: int32: a head, and sets of as many words each. A set is the rows of its frames,
            their stamps, and their records.
        counts_4: see `Cached`.
        settings: rows, multiplier, the highest number of a call, sets, and whether nothing was
            written there yet.
    """
    handle: int = ops.cached_rows_open(blocks.handle, memory_W, counts_4, list(settings))
    return handle


def _empty_fields(cached: Cached, rows: int) -> dict[str, Tensor]:
    """Memory for the entries of so many rows."""
    fields = cached.blocks.layout.fields
    return {
        name: torch.empty(field.shape(rows), dtype=field.dtype) for name, field in fields.items()
    }


def get(
    requests: Sequence[tuple[Cached, Tensor]],
) -> list[tuple[dict[str, Tensor], UserError | None]]:
    """See the package."""
    fields = [_empty_fields(cached, len(rows_N)) for cached, rows_N in requests]
    into = list(chain.from_iterable(tensors.values() for tensors in fields))
    rows = [rows_N.contiguous() for _, rows_N in requests]
    reports_T7 = ops.cached_rows_get(
        [_handle(cached) for cached, _ in requests], rows, into
    ).tolist()
    errors = [
        cached.blocks.error_of(report)
        for (cached, _), report in zip(requests, reports_T7, strict=True)
    ]
    return list(zip(fields, errors, strict=True))


def _handle(cached: Cached) -> int:
    assert isinstance(cached.state, tuple), "it is the reference's"
    return cached.state[0]
