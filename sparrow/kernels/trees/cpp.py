"""The compiled operator with the signature of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparrow.kernels import missing

if TYPE_CHECKING:
    from sparrow.kernels.trees import Trees

assert not missing(), "`resolve` comes first"
ops = torch.ops.sparrow


def sum_of_leaves(trees: Trees, inputs_BX: Tensor, depth: int) -> Tensor:
    """See the package."""
    out: Tensor = ops.sum_of_leaves(
        [part.contiguous() for part in trees], inputs_BX.contiguous(), depth
    )
    return out


# -- for torch.compile -----------------------------------------------------------------------------


@torch.library.register_fake("sparrow::sum_of_leaves")
def _(trees, inputs, depth):  # type: ignore[no-untyped-def]
    return inputs.new_empty(inputs.shape[0], trees[4].shape[1], dtype=torch.float32)
