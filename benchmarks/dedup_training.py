"""Training steps of a transformer over histories, with and without dedup, against the bound of its
share of time.

    python benchmarks/dedup_training.py GLOBO_REQUESTS.parquet   # about four minutes
    python benchmarks/dedup_training.py --quick                  # the made log alone, few steps, the same checks

Two causal layers of dim 64 over 50 ids, DLRM's head (`models/dlrm.py`), 4096 rows a step. The made
log has sessions of 16.5 rows, one list of 50 ids that is as in the row before in 86 % of rows (80 %
of all numbers, RecD's statistics), two ids and a number of the candidate. Both forms are trained on
the same batches in turn and must have the same loss (1e-5 in the first pass; later ones learn the
batches by heart, which magnifies rounding: 1e-2). p: the share of a step without dedup that goes
into the user's side, which is what a step saves that has constant vectors in its place; bound: 1 /
((1 - p) + p / factor), factor being the vectors that transformers read without, over those with
dedup.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import dedup_storage
import torch
from _peers.targets import print_target
from _peers.tiny import sized
from dedup_storage import GLOBO, GLOBO_GROUPS, MADE, made

from sparrow import data
from sparrow.core import Batch, KeyedJagged
from sparrow.core.memory import keep_freed_memory
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import EmbeddingTables, TableChoices
from sparrow.features.schema import Cluster, Column, Schema
from sparrow.losses import loss_and_probabilities
from sparrow.models import History, Offset, dlrm
from sparrow.trained.build import tables_of

BATCH, STEPS, ROUNDS = sized(4096, 128), 3, 4
MODEL = dlrm.Config(dim=64, bottom=(64,), top=(64, 32))


class Form:
    """A model and its batches; what it is timed on is what it learns."""

    def __init__(self, dataset: Dataset, dedup: Any, steps: int) -> None:
        torch.manual_seed(0)
        lists = tuple(
            name for name, column in dataset.schema.columns.items() if column.kind == "list"
        )
        config = replace(MODEL, history=History(lists=lists, layers=2, heads=2, longest=50))
        self.model: Any = config.build(dataset.schema, TableChoices())
        for tables in tables_of(self.model):
            tables.mode = "fused"
        self.whole = Offset(self.model, dataset.schema)
        self.whole.begin(dataset.log_odds())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.batches = []
        for i in range(steps):  # from all over the log: histories grow
            loader = dataset.loader(BATCH, dedup=dedup)
            at = len(loader) * (2 * i + 1) // (2 * steps)
            loader.load_state_dict({"epoch": 0, "batch": at, "batch_size": BATCH})
            self.batches.append(next(iter(loader)))

    def step(self, batch: Batch) -> float:
        """One step; the loss before it."""
        loss, _ = loss_and_probabilities(self.whole(batch), batch)
        loss.backward()
        self.model.ids.tables.update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def steps(self) -> tuple[list[float], float]:
        """One on each batch: losses, and milliseconds a step."""
        begin = time.perf_counter()
        losses = [self.step(batch) for batch in self.batches]
        return losses, 1000 * (time.perf_counter() - begin) / len(self.batches)


class Rest:
    """A form's step without the user's side: constant vectors in its place, and gradients of 0 for
    its transformers.
    """

    def __init__(self, form: Form, schema: Schema) -> None:
        self.form, self.schema = form, schema
        self.names = {name for names in schema.groups.values() for name in names}
        mine = [f for f in form.model.ids.tables.features if f.name not in self.names]
        specs = [
            spec for spec in form.model.ids.tables.specs if spec.name in {f.table for f in mine}
        ]
        self.tables = EmbeddingTables(specs, mine, mode="fused")
        self.constant_BD = torch.randn(2 * BATCH, MODEL.dim)
        for parameter in form.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def ms(self) -> float:
        """Of a step."""
        model, took = self.form.model, []
        for batch in self.form.batches:
            each = [(key, batch.ids[key]) for key in batch.ids.keys if key not in self.names]
            ids = KeyedJagged(
                keys=tuple(key for key, _ in each),
                values_N=torch.cat([j.values_N for _, j in each]),
                lengths=torch.cat([j.lengths_B for _, j in each]),
            )
            begin = time.perf_counter()
            found: dict[str, Any] = self.tables(ids)
            sparse = [
                found.get(name, self.constant_BD[: batch.batch_size]) for name in self.schema.sparse
            ]
            bottom_BD = model.bottom(batch.dense_BC)
            pairs = model.interaction(torch.stack([bottom_BD, *sparse], 1))
            loss, _ = loss_and_probabilities(
                model.head(model.top(torch.cat([bottom_BD, pairs], 1))), batch
            )
            loss.backward()
            self.tables.update()
            self.form.optimizer.step()
            self.form.optimizer.zero_grad(set_to_none=False)
            took.append(time.perf_counter() - begin)
        return 1000 * sum(took) / len(took)


def measure(name: str, dataset: Dataset, steps: int, rounds: int, goal: float) -> None:
    """A log's line."""
    on, off = (Form(dataset, dedup, steps) for dedup in ("on", "off"))
    rest = Rest(Form(dataset, "off", steps), dataset.schema)
    took: dict[str, list[float]] = {"on": [], "off": [], "rest": []}
    for turn in range(rounds + 1):
        (one, ms_on), (other, ms_off) = on.steps(), off.steps()
        for a, b in zip(one, other, strict=True):
            assert abs(a - b) < (1e-2 if turn else 1e-5) * abs(b), f"{name}: losses {a} and {b}"
        if turn:  # the first warms up
            for key, ms in (("on", ms_on), ("off", ms_off), ("rest", rest.ms())):
                took[key].append(ms)
    group = next(iter(on.batches[0].ids.inverse_B))
    ids = {
        "on": sum(b.ids.values_N.numel() for b in on.batches),
        "off": sum(b.ids.values_N.numel() for b in off.batches),
    }
    work = [b.ids[key].lengths_B.sum() for b in off.batches for key in off.model.ids.lists]
    left = [b.ids[key].lengths_B.sum() for b in on.batches for key in on.model.ids.lists]
    factor = float(sum(work) / sum(left))  # vectors that transformers read
    p = 1 - statistics.median(a / b for a, b in zip(took["rest"], took["off"], strict=True))
    bound = 1 / ((1 - p) + p / factor)
    pairs = [a / b for a, b in zip(took["off"], took["on"], strict=True)]
    ratio = statistics.median(pairs)
    print(
        f"\n{name}: {off.batches[0].batch_size} rows a step, {on.batches[0].ids.stored(group[0])}"
        f" unique in the first; ids a step {ids['off'] // steps:,} and {ids['on'] // steps:,}\nms a"
        f" step {statistics.median(took['off']):.0f} without, {statistics.median(took['on']):.0f}"
        f" with dedup: {ratio:.2f} times as fast (pairs {min(pairs):.2f} to {max(pairs):.2f})\np"
        f" {p:.3f} of a step on the user's side, factor {factor:.2f}: bound {bound:.2f}"
    )
    share = ratio / bound
    print_target(f"share of the bound, {name}", f"{share:.0%}", "85 %", share >= 0.85)
    if goal:
        print_target(f"speed-up, {name}", f"{ratio:.2f}", goal, ratio >= goal)


