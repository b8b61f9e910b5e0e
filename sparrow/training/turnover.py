"""What a run says of tables whose rows come and go: who got rows, who lost them, and how many lookups found one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow.checkpoint import Checkpoint
from sparrow.core import UserError
from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.loader import Loader
from sparrow.distributed import World
from sparrow.embeddings import EmbeddingTables
from sparrow.kernels.row_index import TOLD
from sparrow.trained.run import Run


def in_time(loader: Loader, tables: Sequence[EmbeddingTables], run: Run, dataset: Dataset) -> Loader:
    """Returns the loader, whose batches have their time if tables ask for it.

    Args:
        loader: of the batches.
        tables: the model's.
        run: its settings.
        dataset: its log.

    Raises:
        UserError: when they would not come in the order of time.
    """
    policies = [spec.addressing.traits.policy for of_features in tables for spec in of_features.specs]
    if not any(policy is not None and policy.clock == "time" for policy in policies):
        return loader
    wrong = {
        "the log has no column of kind time": dataset.schema.role("time") is None,
        "data.shuffle mixes the order": bool(run.data.shuffle),
        "with loop.epochs it begins again": run.loop.epochs > 1,
        "the log is clustered by session": dataset.schema.cluster is not None,
    }
    for reason, holds in wrong.items():
        if holds:
            raise UserError(f"tables.addressing.clock: time has to go on, but {reason}; choose clock examples")
    loader.with_time()
    return loader


class Turnover:
    """The tables of all ranks whose rows come and go. Ids are counted as `row_index.TOLD` says.

    Args:
        world: the ranks.
        tables: the model's.
    """

    def __init__(self, world: World, tables: Sequence[EmbeddingTables]) -> None:
        self._world = world
        every = [c for of_features in tables for spec in of_features.specs for c in spec.components]
        self._components = [c for c in every if c.policy]  # the same on all ranks, in one order
        numbers = {c.name: number for number, c in enumerate(self._components)}
        self._records = [
            (numbers[record.component.name], of_features, record)
            for of_features in tables
            for record in of_features.all_records()
            if record.component.policy and record.columns[0] == 0  # parts of columns do the same
        ]
        self._before_CT = torch.zeros(len(numbers), len(TOLD), dtype=torch.int64)  # of the run so far
        self._line_CT = self._before_CT.clone()  # and at the last line of the run log
        self._said: set[str] = set()

    def line(self) -> dict[str, float]:
        """Returns the share of lookups that found a row of their id's own, and moves, since the last such line."""
        if not self._components:
            return {}
        counts_CT = self._counts()
        found = dict(zip(TOLD, (counts_CT - self._line_CT).sum(0).tolist(), strict=True))
        self._line_CT = counts_CT
        share = {"live_rate": found["live"] / found["looked_up"]} if found["looked_up"] else {}
        return share | {name: found[name] for name in ("admitted", "evicted", "expired")}

    def crowded(self) -> list[str]:
        """Returns a line, once, for each table with ids that found all rows in use by batches that had not learnt."""
        if not self._components:
            return []
        counts = self._counts()[:, TOLD.index("crowded")].tolist()
        new = [(c, n) for c, n in zip(self._components, counts, strict=True) if n and c.name not in self._said]
        self._said |= {c.name for c, _ in new}
        return [
            f"table {c.name!r}: {n:,} ids found no row, since the batches of a step have more ids of a bucket than it "
            "has rows; raise tables.addressing.rows or bucket, or lower data.batch_size or loop.accumulate"
            for c, n in new
        ]

    def results(self) -> dict[str, dict[str, float]]:
        """Returns, table by table, how many rows there are for ids and have one, how old these are, and the counts.

        The age of a row is how long it was not used, on the table's clock; it is the mean of all rows.
        """
        held_C2 = torch.zeros(len(self._components), 2, dtype=torch.float64)  # rows, sum of their ages
        for number, of_features, record in self._records:
            index = record.index
            mine_R = index.ids_R > 0
            now = of_features.components.passed.by(index.policy)
            ages = (now - index.times_R[mine_R]).sum()
            held_C2[number] += torch.stack([mine_R.sum(), ages]).double()
        held_C2 = self._world.all_sum("ages of rows", held_C2)
        found = {}
        for component, (rows, ages), counts in zip(
            self._components, held_C2.tolist(), self._counts().tolist(), strict=True
        ):
            told = dict(zip(TOLD, counts, strict=True))
            assert component.policy is not None
            age = ages / rows if rows else 0.0
            found[component.name] = {"capacity": component.policy.capacity, "rows": int(rows), "age": age, **told}
        return found

    def state(self) -> dict[str, Tensor]:
        """Returns the counts, for a checkpoint."""
        return {"ids": self._counts(), "ids at the last line": self._line_CT} if self._components else {}

    def load(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint."""
        if self._components:
            state = saved.part("progressive")
            self._before_CT, self._line_CT = state["ids"], state["ids at the last line"]

    def _counts(self) -> Tensor:
        """Returns what happened to the ids of each table on all ranks: int64 [C, T]."""
        mine_CT = torch.zeros_like(self._before_CT)
        for number, _, record in self._records:
            mine_CT[number] += torch.tensor([record.told[name] for name in TOLD])
        return self._before_CT + self._world.all_sum("ids that came and went", mine_CT)
