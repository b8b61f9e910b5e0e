"""Training steps of sharded embedding tables: Sparrow's against torchrec's, on CPUs over Gloo.

    python benchmarks/vs_torchrec.py           # every layout, with 1 and 10 ids a bag: a few minutes
    python benchmarks/vs_torchrec.py --quick   # two layouts, under a minute, the same checks

The peer is torchrec 1.8.0 with torch 2.13.0 and fbgemm-gpu-cpu 1.8.0 (how to install it: README.md
beside this file). 4 ranks of one thread each, on loopback, told to be 2 hosts of 2; 26 tables of
20,000 rows, each with a feature of its own; sums; row-wise AdaGrad in the backward. Both sides live
in the same processes and are used as their users use them: `ShardedExchange` by a plan of its named
layout, and an `EmbeddingBagCollection` on the meta device under `apply_optimizer_in_backward`,
`construct_module_sharding_plan` and `DistributedModelParallel`, its vectors put side by side as
torchrec's DLRM does. Tables are on the same ranks. A step is forward, backward and update, from a
batch's tensors.

Both begin with the same rows and see the same ids and upstream gradients; torchrec's are multiplied
by the number of ranks, by which it divides them (GRADIENT_DIVISION; data-parallel tables by DDP).
The pooled vectors of three steps, before and after updates, must agree to 1e-4, or nothing is
timed. torchrec cannot fuse the update of data-parallel tables: they get its dense RowWiseAdagrad.
Sides take turns, some steps each, all ranks together; a ratio is that of a pair, torchrec /
Sparrow. "bare" is Sparrow's bytes of a step, sent by Gloo alone in as many all-to-alls: the limit.
torchrec's planner refuses some layouts on CPUs, with the words at the end; a plan made by hand runs
them all the same (the grid's with MIN_CW_DIM lowered, since it cuts no columns narrower than 128).
CPU time is that of all ranks together; unlike the wall's it suffers little from other programs on
the same cores.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from _peers.targets import print_target
from torch import Tensor, nn

from sparrow.core import KeyedJagged
from sparrow.core.memory import keep_freed_memory
from sparrow.distributed import World, begin_world
from sparrow.embeddings import UNALLOCATED, Direct, EmbeddingTables, Feature, RowRecords, TableSpec
from sparrow.kernels import missing
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.sharding import Codecs, plan, shard

HOSTS, LOCAL, TABLES, ROWS, SEED = 2, 2, 26, 20_000, 1
RANKS = HOSTS * LOCAL
NAMES = tuple(f"t{i}" for i in range(TABLES))  # of tables, and of the features that look into them
RULE = rowwise_adagrad.Config(lr=0.05, eps=1e-8)
BATCHES = 8  # that take turns
CLOSE = 1e-4


class Point(NamedTuple):
    """One row of the table. pooling: ids a bag. batch: samples of all ranks."""

    layout: str
    pooling: int
    dim: int = 32
    batch: int = 2048

    def __str__(self) -> str:
        return f"{self.layout:18} {self.pooling:7} {self.dim:4} {self.batch:6}"


LAYOUTS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid",
    "data_parallel",
)
POINTS = [Point(layout, pooling) for layout in LAYOUTS for pooling in (1, 10)]
POINTS += [Point(layout, 1, *size) for layout in LAYOUTS[:2] for size in ((128, 2048), (32, 256))]
QUICK = [Point("table_wise", 1), Point("row_wise", 10)]


class Ids(NamedTuple):
    """A rank's batch as it comes from a loader, and the upstream gradient [B, sum of dims]."""

    values_N: Tensor
    lengths: Tensor
    grad_BC: Tensor


def draw(point: Point, rank: int) -> list[Ids]:
    """This rank's batches."""
    random = torch.Generator().manual_seed(100 + rank)
    mine = point.batch // RANKS
    return [
        Ids(
            torch.randint(0, ROWS, (TABLES * mine * point.pooling,), generator=random),
            torch.full((TABLES * mine,), point.pooling, dtype=torch.int32),
            torch.randn(mine, TABLES * point.dim, generator=random),
        )
        for _ in range(BATCHES)
    ]


# -- the two sides, and the wire alone -------------------------------------------------------------


class Side(Protocol):
    """Who takes steps."""

    def lookup(self, ids: Ids) -> Tensor:
        """Pooled vectors [B, sum of dims], in the tables' order."""

    def learn(self, vectors_BC: Tensor, grad_BC: Tensor) -> None:
        """Backward and update."""


def specs(point: Point) -> list[TableSpec]:
    """The tables."""
    return [TableSpec(name=n, dim=point.dim, addressing=Direct(ROWS), rule=RULE) for n in NAMES]


