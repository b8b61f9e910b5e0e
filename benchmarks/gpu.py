"""One GPU: lookups and updates against its copy bandwidth, NE against the CPU's, and DCNv2 in
MLPerf's shapes.

    python benchmarks/gpu.py                     # under ten minutes; --globo DIR: the prepared Globo log, for the NE
    python benchmarks/gpu.py --quick             # fewer repetitions, one small log, under a minute, the same checks
    python benchmarks/gpu.py --device cpu        # tiny sizes: whether the program runs. It measures nothing

It begins with checks: lookups and updates against the reference on the CPU, and twice the same
bits. Then

- tables: 10 and 26 of 1,048,576 rows of dim 128 in fp32, 20 ids a bag by Zipf (1.05), batches of
  8,192. The share is the logical bytes over the time, divided by what a copy on the device reaches
  (bytes read and written). Forward counts 8 + 4 D bytes a lookup and 4 D a bag. Backward with its
  update counts 8 + 4 D a lookup, for the gradient of its bag, and for each row of the batch what is
  read and written of it: 8 D, and 8 for row-wise AdaGrad. `nn.EmbeddingBag` has the same rows; its
  update is torch's SGD on sparse gradients.
- NE: the same run on the CPU and on the device, judged before it learns from each batch or on the
  valid part.
- DCNv2: MLPerf's sizes, ids a column and batch of one of eight GPUs (6,912), random ids. Rows are
  cut to what fits.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _peers.targets import print_target
from embedding_bag import target, zipf
from torch import Tensor, nn

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.core import Batch, KeyedJagged
from sparrow.embeddings import Direct, EmbeddingTables, Feature, Placement, TableChoices, TableSpec
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.kernels import embedding_bag
from sparrow.kernels.embedding_bag import Bags
from sparrow.kernels.rules import RowRule, adagrad, rowwise_adagrad, sgd
from sparrow.layers.precision import Precision, computing
from sparrow.losses import loss_and_probabilities
from sparrow.models import dcnv2
from sparrow.optimizers import adagrad as dense_adagrad
from sparrow.trained.run import Run
from sparrow.training import train

RULES: dict[str, RowRule] = {
    "sgd": sgd.Config(lr=0.01),
    "rowwise_adagrad": rowwise_adagrad.Config(lr=0.01),
}
BATCHES = 4  # that take turns, so that no cache holds a batch from its last use
RECIPES = Path(__file__).parents[1] / "recipes"
# of MLPerf's DLRM-DCNv2 (mlcommons/training, recommendation_v2): rows of each table, and ids a
# sample looks up in it
MLPERF_ROWS = (
    40_000_000,
    39_060,
    17_295,
    7_424,
    20_265,
    3,
    7_122,
    1_543,
    63,
    40_000_000,
    3_067_956,
    405_282,
    10,
    2_209,
    11_938,
    155,
    4,
    976,
    14,
    40_000_000,
    40_000_000,
    40_000_000,
    590_152,
    12_973,
    108,
    36,
)
MLPERF_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


class Sizes(NamedTuple):
    """How large everything is, and how often it is repeated."""

    tables: tuple[int, ...] = (10, 26)
    rows: int = 1 << 20
    dim: int = 128
    batch: int = 8192
    pooling: int = 20
    repeat: int = 30
    copied: int = 1 << 30  # bytes
    mlperf_batch: int = 6912
    log_rows: int = 200_000
    steps: int = 2000


QUICK = Sizes(repeat=5, log_rows=30_000, steps=200)
TINY = Sizes(
    tables=(2,),
    rows=500,
    dim=16,
    batch=32,
    pooling=3,
    repeat=2,
    copied=1 << 16,
    mlperf_batch=16,
    log_rows=3000,
    steps=10,
)


@dataclass(frozen=True)
class Clock:
    """Times work on a device."""

    device: str
    repeat: int

    def ms(self, work: Callable[[], object]) -> float:
        """The median of several times, after two that do not count."""
        times = [self._once(work) for _ in range(self.repeat + 2)][2:]
        return statistics.median(times)

    def _once(self, work: Callable[[], object]) -> float:
        if self.device == "cpu":
            begin = time.perf_counter()
            work()
            return (time.perf_counter() - begin) * 1e3
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        work()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended))


def copy_gb_per_s(clock: Clock, count: int) -> float:
    """Bytes read and written by a copy on the device."""
    one, other = (torch.ones(count, dtype=torch.uint8, device=clock.device) for _ in range(2))
    return 2 * count / clock.ms(lambda: other.copy_(one)) / 1e6


# -- tables ----------------------------------------------------------------------------------------


def tables_on(device: str, rule: RowRule, count: int, rows: int, dim: int) -> EmbeddingTables:
    """Tables t0, t1, ... with a feature each, whose rows are on a device."""
    specs = [
        TableSpec(name=f"t{i}", dim=dim, addressing=Direct(rows), rule=rule, init_scale=0.1)
        for i in range(count)
    ]
    features = [Feature(name=f"f{i}", table=f"t{i}", pooling="sum") for i in range(count)]
    return EmbeddingTables(specs, features, seed=1, placement=Placement(device=device))


def batches_on(
    device: str, tables: EmbeddingTables, sizes: Sizes, count: int, rows: int
) -> list[Bags]:
    """Batches as the operators take them."""
    random, made = torch.Generator().manual_seed(1), []
    for _ in range(BATCHES):
        bags = count * sizes.batch
        ids = KeyedJagged(
            keys=tuple(f"f{i}" for i in range(count)),
            values_N=zipf(bags * sizes.pooling, rows, 1.05, random),
            lengths=torch.full((bags,), sizes.pooling),
        ).to(device)
        made.append(tables.prepare(ids).inner.bags)
    return made


def check(device: str) -> None:
    """Two steps against the reference on the CPU, and twice the same bits; AssertionError ends the
    benchmark.
    """
    small = Sizes(batch=257, pooling=7)
    for rule in RULES.values():
        found: list[list[Tensor]] = []
        for place in ("cpu", device, device):
            tables = tables_on(place, rule, 3, 1000, 128)
            inner, out = tables.exchange.parts[0], []
            grad = torch.randn(small.batch, 3 * 128, generator=torch.Generator().manual_seed(2)).to(
                place
            )
            for step, bags in enumerate(batches_on(place, tables, small, 3, 1000)[:2]):
                impl: Any = "reference" if place == "cpu" else "auto"
                out += embedding_bag.lookup(inner.kernel_tables, bags, impl=impl)
                embedding_bag.fused_update(
                    inner.kernel_tables, [grad], bags, inner.lr_T, step, impl=impl
                )
            found.append([*(t.cpu() for t in out), *(r.weight.cpu() for r in tables.all_records())])
        for cpu, one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, cpu, rtol=1e-5, atol=1e-5)
            assert torch.equal(one, other), "the second time other bits"


def measure_tables(clock: Clock, sizes: Sizes, count: int, copy: float) -> dict[str, float]:
    """Prints the times of so many tables. Returns the shares of the copy bandwidth."""
    shares: dict[str, float] = {}
    for name, rule in RULES.items():
        tables = tables_on(clock.device, rule, count, sizes.rows, sizes.dim)
        inner, batches = (
            tables.exchange.parts[0],
            batches_on(clock.device, tables, sizes, count, sizes.rows),
        )
        unique = statistics.mean(_unique(bags, sizes.rows) for bags in batches)
        lookups, bags_all = count * sizes.batch * sizes.pooling, count * sizes.batch
        grad = torch.randn(sizes.batch, count * sizes.dim, device=clock.device) * 1e-3
        turns, number = itertools.cycle(batches), itertools.count(1)

        def forward(turns: Any = turns, inner: Any = inner) -> None:
            embedding_bag.lookup(inner.kernel_tables, next(turns))

        def backward(
            turns: Any = turns, inner: Any = inner, grad: Tensor = grad, number: Any = number
        ) -> None:
            embedding_bag.fused_update(
                inner.kernel_tables, [grad], next(turns), inner.lr_T, next(number)
            )

        row = 4 * sizes.dim
        bytes_of = {
            "forward": lookups * (8 + row) + bags_all * row,
            f"backward and {name}": lookups * (8 + row) + unique * (2 * row + 8 * (name != "sgd")),
        }
        for (what, size), work in zip(bytes_of.items(), (forward, backward), strict=True):
            if what not in shares:
                shares[what] = _told(clock, f"{count} tables, {what}", size, work, copy)
        if name == "sgd":
            _peer(clock, tables, batches, grad, sizes, count, bytes_of, copy)
    return shares


def _unique(bags: Bags, rows: int) -> int:
    parts = bags.slots_N.cpu().split([high - low for low, high in itertools.pairwise(bags.bounds)])
    return sum(len(part.unique()) for part in parts)


def _told(clock: Clock, what: str, size: float, work: Callable[[], object], copy: float) -> float:
    ms = clock.ms(work)
    rate = size / ms / 1e6
    print(f"{what:<48} {ms:9.3f} ms {rate:9.1f} GB/s {rate / copy:7.1%} of a copy", flush=True)
    return rate / copy


def _peer(
    clock: Clock,
    tables: EmbeddingTables,
    batches: Sequence[Bags],
    grad: Tensor,
    sizes: Sizes,
    count: int,
    bytes_of: dict[str, float],
    copy: float,
) -> None:
    """`nn.EmbeddingBag` on the same rows."""
    weights = [record.fields["weight"] for record in tables.all_records()]
    modules = [
        nn.EmbeddingBag.from_pretrained(w, freeze=False, mode="sum", sparse=True) for w in weights
    ]
    optimizer = torch.optim.SGD([m.weight for m in modules], lr=0.01)
    cut = [bags.slots_N.view(count, sizes.batch, sizes.pooling) for bags in batches]
    turns = itertools.cycle(cut)

    def forward() -> Tensor:
        ids = next(turns)
        return torch.cat([module(ids[i]) for i, module in enumerate(modules)], 1)

    torch.testing.assert_close(
        modules[0](cut[0][0]),
        embedding_bag.lookup(tables.exchange.parts[0].kernel_tables, batches[0])[0][:, : sizes.dim],
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip

    def step() -> None:
        forward().backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    with torch.no_grad():
        _told(
            clock, f"{count} tables, nn.EmbeddingBag, forward", bytes_of["forward"], forward, copy
        )
    _told(
        clock, f"{count} tables, nn.EmbeddingBag, all of a step", sum(bytes_of.values()), step, copy
    )


# -- quality, DCNv2 --------------------------------------------------------------------------------


def quality(device: str, sizes: Sizes, globo: Path | None) -> float:
    """The difference of NE between the same run on the CPU and on the device."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        prepared, base = globo, "globo"
        if prepared is None:
            log, base = Path(folder) / "log.parquet", "demo"
            generate(log, rows=sizes.log_rows, seed=1)
            prepared = data.prepare([log], Path(folder) / "prepared").out
        for place in ("cpu", device):
            given = {
                "data.path": str(prepared),
                "run_dir": f"{folder}/{len(found)}",
                "device": place,
            }
            given |= {"log.tensorboard": False, "loop.max_steps": sizes.steps}
            begin = time.perf_counter()
            results = train(Run.load(RECIPES / f"{base}.toml", given))
            judged_on = results["valid"] or results["progressive"][-1]
            found.append(judged_on["ne"])
            seconds = time.perf_counter() - begin
            print(
                f"{base} on {place}: NE {found[-1]:.5f} after {results['step']} steps,"
                f" {seconds:.0f} s",
                flush=True,
            )
    return abs(found[0] - found[1])


