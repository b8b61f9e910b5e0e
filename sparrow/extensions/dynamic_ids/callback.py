"""What a run says of tables whose rows come and go: who got rows, who lost them, and how many
lookups found one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparrow.checkpoint import Checkpoint
from sparrow.core import UserError
from sparrow.data.batches.dataset import Dataset
from sparrow.distributed import World
from sparrow.embeddings import EmbeddingTables, RowRecords
from sparrow.kernels.row_index import COUNT_NAMES
from sparrow.trained.run import Run
from sparrow.training.callbacks import Callback, Job


class Turnover(Callback):
    """The tables of all ranks whose rows come and go. Ids are counted as `row_index.COUNT_NAMES`
    says.

    Args:
        world: the ranks.
        tables: the model's.
    """

    def __init__(self, world: World, tables: Sequence[EmbeddingTables]) -> None:
        self._world = world
        components = chain.from_iterable(features.components for features in tables)
        # the same on all ranks, in one order
        self._components = [component for component in components if component.policy]
        numbers = {c.name: number for number, c in enumerate(self._components)}
        self._records: list[tuple[int, EmbeddingTables, RowRecords]] = []
        for features in tables:
            for record in features.all_records():
                # parts of columns do the same
                if record.component.policy and record.columns[0] == 0:
                    self._records.append((numbers[record.component.name], features, record))
        # of the run so far
        self._before_CT = torch.zeros(len(numbers), len(COUNT_NAMES), dtype=torch.int64)
        self._line_CT = self._before_CT.clone()  # and at the last line of the run log
        self._noted: set[str] = set()

    @override
    def log_line(self) -> dict[str, float]:
        """Returns the share of lookups that found a row of their id's own, and moves, since the
        last such line.
        """
        if not self._components:
            return {}
        counts_CT = self._counts()
        sums = dict(zip(COUNT_NAMES, (counts_CT - self._line_CT).sum(0).tolist(), strict=True))
        self._line_CT = counts_CT
        share = {"live_rate": sums["live"] / sums["looked_up"]} if sums["looked_up"] else {}
        return share | {name: sums[name] for name in ("admitted", "evicted", "expired")}

    @override
    def notes(self) -> list[str]:
        """Returns a line, once, for each table with ids that found all rows in use by batches that
        had not learnt.
        """
        if not self._components:
            return []
        counts = self._counts()[:, COUNT_NAMES.index("crowded")].tolist()
        new = [
            (c, n)
            for c, n in zip(self._components, counts, strict=True)
            if n and c.name not in self._noted
        ]
        self._noted |= {c.name for c, _ in new}
        return [
            f"table {c.name!r}: {n:,} ids found no row, since the batches of a step have more ids"
            " of a bucket than it has rows; raise tables.addressing.rows or bucket, or lower"
            " data.batch_size or loop.accumulate"
            for c, n in new
        ]

    @override
    def results(self) -> dict[str, Any]:
        """Returns, table by table, how many rows there are for ids and have one, how old these are,
        and the counts.

        The age of a row is how long it was not used, on the table's clock; it is the mean of all
        rows.
        """
        # rows, sum of their ages
        held_C2 = torch.zeros(len(self._components), 2, dtype=torch.float64)
        for number, features, record in self._records:
            index = record.index
            in_use_R = index.ids_R > 0
            now = features.exchange.parts[0].passed.by(index.policy)
            ages = (now - index.times_R[in_use_R]).sum()
            held_C2[number] += torch.stack([in_use_R.sum(), ages]).double()
        held_C2 = self._world.all_sum("ages of rows", held_C2)
        tables = {}
        for component, (rows, ages), counts in zip(
            self._components, held_C2.tolist(), self._counts().tolist(), strict=True
        ):
            counts_by_name = dict(zip(COUNT_NAMES, counts, strict=True))
            assert component.policy is not None
            age = ages / rows if rows else 0.0
            tables[component.name] = {
                "capacity": component.policy.capacity,
                "rows": int(rows),
                "age": age,
                **counts_by_name,
            }
        return {"tables": {"ids": tables}}

    @override
    def state_dict(self) -> dict[str, Tensor]:
        """Returns the counts."""
        return (
            {"ids": self._counts(), "ids at the last line": self._line_CT}
            if self._components
            else {}
        )

    @override
    def load(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint."""
        if self._components:
            state = saved.part("progressive")
            self._before_CT = state["ids"]
            self._line_CT = state["ids at the last line"]

    def _counts(self) -> Tensor:
        """Returns what happened to the ids of each table on all ranks: int64 [C, T]."""
        counts_CT = torch.zeros_like(self._before_CT)
        for number, _, record in self._records:
            counts_CT[number] += torch.tensor([record.id_counts[name] for name in COUNT_NAMES])
        return self._before_CT + self._world.all_sum("ids that came and went", counts_CT)


def callback(job: Job) -> Turnover:
    """Returns the callback of a run, whose batches have their time if tables ask for it.

    Raises:
        UserError: when they would not come in the order of time.
    """
    specs = chain.from_iterable(features.specs for features in job.tables)
    policies = [spec.addressing.traits.policy for spec in specs]
    if any(policy is not None and policy.clock == "time" for policy in policies):
        require_time_order(job.run, job.dataset)
        job.feed.with_time()
    return Turnover(job.ranks.world, job.tables)


def require_time_order(run: Run, dataset: Dataset) -> None:
    """Check that batches come in the order of time.

    Raises:
        UserError: when they do not.
    """
    wrong = {
        "the log has no column of kind time": dataset.schema.role("time") is None,
        "data.shuffle mixes the order": bool(run.data.shuffle),
        "with loop.epochs it begins again": run.loop.epochs > 1,
        "the log is clustered by session": dataset.schema.cluster is not None,
    }
    for reason, holds in wrong.items():
        if holds:
            raise UserError(
                f"tables.addressing.clock: time has to go on, but {reason}; choose clock examples"
            )
