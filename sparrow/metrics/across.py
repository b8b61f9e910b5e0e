"""Metrics of rows that lie on many ranks. Rows that must be seen together go to one rank, and its
sums to all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sparrow.distributed import World
from sparrow.metrics._columns import PIECE
from sparrow.metrics.ranking import auc
from sparrow.metrics.streaming import ECE_BINS, Streaming, residuals


def merged(world: World, streams: Sequence[Streaming]) -> list[Streaming]:
    """Returns for each stream what it has seen on all ranks together, the same on every rank.

    streams: of one model, so that all have its measures.
    """
    sums = world.all_sum("metrics", torch.stack([stream.sums() for stream in streams]))
    return [Streaming(sums_of_stream, streams[0].measures) for sums_of_stream in sums]


def folded(world: World, streams: Sequence[Streaming]) -> list[dict[str, Tensor]]:
    """Returns the state of each stream on all ranks. A run continues from it to the same bits, here
    and when resumed.

    The weights by score, whose counts are exact, are rank 0's from now on. The sums, [W, S], stay
    those of each rank: added up they would be rounded, and a run that was stopped between two
    checkpoints would end in other bits.
    """
    states = [
        stream.state_dict() for stream in (merged(world, streams) if world.size > 1 else streams)
    ]
    # not its state_dict, which looks at all bins
    own_sums = torch.stack([stream._sums for stream in streams])
    sums_of_ranks = world.all_gather("metrics", own_sums, same=True)
    for number, (stream, state) in enumerate(zip(streams, states, strict=True)):
        state["sums"] = torch.stack([sums[number] for sums in sums_of_ranks])
        stream.load_state_dict(state, world.rank, world.size)
    return states


def auc_across(
    world: World, everyone: Streaming, scores_N: Tensor, labels_N: Tensor, weights_N: Tensor
) -> float:
    """Returns `auc` of all ranks' rows. Rows of a range of scores go to one rank, which counts the
    pairs within it.

    Many rows are cut into more ranges, which a rank counts one after another.

    Args:
        world: the ranks.
        everyone: has seen the rows of all ranks, so it can cut the scores into ranges of about the
            same weight.
        scores_N, labels_N, weights_N: this rank's rows, [N].
    """
    pieces = count_pieces(world, everyone)

    def ranges(scores_N: Tensor) -> Tensor:
        parts = [
            everyone.quantiles(part_N, world.size * pieces).int()
            for part_N in scores_N.split(PIECE)
        ]
        return torch.cat(parts)

    columns = send_to_owners(
        world, "auc", lambda: ranges(scores_N) // pieces, [scores_N, labels_N, weights_N]
    )
    piece_sums = []
    for scores_K, labels_K, weights_K in cut(columns, pieces, lambda: ranges(columns[0]) % pieces):
        clicks, non_clicks = (
            float(weights_K.double() @ side_K.double()) for side_K in (labels_K, 1 - labels_K)
        )
        won = (
            auc(scores_K, labels_K, weights_K) * clicks * non_clicks
            if clicks and non_clicks
            else 0.0
        )
        piece_sums.append([won, clicks, non_clicks])
    sums = torch.tensor(piece_sums, dtype=torch.float64)
    won_P, clicks_P, non_clicks_P = torch.cat(world.all_gather("auc", sums, same=True)).T
    below_P = non_clicks_P.cumsum(0) - non_clicks_P
    pairs = float(clicks_P.sum() * non_clicks_P.sum())
    # not by BLAS: the bits of its dot product depend on the address of the memory, and all ranks
    # must agree
    return float((won_P + clicks_P * below_P).sum()) / pairs if pairs else math.nan


def ece_across(
    world: World, everyone: Streaming, scores_N: Tensor, labels_N: Tensor, weights_N: Tensor
) -> float:
    """Returns `ece` of all ranks' rows; the arguments are those of `auc_across`."""
    sums = torch.zeros(ECE_BINS + 1, dtype=torch.float64, device=scores_N.device)
    columns = (scores_N, labels_N, weights_N)
    for scores_K, labels_K, weights_K in zip(
        *(column_N.split(PIECE) for column_N in columns), strict=True
    ):
        bin_K = everyone.quantiles(scores_K, ECE_BINS)
        sums += residuals(bin_K, scores_K.double(), labels_K.double(), weights_K.double())
    *off, mass = world.all_sum("ece", sums.cpu()).tolist()
    return sum(map(abs, off)) / mass if mass else math.nan


def count_pieces(world: World, everyone: Streaming) -> int:
    """Returns in how many pieces each rank judges its rows, so that these have about PIECE rows
    each.
    """
    return max(1, math.ceil(everyone.rows / (world.size * PIECE)))


def cut(
    columns: Sequence[Tensor], pieces: int, locate: Callable[[], Tensor]
) -> Iterator[Sequence[Tensor]]:
    """Yields columns of the rows of each piece. locate: returns the piece of each row, [N]."""
    if pieces == 1:
        yield columns
        return
    piece_N = locate()
    for piece in range(pieces):
        at_K = (piece_N == piece).nonzero()[:, 0]
        yield [column[at_K] for column in columns]


def send_to_owners(
    world: World, purpose: str, locate: Callable[[], Tensor], columns: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Returns columns of the rows that this rank owns, of all ranks' rows.

    Args:
        world: the ranks.
        purpose: of the exchange.
        locate: returns the owner of each row, [N].
        columns: of this rank's rows, [N] each.
    """
    if world.size == 1:
        return columns
    owner_N = locate()
    order_N, counts = owner_N.argsort(stable=True), owner_N.bincount(minlength=world.size).tolist()
    owned: list[Tensor] = []
    sizes = None
    for column in columns:
        parts = world.all_to_all(purpose, column[order_N].split(counts), sizes).wait()
        sizes = [len(part) for part in parts]
        owned.append(torch.cat(parts))
    return owned
