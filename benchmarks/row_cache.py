"""Tables of few bits with a cache of fp32 rows against fp32 tables: steps, hit rates, and a DLRM's
examples/s.

    python benchmarks/row_cache.py           # about ten minutes
    python benchmarks/row_cache.py --quick   # one table, under two minutes, the same checks

A step of a table is a lookup, its backward and the fused update by row-wise AdaGrad through
`ComponentTables`, cache included. Ids are Zipf 1.05 over tables beyond the processor's caches. Two
sides take turns, as in row_formats.py. Hit rates are those of `CachedStore`, beside the miss-ratio
curve of the same batches: what a fully associative LRU cache of as many rows would have had.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from _peers.targets import print_target
from _peers.tiny import sized
from embedding_bag import RULE, target, zipf
from limits import bytes_last_level_cache
from row_formats import (
    BATCH,
    BYTES_FP32,
    POOLING,
    Point,
    Results,
    Turns,
    batches_of,
    begun,
    processor,
)
from torch import Tensor

from sparrow.core import Batch, KeyedJagged
from sparrow.core.config import Family
from sparrow.embeddings import Feature, TableChoices
from sparrow.embeddings.components import ComponentTables
from sparrow.embeddings.exchange import LocalExchange
from sparrow.embeddings.records import RowRecords
from sparrow.embeddings.spec import Cache, Component
from sparrow.embeddings.stores import MemoryStore
from sparrow.extensions.tiers.stores.cached import CachedStore
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.kernels import embedding_bag
from sparrow.kernels.embedding_bag import Bags
from sparrow.models import dlrm

FRACTIONS = (0.01, 0.05, 0.2)
CURVE_ROWS, CURVE_BATCHES = sized(
    (1_000_000, 4096), (2_000, 64)
)  # of BATCH ids: few against the smallest cache
TABLES, MODEL_ROWS, MODEL_DIM = 8, sized(1_000_000, 2_000), 64


def format_of(name: str) -> Any:
    """A row format with its defaults."""
    return Family("sparrow.kernels.formats").config(name)()


def component(rows: int, dim: int, format: str, cache: Cache) -> Component:
    """A table's rows."""
    made = format_of(format)
    return Component(
        name="t", rows=rows, dim=dim, format=made, rule=RULE, init_scale=0.1, cache=cache
    )


class Side:
    """A table with one feature."""

    def __init__(self, point: Point, format: str, cache: Cache) -> None:
        records = RowRecords(component(point.rows, point.dim, format, cache), seed=1)
        self.tables = ComponentTables([records])
        self.exchange = LocalExchange(self.tables, [Feature(name="f", table="t")])
        self.grad = torch.randn(BATCH, point.dim, generator=torch.Generator().manual_seed(3))

    @property
    def store(self) -> Any:
        """Its rows."""
        return next(self.tables.all_records()).store

    def lookup(self, bags: Bags) -> Tensor:
        """The vectors of a batch of training, whose rows enter the cache first."""
        ids = KeyedJagged(keys=("f",), values_N=bags.slots_N, offsets=bags.offsets_B1)
        found: Any = self.exchange.lookup(self.exchange.prepare(ids, bags.slots_N))["f"]
        return found

    def step(self, bags: Bags) -> None:
        """Lookup and update."""
        self.lookup(bags).backward(self.grad)

    def check(self, bags: Bags) -> None:
        """The lookup against the definition, where every row is; AssertionError ends the
        benchmark.
        """
        mine = self.lookup(bags).detach()
        slots_N = self.store.slots_of(bags.slots_N)
        kernel_tables = self.tables.kernel_tables
        theirs = embedding_bag.lookup(
            kernel_tables, replace(bags, slots_N=slots_N), impl="reference"
        )[0]
        assert torch.equal(mine, theirs)
        self.tables.discard()


def steps(point: Point, policies: Sequence[str], results: Results) -> None:
    """Tables of int8 and int4 with a cache of 5 % against fp32."""
    batches = batches_of(point)
    fp32 = Side(point, "fp32", Cache())
    for format in ("int8", "int4"):
        for policy in policies:
            mine = Side(point, format, Cache(fraction=0.05, policy=policy))
            for bags in batches:  # until the cache is full
                mine.step(bags)
            mine.check(batches[0])
            what = f"step, 5 % {policy} / fp32"
            results.add(what, format, point, Turns(mine.step, batches), Turns(fp32.step, batches))


# -- hit rates -------------------------------------------------------------------------------------


def curve(batches: Sequence[Tensor], rows: int, frames: Sequence[int]) -> list[float]:
    """The hit rates of fully associative LRU caches: the share of each batch's different rows that
    were in before it.

    A row is in if fewer rows than there are frames were used after its last use. Of rows of one
    batch, half were.
    """
    last_R, used_by = torch.full((rows,), -1), torch.zeros(len(batches), dtype=torch.float64)
    hits, used = torch.zeros(len(frames), dtype=torch.float64), 0
    for number, rows_N in enumerate(batches):
        rows_U = rows_N.unique()
        last_U = last_R[rows_U]
        seen_U = last_U[last_U >= 0]
        after_U = used_by.flip(0).cumsum(0).flip(0)[seen_U] - used_by[seen_U] / 2
        hits += torch.stack([(after_U < count).sum() for count in frames])
        used += len(rows_U)
        used_by -= torch.bincount(seen_U, minlength=len(batches))
        used_by[number] += len(rows_U)
        last_R[rows_U] = number
    return (hits / used).tolist()


