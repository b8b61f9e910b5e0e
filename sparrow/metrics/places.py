"""How high scores place the positives of a request: recall@k, NDCG@k, hit rate@k and MRR.

Candidates with equal scores have no order. Each metric is its expected value over all orders of
them, so a model that gives every candidate the same score gets what chance gets. Two numbers of
every place are enough for that: the expected label, and the probability that the first positive
stands there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparrow.core import UserError
from sparrow.metrics._columns import columns, has_shares
from sparrow.metrics.metric import KS, topk_names
from sparrow.metrics.ranking import by_group_then_score, differs_from_before


def topk(
    scores_B: Tensor,
    labels_B: Tensor,
    groups_B: Tensor,
    weights_B: Tensor | None = None,
    ks: Sequence[int] = KS,
) -> dict[str, float]:
    """Returns the metrics of `topk_names`, ranked_groups (how many they average),
    groups_without_positive (left out).

    A group counts by the mean weight of its rows. The metrics are NaN when no group has a positive.
    For the formulas see `topk_by_group`, whose arguments these are.

    Raises:
        UserError: as `topk_by_group`.
    """
    sums, counts = summed(*topk_by_group(scores_B, labels_B, groups_B, weights_B, ks))
    return averaged(sums.tolist(), counts.tolist(), ks)


def topk_by_group(
    scores_B: Tensor,
    labels_B: Tensor,
    groups_B: Tensor,
    weights_B: Tensor | None = None,
    ks: Sequence[int] = KS,
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns each metric of each group, and the mean weight of its rows, [G], in the order of the
    groups' numbers.

    A group's n candidates are placed by falling score. P of them are positive, y_j is 1 if that at
    place j is. recall@k: the positives at the first k places, divided by P.
    NDCG@k: sum over j <= k of y_j / log2(j + 1), divided by the most that P positives can have of
    it (Jarvelin and Kekalainen 2002).
    hit rate@k: 1 if a positive is at the first k places, else 0.
    MRR: 1 / the place of the first positive (Voorhees 1999).
    They are NaN for a group without a positive, and for all groups when a score is NaN.

    Args:
        scores_B: any numbers, [B].
        labels_B: 1 for a positive, else 0, [B].
        groups_B: integers, such as the request, [B]. A row with one below 0 belongs to none and is
            left out.
        weights_B: >= 0, [B]; ones by default. A candidate takes one place whatever its weight, but
            with weight 0 none.
        ks: how many places count, 1 or more each.

    Raises:
        UserError: for other shapes, labels or weights, for a label between 0 and 1, and for a k
            below 1.
    """
    wanted = topk_names(ks)
    scores_B, labels_B, weights_B = columns(scores_B, labels_B, weights_B)
    if has_shares(labels_B):
        row = int(((labels_B > 0) & (labels_B < 1)).nonzero()[0])
        remedy = (
            "a candidate at one place is a positive or not; use gauc, or rows of one showing each"
        )
        raise UserError(f"labels: {float(labels_B[row]):g} in row {row}; {remedy}")
    groups_B = groups_B.to(scores_B.device)
    if groups_B.shape != scores_B.shape:
        raise UserError(
            f"groups: shape {tuple(groups_B.shape)} for {scores_B.numel()} scores; give one per row"
        )
    order_B = by_group_then_score(-scores_B, groups_B) if len(scores_B) else groups_B
    scores_B, labels_B, groups_B, weights_B = (
        t[order_B] for t in (scores_B, labels_B, groups_B, weights_B)
    )
    group_B = differs_from_before(groups_B).cumsum(0) - 1
    count = int(group_B[-1]) + 1 if len(group_B) else 0
    is_counted_B = (weights_B > 0) & (groups_B >= 0)
    scores_B, labels_B, group_B, weights_B = (
        t[is_counted_B] for t in (scores_B, labels_B, group_B, weights_B)
    )
    rows_G = torch.bincount(group_B, minlength=count).clamp(min=1)
    weight_G = torch.bincount(group_B, weights_B, count) / rows_G
    unknown_G = torch.full((count,), math.nan, dtype=torch.float64, device=scores_B.device)
    if not scores_B.numel() or bool(scores_B.isnan().any()):
        return dict.fromkeys(wanted, unknown_G), weight_G
    labels_B = (labels_B > 0).double()
    place_B, expected_B, first_B = _places(scores_B, labels_B, group_B)

    def total(values_B: Tensor) -> Tensor:
        return torch.bincount(group_B, values_B, count)

    positives_G = total(labels_B)
    gains = 1 / torch.log2(torch.arange(max(ks), dtype=torch.float64, device=scores_B.device) + 2)
    best = torch.cat([gains.new_zeros(1), gains.cumsum(0)])  # of 0, 1, ... positives
    by_metric = {"mrr": total(first_B / (place_B + 1))}
    for k in ks:
        top_B = place_B < k
        gain_B = gains[place_B.clamp(max=k - 1)]
        by_metric[f"recall@{k}"] = total(expected_B * top_B) / positives_G
        by_metric[f"ndcg@{k}"] = (
            total(expected_B * gain_B * top_B) / best[positives_G.long().clamp(max=k)]
        )
        by_metric[f"hit_rate@{k}"] = total(first_B * top_B)
    values = {name: torch.where(positives_G > 0, by_metric[name], unknown_G) for name in wanted}
    return values, weight_G


