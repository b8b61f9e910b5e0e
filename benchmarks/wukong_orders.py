"""Does depth pay where the order of interactions demands it? Wukong on planted interactions.

    python benchmarks/wukong_orders.py --cells DIR   # a quarter of an hour
    python benchmarks/wukong_orders.py --quick       # few rows, one seed

27 id columns of 8 values. A value of the first 24 is a direction in the plane, and two columns meet
as the cosine between theirs: 12 pairs; the last 3 columns say nothing. A click's logit is a
weighted sum of the pairs (order 2), and of all products of two pairs too (order 4), and of products
of two such sums too (order 8); signs are drawn, the parts have about equal variance, all together
2.5^2. The lower orders are there because they are what the higher ones are learned from.
Wukong of dim 16, n_f = n_l = k = 8, linear projection, with 1 to 3 layers, in two forms: with the
MLPs that it is published with (128 in a block, 64 at the end), which make products of what they
read too, and with linear maps in their place, where but for norms one layer has orders up to 2, two
up to 4, three up to 8. Each row is seen once; NE of 50,000 rows that come after, and of the true
probabilities (the limit). Seeds draw the world too, so gains are of pairs. Every cell (form, order,
layers, seed) is kept in --cells.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _peers.cells import cells
from _peers.stats import paired, spread
from _peers.targets import print_target
from _peers.tiny import sized

from sparrow.core import Batch, KeyedJagged
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.losses import loss_and_probabilities, probabilities
from sparrow.metrics import evaluate
from sparrow.models import Offset, wukong

COLUMNS, VALUES, PAIRS, BATCH = 27, 8, 12, sized(512, 128)
TEST, JUDGED = sized((50_000, 5_000), (500, 500))  # rows, and those of a batch
ORDERS, LAYERS = (2, 4, 8), (1, 2, 3)
NAMES = tuple(f"c{i}" for i in range(COLUMNS))
SCHEMA = Schema(
    columns={
        **{n: Column(kind="categorical", table=n) for n in NAMES},
        "click": Column(kind="label"),
    },
    encodings={n: Encoding(kind="range", low=0, high=VALUES - 1, rows=VALUES + 1) for n in NAMES},
)
SMALL = wukong.Config(layers=1, n_f=8, n_l=8, k=8, mlp=(128,), top=(64,), projection="linear")
FORMS = {"with MLPs": SMALL, "linear": dataclasses.replace(SMALL, mlp=(), top=())}


class World:
    """Where clicks come from. order: the highest of the planted interactions."""

    def __init__(self, order: int, seed: int) -> None:
        self.random = np.random.default_rng((order, seed))
        self.angle = self.random.uniform(0, 2 * np.pi, (COLUMNS, VALUES))
        self.order, self.scale = order, 1.0
        self.pairs = self.random.choice([-1, 1], PAIRS) / PAIRS**0.5
        signs = self.random.choice([-1, 1], (2, PAIRS, PAIRS))
        self.products = np.triu(signs, 1) / (PAIRS * (PAIRS - 1) / 2) ** 0.5
        self.scale = (
            2.5
            / self.logits(self.random.integers(0, VALUES, (sized(50_000, 1_000), COLUMNS))).std()
        )

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
        return (
            Batch(dense_BC=dense, ids=ids, labels_BT=labels),
            torch.from_numpy(true_B).float()[:, None],
        )


def trained(config: Any, order: int, seed: int, rows: int) -> dict[str, float]:
    """A model after one pass, and the limit."""
    world = World(order, seed)
    torch.manual_seed(seed)
    model = Offset(
        config.build(SCHEMA, TableChoices(rule=rowwise_adagrad.Config(lr=0.1), seed=seed)), SCHEMA
    )
    model.begin([float(world.batch(BATCH)[1].mean().logit())])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = rows // BATCH
    for step in range(steps):
        for group in optimizer.param_groups:  # up, level, and down over the last third
            group["lr"] = 2e-3 * min(1, (step + 1) / 50, 3 * (steps - step) / steps)
        example, _ = world.batch(BATCH)
        loss, _ = loss_and_probabilities(model(example), example)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    test = [world.batch(JUDGED) for _ in range(TEST // JUDGED)]
    truth = iter([true for _, true in test])
    limit = evaluate(lambda batch: next(truth), [batch for batch, _ in test])["ne"]
    found = evaluate(
        lambda batch: probabilities(model(batch)).detach(), [batch for batch, _ in test]
    )
    return {"ne": found["ne"], "limit": limit}


def depth(folder: Path, rows: int, seeds: int) -> None:
    """NE by planted order and layers, and what each layer more gains."""
    jobs = {}
    for form, config in FORMS.items():
        for order in ORDERS:
            for layers in LAYERS:
                for seed in range(seeds):
                    job = dataclasses.replace(config, layers=layers), order, seed, rows
                    jobs[f"{form}, order {order}, {layers} layers, seed {seed}"] = job
    found = cells(folder, trained, jobs)
    for form in FORMS:
        print(
            f"\nWukong {form}, {rows:,} rows, {seeds} seeds: NE (mean +- standard deviation), gains"
            " (+- its error)"
        )
        print(
            f"{'order':<8}{'limit':>8}"
            + "".join(f"{f'{n} layers':>18}" for n in LAYERS)
            + f"{'1 to 2':>18}{'2 to 3':>18}"
        )
        gains = {}
        for order in ORDERS:
            of = {
                n: [
                    found[f"{form}, order {order}, {n} layers, seed {seed}"]
                    for seed in range(seeds)
                ]
                for n in LAYERS
            }
            limit = statistics.mean(one["limit"] for one in of[1])
            texts = [spread([one["ne"] for one in of[n]]) for n in LAYERS]
            for n in LAYERS[:-1]:
                gains[order, n] = gain, error = paired(
                    *([one["ne"] for one in of[layers]] for layers in (n, n + 1))
                )
                texts.append(f"{gain:.4f} +- {error:.4f}")
            print(f"{order:<8}{limit:8.4f}" + "".join(f"{text:>18}" for text in texts))
        for order, n, pays in ((2, 1, False), (4, 1, True), (8, 1, True), (8, 2, True)):
            gain, error = gains[order, n]
            goal = f"{'above' if pays else 'at most'} 2 errors, {2 * error:.4f}"
            claim, is_met = (
                f"{form}, order {order}, layer {n + 1} gains",
                (gain > 2 * error) == pays,
            )
            print_target(claim, f"{gain:.4f}", goal, is_met)


def main() -> None:
    """All cells, then a table for each form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cells", type=Path, help="where results are kept; a folder of its own unless told"
    )
    parser.add_argument("--quick", action="store_true", help="few rows, one seed")
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    rows, seeds = (sized(20_000, 600), 1) if asked.quick else (asked.rows, asked.seeds)
    with tempfile.TemporaryDirectory() as folder:
        depth(asked.cells or Path(folder), rows, seeds)


if __name__ == "__main__":
    main()
