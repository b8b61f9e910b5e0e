from __future__ import annotations

import torch
from torch import Tensor, nn


class FactorizationMachine(nn.Module):
    """A weight for each feature and a dot product for each pair, summed: [B, F, tasks * (D + 1)] ->
    [B, tasks].

    A task's part of a vector is D numbers for the pairs, and then the weight. Weights are divided
    by D^0.5, and the sum of the pairs by (F - 1)^0.5. Neither changes which functions there are;
    both change how fast they are learned. The pairs cost O(F D): ((sum v)^2 - sum v^2) / 2 (Rendle
    2010, Factorization Machines, lemma 3.1).
    """

    is_last = True  # see `put_layers`

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.bias_T = nn.Parameter(torch.zeros(tasks))

    def forward(self, vectors_BFX: Tensor) -> Tensor:
        """Returns logits [B, tasks]."""
        v_BFTD, weight_BFT = self.split(vectors_BFX.float())
        # row-wise AdaGrad has one sum of squares for all of them; unscaled, the weight's gradient
        # would slow the others
        weight_BFT = weight_BFT * v_BFTD.shape[-1] ** -0.5
        pairs_BT = (v_BFTD.sum(1).square() - v_BFTD.square().sum(1)).sum(2) / 2
        # the gradient of a vector is the sum of the others; unscaled, many features would begin
        # with large random logits, take too large steps and leave the weights almost nothing to
        # learn
        pairs_BT = pairs_BT * max(v_BFTD.shape[1] - 1, 1) ** -0.5
        return weight_BFT.sum(1) + pairs_BT + self.bias_T

    def split(self, vectors_BFX: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the numbers for the pairs [B, F, tasks, D] and the weights [B, F, tasks], not yet
        divided.
        """
        vectors_BFTX = vectors_BFX.unflatten(2, (len(self.bias_T), -1))
        return vectors_BFTX[..., :-1], vectors_BFTX[..., -1]
