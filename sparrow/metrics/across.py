"""Metrics of rows that lie on many ranks. Rows that must be seen together go to one rank, and its sums to all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow.distributed import World
from sparrow.metrics.places import KS, averaged, summed, topk_by_group
from sparrow.metrics.ranking import auc, auc_by_group
from sparrow.metrics.streaming import ECE_BINS, Streaming, residuals


def merged(world: World, streams: Sequence[Streaming]) -> list[Streaming]:
    """Returns for each stream what it has seen on all ranks together, the same on every rank."""
    sums = world.all_sum("metrics", torch.stack([stream.sums() for stream in streams]))
    return [Streaming(of_one) for of_one in sums]


def folded(world: World, streams: Sequence[Streaming]) -> list[dict[str, Tensor]]:
    """Returns the state of each stream on all ranks. A run continues from it to the same bits, here and when resumed.

    The weights by score, whose counts are exact, are rank 0's from now on. The sums, [W, 5], stay those of each rank:
    added up they would be rounded, and a run that was stopped between two checkpoints would end in other bits.
    """
    states = [stream.state_dict() for stream in (merged(world, streams) if world.size > 1 else streams)]
    own_S5 = torch.stack([stream._sums for stream in streams])  # not its state_dict, which looks at all bins
    of_ranks = world.all_gather("metrics", own_S5, same=True)
    for number, (stream, state) in enumerate(zip(streams, states, strict=True)):
        state["sums"] = torch.stack([of_rank[number] for of_rank in of_ranks])
        stream.load_state_dict(state, world.rank, world.size)
    return states


def auc_across(world: World, everyone: Streaming, scores_N: Tensor, labels_N: Tensor, weights_N: Tensor) -> float:
    """Returns `auc` of all ranks' rows. Rows of a range of scores go to one rank, which counts the pairs within it.

    Args:
        world: the ranks.
        everyone: has seen the rows of all ranks, so it can cut the scores into ranges of about the same weight.
        scores_N, labels_N, weights_N: this rank's rows, [N].
    """
    owner_N = everyone.quantiles(scores_N, world.size)
    scores_N, labels_N, weights_N = _sent(world, "auc", owner_N, [scores_N, labels_N, weights_N])
    clicks, others = (float(weights_N.double() @ of_N.double()) for of_N in (labels_N, 1 - labels_N))
    won = auc(scores_N, labels_N, weights_N) * clicks * others if clicks and others else 0.0
    here = torch.tensor([won, clicks, others], dtype=torch.float64)
    won_W, clicks_W, others_W = torch.stack(world.all_gather("auc", here, same=True)).T
    below_W = others_W.cumsum(0) - others_W
    pairs = float(clicks_W.sum() * others_W.sum())
    # not by BLAS: the bits of its dot product depend on the address of the memory, and all ranks must agree
    return float((won_W + clicks_W * below_W).sum()) / pairs if pairs else math.nan


def ece_across(world: World, everyone: Streaming, scores_N: Tensor, labels_N: Tensor, weights_N: Tensor) -> float:
    """Returns `ece` of all ranks' rows; the arguments are those of `auc_across`."""
    bin_N = everyone.quantiles(scores_N, ECE_BINS)
    sums = residuals(bin_N, scores_N.double(), labels_N.double(), weights_N.double())
    *off, mass = world.all_sum("ece", sums.cpu()).tolist()
    return sum(map(abs, off)) / mass if mass else math.nan


def groups_across(
    world: World,
    scores_N: Tensor,
    labels_N: Tensor,
    groups_N: Tensor,
    weights_N: Tensor,
    ks: Sequence[int] = KS,
) -> dict[str, float]:
    """Returns `gauc` of all ranks' rows, gauc_groups (how many groups it averages), and what `topk` returns.

    Rows of a group go to one rank.
    """
    owner_N = (groups_N * 0x1E3779B97F4A7C15 >> 33) % world.size  # Fibonacci hashing spreads numbers of any pattern
    scores_N, labels_N, groups_N, weights_N = _sent(world, "gauc", owner_N, [scores_N, labels_N, groups_N, weights_N])
    auc_G, impressions_G = auc_by_group(scores_N, labels_N, groups_N, weights_N)
    counted_G = ~auc_G.isnan()
    counted = impressions_G[counted_G]
    sums = torch.stack([auc_G[counted_G] @ counted, counted.sum(), counted_G.sum()]).double().cpu()
    total, impressions, groups = world.all_sum("gauc", sums).tolist()
    places = summed(*topk_by_group(scores_N, labels_N, groups_N, weights_N, ks))
    *of_metrics, ranked, without = world.all_sum("topk", torch.cat(places).cpu()).tolist()
    found = {"gauc": total / impressions if groups else math.nan, "gauc_groups": int(groups)}
    return found | averaged(of_metrics, (ranked, without), ks)


def _sent(world: World, what: str, owner_N: Tensor, columns: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns columns of the rows that this rank owns, of all ranks' rows."""
    if world.size == 1:
        return columns
    order_N, counts = owner_N.argsort(stable=True), owner_N.bincount(minlength=world.size).tolist()
    found: list[Tensor] = []
    sizes = None
    for column in columns:
        parts = world.all_to_all(what, column[order_N].split(counts), sizes).wait()
        sizes = [len(part) for part in parts]
        found.append(torch.cat(parts))
    return found
