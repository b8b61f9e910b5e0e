"""Lookups and updates of embedding tables against fbgemm's CPU operator and this machine's limits.

    python benchmarks/embedding_bag.py           # 60 pooled points and 12 unpooled ones, under half an hour
    python benchmarks/embedding_bag.py --quick   # a few of them, under a minute, the same checks

The peer is fbgemm-gpu-cpu 1.8.0 with torch 2.13.0 (how to install it: README.md beside this file);
without it its columns stay empty. Both sides are used as their users use them: `EmbeddingTables`
and `SplitTableBatchedEmbeddingBagsCodegen`, each with its checks of the ids, autograd and row-wise
AdaGrad in the backward. Both have the same rows, ids and gradients, and their results are compared
before anything is timed. Sides alternate, each running 20 ms (once at least) before the run that is
timed, in a process that keeps freed memory (both gain by it). The id stream and the baskets of real
logs come from the folder SPARROW_DATA; without it their points are left out.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _peers.targets import print_target
from _peers.tiny import TINY, sized
from limits import bytes_last_level_cache, copy_gb_per_s, gather_gb_per_s
from torch import Tensor

from sparrow.core import KeyedJagged
from sparrow.core.memory import keep_freed_memory
from sparrow.embeddings import Direct, EmbeddingTables, Feature, TableSpec
from sparrow.kernels import missing
from sparrow.kernels.rules import rowwise_adagrad

DATA = Path(os.environ.get("SPARROW_DATA", Path(__file__).parents[2] / "shared" / "data"))
RULE = rowwise_adagrad.Config(lr=0.01, eps=1e-8)
BIG = int(
    sized(1.25e9, 1e6)
)  # bytes of all tables together where rows are "big": beyond the caches


class Point(NamedTuple):
    """One row of the table. pooling: lookups per bag, or the lengths of retail baskets. ids: how
    they are drawn.
    """

    tables: int
    dim: int
    pooling: int | str
    batch: int
    rows: int | str
    ids: str

    @property
    def rows_each(self) -> int:
        """Rows of one table."""
        rows = BIG // (self.tables * self.dim * 4) if isinstance(self.rows, str) else self.rows
        return sized(rows, min(rows, 1_000))

    def __str__(self) -> str:
        rows = f"{self.rows_each:.0e}".replace("e+0", "e")
        return (
            f"{self.tables:3} x {rows:>5} x {self.dim:<3} {self.batch:5} x {self.pooling:<6}"
            f" {self.ids}"
        )


# Drawn once so that all pairs of values occur together where 6 GB allow it.
POOLED = [
    Point(*p)  # type: ignore[arg-type]
    for p in [
        (1, 4, 1, 256, 1_000_000, "uniform"),
        (1, 4, 10, 16384, 10_000, "globo"),
        (1, 4, 80, 2048, 10_000, "zipf"),
        (1, 4, 80, 16384, "big", "zipf"),
        (1, 4, "retail", 256, 1_000_000, "globo"),
        (1, 16, 10, 2048, 1_000_000, "zipf"),
        (1, 16, 10, 2048, "big", "zipf"),
        (1, 16, 80, 256, "big", "uniform"),
        (1, 16, "retail", 16384, 1_000_000, "uniform"),
        (1, 50, 1, 256, 10_000, "globo"),
        (1, 50, 1, 16384, 1_000_000, "uniform"),
        (1, 50, 10, 256, 1_000_000, "uniform"),
        (1, 50, "retail", 256, 10_000, "zipf"),
        (1, 50, "retail", 2048, 1_000_000, "uniform"),
        (1, 64, 1, 256, 10_000, "globo"),
        (1, 64, 1, 256, 1_000_000, "uniform"),
        (1, 64, 1, 256, "big", "uniform"),
        (1, 64, 80, 256, 10_000, "uniform"),
        (1, 64, 80, 2048, 1_000_000, "globo"),
        (1, 64, "retail", 2048, 1_000_000, "zipf"),
        (1, 128, 1, 256, 10_000, "zipf"),
        (1, 128, 10, 256, "big", "zipf"),
        (1, 128, 10, 2048, 10_000, "globo"),
        (1, 128, 80, 16384, "big", "globo"),
        (1, 128, 80, 16384, 1_000_000, "globo"),
        (1, 128, "retail", 256, 1_000_000, "globo"),
        (1, 256, 10, 2048, "big", "globo"),
        (1, 256, 10, 16384, 1_000_000, "zipf"),
        (1, 256, 80, 256, 1_000_000, "uniform"),
        (26, 4, 1, 2048, "big", "uniform"),
        (26, 4, 1, 2048, 1_000_000, "zipf"),
        (26, 4, 10, 16384, 10_000, "uniform"),
        (26, 16, "retail", 256, 1_000_000, "globo"),
        (26, 16, "retail", 16384, 1_000_000, "zipf"),
        (26, 50, 1, 16384, "big", "globo"),
        (26, 50, 80, 2048, 10_000, "uniform"),
        (26, 64, 1, 16384, "big", "zipf"),
        (26, 64, 10, 16384, 10_000, "zipf"),
        (26, 128, 1, 256, 10_000, "uniform"),
        (26, 128, "retail", 256, 10_000, "zipf"),
        (26, 256, 1, 2048, 10_000, "globo"),
        (26, 256, 80, 256, "big", "uniform"),
        (26, 256, 80, 256, 10_000, "uniform"),
        (26, 256, "retail", 16384, 10_000, "zipf"),
        (26, 256, "retail", 16384, "big", "globo"),
        (200, 4, 80, 256, "big", "zipf"),
        (200, 4, "retail", 256, "big", "globo"),
        (200, 16, 1, 16384, 10_000, "uniform"),
        (200, 16, 1, 16384, 10_000, "globo"),
        (200, 16, 80, 256, 10_000, "uniform"),
        (200, 50, 10, 256, "big", "uniform"),
        (200, 50, 10, 2048, "big", "uniform"),
        (200, 50, 80, 256, 10_000, "zipf"),
        (200, 50, "retail", 256, 10_000, "zipf"),
        (200, 64, 10, 256, 10_000, "globo"),
        (200, 64, "retail", 2048, "big", "uniform"),
        (200, 128, 1, 2048, 10_000, "uniform"),
        (200, 128, 10, 2048, 10_000, "globo"),
        (200, 256, 1, 256, 10_000, "globo"),
        (200, 256, "retail", 256, 10_000, "uniform"),
    ]
]
QUICK = [POOLED[i] for i in sized((0, 13, 18, 29, 38, 54), (15, 38))]
SEQUENCES = [
    Point(t, d, 1, n, r, ids)
    for t, n in ((1, sized(65536, 512)), (8, 8192))
    for d, r, ids in (
        (16, 1_000_000, "uniform"),
        (64, 1_000_000, "uniform"),
        (64, 100_000, "zipf"),
        (64, 1_000_000, "globo"),
        (128, 1_000_000, "zipf"),
        (256, 100_000, "uniform"),
    )
]


# -- real and drawn ids ----------------------------------------------------------------------------


class Logs:
    """Real streams, read once; None where the folder is absent."""

    def __init__(self) -> None:
        self.articles = self.baskets = None
        if not DATA.is_dir():
            return
        import pyarrow.parquet as pq

        column = pq.read_table(DATA / "globo_clicks.parquet", columns=["click_article_id"])[0]
        self.articles = torch.tensor(column.to_numpy()).unique(return_inverse=True)[1]
        lines = (DATA / "retail" / "retail.dat").read_text().splitlines()
        self.baskets = torch.tensor([len(line.split()) for line in lines])


def zipf(count: int, rows: int, exponent: float, random: torch.Generator) -> Tensor:
    """Row r with probability about 1 / (r + 1) ** exponent, r scattered over the table."""
    u = torch.rand(count, generator=random, dtype=torch.float64)
    power = 1 - exponent
    rank = ((u * ((rows + 1.0) ** power - 1) + 1) ** (1 / power)).long().clamp(1, rows) - 1
    return rank * 2_654_435_761 % rows  # a prime: a permutation of the rows


def draw(point: Point, logs: Logs) -> KeyedJagged | None:
    """The batch, or None where its log is absent."""
    random = torch.Generator().manual_seed(1)
    bags = point.tables * point.batch
    if isinstance(point.pooling, int):
        lengths = torch.full((bags,), point.pooling)
    elif logs.baskets is not None:
        lengths = logs.baskets[(torch.arange(bags) + 1000) % len(logs.baskets)]
    else:
        return None
    count, rows = int(lengths.sum()), point.rows_each
    if point.ids == "uniform":
        values_N = torch.randint(0, rows, (count,), generator=random)
    elif point.ids == "zipf":
        values_N = zipf(count, rows, 1.05, random)
    elif logs.articles is not None:
        values_N = (
            logs.articles[(torch.arange(count) + 500_000) % len(logs.articles)]
            * 2_654_435_761
            % rows
        )
    else:
        return None
    keys = tuple(f"f{t}" for t in range(point.tables))
    return KeyedJagged(keys=keys, values_N=values_N, lengths=lengths)


# -- the two sides ---------------------------------------------------------------------------------


@dataclass
class Side:
    """lookup: the vectors, in one tensor or one per feature. rows(t): weights and accumulators of a
    table.
    """

    lookup: Callable[[], list[Tensor]]
    rows: Callable[[int], tuple[Tensor, Tensor]]

    def learn(self, vectors: list[Tensor], grad: Tensor) -> None:
        """Backward and update."""
        torch.autograd.backward(vectors, grad.split([len(v) for v in vectors]))


def ours(point: Point, ids: KeyedJagged, pooled: bool) -> Side:
    """Sparrow's tables."""
    spec = [
        TableSpec(name=k, dim=point.dim, addressing=Direct(point.rows_each), rule=RULE)
        for k in ids.keys
    ]
    features = [Feature(name=k, table=k, pooling="sum" if pooled else "none") for k in ids.keys]
    tables = EmbeddingTables(spec, features, seed=1)

    def lookup() -> list[Tensor]:
        return [tables.pooled(ids)] if pooled else [v.values_N for v in tables(ids).values()]  # type: ignore[union-attr]

    def rows(t: int) -> tuple[Tensor, Tensor]:
        record = tables.record(ids.keys[t])
        return record.weight, record.fields["sum"]

    return Side(lookup, rows)


