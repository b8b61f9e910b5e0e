"""Which tables of a run are in memory, which on an SSD, and how many bytes of memory each gets for its frames.

For every table the time of a batch is predicted for memory and for frames of many sizes, from its miss-ratio curve and
from what the disk does. Of each table one of these is chosen, so that all fit into memory and the times have the least
sum. MTrainS (arXiv 2305.01515, section 5) places tables by bandwidth and capacity too; it has the slowest tier as fast
as possible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparrow.analysis.smaller.budget import in_units
from sparrow.analysis.smaller.knapsack import choose, smallest
from sparrow.core.config import to_dict, write_toml
from sparrow.core.errors import UserError
from sparrow.core.files import write_text
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings.spec import Tier
from sparrow.sharding import tiering
from sparrow.sharding.plan import read
from sparrow.sharding.tiering import Cost, Device, Use
from sparrow.trained.run import Run
from sparrow.training import preflight, reuse

SMALLEST = Tier(name="ssd", bytes=1)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One table in its place.

    Args:
        uses: of its components.
        cost: what it costs where it is.
    """

    uses: tuple[Use, ...]
    cost: Cost

    @property
    def rows(self) -> int:
        """Of all components."""
        return sum(use.component.rows for use in self.uses)

    @property
    def bytes_table(self) -> int:
        """Of all row records."""
        return sum(use.component.rows * use.component.bytes_row for use in self.uses)

    @property
    def lookups(self) -> float:
        """Of a batch."""
        return sum(use.lookups for use in self.uses)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All tables in their places.

    Args:
        tables: by name, in the order of the model.
        device: what was assumed of the disk.
        batch_size: examples of a batch.
        bytes_beside: what the run needs of memory beside the rows of tables.
        bytes_memory: what it may have.
    """

    tables: dict[str, Placed]
    device: Device
    batch_size: int
    bytes_beside: int
    bytes_memory: int

    @property
    def bytes_tables(self) -> int:
        """Of memory, of all tables."""
        return sum(table.cost.bytes for table in self.tables.values())

    @property
    def ms_disk(self) -> float:
        """Of each batch, of all tables, which share a disk."""
        return sum(table.cost.ms_disk for table in self.tables.values())

    @property
    def examples_per_s(self) -> float:
        """What tables allow at most: the disk works beside the processor. Infinity where nothing is looked up."""
        ms = max(self.ms_disk, sum(table.cost.ms_processor for table in self.tables.values()))
        return self.batch_size / ms * 1e3 if ms else float("inf")

    def save(self, path: Path, run: Run) -> None:
        """Write a plan file, with the layouts of the run's plan."""
        plan = dataclasses.replace(read(run.sharding.plan), tiers={n: t.cost.tier for n, t in self.tables.items()})
        header = f"Made by sparrow plan, for {in_units(self.bytes_memory)} of memory."
        write_text(path, write_toml(to_dict(plan), header=header))


def place(
    run: Run,
    dataset: Dataset,
    *,
    memory: int,
    device: Device | None = None,
    examples: int = reuse.EXAMPLES,
    told: Progress = reuse.silent,
) -> Placement:
    """Returns the placement with the least predicted time.

    Args:
        run: its settings. Its tables may go to disk only if `ssd` is set.
        dataset: the prepared log.
        memory: bytes that the run may have.
        device: what the disk does; None measures it.
        examples: how many are read, at most, to learn how tables are used.
        told: hears how it goes on.

    Raises:
        UserError: when memory is too small, or the disk cannot be measured.
    """
    run = preflight.resolved(run, dataset)
    if torch.device(run.device).type != "cpu":
        raise UserError(f"device: {run.device!r}, and only memory of the host is divided; use --device cpu")
    beside = _beside(run, dataset)  # before anything else takes memory
    if device is None:
        device = Device() if run.ssd is None else tiering.probed(Path(run.ssd))
    uses = reuse.uses(run, dataset, examples, told)
    options = {name: options_of(of, device, run.ssd is not None) for name, of in uses.items()}
    _check(options, memory, beside, run)
    chosen = divide(options, memory - beside)
    return Placement(
        tables={n: Placed(uses=tuple(uses[n]), cost=cost) for n, cost in chosen.items()},
        device=device,
        batch_size=run.data.batch_size,
        bytes_beside=beside,
        bytes_memory=memory,
    )


def divide(options: Mapping[str, Sequence[Cost]], budget: int) -> dict[str, Cost]:
    """Returns the option of each table so that all times have the least sum. It is exact, see `choose`.

    Args:
        options: table -> what it costs in each of its places.
        budget: the most bytes of all together.

    Raises:
        UserError: when no choice fits.
    """
    numbers = choose([[(cost.bytes, cost.ms) for cost in costs] for costs in options.values()], budget)
    return {name: costs[number] for (name, costs), number in zip(options.items(), numbers, strict=True)}


def _check(options: Mapping[str, Sequence[Cost]], memory: int, beside: int, run: Run) -> None:
    """Check that the smallest places of all tables fit."""
    least = smallest([[(cost.bytes, cost.ms) for cost in costs] for costs in options.values()])
    if least + beside <= memory:
        return
    remedy = f"give --memory {-(-(least + beside) // 1_000_000)}MB, or lower data.batch_size"
    if run.ssd is None:
        remedy = f"name a folder on an SSD with --ssd, or {remedy}"
    raise UserError(
        f"--memory: {in_units(memory)} are too few; tables need {in_units(least)} at least, and the rest of the run "
        f"{in_units(beside)}; {remedy}"
    )


def options_of(uses: Sequence[Use], device: Device, may_leave: bool) -> list[Cost]:
    """Returns what a table costs in memory, and on an SSD with frames of many sizes."""
    tiers = [Tier()]
    if may_leave:
        tiers += [Tier(name="ssd", bytes=size) for size in tiering.sizes(uses)]
    return [tiering.cost(uses, tier, device) for tier in tiers]


def _beside(run: Run, dataset: Dataset) -> int:
    """Returns the bytes of memory that a run needs beside the rows of tables that may leave memory."""
    rows = {name: table.rows or 0 for name, table in dataset.schema.encodings.items()}
    specs = [spec for of in reuse.tables_for(run, dataset) for spec in of.specs if reuse.may_leave(spec)]
    small = run.tables.placed({spec.name: SMALLEST for spec in specs}, rows)  # so that what a step needs is measured
    needs = preflight.estimate(dataclasses.replace(run, tables=small), dataset)
    parts = [dataclasses.replace(part, tier=SMALLEST) for spec in specs for part in spec.components]
    return needs.bytes_host - sum(part.bytes_of(part.rows, part.dim) for part in parts)
