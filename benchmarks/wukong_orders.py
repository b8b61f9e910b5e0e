"""Does depth pay where the order of interactions demands it? Wukong on planted interactions, and three families' FLOPs.

    python benchmarks/wukong_orders.py --cells DIR   # about half an hour
    python benchmarks/wukong_orders.py --quick       # few rows, one seed, the same checks

27 id columns of 8 values. A value of the first 24 is a direction in the plane, and two columns meet as the cosine
between theirs: 12 pairs. A click's logit is a weighted sum of the pairs (order 2), and of all products of two pairs
too (order 4), and of products of two such sums too (order 8); signs are drawn, the parts have about equal variance,
all together 2.5^2. The lower orders are there because they are what the higher ones are learned from.
First Wukong of dim 16, n_f = n_l = k = 8 with 1 to 3 layers: with the linear projection that is used here, and but for
norms and ReLUs, a layer has orders up to 2, two up to 4, three up to 8. Then Wukong, DLRM and DCNv2 grow
(`Config.larger`) on order 8, and their NE at equal FLOP is read between their sizes. Each row is seen once; NE of
50,000 rows that come after, and of the true probabilities (the limit). Every cell (model, order, seed) is kept in
--cells.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _peers.cells import cells

from sparrow.core import Batch, KeyedJagged
from sparrow.data.schema import Column, Schema, Table
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.losses import judged, probabilities
from sparrow.metrics import evaluate
from sparrow.models import dcnv2, dlrm, wukong
from sparrow.training.restore import tables_of
from sparrow.training.scaling import Point, draw, flops

COLUMNS, VALUES, PAIRS, BATCH, TEST = 27, 8, 12, 512, 50_000
ORDERS, LAYERS = (2, 4, 8), (1, 2, 3)
NAMES = tuple(f"c{i}" for i in range(COLUMNS))
SCHEMA = Schema(
    columns={**{n: Column(kind="categorical", table=n) for n in NAMES}, "click": Column(kind="label")},
    tables={n: Table(encoding="range", low=0, high=VALUES - 1, rows=VALUES + 1) for n in NAMES},
)
FAMILIES = {  # the smallest, and how many sizes: all from 0.05 to 1.7 MFLOP and more
    "wukong": (wukong.Config(layers=1, n_f=4, n_l=4, k=4, mlp=(32,), top=(32,), compressed=2), 6),
    "dlrm": (dlrm.Config(bottom=(16,), top=(32, 16)), 5),
    "dcnv2": (dcnv2.Config(cross_layers=1, deep=(16,), rank=16), 5),
}


class World:
    """Where clicks come from. order: the highest of the planted interactions."""

    def __init__(self, order: int, seed: int) -> None:
        self.random = np.random.default_rng((order, seed))
        self.angle = self.random.uniform(0, 2 * np.pi, (COLUMNS, VALUES))
        self.order, self.scale = order, 1.0
        self.pairs = self.random.choice([-1, 1], PAIRS) / PAIRS**0.5
        signs = self.random.choice([-1, 1], (2, PAIRS, PAIRS))
        self.products = np.triu(signs, 1) / (PAIRS * (PAIRS - 1) / 2) ** 0.5
        self.scale = 2.5 / self.logits(self.random.integers(0, VALUES, (50_000, COLUMNS))).std()

    def logits(self, ids_BC: np.ndarray) -> np.ndarray:
        """Of rows [B, C]."""
        angle = self.angle[np.arange(COLUMNS), ids_BC]
        pair_BP = 2**0.5 * np.cos(angle[:, 0 : 2 * PAIRS : 2] - angle[:, 1 : 2 * PAIRS : 2])
        fours = [((pair_BP @ signs) * pair_BP).sum(1) for signs in self.products]
        parts = {2: pair_BP @ self.pairs, 4: fours[0], 8: fours[0] * fours[1]}
        return self.scale * sum(part for order, part in parts.items() if order <= self.order)

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


def trained(config: Any, order: int, seed: int, rows: int) -> dict[str, float]:
    """A model after one pass, and the limit."""
    world = World(order, seed)
    torch.manual_seed(seed)
    model = config.build(SCHEMA, rowwise_adagrad.Config(lr=0.1), seed)
    for tables in tables_of(model):
        tables.mode = "fused"
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
    return {"ne": found["ne"], "limit": limit, "flops": flops(model, test[0][0]), "weights": weights}


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.4f} +- {statistics.stdev(values) if len(values) > 1 else 0:.4f}"


def depth(folder: Path, rows: int, seeds: int) -> None:
    """NE by planted order and layers."""
    jobs = {}
    for order in ORDERS:
        for layers in LAYERS:
            config = wukong.Config(layers=layers, n_f=8, n_l=8, k=8, mlp=(128,), top=(64,), projection="linear")
            for seed in range(seeds):
                jobs[f"{rows}-order-{order}-layers-{layers}-{seed}"] = config, order, seed, rows
    found = cells(folder, trained, jobs)
    print(f"Wukong of dim 16, n_f = n_l = k = 8, {rows:,} rows, {seeds} seeds: NE (mean +- standard deviation)")
    print(f"{'order':<8}{'limit':>8}" + "".join(f"{f'{n} layers':>18}" for n in LAYERS) + f"{'1 to 3 layers':>18}")
    gains = {}
    for order in ORDERS:
        of = {n: [found[f"{rows}-order-{order}-layers-{n}-{seed}"] for seed in range(seeds)] for n in LAYERS}
        limit = statistics.mean(one["limit"] for one in of[1])
        gains[order] = [one["ne"] - three["ne"] for one, three in zip(of[1], of[3], strict=True)]
        texts = [spread([one["ne"] for one in of[n]]) for n in LAYERS]
        print(f"{order:<8}{limit:8.4f}" + "".join(f"{text:>18}" for text in [*texts, spread(gains[order])]))
    for order in ORDERS[1:]:
        more = [high - low for high, low in zip(gains[order], gains[2], strict=True)]
        error = statistics.stdev(more) / seeds**0.5 if seeds > 1 else 0.0
        met = "met" if statistics.mean(more) > 2 * error and statistics.mean(more) > 0 else "missed"
        text = f"{statistics.mean(gains[order]):.4f} against {statistics.mean(gains[2]):.4f}, error {error:.4f}"
        print(f"TARGET three layers gain more over one at order {order} than at 2: {text} (goal: by 2 errors) {met}")


def families(folder: Path, rows: int, seeds: int, most: int, picture: Path | None) -> None:
    """NE against FLOP of three families on order 8."""
    jobs, order = {}, ORDERS[-1]
    for name, (config, sizes) in FAMILIES.items():
        for size in range(min(sizes, most)):
            for seed in range(seeds):
                jobs[f"{rows}-{name}-{size}-{seed}"] = config, order, seed, rows
            config = config.larger()
    found = cells(folder, trained, jobs)
    print(f"\nfamilies on order {order}, {rows:,} rows, {seeds} seeds")
    print(f"{'family':<10}{'MFLOP':>10}{'weights':>11}{'NE':>18}")
    lines: dict[str, list[Point]] = {}
    for name, (_, sizes) in FAMILIES.items():
        lines[name] = []
        for size in range(min(sizes, most)):
            each = [found[f"{rows}-{name}-{size}-{seed}"] for seed in range(seeds)]
            values = [one["ne"] for one in each]
            print(f"{name:<10}{each[0]['flops'] / 1e6:10.4f}{each[0]['weights']:11,}{spread(values):>18}")
            point = Point(name, {}, each[0]["flops"], each[0]["weights"], 0, statistics.mean(values), 0, "new rows")
            lines[name].append(point)
    if picture is not None and draw(lines, picture):
        print(f"{picture.name}: the picture")
    verdict(lines)


def verdict(lines: dict[str, list[Point]]) -> None:
    """The span of compute, and all families where the smallest of the largest is, between their sizes."""
    x = {name: np.log([p.flops for p in points]) for name, points in lines.items()}
    at = min(one[-1] for one in x.values())
    span = np.exp(at - max(one[0] for one in x.values()))
    print(f"TARGET span of compute that all have: {span:.0f} times (goal 30) {'met' if span >= 30 else 'missed'}")
    ne = {name: float(np.interp(at, x[name], [p.ne for p in points])) for name, points in lines.items()}
    others = {name: value for name, value in ne.items() if name != "wukong"}
    text = ", ".join(f"{name} {value:.4f}" for name, value in others.items())
    met = "met" if ne["wukong"] < min(others.values()) else "missed"
    print(f"TARGET NE at {np.exp(at) / 1e6:.2f} MFLOP: Wukong {ne['wukong']:.4f}, {text} (goal: lowest) {met}")


def main() -> None:
    """Both experiments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=Path, help="where results are kept; a folder of its own unless told")
    parser.add_argument("--quick", action="store_true", help="few rows, one seed")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="where the families are drawn")
    asked = parser.parse_args()
    rows, seeds, sizes = (20_000, 1, 2) if asked.quick else (asked.rows, asked.seeds, 9)
    with tempfile.TemporaryDirectory() as folder:
        kept = asked.cells or Path(folder)
        depth(kept, rows, seeds)
        families(kept, rows, seeds, sizes, asked.picture)


if __name__ == "__main__":
    main()