def dcn_schema(most: int) -> Schema:
    """MLPerf's columns, and tables of at most so many rows."""
    lists = {f"c{i}": Column(kind="list", table=f"t{i}", pooling="sum") for i in range(26)}
    numbers = {f"n{i}": Column(kind="numeric") for i in range(13)}
    encodings = {
        f"t{i}": Encoding(kind="range", rows=min(rows, most)) for i, rows in enumerate(MLPERF_ROWS)
    }
    return Schema(columns={**numbers, **lists, "click": Column(kind="label")}, encodings=encodings)


def most_rows(free: float, dim: int) -> int:
    """Rows of the largest tables with which all take six tenths of the free bytes, with AdaGrad's
    state.
    """
    most = max(MLPERF_ROWS)
    while sum(min(rows, most) for rows in MLPERF_ROWS) * (8 * dim + 1) > 0.6 * free:
        most = int(most * 0.9)
    return most


def dcn(clock: Clock, sizes: Sizes) -> dict[str, float]:
    """Examples/s of whole steps, by precision."""
    on_gpu = clock.device != "cpu"
    free = torch.cuda.mem_get_info()[0] if on_gpu else 1e6
    most = most_rows(free, sizes.dim)
    print(
        f"DCNv2: tables cut to {most:,} rows, {sum(min(rows, most) for rows in MLPERF_ROWS):,}"
        " in all"
    )
    schema = dcn_schema(most)
    wide = (512, 256) if on_gpu else (8,)
    config = dcnv2.Config(
        dim=sizes.dim,
        bottom=(*wide, sizes.dim),
        cross_layers=3,
        rank=512 if on_gpu else 4,
        structure="stacked",
        deep=(1024, 1024, 512, 256) if on_gpu else (8,),
    )
    torch.manual_seed(0)
    choices = TableChoices(rule=adagrad.Config(lr=0.005), seed=1).at(Placement(device=clock.device))
    model = config.build(schema, choices).to(clock.device)
    optimizer = dense_adagrad.Config(lr=0.005).build(
        [p for p in model.parameters() if p.requires_grad]
    )
    turns = itertools.cycle(
        [dcn_batch(schema, sizes.mlperf_batch, clock.device, seed) for seed in range(BATCHES)]
    )
    found = {}
    for precision in ("fp32", "bf16"):

        def step(precision: Any = precision) -> Tensor:
            batch = next(turns)
            with computing(Precision(precision), torch.device(clock.device)):
                loss, _ = loss_and_probabilities(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        ms = clock.ms(step)
        assert math.isfinite(float(step())), "the loss"
        found[precision] = sizes.mlperf_batch / ms * 1e3
        print(
            f"DCNv2, {precision}: {ms:.3f} ms a step, {found[precision]:,.0f} examples/s",
            flush=True,
        )
    return found


def dcn_batch(schema: Schema, size: int, device: str, seed: int) -> Batch:
    """Random samples with MLPerf's number of ids in each column."""
    random = torch.Generator().manual_seed(seed)
    rows = [encoding.rows or 1 for encoding in schema.encodings.values()]
    values = [
        torch.randint(0, n, (size * ids,), generator=random)
        for n, ids in zip(rows, MLPERF_IDS, strict=True)
    ]
    lengths = [torch.full((size,), ids) for ids in MLPERF_IDS]
    ids = KeyedJagged(keys=schema.sparse, values_N=torch.cat(values), lengths=torch.cat(lengths))
    labels_BT = torch.randint(0, 2, (size, 1), generator=random).float()
    return Batch(dense_BC=torch.randn(size, 13, generator=random), ids=ids, labels_BT=labels_BT).to(
        device
    )


def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:1, or cpu to see whether the program runs"
    )
    parser.add_argument(
        "--globo",
        type=Path,
        help="the prepared Globo log (recipes/globo.toml); else one is generated",
    )
    options = parser.parse_args()
    is_gpu = torch.device(options.device).type == "cuda"
    if is_gpu and not torch.cuda.is_available():
        sys.exit(
            "no CUDA device is here, and nothing was measured; --device cpu runs the program with"
            " tiny sizes"
        )
    sizes = TINY if not is_gpu else QUICK if options.quick else Sizes()
    if is_gpu:
        torch.cuda.set_device(torch.device(options.device).index or 0)
        kind = torch.cuda.get_device_properties(options.device)
        print(f"torch {torch.__version__}, {kind.name}, {kind.total_memory / 1e9:.0f} GB")
    else:
        print("on the CPU, with tiny sizes: these numbers mean nothing")
    clock = Clock(options.device, sizes.repeat)
    check(options.device)
    print("checks: lookups and updates are the reference's, and twice the same bits")
    copy = copy_gb_per_s(clock, sizes.copied)
    print(f"a copy on the device: {copy:.1f} GB/s read and written")
    shares = [measure_tables(clock, sizes, count, copy) for count in sizes.tables]
    difference = quality(options.device, sizes, options.globo)
    rates = dcn(clock, sizes)
    if not is_gpu:
        return
    print()
    target("forward, share of a copy, lowest", min(one["forward"] for one in shares), 0.80)
    for name in RULES:
        target(
            f"backward and {name}, share of a copy, lowest",
            min(s[f"backward and {name}"] for s in shares),
            0.45,
        )
    log = "Globo" if options.globo else "a generated log"
    reached = difference <= 0.001
    print_target(
        f"NE on {log} as on the CPU, difference", f"{difference:.5f}", "at most 0.001", reached
    )
    target("DCNv2 in MLPerf's shapes, million examples/s, bf16", rates["bf16"] / 1e6, 2.2)


if __name__ == "__main__":
    main()
