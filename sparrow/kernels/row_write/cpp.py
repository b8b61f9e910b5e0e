from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def write(fields: Sequence[Tensor], values: Sequence[Tensor], rows_L: Tensor) -> None:
    """See the package."""
    torch.ops.sparrow.row_index_write(
        list(fields), [value.contiguous() for value in values], rows_L.contiguous()
    )
