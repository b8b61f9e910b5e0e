"""Where looking equal rows up once wins, and where it loses: CPU and wall time of training with
dedup on and off.

    python benchmarks/dedup_auto.py           # every kind of group and model; some ten minutes
    python benchmarks/dedup_auto.py --quick   # few pairs of two logs, the same checks

The made log of dedup_storage.py, with one group of lists of ids (or of ids, where a list has one)
that are as in the session's row before in a share of rows that gives so many rows a run. From the
prepared log to the updated tables: reading, batches, forward, backward, update, in one process,
torch with one thread; 2048 rows a step. Both forms are trained on the same rows in turn, in pairs,
and must have the same first loss (1e-5). CPU time is that of all threads. First milliseconds a step
without dedup; then time without over time with dedup, above 1 where dedup is faster: the median of
pairs with the quartiles, and the shortest epochs' ratio.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import dedup_storage
import torch
from _peers.tiny import sized
from dedup_storage import MADE, made

from sparrow import data
from sparrow.core.memory import keep_freed_memory
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Cluster, Column
from sparrow.losses import loss_and_probabilities
from sparrow.models import History, dlrm
from sparrow.trained.build import tables_of

BATCH = 2048
FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0, 4.0)  # rows a run


@dataclass(frozen=True)
class Case:
    """A group of `lists` columns of `length` ids, in a log of so many rows, and a model that pools
    or reads them.
    """

    name: str
    lists: int
    length: int
    rows: int
    dim: int = 16
    reads: bool = False


CASES = (
    Case("1 id", 1, 1, 20_000),
    Case("8 ids", 8, 1, 20_000),
    Case("1 list of 12", 1, 12, 20_000),
    Case("10 lists of 12", 10, 12, 12_000),
    Case("1 list of 100", 1, 100, 12_000),
    Case("transformer over 1 list of 12", 1, 12, 8_000, reads=True),
)


class Form:
    """A model that learns a log's rows as `dedup` has them."""

    def __init__(self, dataset: Dataset, dedup: Literal["on", "off"], case: Case) -> None:
        torch.manual_seed(0)
        self.dataset, self.dedup = dataset, dedup
        read = dataset.schema.groups["user"] if case.reads else ()
        config = dlrm.Config(
            dim=case.dim, bottom=(case.dim,), top=(64, 32), history=History(lists=read, layers=1)
        )
        self.model: Any = config.build(dataset.schema, TableChoices())
        for tables in tables_of(self.model):
            tables.mode = "fused"
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def epoch(self) -> tuple[float, float, float]:
        """Each batch once: the first one's loss, seconds of CPU and of the clock."""
        cpu, wall, first = time.process_time(), time.perf_counter(), 0.0
        for i, batch in enumerate(self.dataset.loader(BATCH, dedup=self.dedup)):
            loss, _ = loss_and_probabilities(self.model(batch), batch)
            loss.backward()
            self.model.ids.tables.update()
            self.optimizer.step()
            self.optimizer.zero_grad()
            first = first if i else loss.item()
        return first, time.process_time() - cpu, time.perf_counter() - wall


def measure(case: Case, factor: float, work: Path, pairs: int) -> None:
    """A line."""
    dedup_storage.LISTS, dedup_storage.LENGTH = case.lists, case.length
    user = {name: column for name, column in MADE.columns.items() if name == "user_0"}
    kind = user["user_0"] if case.length > 1 else Column(kind="categorical", table="user")
    lists = {f"user_{i}": kind for i in range(case.lists)}
    others = {name: column for name, column in MADE.columns.items() if not name.startswith("user_")}
    groups = {"user": tuple(lists)}
    schema = replace(
        MADE, columns={**others, **lists}, groups=groups, cluster=Cluster(by="session")
    )
    numbers = case.lists * case.length
    made(case.rows, work / "log.parquet", same=(1 - 1 / factor) * numbers / (numbers + 3))
    data.prepare([work / "log.parquet"], work / "log", schema=schema, overwrite=True)
    dataset = data.open(work / "log")
    on, off = Form(dataset, "on", case), Form(dataset, "off", case)
    took: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    for turn in range(pairs + 1):
        losses = []
        for form in (on, off) if turn % 2 else (off, on):
            loss, *seconds = form.epoch()
            losses.append(loss)
            if turn:  # the first warms up
                took[form.dedup].append((seconds[0], seconds[1]))
        assert turn or abs(losses[0] - losses[1]) < 1e-5 * losses[1], (
            f"{case.name}: losses {losses}"
        )
    line = (
        f"{case.name:<30}{dataset.factor('user'):7.2f}{'on' if dataset.pays('user') else 'off':>5}"
    )
    for k in range(2):
        without, with_it = ([each[k] for each in took[dedup]] for dedup in ("off", "on"))
        low, middle, high = statistics.quantiles(
            [a / b for a, b in zip(without, with_it, strict=True)], n=4
        )
        ms = 1000 * statistics.median(without) / len(dataset.loader(BATCH))
        line += (
            f" |{ms:7.1f}{middle:7.2f} ({low:.2f} to {high:.2f}){min(without) / min(with_it):6.2f}"
        )
    print(line, flush=True)


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few pairs of two logs")
    asked = parser.parse_args()
    keep_freed_memory()  # as `sparrow train` does
    torch.set_num_threads(1)
    print(
        f"{'group':<30}{'factor':>7}{'auto':>5} |{'ms CPU, off / on':^35}"
        f" |{'ms wall, off / on':^35}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES[:1] if asked.quick else CASES:
            for factor in FACTORS[::5] if asked.quick else FACTORS:
                measure(case, factor, Path(folder), sized(3, 2) if asked.quick else 21)


if __name__ == "__main__":
    main()
