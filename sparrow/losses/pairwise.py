from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sparrow.core import Batch, UserError
from sparrow.losses._groups import ComparingConfig, Groups, add_bce, group_rows
from sparrow.losses._labels import Loss, send

_MOST = 1 << 26  # pairs of a batch
# of a pair, and of each member's logits beside it; measured with 16 million pairs
_BYTES = 24
_BYTES_MEMBER = 14


@dataclass(frozen=True, kw_only=True)
class Config(ComparingConfig):
    """Logistic loss of each pair of a click and a non-click of a group (RankNet), the smooth form
    of GAUC.

    A row whose label y is between 0 and 1 is y clicks and 1 - y non-clicks.

    bce: what the binary cross-entropy that is added is multiplied by. Without it scores order the
    rows of a group, and are no probabilities. weights: see `bce`.
    """

    def build(self, labels: Sequence[str]) -> Loss:
        """Returns the loss for a log with these labels."""
        return add_bce(pairwise, self.bce, labels, self.weights)

    def bytes_of(self, batch: Batch, members: int) -> int:
        """Returns the bytes of the pairs of all labels, see `LossConfig`."""
        assert batch.labels_BT is not None
        pairs = 0
        for label in range(batch.labels_BT.shape[1]):
            rows = group_rows(batch, label)
            is_positive_N, is_negative_N = _sides(rows)
            positives_G = rows.sums(is_positive_N.float()).long()
            negatives_G = rows.sums(is_negative_N.float()).long()
            pairs += int((positives_G * negatives_G).sum())
        return pairs * (_BYTES + _BYTES_MEMBER * members)


def pairwise(logits_NK: Tensor, groups: Groups) -> Tensor:
    """Returns the sum of the groups' losses, each times the weight of its rows.

    A group's loss is the mean over its pairs of log(1 + exp(s_negative - s_positive)), in which
    a pair counts w_positive w_negative, and over members (Burges et al. 2005, section 4). A group
    with one kind of label has none. A row with a label y between 0 and 1 is a positive of weight w
    y and a negative of weight w (1 - y), which are a pair, too.

    Args:
        logits_NK: s of the groups' rows and of members.
        groups: the rows.

    Raises:
        UserError: for more pairs than memory holds.
    """
    positives_P, negatives_P = _pairs(groups)
    group_N = groups.group_N
    weights_N = groups.weights_N
    positive_mass_N = weights_N * groups.labels_N
    negative_mass_N = weights_N * (1 - groups.labels_N)
    scale_G = groups.sums(weights_N) / (groups.sums(positive_mass_N) * groups.sums(negative_mass_N))
    counts_P = (
        scale_G[group_N[positives_P]] * positive_mass_N[positives_P] * negative_mass_N[negatives_P]
    )
    positives_P, negatives_P, counts_P = send(logits_NK.device, positives_P, negatives_P, counts_P)
    losses_P = F.softplus(logits_NK[negatives_P] - logits_NK[positives_P]).mean(1)
    return (losses_P * counts_P).sum()


def _sides(groups: Groups) -> tuple[Tensor, Tensor]:
    """Returns which rows are positives and which are negatives, bool [N] each; a row with a label
    in between is both.
    """
    return groups.labels_N > 0, groups.labels_N < 1


def _pairs(groups: Groups) -> tuple[Tensor, Tensor]:
    """Returns the places of the positive and of the negative of each pair, int64 [P] each."""
    group_N = groups.group_N
    positives, negatives = (side_N.nonzero()[:, 0] for side_N in _sides(groups))
    negatives_G = torch.bincount(group_N[negatives], minlength=len(groups.lengths_G))
    first_G = negatives_G.cumsum(0) - negatives_G
    pairs_O = negatives_G[group_N[positives]]  # of each positive
    pairs = int(pairs_O.sum())
    if pairs > _MOST:
        remedy = "lower data.batch_size, or use the listwise loss"
        raise UserError(
            f"loss: a batch has {pairs:,} pairs of a click and a non-click of a group; {remedy}"
        )
    before_O = pairs_O.cumsum(0) - pairs_O
    begin_O = first_G[group_N[positives]] - before_O
    negative_P = begin_O.repeat_interleave(pairs_O) + torch.arange(pairs)
    return positives.repeat_interleave(pairs_O), negatives[negative_P]