class Ours:
    """Sparrow's tables."""

    def __init__(self, point: Point, world: World) -> None:
        features = [Feature(name=n, table=n) for n in NAMES]
        whole = EmbeddingTables(specs(point), features, seed=SEED, placement=UNALLOCATED)
        layouts = plan(point.layout, [record.component for record in whole.all_records()], world)
        shard(whole, layouts, world, Codecs())
        self.tables = whole

    def lookup(self, ids: Ids) -> Tensor:
        """See Side."""
        return self.tables.pooled(
            KeyedJagged(keys=NAMES, values_N=ids.values_N, lengths=ids.lengths)
        )

    def learn(self, vectors_BC: Tensor, grad_BC: Tensor) -> None:
        """See Side."""
        vectors_BC.backward(grad_BC)
        self.tables.update()


class Peer:
    """torchrec's tables, see `distributed`."""

    def __init__(self, point: Point) -> None:
        import torchrec
        from torchrec.optim import KeyedOptimizerWrapper, RowWiseAdagrad
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        self.model = distributed(point, lambda tables: nn.ModuleDict({"tables": tables}), "tables")
        self.tables, self.jagged = self.model.module["tables"], torchrec.KeyedJaggedTensor
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        rule = {"lr": RULE.lr, "eps": RULE.eps}
        self.optimizer = (
            KeyedOptimizerWrapper(dense, lambda p: RowWiseAdagrad(p, **rule)) if dense else None
        )

    def lookup(self, ids: Ids) -> Tensor:
        """See Side."""
        vectors = self.tables(
            self.jagged(keys=list(NAMES), values=ids.values_N, lengths=ids.lengths)
        ).to_dict()
        return torch.cat([vectors[name] for name in NAMES], 1)

    def learn(self, vectors_BC: Tensor, grad_BC: Tensor) -> None:
        """See Side."""
        if self.optimizer:
            self.optimizer.zero_grad()
        vectors_BC.backward(grad_BC)
        if self.optimizer:
            self.optimizer.step()


def distributed(point: Point, within: Callable[[nn.Module], nn.Module], path: str) -> Any:
    """torchrec's tables, cut and placed as `plan` cuts and places ours, with the same rows, in a
    distributed model.

    within: what makes the model of the tables, which are at this path of it.
    """
    import torchrec
    from torchrec.distributed import sharding_plan as layouts
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim import RowWiseAdagrad, apply_optimizer_in_backward

    of_host = [[h * LOCAL + i for i in range(LOCAL)] for h in range(HOSTS)]
    named: dict[str, Callable[[int], Any]] = {
        "table_wise": lambda t: layouts.table_wise(rank=t % RANKS),
        "row_wise": lambda t: layouts.row_wise(),
        "column_wise": lambda t: layouts.column_wise(ranks=list(range(RANKS))),
        "table_row_wise": lambda t: layouts.table_row_wise(host_index=t % HOSTS),
        "table_column_wise": lambda t: layouts.column_wise(ranks=of_host[t % HOSTS]),
        "grid": lambda t: layouts.grid_shard(host_indexes=list(range(HOSTS))),
        "data_parallel": lambda t: layouts.data_parallel(),
    }
    fused = point.layout != "data_parallel"
    tables = torchrec.EmbeddingBagCollection(
        device=torch.device("meta" if fused else "cpu"),
        tables=[
            torchrec.EmbeddingBagConfig(
                name=n, embedding_dim=point.dim, num_embeddings=ROWS, feature_names=[n]
            )
            for n in NAMES
        ],
    )
    if fused:
        apply_optimizer_in_backward(
            RowWiseAdagrad, tables.parameters(), {"lr": RULE.lr, "eps": RULE.eps}
        )
    sharder = EmbeddingBagCollectionSharder()
    # a grid's columns; narrower ones than 128 it does not cut
    layouts.MIN_CW_DIM = min(128, point.dim // HOSTS)
    each = {n: named[point.layout](t) for t, n in enumerate(NAMES)}
    placed = layouts.construct_module_sharding_plan(tables, each, sharder, LOCAL, RANKS, "cpu")
    model = DistributedModelParallel(
        within(tables),
        device=torch.device("cpu"),
        plan=ShardingPlan({path: placed}),
        sharders=[sharder],
    )
    fill(model.state_dict(), path, point)
    return model


@torch.no_grad()
def fill(found: dict[str, Any], path: str, point: Point) -> None:
    """Give torchrec's tables the rows that ours begin with."""
    for spec in specs(point):
        whole = RowRecords(*spec.components, seed=SEED).weight
        weight = found[f"{path}.embedding_bags.{spec.name}.weight"]
        if isinstance(weight, Tensor) and not hasattr(weight, "local_shards"):
            weight.copy_(whole)
            continue
        for local in weight.local_shards():
            (row, column), (rows, columns) = (
                local.metadata.shard_offsets,
                local.metadata.shard_sizes,
            )
            local.tensor.copy_(whole[row : row + rows, column : column + columns])


def planner_says() -> str:
    """Which layouts torchrec's own planner gives on CPUs when told by constraints, and what it says
    if not.
    """
    import torchrec
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )

    table = torchrec.EmbeddingBagConfig(
        name="t", embedding_dim=32, num_embeddings=ROWS, feature_names=["t"]
    )
    model = nn.ModuleDict(
        {"tables": torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=[table])}
    )
    given, told = [], {}
    for layout in LAYOUTS:
        kind = "grid_shard" if layout == "grid" else layout
        machines = Topology(RANKS, "cpu", local_world_size=LOCAL)
        planner = EmbeddingShardingPlanner(
            topology=machines,
            constraints={"t": ParameterConstraints(sharding_types=[kind], min_partition=8)},
        )
        try:
            planner.plan(model, [EmbeddingBagCollectionSharder()])
            given.append(layout)
        except Exception as error:
            told[layout] = line_of(error)
    lines = [f"  {layout}: {why}" for layout, why in told.items()]
    return "\n".join(
        [f"torchrec's EmbeddingShardingPlanner on CPUs gives {', '.join(given)}; not", *lines]
    )


