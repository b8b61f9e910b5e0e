"""Functions with a gradient of their own, without autograd where nothing needs one."""

from __future__ import annotations

from typing import Any

import torch


class _Forgotten:
    """What a forward is given to keep things for backward, where there will be none."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep nothing."""


def applied(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Returns `function.apply(*inputs)`, with the same bits.

    Where no gradients are taken, its forward runs alone: autograd's part takes as long as a product
    of one row.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*inputs)
    return function.forward(_Forgotten(), *inputs)
