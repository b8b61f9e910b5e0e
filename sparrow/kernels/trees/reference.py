"""The definition, in plain torch, for any device. All rows walk down all trees at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparrow.kernels.trees import Trees


def sum_of_leaves(trees: Trees, inputs_BX: Tensor, depth: int) -> Tensor:
    """See the package."""
    node_BG = trees.root_G.expand(inputs_BX.shape[0], -1)
    for _ in range(depth):
        x_BG = inputs_BX.gather(1, trees.input_M[node_BG])
        left_BG = x_BG <= trees.threshold_M[node_BG]
        if len(trees.sets_SW):
            set_BG = trees.set_M[node_BG]
            id_BG = x_BG.nan_to_num().long().clamp(0, trees.sets_SW.shape[1] - 1)
            member_BG = trees.sets_SW[set_BG.clamp(min=0), id_BG] > 0
            # onnxruntime has no `where` of bools
            left_BG = (set_BG >= 0) & member_BG | (set_BG < 0) & left_BG
        node_BG = torch.where(left_BG, trees.left_M[node_BG], trees.right_M[node_BG])
    return trees.value_MT[node_BG].double().sum(1).float()
