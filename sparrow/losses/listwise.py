from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.losses._groups import ComparingConfig, Groups, beside_bce
from sparrow.losses._labels import Loss, sent


@dataclass(frozen=True, kw_only=True)
class Config(ComparingConfig):
    """Cross-entropy between the clicks of a group and the softmax of its scores (ListNet).

    bce, weights: see `pairwise`.
    """

    def build(self, labels: Sequence[str]) -> Loss:
        """Returns the loss for a log with these labels."""
        return beside_bce(listwise, self.bce, labels, self.weights)


def listwise(logits_NK: Tensor, groups: Groups) -> Tensor:
    """Returns the sum of the groups' losses, each times the weight of its rows.

    A group's loss is the mean over its ones of log(sum_j w_j exp(s_j)) - s_one, in which a one counts its weight, and
    over members (Cao et al. 2007, section 4, with labels in the place of the true scores). A row of weight 2 counts as
    two rows.

    Args:
        logits_NK: s of the groups' rows and of members.
        groups: the rows.
    """
    ones_N = groups.weights_N * groups.labels_N
    counts_N = (groups.sums(groups.weights_N) / groups.sums(ones_N))[groups.of_N] * ones_N
    on_host = (groups.lengths_G, groups.of_N, groups.weights_N, counts_N)
    lengths_G, of_N, weights_N, counts_N = sent(logits_NK.device, *on_host)

    def reduced(x_NK: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(x_NK, how, lengths=lengths_G, unsafe=True)  # a check of lengths would wait

    most_NK = reduced(logits_NK.detach(), "max")[of_N]  # so that no power overflows
    whole_NK = reduced(weights_N[:, None] * (logits_NK - most_NK).exp(), "sum").log()[of_N] + most_NK
    return ((whole_NK - logits_NK).mean(1) * counts_N).sum()
