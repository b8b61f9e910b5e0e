"""Training steps of a whole DLRM on a cluster in a box: Sparrow's against torchrec's.

    python benchmarks/vs_torchrec_box.py           # three layouts, 1 and 10 ids a bag: about five minutes
    python benchmarks/vs_torchrec_box.py --quick   # one point, the same checks, under a minute

2 hosts of 2 ranks, links of 1 Gbit/s, and for each rank a quarter of the machine's cores
(cluster/box.py; root). The peer, the tables, their rows and their ids are those of
`vs_torchrec.py`. The model has 13 numbers and the MLPs below; the loss is binary cross-entropy;
dense weights learn by SGD (Adam makes whole steps of rounding: within ten, both sides would part),
rows by row-wise AdaGrad in the backward. Both live in the same processes, used as their users use
them.

Ours is `Ranks` and `Step`, as `sparrow train` has them, but for the guard against gradients that
are not finite, which torchrec lacks; ids of the next batch leave in the forward. The peer is
`DLRMTrain` under `DistributedModelParallel`, once with the ids sent when they are needed (plain),
once under `TrainPipelineSparseDist` (pipelined), which sends those of the next batch as ours does.
A step is from a batch's tensors to the updated model.

All begin with the same weights and see the same batches, each rank its quarter. torchrec divides
gradients of the tables by the number of ranks, and DDP those of dense weights: with each rank's
mean loss that is the mean over all samples, which ours takes too. The probabilities of the first
four steps, of two batches that come twice, and the losses of all ranks together must agree to 1e-4,
or nothing is timed.

Sides take turns, some steps each, all ranks together. A ratio is that of a pair, torchrec /
Sparrow. CPU time is that of all ranks together. "MB sent" is what leaves the hosts by their links
in a step, headers included.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "cluster"))

import torch
import torch.distributed as dist
from box import Box, ready, told
from rank_job import NUMBERS, Case, sent, settings
from torch import Tensor
from vs_torchrec import (
    CLOSE,
    HOSTS,
    LOCAL,
    NAMES,
    RANKS,
    ROWS,
    RULE,
    SEED,
    Ids,
    Point,
    agreed,
    block,
    distributed,
    draw,
    quartiles,
    target,
)

from sparrow.core import Batch, KeyedJagged
from sparrow.core.memory import keep_freed_memory
from sparrow.data.batches.loader import Share
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.kernels import missing
from sparrow.models import dlrm
from sparrow.optimizers import sgd
from sparrow.trained.run import Loop, Run
from sparrow.training.begin import begin_ranks
from sparrow.training.ranks import Ranks

BOTTOM, TOP, SGD = (256, 64), (256, 128), sgd.Config(lr=0.1)
POINTS = [
    Point(layout, pooling)
    for layout in ("table_wise", "row_wise", "column_wise")
    for pooling in (1, 10)
]
# steps that are compared, two of them of batches seen before; steps of a turn
CHECKED, STEPS = 4, 3
# with which no ReLU's input comes so near 0 in the compared steps that rounding decides
SEEDS = 2000


class Sample(NamedTuple):
    """A rank's part of a batch."""

    numbers_BC: Tensor
    ids: Ids
    labels_B: Tensor


Step = Callable[[], tuple[Tensor, Tensor]]
"""Take one; gives this rank's probabilities [B] before it, and a loss whose mean over ranks is that
of the batch.
"""


def samples(point: Point, rank: int) -> Iterator[Sample]:
    """This rank's parts of the batches, again and again; the first two come twice at once, for the
    check.
    """
    random, mine = torch.Generator().manual_seed(SEEDS + rank), point.batch // RANKS
    found = [
        Sample(
            torch.randn(mine, NUMBERS, generator=random),
            ids,
            (torch.rand(mine, generator=random) < 0.25).float(),
        )
        for ids in draw(point, SEEDS + rank)
    ]
    return itertools.chain(found[:2], itertools.cycle(found))


def run_of(point: Point) -> Run:
    """Sparrow's settings."""
    model, loop = dlrm.Config(dim=point.dim, bottom=BOTTOM, top=TOP), Loop(nonfinite="off")
    return replace(
        settings(point.layout, "fp32"), model=model, loop=loop, tables=RULE, dense=SGD, seed=SEED
    )


