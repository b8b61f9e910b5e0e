"""The moments of both kinds of Adam."""

from __future__ import annotations

import torch
from torch import Tensor


def adam_moments(
    state: dict[str, Tensor],
    grad_UD: Tensor,
    square: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Returns the state after an update, lr divided by the first moment's bias [U], and the root of
    the second's [U].

    square: what the second moment averages, g^2 [U, D] or its mean over each row [U].
    """
    updates_U = state["updates"] + 1
    bias1_U, bias2_U = (
        (1 - torch.pow(beta, updates_U.double())).float() for beta in (beta1, beta2)
    )
    first_UD = state["first"] * beta1 + grad_UD * (1 - beta1)
    second = state["second"] * beta2 + square * (1 - beta2)
    return {"first": first_UD, "second": second, "updates": updates_U}, lr / bias1_U, bias2_U.sqrt()