def main() -> None:
    """Both logs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "globo", nargs="?", type=Path, help="the request log that globo_requests.py makes"
    )
    parser.add_argument("--quick", action="store_true", help="few steps of the made log alone")
    asked = parser.parse_args()
    # as `sparrow train` does; fresh pages would cost most where tensors are large
    keep_freed_memory()
    dedup_storage.LISTS, dedup_storage.LENGTH = 1, 50
    lists = [f"user_{i}" for i in range(1, 10)]
    columns = {name: column for name, column in MADE.columns.items() if name not in lists}
    schema = replace(
        MADE, columns=columns, groups={"user": ("user_0",)}, cluster=Cluster(by="session")
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        made(sized(20_000, 600), work / "made.parquet")
        data.prepare([work / "made.parquet"], work / "made", schema=schema)
        measure(
            "made log",
            data.open(work / "made"),
            sized(2, 1) if asked.quick else STEPS,
            sized(2, 1) if asked.quick else ROUNDS,
            2.5,
        )
        if asked.globo and not asked.quick:
            globo = Schema.load(GLOBO)
            columns = {**globo.columns, "session_id": Column(kind="session")}
            globo = replace(
                globo, columns=columns, cluster=Cluster(by="session_id"), groups=GLOBO_GROUPS
            )
            data.prepare([asked.globo], work / "globo", schema=globo)
            measure("Globo", data.open(work / "globo"), STEPS, ROUNDS, 0)


if __name__ == "__main__":
    main()