def ours(point: Point, first: Ranks) -> tuple[Any, Step]:
    """Sparrow's model and its step."""
    of: dict[str, Any] = (
        {"kind": "categorical"} if point.pooling == 1 else {"kind": "list", "pooling": "sum"}
    )
    columns = {"label": Column(kind="label")} | {
        f"I{i}": Column(kind="numeric") for i in range(NUMBERS)
    }
    columns |= {name: Column(table=name, **of) for name in NAMES}
    tables = {name: Encoding(kind="range", rows=ROWS) for name in NAMES}
    case = Case(run_of(point), first, log=Schema(columns=columns, encodings=tables))

    def shares() -> Iterator[Share]:
        for sample in samples(point, first.world.rank):
            ids = KeyedJagged(keys=NAMES, values_N=sample.ids.values_N, lengths=sample.ids.lengths)
            batch = Batch(dense_BC=sample.numbers_BC, ids=ids, labels_BT=sample.labels_B[:, None])
            yield Share(batch, point.batch, point.batch)

    following = itertools.pairwise(shares())

    def step() -> tuple[Tensor, Tensor]:
        outcome = case.step(*next(following))
        (scores_B1,) = outcome.scores
        assert scores_B1 is not None
        return scores_B1[:, 0], outcome.losses[0] / outcome.losses[1]

    return case.model.model, step


def peer(point: Point, rank: int, mine: Any, pipelined: bool) -> Step:
    """The step of torchrec's model, which begins with our model's weights."""
    from torchrec import KeyedJaggedTensor
    from torchrec.datasets.utils import Batch as Theirs
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.models.dlrm import DLRM, DLRMTrain
    from torchrec.optim import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    model = distributed(
        point,
        lambda tables: DLRMTrain(DLRM(tables, NUMBERS, [*BOTTOM, point.dim], [*TOP, 1])),  # type: ignore[arg-type]
        "model.sparse_arch.embedding_bag_collection",
    )
    copy_dense(mine, model.module.model)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda p: torch.optim.SGD(p, lr=SGD.lr))

    def batches() -> Iterator[Theirs]:
        for sample in samples(point, rank):
            ids = KeyedJaggedTensor(
                keys=list(NAMES), values=sample.ids.values_N, lengths=sample.ids.lengths
            )
            yield Theirs(sample.numbers_BC, ids, sample.labels_B)

    each = batches()
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))

    def step() -> tuple[Tensor, Tensor]:
        if pipelined:
            loss, logits_B, _ = pipeline.progress(each)
            return logits_B.sigmoid(), loss
        optimizer.zero_grad()
        loss, (_, logits_B, _) = model(next(each))
        loss.backward()
        optimizer.step()
        return logits_B.sigmoid(), loss.detach()

    return step


@torch.no_grad()
def copy_dense(mine: Any, theirs: Any) -> None:
    """Give torchrec's MLPs our weights. Its pairs are in the order of the upper triangle, ours in
    that of the lower.
    """
    vectors, dim = len(NAMES) + 1, mine.dim
    theirs_at = {pair: i for i, pair in enumerate(itertools.combinations(range(vectors), 2))}
    order = torch.tensor([theirs_at[j, i] for i in range(vectors) for j in range(i)])
    layers = [
        m
        for arch in (theirs.dense_arch, theirs.over_arch)
        for m in arch.modules()
        if hasattr(m, "in_features")
    ]
    own = [*mine.bottom.layers, *mine.top.layers, mine.head]
    for one, other in zip(own, layers, strict=True):
        other.weight.copy_(one.weight)
        other.bias.copy_(one.bias)
    over = layers[len(mine.bottom.layers)].weight
    over[:, dim + order] = mine.top.layers[0].weight[:, dim:]


# -- checking and timing ---------------------------------------------------------------------------


@dataclass
class Result:
    """Of one point, the same on every rank: of each pair of turns [ours, plain, pipelined], per
    step of all ranks.
    """

    difference: float
    wall: list[list[float]] = field(default_factory=list)
    cpu: list[list[float]] = field(default_factory=list)
    bytes: list[list[float]] = field(default_factory=list)


def check(sides: list[Step]) -> float:
    """The largest difference of probabilities and losses from ours on any rank; SystemExit when it
    is too large.
    """
    worst = torch.zeros(())
    for _ in range(CHECKED):
        answers = []
        for side in sides:
            scores_B, loss = side()
            mean = loss.float().reshape(1) / RANKS
            dist.all_reduce(mean)
            answers.append(torch.cat([scores_B, mean]))
        for answer in answers[1:]:
            worst = torch.maximum(worst, (answer - answers[0]).abs().max())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if not worst <= CLOSE:
        raise SystemExit(f"probabilities or losses differ by {float(worst):.1e}")
    return float(worst)


