"""Metrics within groups, such as sessions, whose rows lie on many ranks: GAUC, and places of
positives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow.distributed import World
from sparrow.metrics._columns import PIECE, has_shares
from sparrow.metrics.across import count_pieces, cut, send_to_owners
from sparrow.metrics.metric import KS
from sparrow.metrics.places import averaged, summed, topk_by_group
from sparrow.metrics.ranking import auc_by_group
from sparrow.metrics.streaming import Streaming


def groups_across(
    world: World,
    everyone: Streaming,
    scores_N: Tensor,
    labels_N: Tensor,
    groups_N: Tensor,
    weights_N: Tensor,
    ks: Sequence[int] = KS,
) -> dict[str, float]:
    """Returns `gauc` of all ranks' rows, gauc_groups (how many groups it averages), and what `topk`
    returns.

    Rows of a group go to one rank, and are judged at one time. With a label between 0 and 1 on any
    of them there are no places, see `topk`.
    """
    pieces = count_pieces(world, everyone)

    def ranges(groups_N: Tensor) -> Tensor:
        """Fibonacci hashing spreads numbers of any pattern."""
        count = world.size * pieces
        return torch.cat(
            [
                ((group_K * 0x1E3779B97F4A7C15 >> 33) % count).int()
                for group_K in groups_N.split(PIECE)
            ]
        )

    columns = send_to_owners(
        world, "gauc", lambda: ranges(groups_N) // pieces, [scores_N, labels_N, groups_N, weights_N]
    )
    sums = torch.zeros(3, dtype=torch.float64)
    for part in cut(columns, pieces, lambda: ranges(columns[2]) % pieces):
        auc_G, impressions_G = auc_by_group(*part)
        counted_G = ~auc_G.isnan()
        counted = impressions_G[counted_G]
        sums += torch.stack([auc_G[counted_G] @ counted, counted.sum(), counted_G.sum()]).cpu()
    shares = sums.new_tensor([has_shares(columns[1])])
    total, impressions, groups, shares_sum = world.all_sum(
        "gauc", torch.cat([sums, shares])
    ).tolist()
    auc_within = {"gauc": total / impressions if groups else math.nan, "gauc_groups": int(groups)}
    if shares_sum:
        return auc_within
    places = []
    for scores_K, labels_K, groups_K, weights_K in cut(
        columns, pieces, lambda: ranges(columns[2]) % pieces
    ):
        places.append(
            torch.cat(summed(*topk_by_group(scores_K, labels_K, groups_K, weights_K, ks))).cpu()
        )
    *metric_sums, ranked, without_positive = world.all_sum(
        "topk", torch.stack(places).sum(0)
    ).tolist()
    return auc_within | averaged(metric_sums, (ranked, without_positive), ks)
