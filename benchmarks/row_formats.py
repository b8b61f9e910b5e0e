"""Tables of every row format against Sparrow's own fp32, and their lookups against FBGEMM's.

    python benchmarks/row_formats.py           # under fifteen minutes
    python benchmarks/row_formats.py --quick   # two points, under a minute, the same checks
    python benchmarks/row_formats.py --serving --threads 1   # lookups of a service alone, under two minutes

Every format has a table of the same rows, in pages of 2 MiB. A format and fp32 take turns of some
milliseconds, and a ratio is the median over pairs of neighbouring turns: above 1 the format is
faster. The turns go through many batches, so that the caches hold no row of a large table from its
last use. A step is a lookup and a fused update by row-wise AdaGrad. FBGEMM's modules for training
and for inference have the same rows and ids, in pages of the same size.

With `--serving` there are 26 tables of 100,000 rows and batches of 500, as in a service.
`EmbeddingTables.pooled` is compared with the module of FBGEMM that torchrec's quantised collections
call.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _peers.tiny import sized
from embedding_bag import RULE, Times, compare, peer_version, target, zipf
from limits import bytes_last_level_cache
from torch import Tensor

from sparrow.core import KeyedJagged
from sparrow.core.config import Family
from sparrow.core.memory import keep_freed_memory
from sparrow.core.pages import empty_rows
from sparrow.embeddings import Direct, EmbeddingTables, Feature, TableSpec
from sparrow.kernels import missing
from sparrow.kernels.embedding_bag import Bags, Rows, Table, Tables, bags_of, fused_update, lookup
from sparrow.kernels.formats import RowFormat, converted, int4, int8
from sparrow.kernels.rules import init_state, sgd

BATCH, POOLING = sized((2048, 20), (64, 4))
GREEDY = int4.Config(rounding="nearest", search="greedy")
SERVED_TABLES, SERVED_ROWS, SERVED_BATCH, SERVED_BATCHES = 26, 100_000, 500, 16
BATCHES = sized(64, 2)  # their rows are more than the caches hold
# of a table that is beyond the caches in any format
BYTES_FP32 = max(int(1.25e9), 16 * bytes_last_level_cache())
TILE = 1 << 16  # rows that a table repeats
TURN_MS = 20
FORMATS = ("fp16", "bf16", "split_bf16", "int8", "int4")
BYTES_ROW: dict[str, Callable[[int], int]] = {
    "fp32": lambda dim: 4 * dim,
    "fp16": lambda dim: 2 * dim,
    "bf16": lambda dim: 2 * dim,
    "split_bf16": lambda dim: 4 * dim,
    "int8": lambda dim: dim + 8,
    "int4": lambda dim: (dim + 1) // 2 + 4,
}


class Point(NamedTuple):
    """A table and how its ids are drawn."""

    dim: int
    rows: int
    ids: str

    @property
    def is_large(self) -> bool:
        """Whether the caches cannot hold it in any format."""
        return BYTES_ROW["int4"](self.dim) * self.rows > 2 * bytes_last_level_cache()

    def __str__(self) -> str:
        return f"{self.rows:>9} x {self.dim:<3} {self.ids:<7}"


POINTS = [
    Point(dim, BYTES_FP32 // (4 * dim), ids) for dim in (16, 64, 128) for ids in ("uniform", "zipf")
]
POINTS.append(Point(64, 10_000, "uniform"))
QUICK = [Point(64, 3_000_000, "uniform"), POINTS[-1]][sized(0, 1) :]


def batches_of(point: Point) -> list[Bags]:
    """The batches that all sides go through."""
    random, count = torch.Generator().manual_seed(1), BATCHES * BATCH * POOLING
    if point.ids == "zipf":
        slots = zipf(count, point.rows, 1.05, random)
    else:
        slots = torch.randint(0, point.rows, (count,), generator=random)
    offsets_B1 = torch.arange(0, BATCH * POOLING + 1, POOLING)
    return [bags_of(slots_N, offsets_B1) for slots_N in slots.split(BATCH * POOLING)]


def values_of(dim: int) -> Tensor:
    """The rows that every table repeats."""
    return torch.randn(TILE, dim, generator=torch.Generator().manual_seed(2)) * 0.1


def repeated(tile: Tensor, rows: int) -> Tensor:
    """So many rows, one tile after another."""
    made = empty_rows(rows, *tile.shape[1:], dtype=tile.dtype)
    for part in made.split(TILE):
        part.copy_(tile[: len(part)])
    return made


# -- the sides -------------------------------------------------------------------------------------


class Ours:
    """A table of a format with row-wise AdaGrad."""

    def __init__(self, format: RowFormat, point: Point) -> None:
        payload = {
            n: repeated(t, point.rows) for n, t in format.encode(values_of(point.dim), None).items()
        }
        state = {n: repeated(t, point.rows) for n, t in init_state(RULE, TILE, point.dim).items()}
        touched_R = empty_rows(point.rows, dtype=torch.uint8).zero_()
        self.level = Rows(format=format, payload=payload, state=state, touched_R=touched_R)
        self.point, self.lr_T, self.count = point, torch.tensor([RULE.lr]), itertools.count()
        self.grads = [torch.randn(BATCH, point.dim, generator=torch.Generator().manual_seed(3))]
        self.use(format)

    def use(self, format: RowFormat) -> None:
        """Round as this format does; its rows are those of the first one."""
        self.level = replace(self.level, format=format)
        self.tables = Tables(
            [Table(levels=(self.level,), rule=RULE, rows=self.point.rows, dim=self.point.dim)]
        )

    def lookup(self, bags: Bags) -> Tensor:
        """The vectors."""
        return lookup(self.tables, bags, impl="cpp")[0]

    def step(self, bags: Bags) -> None:
        """Lookup and update."""
        self.lookup(bags)
        fused_update(self.tables, self.grads, bags, self.lr_T, next(self.count), impl="cpp")

    def check(self, bags: Bags) -> None:
        """Bytes, lookups and an update against the definition; AssertionError ends the
        benchmark.
        """
        format, point = self.level.format, self.point
        name = format.cpp() or ""
        assert sum(t.nbytes for t in self.level.payload.values()) == point.rows * BYTES_ROW[name](
            point.dim
        ), name
        assert torch.equal(self.lookup(bags), lookup(self.tables, bags, impl="reference")[0]), name
        some, found = torch.arange(0, sized(5000, 500)), []
        small = replace(bags, slots_N=bags.slots_N % len(some))
        for impl in ("cpp", "reference"):
            payload = {n: t[some].clone() for n, t in self.level.payload.items()}
            level = Rows(
                format=format, payload=payload, touched_R=self.level.touched_R[some].clone()
            )
            table = Table(levels=(level,), rule=sgd.Config(), rows=len(some), dim=point.dim)
            fused_update(Tables([table]), self.grads, small, self.lr_T, impl=impl)  # type: ignore[arg-type]
            found.append(payload)
        assert all(torch.equal(found[0][n], found[1][n]) for n in found[0]), name


def fbgemm(format: str, point: Point) -> Iterator[tuple[str, Callable[[Bags], Tensor], Tensor]]:
    """FBGEMM's modules that have the format: name, lookup, and the values of the rows that the
    table repeats.
    """
    try:
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError:
        return
    dim, rows, _ = point
    values_TD, kind = values_of(dim), SparseType(format)
    sum_pooling, host = PoolingMode.SUM, EmbeddingLocation.HOST
    if format != "int4":
        spec = (rows, dim, host, ComputeDevice.CPU)
        made: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [spec], weights_precision=kind, pooling_mode=sum_pooling
        )
        mine = Family("sparrow.kernels.formats").config(format)(rounding="nearest")
        fields = mine.encode(values_TD, None)
        made.weights_host.data = repeated(fields["weight"], rows).view(-1)
        yield "training", lambda bags: made(bags.slots_N, bags.offsets_B1), mine.decode(fields, dim)
    other = _inference_module(format, [(rows, dim)])
    if format == "fp16":
        tile, read_TD = values_TD.half().view(torch.uint8), values_TD.half().float()
    else:
        bits = 8 if format == "int8" else 4
        tile = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(values_TD, bits)
        read_TD = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(tile, bits)
        tile = tile.roll(4, 1)  # these tables have scale and bias first
    other.weights_host = repeated(tile, rows).view(-1)
    yield "inference", lambda bags: other(bags.slots_N, bags.offsets_B1), read_TD


def _inference_module(format: str, sizes: Sequence[tuple[int, int]]) -> Any:
    """FBGEMM's module for inference with tables of so many rows and columns, not yet filled; None
    without FBGEMM.
    """
    try:
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
            IntNBitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError:
        return None
    specs = [("", rows, dim, SparseType(format), EmbeddingLocation.HOST) for rows, dim in sizes]
    made: Any = IntNBitTableBatchedEmbeddingBagsCodegen(
        specs, device="cpu", pooling_mode=PoolingMode.SUM, output_dtype=SparseType.FP32
    )
    made.initialize_weights()
    return made


def check_peer(find: Callable[[Bags], Tensor], bags: Bags, read_TD: Tensor) -> None:
    """Whether a lookup is the sum of the rows that it should read."""
    expected = read_TD[bags.slots_N % TILE].view(BATCH, POOLING, -1).sum(1)
    torch.testing.assert_close(find(bags), expected, rtol=1e-4, atol=1e-5)


# -- timing ----------------------------------------------------------------------------------------


class Turns:
    """One batch after another, as many in a turn as take TURN_MS.

    One thread is timed by the processor's time, which does not count when other programs of the
    machine run.
    """

    def __init__(self, work: Callable[[Bags], object], batches: Sequence[Bags]) -> None:
        self.work, self.batches, self.steps = work, itertools.cycle(batches), 1
        self.clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self()
        self.steps = max(1, math.ceil(TURN_MS / self()))

    def __call__(self) -> float:
        """Returns the milliseconds of a batch in the next turn."""
        begin = self.clock()
        for _ in range(self.steps):
            self.work(next(self.batches))
        return (self.clock() - begin) * 1e3 / self.steps


@dataclass
class Results:
    """ratios: what was measured, of which format, at which point -> times as fast as the other
    side.
    """

    seconds: float
    ratios: dict[tuple[str, str, Point], float] = field(default_factory=dict)

    def add(self, what: str, format: str, point: Point, mine: Turns, theirs: Turns) -> None:
        """Measure and print a pair."""
        t: Times = compare(mine, theirs, self.seconds)
        self.ratios[what, format, point] = t.ratio
        times = f"{t.ours:9.3f} {t.peer:9.3f} {t.ratio:6.2f} ({t.low:5.2f} - {t.high:5.2f})"
        print(f"{point} {format:<10} {what:<28} {times}", flush=True)

    def lowest(self, what: str, formats: Sequence[str]) -> float:
        """Of the points with large tables; NaN for none."""
        found = [
            r
            for (w, f, p), r in self.ratios.items()
            if w.startswith(what) and f in formats and p.is_large
        ]
        return min(found, default=math.nan)


def run(point: Point, results: Results) -> None:
    """Every format at a point: checks, then times."""
    family, batches = Family("sparrow.kernels.formats"), batches_of(point)
    fp32 = Ours(family.config("fp32")(), point)
    fp32.check(batches[0])
    for name in FORMATS:
        config: Any = family.config(name)
        roundings: list[Any] = [None] if name == "split_bf16" else ["stochastic", "nearest"]
        mine = Ours(config(), point)
        for rounding in roundings:
            mine.use(config(rounding=rounding) if rounding else config())
            mine.check(batches[0])
        results.add(
            "lookup / fp32", name, point, Turns(mine.lookup, batches), Turns(fp32.lookup, batches)
        )
        peers = fbgemm(name, point) if name in ("fp16", "int8", "int4") else ()
        for kind, find, read_TD in peers:
            check_peer(find, batches[0], read_TD)
            results.add(
                f"lookup / fbgemm, {kind}",
                name,
                point,
                Turns(mine.lookup, batches),
                Turns(find, batches),
            )
        for rounding in roundings:
            mine.use(config(rounding=rounding) if rounding else config())
            what = f"step{f', {rounding}' if rounding else ''} / fp32"
            results.add(what, name, point, Turns(mine.step, batches), Turns(fp32.step, batches))


def serving(seconds: float) -> None:
    """Pooled lookups of many tables in few bits, beside FBGEMM's module for inference."""
    lowest = math.inf
    for name, dim, pooling in itertools.product(("int8", "int4"), (16, 64), (1, 20)):
        random = torch.Generator().manual_seed(4)
        keys = tuple(f"t{t}" for t in range(SERVED_TABLES))
        format: Any = Family("sparrow.kernels.formats").config(name)(rounding="nearest")
        specs = [
            TableSpec(name=key, dim=dim, addressing=Direct(SERVED_ROWS), format=format)
            for key in keys
        ]
        tables = EmbeddingTables(
            specs, [Feature(name=key, table=key) for key in keys], seed=1, mode="off"
        ).eval()
        other = _inference_module(name, [(SERVED_ROWS, dim)] * SERVED_TABLES)
        if other is None:
            return print("fbgemm is not installed: see benchmarks/README.md")
        other.weights_host = empty_rows(other.weights_host.numel(), dtype=torch.uint8)
        for t, (key, (theirs, _)) in enumerate(
            zip(keys, other.split_embedding_weights(split_scale_shifts=False), strict=True)
        ):
            weights_RD = torch.randn(SERVED_ROWS, dim, generator=random) * 0.1
            ours = tables.record(key).fields["weight"]
            # fbgemm's rows of 8 bits have scale and bias in fp16 here, and 4 bytes less
            if t == 0 and pooling == 1:
                print(f"{name}, D = {dim}: {ours.shape[1]} bytes a row, fbgemm {theirs.shape[1]}")
            ours.copy_(converted(weights_RD, format)["weight"])
            bits = {"int8": 8, "int4": 4}[name]
            made = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(weights_RD, bits).roll(
                4, 1
            )
            theirs[:, : made.shape[1]] = made
        drawn = (SERVED_BATCHES, SERVED_TABLES * SERVED_BATCH * pooling)
        batches = [
            KeyedJagged(
                keys=keys,
                values_N=ids_N,
                lengths=torch.full((SERVED_TABLES * SERVED_BATCH,), pooling),
            )
            for ids_N in torch.randint(0, SERVED_ROWS, drawn, generator=random)
        ]
        found, expected = tables.pooled(batches[0]), other(batches[0].values_N, batches[0].offsets)
        # scales in fp16
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=4e-3 * pooling)
        times = compare(
            Turns(tables.pooled, batches),  # type: ignore[arg-type]
            Turns(lambda ids, other=other: other(ids.values_N, ids.offsets), batches),  # type: ignore[arg-type,misc]
            seconds,
        )
        what = (
            f"{SERVED_TABLES} x {SERVED_ROWS} x {dim:<3} {name}, {SERVED_BATCH} bags of {pooling}"
        )
        print(
            f"{what:<45} {times.ours:9.3f} {times.peer:9.3f} {times.ratio:6.2f}"
            f" ({times.low:5.2f} - {times.high:5.2f})",
            flush=True,
        )
        lowest = min(lowest, times.ratio)
    weights_RD = torch.randn(1_000_000, 16)
    for format in (int8.Config(rounding="nearest"), int4.Config(rounding="nearest"), GREEDY):
        begin = time.thread_time()
        converted(weights_RD, format)
        print(
            f"a million rows of 16 converted in {time.thread_time() - begin:.2f} s of this thread:"
            f" {format}"
        )
    target("lookup of a service against fbgemm, lowest", lowest, 1.0)


