"""What all losses have in common: logits and labels that fit each other, and what each label
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sparrow.core import Batch, UserError
from sparrow.core.errors import suggest

Loss = Callable[[Tensor, Batch], Tensor]
"""Of logits [B, T], or [B, T, K] of K members, and a batch."""


def members(logits_BT: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns logits of members, fp32 [B, T, K], and labels [B, T]; NaN where one is missing.

    Args:
        logits_BT: what a model gave, [B, T], which is one member, or [B, T, K].
        batch: the samples.

    Raises:
        UserError: when the batch has no labels, or labels of another shape.
    """
    if batch.labels_BT is None:
        raise UserError(
            "loss: the batch has no labels; use a log with a label column, or only predict"
        )
    if logits_BT.shape[:2] != batch.labels_BT.shape:
        shape = list(logits_BT.shape)
        needed = list(batch.labels_BT.shape)
        raise UserError(
            f"loss: forward gave logits {shape}, not [B, T] = {needed}; T is the number of labels"
        )
    logits = logits_BT.float()
    logits_BTK = logits.flatten(2) if logits.dim() > 2 else logits[:, :, None]
    return logits_BTK, batch.labels_BT


def send(device: torch.device, *parts: Tensor) -> Iterator[Tensor]:
    """Yields copies of tensors of the host on a device. The host does not wait for a GPU."""
    for part in parts:
        yield (part.pin_memory() if device.type == "cuda" else part).to(device, non_blocking=True)


def factors(labels: Sequence[str], weights: Mapping[str, float]) -> Tensor | None:
    """Returns what each label's loss is multiplied by, [T], or None where a run says nothing of it.

    Args:
        labels: of the log.
        weights: label -> its factor; by default 1.

    Raises:
        UserError: for a name that is no label.
    """
    for name in weights:
        if name not in labels:
            raise UserError(
                f"loss.weights.{name}: no label of the log{suggest(name, labels)}; leave it out"
            )
    return torch.tensor([weights.get(name, 1.0) for name in labels]) if weights else None