def measure(point: Point, first: Ranks, seconds: float) -> Result:
    """Check, then time; every rank does the same."""
    mine, own = ours(point, first)
    rank = first.world.rank
    sides = [own, peer(point, rank, mine, pipelined=False), peer(point, rank, mine, pipelined=True)]
    result, end, turn = Result(check(sides)), time.perf_counter() + seconds, 0
    while agreed(turn < 4 or time.perf_counter() < end):
        found = {
            side: timed(sides[side], rank)
            for side in (range(3) if turn % 2 else reversed(range(3)))
        }
        wall, cpu, count = zip(*(found[side] for side in range(3)), strict=True)
        result.wall.append(list(wall))
        result.cpu.append(list(cpu))
        result.bytes.append(list(count))
        turn += 1
    return result


def timed(side: Step, rank: int) -> tuple[float, float, float]:
    """Of a step: milliseconds, milliseconds of CPU of all ranks, bytes on all links."""
    before = sent()["eth0"]
    wall, cpu = block(lambda _: side(), 0, STEPS)
    count = torch.tensor(float(sent()["eth0"] - before) if rank % LOCAL == 0 else 0.0)
    dist.all_reduce(count)
    return wall, cpu, float(count) / STEPS


HEAD = (
    f"{'layout':12}{'ids/bag':>8} | step ms"
    f" {'ours':>7}{'plain':>8}{'pipelined':>10}{'plain / ours':>21}{'pipelined / ours':>21} | CPU"
    f" ms {'ours':>7}{'plain':>8}{'pipelined':>10}{'ratios':>9} | MB sent {'ours':>6}{'plain':>7} |"
    " turns | difference"
)


def ratios(times: list[list[float]], side: int) -> list[float]:
    """Of pairs: a side of torchrec's / ours."""
    return [pair[side] / pair[0] for pair in times]


def line(point: Point, r: Result) -> str:
    """One row of the table."""
    sides = [
        [statistics.median(side) for side in zip(*each, strict=True)]
        for each in (r.wall, r.cpu, r.bytes)
    ]
    wall, cpu, sent_by = sides
    shown = []
    for side in (1, 2):
        low, middle, high = quartiles(ratios(r.wall, side))
        shown.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    of_cpu = [statistics.median(ratios(r.cpu, side)) for side in (1, 2)]
    return (
        f"{point.layout:12}{point.pooling:8} |"
        f" {wall[0]:15.1f}{wall[1]:8.1f}{wall[2]:10.1f}{shown[0]:>21}{shown[1]:>21} |"
        f" {cpu[0]:14.1f}{cpu[1]:8.1f}{cpu[2]:10.1f}  {of_cpu[0]:.2f} {of_cpu[1]:.2f} |"
        f" {sent_by[0] / 1e6:14.1f}{sent_by[1] / 1e6:7.1f} | {len(r.wall):5} | {r.difference:.0e}"
    )


def job(points: list[Point], seconds: float) -> None:
    """What a rank runs; rank 0 prints."""
    import torchrec.models.dlrm  # noqa: F401  (before quotas hold)

    torch.set_num_threads(1)
    keep_freed_memory()
    logging.disable(logging.WARNING)
    first = begin_ranks(run_of(points[0]))
    ready()
    results = []
    with first.world.watched():
        for point in points:
            results.append(measure(point, first, seconds))
            if first.leads:
                print(line(point, results[-1]))
    if first.leads:
        for name, of in (("step", "wall"), ("CPU time", "cpu")):
            medians = [
                statistics.median(ratios(getattr(r, of), side)) for r in results for side in (1, 2)
            ]
            target(f"{name} against torchrec, lowest", min(medians))
    first.world.end()


def main() -> None:
    """Start the ranks in a box."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one point, the least time")
    parser.add_argument("--seconds", type=float, default=25.0, help="of a point's timing (25)")
    parser.add_argument("--job", action="store_true", help="what the box runs as each rank")
    asked = parser.parse_args()
    points = POINTS[:1] if asked.quick else POINTS
    if asked.job:
        job(points, 0.0 if asked.quick else asked.seconds)
        return
    if missing():
        sys.exit(f"{missing()}: run `make setup`")
    try:
        version = importlib.metadata.version("torchrec")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("torchrec is not installed here; benchmarks/README.md says how")
    print(
        f"torch {torch.__version__}, torchrec {version}; {os.cpu_count()} cores, load before"
        f" {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    with Box(hosts=HOSTS, ranks_per_host=LOCAL, mbit=1000) as box:
        ended = box.run(
            [sys.executable, "-W", "ignore", *sys.argv, "--job"], timeout_s=1500, begins_free=True
        )
        print(
            f"{HOSTS} hosts x {LOCAL} ranks of {box.cores_each:g} cores;"
            f" {told(box.links, box.mbit)}\n{HEAD}"
        )
    print(ended[0].out, end="")
    if failed := [one for one in ended if one.code]:
        sys.exit(
            "\n".join(f"rank {one.rank} ended with {one.code}: {one.err[-2000:]}" for one in failed)
        )


if __name__ == "__main__":
    main()