def _places(scores_B: Tensor, labels_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns of rows in the order of group and falling score their place in the group, 0 the
    first, and what is there.

    That is the expected label, and the probability that it is the group's first positive, over all
    orders of equal scores. Of m equal scores, c positive, the first positive is at r with
    probability C(m - r, c - 1) / C(m, c).
    """
    at_B = torch.arange(len(scores_B), device=scores_B.device)
    new_group_B = differs_from_before(group_B)
    new_tie_B = new_group_B | differs_from_before(scores_B)
    tie_B = new_tie_B.cumsum(0) - 1
    group_begins_B = at_B[new_group_B][new_group_B.cumsum(0) - 1]
    tie_begins_B = at_B[new_tie_B][tie_B]
    size_B, clicks_B = torch.bincount(tie_B)[tie_B].double(), torch.bincount(tie_B, labels_B)[tie_B]
    before_B = labels_B.cumsum(0) - labels_B
    is_first_B = (before_B[tie_begins_B] == before_B[group_begins_B]) & (clicks_B > 0)
    behind_B = size_B - 1 - (at_B - tie_begins_B)  # of the equal scores, those behind this place
    first_K = (is_first_B & (behind_B >= clicks_B - 1)).nonzero()[:, 0]
    clicks_K = clicks_B[first_K]
    share_K = (
        _log_choose(behind_B[first_K], clicks_K - 1) - _log_choose(size_B[first_K], clicks_K)
    ).exp()
    first_B = torch.zeros_like(labels_B).index_copy_(0, first_K, share_K)
    return at_B - group_begins_B, clicks_B / size_B, first_B


def _log_choose(n_B: Tensor, k_B: Tensor) -> Tensor:
    """The logarithm of n over k, for 0 <= k <= n."""
    return (n_B + 1).lgamma() - (k_B + 1).lgamma() - (n_B - k_B + 1).lgamma()


def summed(by_metric: Mapping[str, Tensor], weight_G: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what `averaged` takes, of some groups; it can be added to that of others.

    Returns:
        For each metric the weighted sum over its groups, then their weight, float64; and the
        numbers of groups that have a value and that have none, float64 [2].
    """
    known_G = ~next(iter(by_metric.values())).isnan()
    weights = weight_G[known_G]
    sums = [(values_G[known_G] * weights).sum() for values_G in by_metric.values()]
    counts = torch.stack([known_G.sum(), (~known_G & (weight_G > 0)).sum()])
    return torch.stack([*sums, weights.sum()]), counts.double()


def averaged(sums: Sequence[float], counts: Sequence[float], ks: Sequence[int]) -> dict[str, float]:
    """Returns the values of `topk`, from the sums and counts of `summed`."""
    *metric_sums, weight = sums
    named = zip(topk_names(ks), metric_sums, strict=True)
    means = {name: metric_sum / weight if weight else math.nan for name, metric_sum in named}
    return {**means, "ranked_groups": int(counts[0]), "groups_without_positive": int(counts[1])}
