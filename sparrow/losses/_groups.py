"""What losses have in common that compare the rows of a group, such as the candidates of a
request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sparrow.core import Batch, UserError
from sparrow.core.errors import require
from sparrow.losses._labels import Loss, factors, members, send
from sparrow.losses.bce import binary_cross_entropy


@dataclass(frozen=True, kw_only=True)
class ComparingConfig:
    """The settings that all losses have that compare the rows of a group; the members say what they
    mean.
    """

    bce: float = 1.0
    weights: dict[str, float] = field(default_factory=dict)
    compares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(
            least=0,
            bce=self.bce,
            **{f"weights.{name}": weight for name, weight in self.weights.items()},
        )

    def bytes_of(self, batch: Batch, members: int) -> int:
        """Returns 0: what is kept of each row is too little to count."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The rows of a label, those of a group side by side. Groups in which no label is above 0 are
    left out.

    Rows whose label is missing and rows of weight 0 are left out, too. All is on the host.

    Args:
        at_N: their places in the batch, int64.
        labels_N: in 0..1.
        weights_N: the sample weights, above 0.
        lengths_G: the rows of each group, int64.
    """

    at_N: Tensor
    labels_N: Tensor
    weights_N: Tensor
    lengths_G: Tensor

    @property
    def group_N(self) -> Tensor:
        """The number of each row's group."""
        return torch.arange(len(self.lengths_G)).repeat_interleave(self.lengths_G)

    def sums(self, values_N: Tensor) -> Tensor:
        """Returns the sum of the values of each group, [G]."""
        return torch.zeros(len(self.lengths_G), dtype=values_N.dtype).index_add_(
            0, self.group_N, values_N
        )


def group_rows(batch: Batch, label: int) -> Groups:
    """Returns the rows of a batch that a loss compares, group by group. label: the number of the
    label.

    Raises:
        UserError: when the batch has no groups.
    """
    host = batch.on_host
    if host.session_B is None:
        raise UserError(
            "loss: the batch has no groups to compare rows in; give a column kind = 'group', or"
            " use bce"
        )
    assert host.labels_BT is not None
    labels_B = host.labels_BT[:, label].cpu()
    group_B = host.session_B.cpu()
    weights_B = torch.ones_like(labels_B) if host.weights_B is None else host.weights_B.cpu()
    at_N = ((weights_B > 0) & ~labels_B.isnan()).nonzero()[:, 0]
    at_N = at_N[group_B[at_N].argsort(stable=True)]
    lengths_G = group_B[at_N].unique_consecutive(return_counts=True)[1]
    rows = Groups(
        at_N=at_N, labels_N=labels_B[at_N], weights_N=weights_B[at_N], lengths_G=lengths_G
    )
    has_positive_G = rows.sums(rows.labels_N) > 0
    is_counted_N = has_positive_G[rows.group_N]
    return Groups(
        at_N=at_N[is_counted_N],
        labels_N=rows.labels_N[is_counted_N],
        weights_N=rows.weights_N[is_counted_N],
        lengths_G=lengths_G[has_positive_G],
    )


GroupLoss = Callable[[Tensor, Groups], Tensor]
"""Logits [N, K] of the rows of some groups, by K members -> the sum of the groups' losses, each
times its weight.
"""


def add_bce(
    group_loss: GroupLoss, bce: float, labels: Sequence[str], weights: Mapping[str, float]
) -> Loss:
    """Returns a loss that compares rows, with `bce` times the binary cross-entropy of each row
    added.

    Args:
        group_loss: the loss of groups.
        bce: 0 for none.
        labels: of the log.
        weights: label -> what its loss is multiplied by.

    Raises:
        UserError: for a weight of what is no label.
    """
    factors_T = factors(labels, weights)

    def loss(logits_BT: Tensor, batch: Batch) -> Tensor:
        ranking_loss = ranking(logits_BT, batch, factors_T, group_loss)
        if not bce:
            return ranking_loss
        return ranking_loss + bce * binary_cross_entropy(logits_BT, batch, factors_T)

    return loss


def ranking(
    logits_BT: Tensor, batch: Batch, factors_T: Tensor | None, group_loss: GroupLoss
) -> Tensor:
    """Returns the mean loss of a batch: each group's loss counts as often as it has rows, by their
    sample weights.

    The sum is divided by the weights of all rows of the batch, and by the number of labels.

    Args:
        logits_BT: [B, T], or [B, T, K] of K members, each of which learns by itself.
        batch: has labels [B, T], groups [B] and perhaps sample weights [B].
        factors_T: what each label's loss is multiplied by.
        group_loss: the loss of groups.

    Raises:
        UserError: when the batch has no labels or groups, or labels of another shape.
    """
    logits_BTK, labels_BT = members(logits_BT, batch)
    total = logits_BTK[:0].sum()  # has a graph where no group has a loss, as all ranks' losses must
    for label in range(labels_BT.shape[1]):
        rows = group_rows(batch, label)
        if len(rows.at_N):
            (at_N,) = send(logits_BTK.device, rows.at_N)
            loss = group_loss(logits_BTK[at_N, label], rows)
            total = total + (loss if factors_T is None else loss * factors_T[label])
    return total / (max(batch.mass, 1e-12) * labels_BT.shape[1])