def peer(point: Point, ids: KeyedJagged, pooled: bool, like: Side) -> Side | None:
    """fbgemm's tables with the same rows, or None where it is not installed or cannot have this
    dim.
    """
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError:
        return None
    if point.dim % 4:
        return None
    spec = (point.rows_each, point.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
    tables: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [spec] * point.tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RULE.lr,
        eps=RULE.eps,
        pooling_mode=PoolingMode.SUM if pooled else PoolingMode.NONE,
    )
    weights = tables.split_embedding_weights()
    for t, weight in enumerate(weights):
        weight.copy_(like.rows(t)[0])
    state = [s[0] for s in tables.split_optimizer_states()]
    return Side(lambda: [tables(ids.values_N, ids.offsets)], lambda t: (weights[t], state[t]))


def check(one: Side, two: Side, grad: Tensor, tables: int) -> None:
    """Forward, and every row after two updates; AssertionError ends the benchmark."""
    for _ in range(2):
        mine, theirs = one.lookup(), two.lookup()
        torch.testing.assert_close(torch.cat(mine), torch.cat(theirs), rtol=1e-4, atol=1e-5)
        one.learn(mine, grad)
        two.learn(theirs, grad)
    for t in range(0, tables, max(1, tables // 8)):
        for a, b in zip(one.rows(t), two.rows(t), strict=True):
            torch.testing.assert_close(a.flatten(), b.flatten(), rtol=1e-3, atol=1e-5)


# -- timing ----------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Milliseconds: medians, and of the pairs' ratios (peer / ours) the median and quartiles."""

    ours: float
    peer: float = math.nan
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan


def clock(before: Callable[[], Any], work: Callable[[Any], object]) -> float:
    """Milliseconds of `work(before())` without `before`, after 20 ms of such calls (one at least),
    as when training.
    """
    warm = time.perf_counter() + sized(0.02, 0)
    while True:
        given = before()
        begin = time.perf_counter()
        work(given)
        if begin > warm:
            return (time.perf_counter() - begin) * 1e3


def compare(
    mine: Callable[[], float], theirs: Callable[[], float] | None, budget_s: float
) -> Times:
    """Alternating clocked runs, at least five pairs and as many as fit into the time, up to 40."""
    pairs: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while len(pairs) < sized(5, 1) or (time.perf_counter() - begin < budget_s and len(pairs) < 40):
        if len(pairs) % 2 and theirs:
            pairs.append((theirs(), mine())[::-1])  # type: ignore[arg-type]
        else:
            pairs.append((mine(), theirs() if theirs else math.nan))
    ratios = sorted(b / a for a, b in pairs)
    return Times(
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(ratios),
        ratios[len(ratios) // 4],
        ratios[len(ratios) * 3 // 4],
    )


@dataclass
class Result:
    """What one point gave. The shares are limit / time; a sequence's step_share refers to copying
    its bytes.
    """

    point: Point
    unique: float  # unique ids / lookups
    forward: Times
    step: Times  # forward, backward and update; for sequences backward and update
    forward_share: float = math.nan
    step_share: float = math.nan
    bytes_tables: int = 0


def limits_ms(result: Result, ids: KeyedJagged, unique: int, vectors: int) -> tuple[float, float]:
    """(forward, backward with update) at this machine's limits: table rows at the bandwidth of
    random rows, all else (ids, vectors and their gradients, in the order in which they lie) at that
    of a copy. NaN where it was not measured.
    """
    dim, lookups, row = result.point.dim, ids.values_N.numel(), 4 * result.point.dim
    random, copied = gather_gb_per_s(dim, min(result.bytes_tables, 2 * BIG)), copy_gb_per_s()
    if random is None or copied is None:
        return math.nan, math.nan
    forward = lookups * row / random + (8 * lookups + vectors * row) / copied
    backward = unique * (2 * row + 8 + 1) / random + (8 * lookups + vectors * row) / copied
    return forward / 1e6, backward / 1e6


def run(point: Point, logs: Logs, budget_s: float, pooled: bool = True) -> Result | None:
    """Check, then time."""
    ids = draw(point, logs)
    if ids is None:
        return None
    mine = ours(point, ids, pooled)
    theirs = peer(point, ids, pooled, mine)
    vectors = point.tables * point.batch if pooled else ids.values_N.numel()
    shape = (point.batch, point.tables * point.dim) if pooled else (vectors, point.dim)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    if theirs:
        check(mine, theirs, grad, point.tables)
    unique = sum(len(ids[k].values_N.unique()) for k in ids.keys)

    def forward(side: Side) -> Callable[[], float]:
        return lambda: clock(lambda: None, lambda _: side.lookup())

    def step(side: Side) -> Callable[[], float]:
        if pooled:
            return lambda: clock(lambda: None, lambda _: side.learn(side.lookup(), grad))
        return lambda: clock(side.lookup, lambda vectors: side.learn(vectors, grad))

    with torch.no_grad():
        looked_up = compare(forward(mine), forward(theirs) if theirs else None, budget_s)
    times = compare(step(mine), step(theirs) if theirs else None, budget_s)
    result = Result(point, unique / ids.values_N.numel(), looked_up, times)
    result.bytes_tables = 4 * point.tables * point.rows_each * point.dim
    mine = theirs = None
    gc.collect()
    forward_ms, backward_ms = limits_ms(result, ids, unique, vectors)
    result.forward_share = forward_ms / looked_up.ours
    result.step_share = (forward_ms + backward_ms) / times.ours
    if not pooled and (copied := copy_gb_per_s()):  # all bytes at the copy's bandwidth
        moved = ids.values_N.numel() * (8 + 4 * point.dim) + unique * (8 * point.dim + 9)
        result.step_share = moved / 1e6 / copied / times.ours
    return result


# -- showing ---------------------------------------------------------------------------------------

HEAD = (
    "tables x rows x dim  batch x pooling ids | unique | forward ms ours  peer  ratio | step ms"
    " ours   peer  ratio (quartiles)  | share of limit: forward step"
)


def number(x: float, form: str) -> str:
    """Empty where there is nothing."""
    return " " * len(format(0.0, form)) if math.isnan(x) else format(x, form)


def line(r: Result) -> str:
    """One row of the table."""
    f, s = r.forward, r.step
    spread = f"({s.low:5.1f}-{s.high:5.1f})" if s.ratio == s.ratio else " " * 13
    return (
        f"{r.point!s:40} | {r.unique:6.2f} | {f.ours:9.2f} {number(f.peer, '9.2f')}"
        f" {number(f.ratio, '6.2f')} | {s.ours:9.2f} {number(s.peer, '9.2f')}"
        f" {number(s.ratio, '6.2f')} {spread} | {number(100 * r.forward_share, '4.0f')} %"
        f" {number(100 * r.step_share, '4.0f')} %"
    )


def geometric_mean(values: list[float]) -> float:
    """NaN for none."""
    return math.exp(statistics.fmean(map(math.log, values))) if values else math.nan


def target(name: str, value: float, goal: float) -> None:
    """One line per target, as every benchmark ends."""
    if not math.isnan(value):
        print_target(name, f"{value:.2f}", goal, value >= goal)


def targets(pooled: list[Result], sequences: list[Result]) -> None:
    """What the operator was built to reach."""
    with_peer = [r for r in pooled if not math.isnan(r.step.ratio)]
    if with_peer:
        spread = [r.step.ratio for r in with_peer if r.unique >= 0.3]
        target("step against fbgemm, lowest", min(r.step.ratio for r in with_peer), 1.0)
        target(
            "step against fbgemm, lowest where unique ids / lookups >= 0.3",
            min(spread, default=math.nan),
            2.0,
        )
        target(
            "step against fbgemm, geometric mean",
            geometric_mean([r.step.ratio for r in with_peer]),
            3.0,
        )
        target("forward against fbgemm, lowest", min(r.forward.ratio for r in with_peer), 0.95)
    beyond = [
        r
        for r in pooled
        if r.bytes_tables > bytes_last_level_cache() and not math.isnan(r.step_share)
    ]
    # of skewed ids the caches hold the most
    beyond = [r for r in beyond if r.point.ids == "uniform"]
    if beyond:
        for name, shares in (
            ("forward", [r.forward_share for r in beyond]),
            ("step", [r.step_share for r in beyond]),
        ):
            place = f"share of limit, uniform ids beyond the caches, {name}"
            target(f"{place}, median", statistics.median(shares), 0.7)
            target(f"{place}, lowest", min(shares), 0.7)
    ratios = [r.step.ratio for r in sequences if not math.isnan(r.step.ratio)]
    target("sequence backward against fbgemm, geometric mean", geometric_mean(ratios), 5.0)
    wide = [r.step_share for r in sequences if r.point.dim >= 64 and not math.isnan(r.step_share)]
    target(
        "sequence backward, share of copy bandwidth at dim >= 64, lowest",
        min(wide, default=math.nan),
        0.6,
    )


def picture(pooled: list[Result], path: Path) -> None:
    """Ratio of every point against its share of unique ids."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullLocator

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharex=True, constrained_layout=True)
    for ax, title in zip(axes, ("forward", "forward + backward + row-wise AdaGrad"), strict=True):
        for tables, colour in ((1, "tab:blue"), (26, "tab:orange"), (200, "tab:green")):
            some = [r for r in pooled if r.point.tables == tables]
            times = [r.forward if ax is axes[0] else r.step for r in some]
            ax.scatter(
                [r.unique for r in some],
                [t.ratio for t in times],
                color=colour,
                label=f"{tables} table(s)",
                s=22,
            )
        ax.axhline(1, color="black", linewidth=0.8)
        ax.set(yscale="log", yticks=(1, 1.5, 2, 3, 5, 10, 20), title=title)
        ax.set(xlabel="unique ids / lookups", ylabel="times as fast as fbgemm")
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        ax.yaxis.set_minor_locator(NullLocator())
        ax.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=110)


def peer_version() -> str:
    """Of the installed peer."""
    try:
        return importlib.metadata.version("fbgemm-gpu-cpu")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def tested() -> bool:
    """Whether the operator's own tests pass here."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "tests/kernels/embedding_bag",
    ]
    return (
        subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL).returncode
        == 0
    )


def all_runs(points: list[Point], logs: Logs, budget_s: float, pooled: bool) -> Iterator[Result]:
    """Each result as it comes, printed."""
    print(
        f"\n{'pooled (sum)' if pooled else 'sequences (unpooled); step is backward and update alone'}\n{HEAD}"
    )
    for point in points:
        result = run(point, logs, budget_s, pooled)
        print(
            (
                f"{point!s:40} | left out: its log is not in SPARROW_DATA"
                if result is None
                else line(result)
            ),
            flush=True,
        )
        if result is not None:
            yield result


def main() -> None:
    """Measure, print, and with --picture draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few points, under a minute")
    parser.add_argument("--picture", type=Path, help="write the ratios as a picture")
    parser.add_argument(
        "--threads", type=int, default=sized(os.cpu_count(), 1), help="of both sides (all)"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    if missing():
        sys.exit(f"{missing()}: run `make setup`")
    if not TINY and not tested():
        sys.exit(
            "the operator's tests fail (pytest tests/kernels/embedding_bag): no speed is printed"
        )
    from sparrow.kernels.embedding_bag import cpp

    copied = copy_gb_per_s()
    print(
        f"torch {torch.__version__}, fbgemm {peer_version()}, {options.threads} threads,"
        f" {cpp.processor()} loops, last-level cache {bytes_last_level_cache() >> 20} MiB, copy"
        f" {copied or math.nan:.1f} GB/s; ratios are peer / ours"
    )
    logs, budget_s = Logs(), sized(0.3, 0.0) if options.quick else 1.5
    pooled = list(all_runs(QUICK if options.quick else POOLED, logs, budget_s, pooled=True))
    sequences = list(
        all_runs(SEQUENCES[:2] if options.quick else SEQUENCES, logs, budget_s, pooled=False)
    )
    print()
    targets(pooled, sequences)
    if options.picture:
        picture(pooled, options.picture)


if __name__ == "__main__":
    main()
