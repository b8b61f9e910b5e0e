"""Ids out: every rank sends the bags of its samples to the ranks that look them up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor

from sparrow.core import KeyedJagged
from sparrow.distributed import Pending
from sparrow.distributed.devices import put
from sparrow.kernels.embedding_bag import Bags, Lookups
from sparrow.kernels.embedding_bag.arguments import NEVER
from sparrow.sharding.routes import Routes


@dataclass(frozen=True, eq=False)
class SentIds:
    """Ids that are under way.

    Args:
        rows: for every rank its bags by group: the samples, then the unique rows of each group.
        ids_of: how many ids each rank sends to this one.
        counts_of: for every rank how many of these ids are for each job here.
        ids: bag lengths, then row numbers, as one flat message.
        weights: the weights of the ids, if there are any.
        counts: how many ids this rank has for each job.
        places_N: job -> the places of its ids in the feature's ids. It has the jobs of sequences
            cut by rows only.
        time: of the last sample of all ranks, NEVER where nobody asks.
    """

    rows: list[list[int]]
    ids_of: list[int]
    counts_of: list[list[int]]
    ids: Pending[Tensor]
    weights: Pending[Tensor] | None
    counts: list[int]
    places_N: dict[int, Tensor]
    time: int


def _by_parts(
    routes: Routes, ids: KeyedJagged, rows_N: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Returns lengths of bags, rows, weights of ids and numbers of ids, in the order of the routes'
    parts.
    """
    lengths = ids.lengths
    assert lengths is not None and ids.rows is not None
    lengths_of = lengths.split(list(ids.rows))
    places = {key: k for k, key in enumerate(ids.keys)}
    keys = [places[routes.features[part.feature].name] for part in routes.parts]
    bounds = [(ids.bounds[k], ids.bounds[k + 1]) for k in keys]
    lengths_B = torch.cat([lengths_of[k] for k in keys])
    sent_N = torch.cat([rows_N[low:high] for low, high in bounds])
    weights_N = ids.weights_N
    if weights_N is not None:
        weights_N = torch.cat([weights_N[low:high] for low, high in bounds])
    counts_J = torch.tensor([high - low for low, high in bounds], dtype=torch.int64)
    return lengths_B, sent_N, weights_N, counts_J


def send(routes: Routes, ids: KeyedJagged, rows_N: Tensor) -> Pending[SentIds]:
    """Begin to send every rank the bags of its jobs.

    The sizes of the messages are sent first. When they are there (`wait`), the ids themselves
    leave.

    Args:
        routes: which rank has which job.
        ids: the batch.
        rows_N: int32 or int64 [N], the row of each id in the component of its key's feature.

    Returns:
        What receives the sizes, lets the ids leave and returns them.
    """
    world = routes.world
    rows_G = [ids.batch_size, *(ids.stored(group[0]) for group in ids.inverse_B)]
    lengths_B, sent_N, weights_N, counts_J = _by_parts(routes, ids, rows_N)
    bags_J = torch.tensor(rows_G)[routes.group_J]
    places_N: dict[int, Tensor] = {}
    if len(routes.group_J) > len(routes.parts):
        lengths_B, sent_N, order_N, counts_J, places_N = _cut(
            routes, rows_G, lengths_B, sent_N, bags_J, counts_J
        )
        weights_N = None if weights_N is None else weights_N[order_N]
    sent_N = torch.cat([lengths_B, sent_N]).to(routes.index_dtype)
    sizes_R2 = torch.stack([_per_owner(routes, bags_J), _per_owner(routes, counts_J)], 1)
    starts_R2 = _before(sizes_R2) + torch.tensor([0, len(lengths_B)])
    message_N = sent_N[_stretches(starts_R2, sizes_R2, sent_N.device)]
    numbers = sizes_R2.sum(1).tolist()
    ids_of = sizes_R2[:, 1].tolist()
    counts = counts_J.tolist()
    # a receiver's host then knows all sizes, and waits for no device to count
    sizes = [
        [*rows_G, numbers[r], ids_of[r], *counts[slice(*pair)]]
        for r, pair in enumerate(pairwise(routes.edges))
    ]
    time = [NEVER if ids.time is None else ids.time] if "time" in routes.clocks else []
    heads = [[*size, *time] for size in sizes]
    jobs = len(routes.jobs_of(world.rank))
    head_size = len(rows_G) + 2 + jobs + len(time)
    flat = torch.tensor(list(chain.from_iterable(heads)))
    begun_heads = world.all_to_all_flat(
        "sizes of ids", flat, [*map(len, heads)], [head_size] * world.size, lane="ids"
    )

    def leave() -> SentIds:
        received = begun_heads.wait().view(-1, head_size)
        groups = len(rows_G)
        their_numbers, their_ids = received[:, groups : groups + 2].T.tolist()
        begun = world.all_to_all_flat("ids", message_N, numbers, their_numbers, lane="ids")
        weights = None
        if weights_N is not None:
            weights = world.all_to_all_flat("weights", weights_N, ids_of, their_ids, lane="ids")
        job_counts = received[:, groups + 2 : groups + 2 + jobs].tolist()
        latest = int(received[:, -1].max()) if time else NEVER
        return SentIds(
            received[:, :groups].tolist(),
            their_ids,
            job_counts,
            begun,
            weights,
            counts,
            places_N,
            latest,
        )

    return Pending(leave)