def hit_rates() -> float:
    """Prints them; returns the largest difference between LRU and the curve."""
    random = torch.Generator().manual_seed(1)
    batches = list(zipf(CURVE_BATCHES * BATCH, CURVE_ROWS, 1.05, random).split(BATCH))
    stores = {}
    for fraction, policy in itertools.product(FRACTIONS, ("lru", "lfu")):
        made = component(CURVE_ROWS, 1, "int8", Cache(fraction=fraction, policy=policy))
        stores[fraction, policy] = CachedStore(
            made, CURVE_ROWS, 1, MemoryStore(made, CURVE_ROWS, 1)
        )
    for store in stores.values():
        table = embedding_bag.Table(levels=store.levels, rule=RULE, rows=CURVE_ROWS, dim=1)
        for rows_N in batches:
            store.admit(rows_N, table)
            store.settle()
    rates = {key: store.hits / store.used for key, store in stores.items()}
    expected = curve(
        batches, CURVE_ROWS, [len(stores[fraction, "lru"].frame("tag")) for fraction in FRACTIONS]
    )
    print(f"\nhit rates of {len(batches)} batches of {BATCH} ids over {CURVE_ROWS} rows, Zipf 1.05")
    print(f"{'cache':>6} {'LRU':>8} {'curve':>8} {'LFU':>8}")
    for fraction, curve_rate in zip(FRACTIONS, expected, strict=True):
        print(
            f"{fraction:>6.0%} {rates[fraction, 'lru']:8.4f} {curve_rate:8.4f}"
            f" {rates[fraction, 'lfu']:8.4f}"
        )
    return max(abs(rates[f, "lru"] - rate) for f, rate in zip(FRACTIONS, expected, strict=True))


# -- a model ---------------------------------------------------------------------------------------


def model_step(format: str, cache: Cache) -> Callable[[Batch], None]:
    """A step of a DLRM with tables of this kind: forward, backward, tables and dense weights."""
    columns = {f"x{i}": Column(kind="numeric") for i in range(13)}
    columns |= {f"c{i}": Column(kind="categorical", table=f"t{i}") for i in range(TABLES)}
    schema = Schema(
        columns={**columns, "y": Column(kind="label")},
        encodings={f"t{i}": Encoding(kind="range", rows=MODEL_ROWS) for i in range(TABLES)},
    )
    choices = TableChoices(rule=RULE, format=format_of(format), cache=cache)
    model: Any = dlrm.Config(dim=MODEL_DIM, bottom=(512, 256), top=(512, 256)).build(
        schema, choices
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels_BT)
        loss.backward()
        optimizer.step()

    return step


def model_batches(count: int) -> list[Batch]:
    """Batches with an id a table."""
    random, made = torch.Generator().manual_seed(1), []
    for _ in range(count):
        ids = KeyedJagged(
            keys=tuple(f"c{i}" for i in range(TABLES)),
            values_N=zipf(TABLES * BATCH, MODEL_ROWS, 1.05, random),
            lengths=torch.ones(TABLES * BATCH, dtype=torch.int64),
        )
        labels_BT = (torch.rand(BATCH, 1, generator=random) < 0.3).float()
        made.append(
            Batch(dense_BC=torch.randn(BATCH, 13, generator=random), ids=ids, labels_BT=labels_BT)
        )
    return made


def models(results: Results, formats: Sequence[str]) -> None:
    """Examples/s against fp32's."""
    batches: Any = model_batches(sized(64, 2))
    point = Point(MODEL_DIM, MODEL_ROWS, "zipf")
    fp32: Any = model_step("fp32", Cache())
    for format in formats:
        mine: Any = model_step(format, Cache())
        results.add("DLRM / fp32", format, point, Turns(mine, batches), Turns(fp32, batches))
    for policy in ("lru", "lfu"):
        mine = model_step("int8", Cache(fraction=0.05, policy=policy))
        for batch in batches:
            mine(batch)
        results.add(
            f"DLRM, 5 % {policy} / fp32", "int8", point, Turns(mine, batches), Turns(fp32, batches)
        )


def main() -> None:
    """Measure and print."""
    options = begun(__doc__, "one table, under two minutes")
    from sparrow.kernels.embedding_bag import cpp

    print(
        f"torch {torch.__version__}, {options.threads} threads, {processor()}, {cpp.processor()}"
        f" loops, last-level cache {bytes_last_level_cache() >> 20} MiB; {BATCH} bags of {POOLING};"
        " ratios are fp32 / ours"
    )
    print(
        f"{'rows x dim ids':<21} {'format':<10} {'what':<28} {'ours ms':>9} {'other ms':>9}  ratio"
        " (quartiles)"
    )
    results = Results(sized(0.3, 0) if options.quick else options.seconds)
    for dim in (64,) if options.quick else (16, 64, 128):
        rows = sized(1_000_000, 6_000) if options.quick else BYTES_FP32 // (4 * dim)
        steps(Point(dim, rows, "zipf"), ("lru", "lfu"), results)
    models(results, ("int8",) if options.quick else ("fp16", "bf16", "int8", "int4"))
    difference = hit_rates()
    print()
    for policy in ("lru", "lfu"):
        for dims, goal in (((64, 128), 0.6), ((16,), 0.4)):
            found = [
                r
                for (w, _, p), r in results.ratios.items()
                if f"step, 5 % {policy}" in w and p.dim in dims
            ]
            if found:
                target(f"step with a cache, {policy}, dims {dims}, lowest", min(found), goal)
        target(f"DLRM with a cache, {policy}", results.lowest(f"DLRM, 5 % {policy}", ["int8"]), 0.8)
    target(
        "DLRM without a cache, lowest",
        results.lowest("DLRM / fp32", ["fp16", "bf16", "int8", "int4"]),
        0.9,
    )
    is_near = difference <= 0.02
    print_target(
        "LRU's hit rates and the curve, largest difference", f"{difference:.4f}", "0.02", is_near
    )


if __name__ == "__main__":
    main()