def targets(results: Results) -> None:
    """What the formats were built to reach, with tables beyond the caches."""
    for name in ("fp16", "bf16", "int8", "int4"):
        target(
            f"lookup of {name} against fp32, lowest", results.lowest("lookup / fp32", [name]), 1.2
        )
    for names, what, goal in (
        (("fp16", "bf16"), "step", 0.95),
        (("int8", "int4"), "step, stochastic", 0.75),
    ):
        for name in names:
            target(f"{what} of {name} against fp32, lowest", results.lowest(what, [name]), goal)
    for name in ("fp16", "int8"):
        target(
            f"lookup of {name} against fbgemm, lowest",
            results.lowest("lookup / fbgemm", [name]),
            1.0,
        )


def processor() -> str:
    """Its name, and whether it has AVX-512."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "an unknown processor"
    found = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    has = "with" if "avx512f" in found.get("flags", "").split() else "without"
    return f"{found.get('model name', 'an unknown processor')} {has} AVX-512"


def begun(description: str | None, quick: str, serving: bool = False) -> argparse.Namespace:
    """The options of a program that compares tables; its threads and kernels are ready.

    quick: what `--quick` does. serving: whether there is `--serving`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each ratio")
    parser.add_argument(
        "--threads", type=int, default=sized(os.cpu_count(), 1), help="of both sides (all)"
    )
    if serving:
        parser.add_argument("--serving", action="store_true", help="lookups of a service alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    if missing():
        sys.exit(f"{missing()}: run `make setup`")
    return options


def main() -> None:
    """Measure and print."""
    options = begun(__doc__, "two points, under a minute", serving=True)
    from sparrow.kernels.embedding_bag import cpp

    print(
        f"torch {torch.__version__}, fbgemm {peer_version()}, {options.threads} threads,"
        f" {processor()}, {cpp.processor()} loops, last-level cache"
        f" {bytes_last_level_cache() >> 20} MiB;"
        f" {'' if options.serving else f'{BATCH} bags of {POOLING}; '}ratios are the other side /"
        " ours"
    )
    if options.serving:
        with torch.no_grad():
            return serving(0.3 if options.quick else options.seconds)
    print(
        f"{'rows x dim ids':<21} {'format':<10} {'what':<28} {'ours ms':>9} {'other ms':>9}  ratio"
        " (quartiles)"
    )
    results = Results(sized(0.3, 0) if options.quick else options.seconds)
    with torch.no_grad():
        for point in QUICK if options.quick else POINTS:
            run(point, results)
    print()
    targets(results)


if __name__ == "__main__":
    main()
