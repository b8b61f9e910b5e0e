"""Does depth pay where the order of interactions demands it? Wukong on planted interactions, and three families' FLOPs.

    python benchmarks/wukong_orders.py           # about half an hour
    python benchmarks/wukong_orders.py --quick   # fewer rows, one seed, the same checks

27 id columns of 8 values, each value with a hidden vector of two numbers. A click's logit is 2.5 times a sum of
products of dot products of hidden vectors, of unit variance: pairs (order 2), products of two pairs (4) or of four (8).
Wukong of dim 16, n_f = n_l = 8, k = 8 with 1 to 3 layers sees each row once; NE of 50,000 rows that come after, and of
the true probabilities (the limit). With the linear projection that is used there, and but for norms and ReLUs, a layer
has orders up to 2, two up to 4, three up to 8. Then Wukong, DLRM and DCNv2 grow (`Config.larger`) over a factor of 30
in FLOP on order 4, and their NE at equal FLOP, within what all have, is read off the fitted laws.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from sparrow.core import Batch, KeyedJagged
from sparrow.core.memory import keep_freed_memory
from sparrow.data.schema import Column, Schema, Table
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.losses import judged, probabilities
from sparrow.metrics import evaluate
from sparrow.models import dcnv2, dlrm, wukong
from sparrow.training.scaling import Point, flops, law

COLUMNS, VALUES, HIDDEN, BATCH, TEST = 27, 8, 2, 512, 50_000
NAMES = tuple(f"c{i}" for i in range(COLUMNS))
SCHEMA = Schema(
    columns={**{n: Column(kind="categorical", table=n) for n in NAMES}, "click": Column(kind="label")},
    tables={n: Table(encoding="range", low=0, high=VALUES - 1, rows=VALUES + 1) for n in NAMES},
)
GROWING = {
    "wukong": wukong.Config(layers=1, n_f=4, n_l=4, k=4, mlp=(32,), top=(32,), compressed=2),
    "dlrm": dlrm.Config(bottom=(16,), top=(32, 16)),
    "dcnv2": dcnv2.Config(cross_layers=1, deep=(16,), rank=16),
}


class World:
    """Where clicks come from. order: of the planted interactions."""

    def __init__(self, order: int, seed: int) -> None:
        self.random = np.random.default_rng((order, seed))
        self.hidden = self.random.standard_normal((COLUMNS, VALUES, HIDDEN))
        self.order, self.scale = order, 1.0
        self.scale = 2.5 / self.logits(self.random.integers(0, VALUES, (50_000, COLUMNS))).std()

    def logits(self, ids_BC: np.ndarray) -> np.ndarray:
        """Of rows [B, C]."""
        z = self.hidden[np.arange(COLUMNS), ids_BC]
        pairs = (z[:, 0:24:2] * z[:, 1:24:2]).sum(2)  # of 12 pairs of columns
        terms = pairs.reshape(len(pairs), -1, self.order // 2).prod(2)[:, :3]
        return self.scale * terms.sum(1)

    def batch(self, size: int) -> tuple[Batch, torch.Tensor]:
        """Rows, and their true probabilities [B, 1]."""
        ids_BC = self.random.integers(0, VALUES, (size, COLUMNS))
        true_B = 1 / (1 + np.exp(-self.logits(ids_BC)))
        label_B = self.random.random(size) < true_B
        ids = KeyedJagged(
            keys=NAMES, values_N=torch.from_numpy(ids_BC.T.reshape(-1) + 1),
            lengths=torch.ones(size * COLUMNS, dtype=torch.int64),
        )  # fmt: skip
        dense = torch.zeros(size, 0)
        labels = torch.from_numpy(label_B).float()[:, None]
        return Batch(dense_BC=dense, ids=ids, labels_BT=labels), torch.from_numpy(true_B).float()[:, None]


def trained(config: Any, order: int, seed: int, rows: int) -> tuple[Point, float]:
    """A model after one pass, and the limit."""
    world = World(order, seed)
    torch.manual_seed(seed)
    model = config.build(SCHEMA, rowwise_adagrad.Config(lr=0.1), seed)
    model.tables.mode = "fused"
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = rows // BATCH
    for step in range(steps):
        for group in optimizer.param_groups:  # up, level, and down over the last third
            group["lr"] = 2e-3 * min(1, (step + 1) / 50, 3 * (steps - step) / steps)
        example, _ = world.batch(BATCH)
        loss, _ = judged(model(example), example)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    test = [world.batch(5000) for _ in range(TEST // 5000)]
    truth = iter([true for _, true in test])
    limit = evaluate(lambda batch: next(truth), [batch for batch, _ in test])["ne"]
    found = evaluate(lambda batch: probabilities(model(batch)).detach(), [batch for batch, _ in test])
    weights = sum(p.numel() for p in model.parameters())
    count = flops(model, test[0][0])
    return Point("", {}, count, weights, COLUMNS * VALUES, found["ne"], found["auc"], "new rows"), limit


def depth(rows: int, seeds: int) -> None:
    """NE by planted order and layers."""
    print(f"Wukong of dim 16, n_f = n_l = k = 8, {rows:,} rows, {seeds} seeds: NE (mean +- standard deviation)")
    print(
        f"{'planted order':<15}{'limit':>8}" + "".join(f"{f'{n} layers':>18}" for n in (1, 2, 3)) + "   1 to 3 layers"
    )
    gains, learned = {}, {}
    for order in (2, 4, 8):
        cells, limits = {}, []
        for layers in (1, 2, 3):
            config = wukong.Config(layers=layers, n_f=8, n_l=8, k=8, mlp=(128,), top=(64,), projection="linear")
            each = [trained(config, order, seed, rows) for seed in range(seeds)]
            cells[layers] = [point.ne for point, _ in each]
            limits += [limit for _, limit in each]
        paired = [one - three for one, three in zip(cells[1], cells[3], strict=True)]
        spread = {n: statistics.stdev(v) if seeds > 1 else 0.0 for n, v in cells.items()}
        gains[order] = statistics.mean(paired), statistics.stdev(paired) / seeds**0.5 if seeds > 1 else 0.0
        learned[order] = statistics.mean(cells[3]) < 0.99
        row = "".join(f"{f'{statistics.mean(v):.4f} +- {spread[n]:.4f}':>18}" for n, v in cells.items())
        print(
            f"{order:<15}{statistics.mean(limits):8.4f}{row}   {gains[order][0]:.4f} +- {gains[order][1]:.4f}",
            flush=True,
        )
    for order in (4, 8):
        gain, error = gains[order]
        met = "met" if learned[order] and gain > gains[2][0] + 2 * error else "missed"
        found = f"{gain:.4f} against {gains[2][0]:.4f}" + ("" if learned[order] else " (nothing learned)")
        print(f"TARGET depth pays more at order {order} than at 2: {found} (goal: more) {met}")


def families(rows: int, seeds: int, sizes: int) -> None:
    """NE against FLOP of three families on order 4."""
    print(f"\nfamilies on order 4, {rows:,} rows, {seeds} seeds")
    print(f"{'family':<10}{'MFLOP':>10}{'weights':>11}{'NE':>18}{'seconds':>9}")
    means: dict[str, list[Point]] = {}
    for name, config in GROWING.items():
        means[name] = []
        for _ in range(sizes):
            begin = time.perf_counter()
            each = [trained(config, 4, seed, rows)[0] for seed in range(seeds)]
            took = (time.perf_counter() - begin) / seeds
            ne = [point.ne for point in each]
            text = f"{statistics.mean(ne):.4f} +- {statistics.stdev(ne) if seeds > 1 else 0:.4f}"
            print(f"{name:<10}{each[0].flops / 1e6:10.4f}{each[0].weights:11,}{text:>18}{took:9.1f}", flush=True)
            means[name].append(Point(name, {}, each[0].flops, each[0].weights, 0, statistics.mean(ne), 0, ""))
            config = config.larger()
    span = max(p.flops for p in means["wukong"]) / min(p.flops for p in means["wukong"])
    at = min(max(p.flops for p in points) for points in means.values())  # within what all have
    found = {}
    for name, points in means.items():
        a, b = law(points)
        found[name] = a * at**b
        print(f"{name}: NE = {a:.4g} * FLOP^{b:.4f}; at {at / 1e6:.2f} MFLOP {found[name]:.4f}")
    others = min(found["dlrm"], found["dcnv2"])
    print(f"TARGET span of compute: {span:.0f} times (goal 30) {'met' if span >= 30 else 'missed'}")
    met = "met" if found["wukong"] < others else "missed"
    print(f"TARGET Wukong at equal FLOP: NE {found['wukong']:.4f} against {others:.4f} (goal: lower) {met}")


def main() -> None:
    """Both experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows, one seed")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(2)
    rows, seeds = (30_000, 1) if asked.quick else (asked.rows, asked.seeds)
    depth(rows, seeds)
    families(rows, seeds, 2 if asked.quick else 7)


if __name__ == "__main__":
    main()
