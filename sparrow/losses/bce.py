from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sparrow.core import Batch
from sparrow.core.errors import require
from sparrow.losses._labels import Loss, factors, members, send


@dataclass(frozen=True, kw_only=True)
class Config:
    """Binary cross-entropy of each row. weights: label -> what its loss is multiplied by, by
    default 1.
    """

    weights: dict[str, float] = field(default_factory=dict)
    compares: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(least=0, **{f"weights.{name}": weight for name, weight in self.weights.items()})

    def build(self, labels: Sequence[str]) -> Loss:
        """Returns the loss for a log with these labels."""
        return partial(binary_cross_entropy, factors_T=factors(labels, self.weights))

    def bytes_of(self, batch: Batch, members: int) -> int:
        """Returns 0: what is kept of each row is too little to count."""
        return 0


def binary_cross_entropy(
    logits_BT: Tensor, batch: Batch, factors_T: Tensor | None = None
) -> Tensor:
    """Returns the mean binary cross-entropy, a scalar: sum_b w_b l_b / sum_b w_b, averaged over the
    labels.

    With several labels, one may be missing (NaN): its l_b is 0. So each label that there is counts
    the same, whatever else its row and its batch have.

    Args:
        logits_BT: what a model gave, [B, T], or [B, T, K] of K members, each of which learns by
            itself.
        batch: has the labels [B, T] and perhaps sample weights [B].
        factors_T: what each label's loss is multiplied by.

    Raises:
        UserError: when the batch has no labels, or labels of another shape.
    """
    logits_BTK, labels_BT = members(logits_BT, batch)
    may_miss = labels_BT.shape[1] > 1
    known_BT = labels_BT.nan_to_num(0.0) if may_miss else labels_BT
    labels_BTK = known_BT[:, :, None].expand_as(logits_BTK)
    loss_BT = F.binary_cross_entropy_with_logits(logits_BTK, labels_BTK, reduction="none").mean(2)
    if may_miss:
        loss_BT = torch.where(labels_BT.isnan(), 0.0, loss_BT)
    if factors_T is not None:
        loss_BT = loss_BT * next(send(loss_BT.device, factors_T))
    if batch.weights_B is None:
        # a rank may have no samples of a batch
        return loss_BT.mean() if len(loss_BT) else loss_BT.sum()
    weights_B1 = batch.weights_B[:, None]
    return (loss_BT * weights_B1).sum() / (weights_B1.sum().clamp(min=1e-12) * loss_BT.shape[1])


def loss_and_probabilities(
    logits_BT: Tensor, batch: Batch, loss: Loss = binary_cross_entropy
) -> tuple[Tensor, Tensor]:
    """Returns a batch's loss, and the probabilities [B, T] of these logits, which have no graph."""
    return loss(logits_BT, batch), probabilities(logits_BT.detach())


def probabilities(logits_BT: Tensor) -> Tensor:
    """Returns the probabilities of logits, float32 [B, T]. Of members, [B, T, K], it is their
    mean.
    """
    p = torch.sigmoid(logits_BT.float())
    return p if p.dim() < 3 else p.mean(2)