def bare(bytes_by_use: dict[str, int]) -> Callable[[], None]:
    """All-to-alls of so many bytes a rank, one for each use, in parts of one size."""
    most = torch.tensor(list(bytes_by_use.values()))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    buffers = [torch.zeros(-(-int(n) // RANKS) * RANKS, dtype=torch.uint8) for n in most]

    def exchange() -> None:
        for buffer in buffers:
            dist.all_to_all_single(torch.empty_like(buffer), buffer)

    return exchange


# -- checking and timing ---------------------------------------------------------------------------


@dataclass
class Result:
    """Of one point, the same on every rank. failed: what torchrec said, if it could not do it.

    Milliseconds a step, of pairs of blocks: wall [ours, peer, bare] and CPU time of all ranks
    [ours, peer].
    bytes: that Sparrow hands to collectives in a step, of all ranks.
    """

    point: Point
    difference: float = 0.0
    failed: str = ""
    bytes: float = 0.0
    wall: list[tuple[float, ...]] = field(default_factory=list)
    cpu: list[tuple[float, ...]] = field(default_factory=list)

    def ratios(self, times: list[tuple[float, ...]]) -> list[float]:
        """Of pairs."""
        return [peer / ours for ours, peer, *_ in times]


def check(mine: Ours, theirs: Peer, batches: list[Ids]) -> float:
    """The largest difference of pooled vectors over three steps, on this rank; AssertionError ends
    the benchmark.
    """
    worst = 0.0
    for ids in (batches[0], batches[1], batches[0]):
        one, two = mine.lookup(ids), theirs.lookup(ids)
        worst = max(worst, float((one.detach() - two.detach()).abs().max()))
        torch.testing.assert_close(one, two, rtol=CLOSE, atol=CLOSE)
        mine.learn(one, ids.grad_BC)
        theirs.learn(two, ids.grad_BC * RANKS)
    return worst


def block(step: Callable[[int], object], first: int, steps: int) -> tuple[float, float]:
    """Milliseconds a step, until all ranks are through: wall, CPU of all ranks."""
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    for number in range(first, first + steps):
        step(number)
    cpu = time.process_time() - cpu
    dist.barrier()
    wall = time.perf_counter() - begin
    every = torch.tensor([cpu, wall / RANKS])  # the mean of nearly equal walls
    dist.all_reduce(every)
    return float(every[1]) / steps * 1e3, float(every[0]) / steps * 1e3


def measure(point: Point, world: World, budget_s: float) -> Result:
    """Check, then time; every rank does the same."""
    result, batches = Result(point), draw(point, world.rank)
    mine = Ours(point, world)
    try:
        theirs = Peer(point)
        result.difference = check(mine, theirs, batches)
    except AssertionError as error:
        if "not close" in str(error):
            raise
        result.failed = line_of(error)
    except Exception as error:
        result.failed = line_of(error)
    worst = torch.tensor(result.difference)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    result.difference = float(worst)
    multiplied = [ids.grad_BC * RANKS for ids in batches]

    def ours(number: int) -> None:
        ids = batches[number % BATCHES]
        mine.learn(mine.lookup(ids), ids.grad_BC)

    def peers(number: int) -> None:
        ids = batches[number % BATCHES]
        theirs.learn(theirs.lookup(ids), multiplied[number % BATCHES])

    before = world.meter.bytes.copy()
    ours(0)
    used: dict[str, int] = {}
    for (what, _), count in (world.meter.bytes - before).items():
        used[what] = used.get(what, 0) + count
    total = torch.tensor(float(sum(used.values())))
    dist.all_reduce(total)
    result.bytes = float(total)
    wire = bare(used)
    sides: list[Callable[[int], None]] = [ours] if result.failed else [ours, peers]
    sides.append(lambda number: wire())
    warm = max(block(side, 0, 2)[0] for side in sides)
    steps = max(1, min(10, int(0.2 / (warm / 1e3))))
    end, turn = time.perf_counter() + budget_s, 0
    while agreed(turn < 4 or time.perf_counter() < end):
        order = list(range(len(sides))) if turn % 2 else list(reversed(range(len(sides))))
        found = {number: block(sides[number], turn * steps, steps) for number in order}
        result.wall.append(tuple(found[number][0] for number in range(len(sides))))
        result.cpu.append(tuple(found[number][1] for number in range(len(sides) - 1)))
        turn += 1
    return result


def agreed(more: bool) -> bool:
    """Rank 0's answer."""
    answer = torch.tensor(int(more))
    dist.broadcast(answer, 0)
    return bool(answer)


def line_of(error: Exception) -> str:
    """Its first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


# -- showing ---------------------------------------------------------------------------------------

HEAD = (
    f"{'layout':18} {'ids/bag':>7} {'dim':>4} {'batch':>6} | step ms {'ours':>6} {'peer':>8}"
    f" {'bare':>7}  ratio (quartiles)    | CPU ms {'ours':>6} {'peer':>8}  ratio | {'MB sent':>7} |"
    " pairs | difference"
)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower, median, upper."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def line(r: Result) -> str:
    """One row of the table."""
    ours, *peer, wire = [statistics.median(times) for times in zip(*r.wall, strict=True)]
    cpu = [statistics.median(times) for times in zip(*r.cpu, strict=True)]
    if r.failed:
        return (
            f"{r.point} | {ours:14.1f} {'-':>8} {wire:7.1f}{'':21} | {cpu[0]:13.1f} {'-':>8}{'':7}"
            f" | {r.bytes / 1e6:7.1f} | {len(r.wall):5} | torchrec: {r.failed}"
        )
    low, ratio, high = quartiles(r.ratios(r.wall))
    return (
        f"{r.point} | {ours:14.1f} {peer[0]:8.1f} {wire:7.1f} {ratio:6.2f} ({low:5.2f}-{high:5.2f})"
        f" | {cpu[0]:13.1f} {cpu[1]:8.1f} {statistics.median(r.ratios(r.cpu)):6.2f} |"
        f" {r.bytes / 1e6:7.1f} | {len(r.wall):5} | {r.difference:.0e}"
    )


def target(name: str, value: float) -> None:
    """One line per target, as every benchmark ends."""
    print_target(name, f"{value:.2f}", None, None)


def rank(number: int, port: int, points: list[Point], budget_s: float) -> None:
    """What each process does; rank 0 prints."""
    os.environ |= {
        "RANK": str(number), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(LOCAL),
        "LOCAL_RANK": str(number % LOCAL), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    keep_freed_memory()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    world = begin_world(timeout_s=120)
    results = []
    if number == 0:
        print(
            f"torch {torch.__version__}, torchrec {importlib.metadata.version('torchrec')}, fbgemm"
            f" {importlib.metadata.version('fbgemm-gpu-cpu')}; {RANKS} ranks of one thread on"
            f" {os.cpu_count()} cores, load before {os.getloadavg()[0]:.1f}; {TABLES} tables x"
            f" {ROWS:,} rows; ratios are torchrec / Sparrow\n{HEAD}",
            flush=True,
        )
    for point in points:
        results.append(measure(point, world, budget_s))
        if number == 0:
            print(line(results[-1]), flush=True)
    ran = [r for r in results if not r.failed]
    if number == 0:
        print(f"\n{planner_says()}\n")
    if number == 0 and ran:
        target(
            "step against torchrec, lowest", min(statistics.median(r.ratios(r.wall)) for r in ran)
        )
        target(
            "CPU time against torchrec, lowest",
            min(statistics.median(r.ratios(r.cpu)) for r in ran),
        )
    world.end()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two points, under a minute")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a point's timing (8)")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, help="these alone")
    options = parser.parse_args()
    if missing():
        sys.exit(f"{missing()}: run `make setup`")
    try:
        importlib.metadata.version("torchrec")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("torchrec is not installed here; benchmarks/README.md says how")
    points = [
        p
        for p in (QUICK if options.quick else POINTS)
        if not options.layouts or p.layout in options.layouts
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(
        rank, (port, points, 2.0 if options.quick else options.seconds), RANKS
    )


if __name__ == "__main__":
    main()
