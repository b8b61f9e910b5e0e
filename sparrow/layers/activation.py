from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kind = Literal["relu", "swish", "hard-swish"]

FUNCTIONS: dict[Kind, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "swish": F.silu,  # x sigmoid(x)
    "hard-swish": F.hardswish,  # x min(max(x + 3, 0), 6) / 6
}


class Activation(nn.Module):
    """What a hidden layer does to each number: max(x, 0), unless a run names another function (see
    `Layers`).

    kind: which function.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind: Kind = "relu"

    def forward(self, x: Tensor) -> Tensor:
        """Returns f(x), of the shape of x."""
        return FUNCTIONS[self.kind](x)
