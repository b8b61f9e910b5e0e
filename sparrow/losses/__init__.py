"""Logits and labels -> a loss. File `x.py` is the loss named "x" in a run's `[loss]`; its
`Config.build` returns it.

Imports: distributed and below. Imported by: data, embeddings, interactions, optimizers and above.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from sparrow.core import Batch
from sparrow.losses._labels import Loss
from sparrow.losses.bce import binary_cross_entropy, loss_and_probabilities, probabilities


class LossConfig(Protocol):
    """What a member's `Config` offers."""

    compares: ClassVar[bool]
    """Whether it compares the rows of a group, which a batch has to hold together."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Label -> what its loss is multiplied by."""
        ...

    def build(self, labels: Sequence[str]) -> Loss:
        """Returns the loss: of logits [B, T] or [B, T, K] and a batch.

        It is a mean over the batch's rows by their sample weights, because losses of parts of a
        batch are added by these weights.

        Raises:
            UserError: when a setting names a label that the log does not have.
        """
        ...

    def bytes_of(self, batch: Batch, members: int) -> int:
        """Returns how many bytes of memory a step takes for what the loss compares in a batch of
        labels and groups.

        members: K of the logits [B, T, K].
        """
        ...


__all__ = ["Loss", "LossConfig", "binary_cross_entropy", "loss_and_probabilities", "probabilities"]
