from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sparrow.core import Batch, UserError
from sparrow.losses._groups import ComparingConfig, Groups, beside_bce, groups
from sparrow.losses._labels import Loss, sent

_MOST = 1 << 26  # pairs of a batch
_BYTES, _BYTES_MEMBER = 24, 14  # of a pair, and of each member's logits beside it; measured with 16 million pairs


@dataclass(frozen=True, kw_only=True)
class Config(ComparingConfig):
    """Logistic loss of each pair of a click and a non-click of a group (RankNet), the smooth form of GAUC.

    bce: what the binary cross-entropy that is added is multiplied by. Without it scores order the rows of a group, and
    are no probabilities. weights: see `bce`.
    """

    def build(self, labels: Sequence[str]) -> Loss:
        """Returns the loss for a log with these labels."""
        return beside_bce(pairwise, self.bce, labels, self.weights)

    def bytes_of(self, batch: Batch, members: int) -> int:
        """Returns what a step takes for the pairs of all labels, see `LossConfig`."""
        assert batch.labels_BT is not None
        found = [groups(batch, label) for label in range(batch.labels_BT.shape[1])]
        ones = [of.sums(of.labels_N).long() for of in found]
        pairs = sum(int((ones_G * (of.lengths_G - ones_G)).sum()) for ones_G, of in zip(ones, found, strict=True))
        return pairs * (_BYTES + _BYTES_MEMBER * members)


def pairwise(logits_NK: Tensor, groups: Groups) -> Tensor:
    """Returns the sum of the groups' losses, each times the weight of its rows.

    A group's loss is the mean over its pairs of log(1 + exp(s_zero - s_one)), in which a pair counts w_one w_zero, and
    over members (Burges et al. 2005, section 4). A group with one kind of label has none.

    Args:
        logits_NK: s of the groups' rows and of members.
        groups: the rows.

    Raises:
        UserError: for more pairs than memory holds.
    """
    ones_P, zeros_P = _pairs(groups)
    of_N, weights_N = groups.of_N, groups.weights_N
    ones_G, mass_G = groups.sums(weights_N * groups.labels_N), groups.sums(weights_N)
    each_G = mass_G / (ones_G * (mass_G - ones_G))
    counts_P = each_G[of_N[ones_P]] * weights_N[ones_P] * weights_N[zeros_P]
    ones_P, zeros_P, counts_P = sent(logits_NK.device, ones_P, zeros_P, counts_P)
    losses_P = F.softplus(logits_NK[zeros_P] - logits_NK[ones_P]).mean(1)
    return (losses_P * counts_P).sum()


def _pairs(groups: Groups) -> tuple[Tensor, Tensor]:
    """Returns the places of the one and of the zero of each pair, int64 [P] each."""
    of_N, is_one_N = groups.of_N, groups.labels_N > 0
    ones, zeros = is_one_N.nonzero()[:, 0], (~is_one_N).nonzero()[:, 0]
    zeros_G = torch.bincount(of_N[zeros], minlength=len(groups.lengths_G))
    first_G = zeros_G.cumsum(0) - zeros_G
    pairs_O = zeros_G[of_N[ones]]  # of each one
    pairs = int(pairs_O.sum())
    if pairs > _MOST:
        remedy = "lower data.batch_size, or use the listwise loss"
        raise UserError(f"loss: a batch has {pairs:,} pairs of a click and a non-click of a group; {remedy}")
    before_O = pairs_O.cumsum(0) - pairs_O
    zero_P = (first_G[of_N[ones]] - before_O).repeat_interleave(pairs_O) + torch.arange(pairs)
    return ones.repeat_interleave(pairs_O), zeros[zero_P]