def receive(routes: Routes, lookups: Lookups, sent: SentIds) -> Bags:
    """Receive the ids for the shards here.

    Messages come rank by rank, and within a rank job by job. Lookups want them job by job, and
    within a job rank by rank.

    Args:
        routes: which rank has which job.
        lookups: of the shards here.
        sent: the ids under way.

    Returns:
        What the shards here look up.
    """
    world = routes.world
    message_N = sent.ids.wait()
    jobs = routes.jobs_of(world.rank)
    device = message_N.device
    bags_JR = torch.tensor(sent.rows).T[routes.group_J[jobs.start : jobs.stop]]
    bags_R = bags_JR.sum(0)
    ids_R = torch.tensor(sent.ids_of)
    ids_at_R = (bags_R + ids_R).cumsum(0) - ids_R
    lengths_B = message_N[_stretches(_before(bags_JR) + ids_at_R - bags_R, bags_JR, device)]
    offsets_B1 = lengths_B.new_zeros(len(lengths_B) + 1, dtype=torch.int64)
    torch.cumsum(lengths_B, 0, out=offsets_B1[1:])
    counts_JR = torch.tensor(sent.counts_of, dtype=torch.int64).T
    before_JR = _before(counts_JR)
    weights_N = None
    if sent.weights is not None:
        weights_N = sent.weights.wait()[_stretches(before_JR + _before(ids_R), counts_JR, device)]
    return Bags(
        slots_N=message_N[_stretches(before_JR + ids_at_R, counts_JR, device)],
        offsets_B1=offsets_B1,
        bags=bags_JR.sum(1).tolist(),
        bounds=[0, *counts_JR.sum(1).cumsum(0).tolist()],
        lookups=lookups,
        weights_N=weights_N,
        moment=(sum(rows_G[0] for rows_G in sent.rows) if routes.clocks else 0, sent.time),
    )


def _before(sizes: Tensor) -> Tensor:
    """Returns for each element the sum of those above it."""
    return sizes.cumsum(0) - sizes


def _stretches(starts: Tensor, sizes: Tensor, device: torch.device) -> Tensor:
    """Returns the places of all elements of some stretches, one stretch after the other: int64 [sum
    of sizes].
    """
    starts_S = put(starts.flatten(), device)
    sizes_S = put(sizes.flatten(), device)
    total = int(sizes.sum())
    return torch.arange(total, device=device) + (starts_S - _before(sizes_S)).repeat_interleave(
        sizes_S, output_size=total
    )


def _counts(numbers_N: Tensor, count: int) -> Tensor:
    """Returns how often each number below `count` occurs. `bincount` would look for the largest,
    and wait for it.
    """
    return numbers_N.new_zeros(count).index_add_(0, numbers_N, torch.ones_like(numbers_N))


def _per_owner(routes: Routes, values_J: Tensor) -> Tensor:
    """Returns the sum over the jobs of each rank: [R, ...]."""
    return torch.cat([values_J.new_zeros(1), values_J.cumsum(0)])[routes.edges_R1].diff()


def _cut(
    routes: Routes,
    rows_G: list[int],
    lengths_B: Tensor,
    rows_N: Tensor,
    bags_J: Tensor,
    counts_P: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[int, Tensor]]:
    """Reorder ids from column shards to jobs.

    Args:
        routes: which rank has which job.
        rows_G: how many bags each group has here.
        lengths_B: of the bags, shard by shard.
        rows_N: the rows of their ids.
        bags_J: how many bags each job has.
        counts_P: how many ids each shard has.

    Returns:
        The lengths of every job's bags, rows relative to their blocks, the permutation, how many
        ids each job has, and `SentIds.places_N`.
    """
    device = rows_N.device
    parts = routes.parts
    sizes_P = put(counts_P, device)
    total = len(rows_N)
    block_rows_N = put(routes.block_rows_P, device).repeat_interleave(sizes_P, output_size=total)
    part_N = torch.arange(len(parts), device=device).repeat_interleave(sizes_P, output_size=total)
    bags = [torch.arange(rows_G[routes.groups[part.feature]], device=device) for part in parts]
    bag_N = torch.cat(bags).repeat_interleave(lengths_B, output_size=total)
    ends_J = bags_J.cumsum(0)
    block_N = (rows_N // block_rows_N).minimum(put(routes.last_P, device)[part_N])
    job_N = put(routes.job_PM, device)[part_N, block_N]
    # sorted ten times as fast as int64
    narrow = torch.int16 if len(bags_J) < 1 << 15 else torch.int32
    order_N = job_N.to(narrow).argsort(stable=True)
    bag_N += put(ends_J - bags_J, device)[job_N]
    cut_B = _counts(bag_N, int(ends_J[-1]))
    counts_J = _counts(job_N, len(bags_J)).cpu()  # a GPU lets the host wait
    ends = counts_J.cumsum(0).tolist()
    places_N = {}
    for begin, part in zip((counts_P.cumsum(0) - counts_P).tolist(), parts, strict=True):
        if len(part.jobs) > 1 and routes.features[part.feature].pooling == "none":
            for job in part.jobs:
                places_N[job] = order_N[ends[job] - int(counts_J[job]) : ends[job]] - begin
    return cut_B, (rows_N - block_N * block_rows_N)[order_N], order_N, counts_J, places_N
