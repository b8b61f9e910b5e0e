"""How well scores order rows: AUC, and AUC within groups (GAUC)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparrow.core import UserError
from sparrow.metrics._columns import columns


class GroupedAUC(NamedTuple):
    """value: GAUC. counted: how many groups it averages, those with clicks and non-clicks. groups:
    how many in all.
    """

    value: float
    counted: int
    groups: int


def auc(scores_B: Tensor, labels_B: Tensor, weights_B: Tensor | None = None) -> float:
    """Returns the probability that a click scores above a non-click; a tie counts half. Exact.

    It is NaN when there is only one class, or when a score is NaN. Source: Hanley and McNeil 1982
    (the Mann-Whitney statistic).

    Args:
        scores_B: any numbers, [B].
        labels_B: 0..1, [B]. A row with a label y is y of its weight a click, and 1 - y of it none.
        weights_B: >= 0, [B]; ones by default.

    Raises:
        UserError: for other shapes, labels or weights.
    """
    return gauc(scores_B, labels_B, torch.zeros_like(scores_B, dtype=torch.int64), weights_B).value


def gauc(
    scores_B: Tensor, labels_B: Tensor, groups_B: Tensor, weights_B: Tensor | None = None
) -> GroupedAUC:
    """Returns the AUC within each group, averaged over the groups. A group counts by its
    impressions (sum of weights).

    Groups with one class have no AUC and are left out of both sums. The result is NaN when no group
    is left, or when a score is NaN. Source: Deep Interest Network (arXiv 1706.06978), under
    Metrics.

    Args:
        scores_B, labels_B, weights_B: as for `auc`.
        groups_B: integers, such as user or session, [B].

    Raises:
        UserError: as `auc`.
    """
    auc_G, impressions_G = auc_by_group(scores_B, labels_B, groups_B, weights_B)
    counted_G = ~auc_G.isnan()
    counted, impressions = int(counted_G.sum()), impressions_G[counted_G]
    value = float(auc_G[counted_G] @ impressions / impressions.sum()) if counted else math.nan
    return GroupedAUC(value, counted, counted_G.numel())


def auc_by_group(
    scores_B: Tensor, labels_B: Tensor, groups_B: Tensor, weights_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the AUC of each group and its impressions, [G] each, in the order of the groups'
    numbers.

    The AUC is NaN for a group with one class, and for all groups when a score is NaN. The arguments
    are those of `gauc`.
    """
    scores_B, labels_B, weights_B = columns(scores_B, labels_B, weights_B)
    groups_B = groups_B.to(scores_B.device)
    if groups_B.shape != scores_B.shape:
        raise UserError(
            f"groups: shape {tuple(groups_B.shape)} for {scores_B.numel()} scores; give one per row"
        )
    if not scores_B.numel() or bool(scores_B.isnan().any()):
        none_G = scores_B.new_full((int(groups_B.unique().numel()),), math.nan)
        return none_G, none_G
    order_B = by_group_then_score(scores_B, groups_B)
    scores_B, labels_B, weights_B, groups_B = (
        t[order_B] for t in (scores_B, labels_B, weights_B, groups_B)
    )
    new_group_B = differs_from_before(groups_B)
    group_B = new_group_B.cumsum(0) - 1
    # rows of one group and score tie
    tie_B = (new_group_B | differs_from_before(scores_B)).cumsum(0) - 1
    clicks_B = weights_B * labels_B
    non_clicks_B = weights_B * (1 - labels_B)

    def total(values_B: Tensor, index_B: Tensor) -> Tensor:
        return values_B.new_zeros(int(index_B[-1]) + 1).index_add_(0, index_B, values_B)

    non_clicks_G = total(non_clicks_B, group_B)
    non_clicks_U = total(non_clicks_B, tie_B)
    before_group_G = non_clicks_G.cumsum(0) - non_clicks_G
    before_tie_U = non_clicks_U.cumsum(0) - non_clicks_U
    below_B = before_tie_U[tie_B] - before_group_G[group_B] + non_clicks_U[tie_B] / 2
    won_G = total(clicks_B * below_B, group_B)
    pairs_G = total(clicks_B, group_B) * non_clicks_G
    return torch.where(pairs_G > 0, won_G / pairs_G, math.nan), total(weights_B, group_B)


def by_group_then_score(scores_B: Tensor, groups_B: Tensor) -> Tensor:
    """Returns the order of rows by group, and within a group by rising score, int64 [B]."""
    order_B = scores_B.argsort()
    if not bool((groups_B != groups_B[0]).any()):
        return order_B
    return order_B[groups_B[order_B].argsort(stable=True)]


def differs_from_before(sorted_B: Tensor) -> Tensor:
    """Returns where a value is not that of the row before, bool [B]; True for the first."""
    first_B = torch.ones_like(sorted_B[:1], dtype=torch.bool)
    return torch.cat([first_B, sorted_B[1:] != sorted_B[:-1]])
