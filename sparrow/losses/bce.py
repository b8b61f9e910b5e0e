from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparrow.core import Batch, UserError


def binary_cross_entropy(logits_BT: Tensor, batch: Batch) -> Tensor:
    """Returns the mean binary cross-entropy, a scalar: sum_b w_b l_b / sum_b w_b, averaged over the labels.

    Args:
        logits_BT: what a model gave, [B, T], or [B, T, K] of K members, each of which learns by itself.
        batch: has the labels [B, T] and perhaps sample weights [B].

    Raises:
        UserError: when the batch has no labels, or labels of another shape.
    """
    if batch.labels_BT is None:
        raise UserError("loss: the batch has no labels; use a log with a label column, or only predict")
    if logits_BT.shape[:2] != batch.labels_BT.shape:
        found, needed = list(logits_BT.shape), list(batch.labels_BT.shape)
        raise UserError(f"loss: forward gave logits {found}, not [B, T] = {needed}; T is the number of labels")
    members = logits_BT.float().flatten(2) if logits_BT.dim() > 2 else logits_BT.float()[:, :, None]
    labels_BTK = batch.labels_BT[:, :, None].expand_as(members)
    loss_BT = F.binary_cross_entropy_with_logits(members, labels_BTK, reduction="none").mean(2)
    if batch.weights_B is None:
        return loss_BT.mean() if len(loss_BT) else loss_BT.sum()  # a rank may have no samples of a batch
    weights_B1 = batch.weights_B[:, None]
    return (loss_BT * weights_B1).sum() / (weights_B1.sum().clamp(min=1e-12) * loss_BT.shape[1])


def judged(logits_BT: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns `binary_cross_entropy`, and the probabilities [B, T] of these logits, which have no graph."""
    return binary_cross_entropy(logits_BT, batch), probabilities(logits_BT.detach())


def probabilities(logits_BT: Tensor) -> Tensor:
    """Returns the probabilities of logits, float32 [B, T]. Of members, [B, T, K], it is their mean."""
    p = torch.sigmoid(logits_BT.float())
    return p if p.dim() < 3 else p.mean(2)
