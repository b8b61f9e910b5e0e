from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.losses._groups import ComparingConfig, Groups, add_bce
from sparrow.losses._labels import Loss, send


@dataclass(frozen=True, kw_only=True)
class Config(ComparingConfig):
    """Cross-entropy between the clicks of a group and the softmax of its scores (ListNet).

    bce, weights: see `pairwise`.
    """

    def build(self, labels: Sequence[str]) -> Loss:
        """Returns the loss for a log with these labels."""
        return add_bce(listwise, self.bce, labels, self.weights)


def listwise(logits_NK: Tensor, groups: Groups) -> Tensor:
    """Returns the sum of the groups' losses, each times the weight of its rows.

    A group's loss is the mean over its clicks of log(sum_j w_j exp(s_j)) - s_click, in which a
    click counts its weight, and over members (Cao et al. 2007, section 4, with labels in the place
    of the true scores). A row of weight 2 counts as two rows.

    Args:
        logits_NK: s of the groups' rows and of members.
        groups: the rows.
    """
    clicks_N = groups.weights_N * groups.labels_N
    counts_N = (groups.sums(groups.weights_N) / groups.sums(clicks_N))[groups.group_N] * clicks_N
    on_host = (groups.lengths_G, groups.group_N, groups.weights_N, counts_N)
    lengths_G, group_N, weights_N, counts_N = send(logits_NK.device, *on_host)

    def reduce_groups(x_NK: Tensor, how: str) -> Tensor:
        # a check of lengths would wait
        return torch.segment_reduce(x_NK, how, lengths=lengths_G, unsafe=True)

    most_NK = reduce_groups(logits_NK.detach(), "max")[group_N]  # so that no power overflows
    powers_NK = weights_N[:, None] * (logits_NK - most_NK).exp()
    log_sum_NK = reduce_groups(powers_NK, "sum").log()[group_N] + most_NK
    return ((log_sum_NK - logits_NK).mean(1) * counts_N).sum()
