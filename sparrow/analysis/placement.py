"""Which tables of a run are in memory, which on an SSD, and how many bytes of memory each gets for its frames.

For every table the time of a batch is predicted for memory and for frames of many sizes, from its miss-ratio curve and
from what the disk does. Of each table one of these is chosen, so that all fit into memory and the times have the least
sum. MTrainS (arXiv 2305.01515, section 5) places tables by bandwidth and capacity too; it has the slowest tier as fast
as possible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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
from sparrow.embeddings.spec import TableSpec, Tier, in_memory
from sparrow.embeddings.tiers import ssd
from sparrow.sharding import tiering
from sparrow.sharding.plan import Grid, read
from sparrow.sharding.tiering import Cost, Device, Use
from sparrow.trained.run import Run
from sparrow.training import preflight, reuse
from sparrow.training.disk import bytes_of_checkpoints

SMALLEST = ssd.Config(bytes=1)


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
        bytes_beside: what the run needs of memory beside the rows of tables, with its checkpoints.
        bytes_memory: what it may have.
        ranks: bytes of memory of tables on each rank, of a job of several.
        bytes_beside_rank: what each of these needs beside them.
    """

    tables: dict[str, Placed]
    device: Device
    batch_size: int
    bytes_beside: int
    bytes_memory: int
    ranks: tuple[int, ...] = ()
    bytes_beside_rank: int = 0

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
        """What tables allow at most, see `tiering.speed`."""
        return tiering.speed([table.cost for table in self.tables.values()], self.batch_size)

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
    ranks: int = 1,
) -> Placement:
    """Returns the placement with the least predicted time of one process.

    Args:
        run: its settings. Its tables may go to disk only if `ssd` is set.
        dataset: the prepared log.
        memory: bytes that the run may have.
        device: what the disk does; None measures it.
        examples: how many are read, at most, to learn how tables are used.
        told: hears how it goes on.
        ranks: of how many it is told what memory each needs, with tables in these places.

    Raises:
        UserError: when memory is too small, the disk cannot be measured, or the run's plan is not for so many ranks.
    """
    if torch.device(run.device).type != "cpu":
        raise UserError(f"device: {run.device!r}, and only memory of the host is divided; use --device cpu")
    run = preflight.resolved(run, dataset)
    grid, specs = _grid(run, ranks), [spec for of in reuse.tables_for(run, dataset) for spec in of.specs]

    def saving(tiers: Mapping[str, Tier]) -> int:
        """Returns the bytes of memory that checkpoints take. tiers: table -> its place."""
        placed = [dataclasses.replace(spec, tier=tiers.get(spec.name, spec.tier)) for spec in specs]
        return bytes_of_checkpoints([part for spec in placed for part in spec.components], run.checkpoint.keep)

    def needed(costs: Mapping[str, Cost]) -> int:
        """Returns the bytes of memory of tables in their places, and of checkpoints, which may be of a copy."""
        tables = (1 + run.checkpoint.background) * sum(one.bytes for one in costs.values())
        return tables + saving({name: one.tier for name, one in costs.items()})

    beside, least = _needed(run, dataset, specs, saving)  # before anything else takes memory
    _check(least, memory, beside, run)  # before anything is read
    beside_rank = _beside_rank(run, dataset, specs, grid, saving) if ranks > 1 else 0
    if device is None:
        device = Device() if run.ssd is None else tiering.probed(Path(run.ssd))
    uses = reuse.uses(run, dataset, examples, told)
    options = {name: options_of(of, device, run.ssd is not None) for name, of in uses.items()}
    smallest_of = {name: min(costs, key=lambda one: (one.bytes, one.ms)) for name, costs in options.items()}
    fewest = min(smallest_of, {name: costs[0] for name, costs in options.items()}, key=needed)  # or all in memory
    _check(needed(fewest), memory, beside, run)
    chosen = _divided(options, memory - beside, needed, fewest)
    tiers = {name: cost.tier for name, cost in chosen.items()}
    placed = [dataclasses.replace(spec, tier=tiers.get(spec.name, spec.tier)) for spec in specs]
    return Placement(
        tables={n: Placed(uses=tuple(uses[n]), cost=cost) for n, cost in chosen.items()},
        device=device,
        batch_size=run.data.batch_size,
        bytes_beside=beside + needed(chosen) - sum(one.bytes for one in chosen.values()),
        bytes_memory=memory,
        ranks=tuple(preflight.held(run, placed, grid)) if ranks > 1 else (),
        bytes_beside_rank=beside_rank + saving(tiers) if ranks > 1 else 0,
    )


def _grid(run: Run, ranks: int) -> Grid:
    per_host = run.sharding.ranks_per_host or ranks
    if ranks % per_host:
        raise UserError(f"ranks: {ranks} are not whole hosts of sharding.ranks_per_host {per_host}; change one of them")
    return Grid(ranks // per_host, per_host)


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


def _divided(
    options: Mapping[str, Sequence[Cost]],
    budget: int,
    needed: Callable[[Mapping[str, Cost]], int],
    fewest: Mapping[str, Cost],
) -> Mapping[str, Cost]:
    """Returns the choice of `divide` that leaves enough for checkpoints.

    How much these take depends on the choice. So it is found by trying, to a thousandth of the budget.

    Args:
        options: table -> what it costs in each of its places.
        budget: the most bytes of tables and checkpoints.
        needed: a choice -> the bytes of both.
        fewest: a choice that fits.
    """
    low, high = 0, budget - smallest([[(cost.bytes, cost.ms) for cost in costs] for costs in options.values()])
    left, chosen = 0, fewest
    while high - low > max(budget // 1000, 1):
        found = divide(options, budget - left)
        if needed(found) <= budget:
            high, chosen = left, found
        else:
            low = left
        left = (low + high) // 2
    return chosen


def _check(least: int, memory: int, beside: int, run: Run) -> None:
    """Check that tables in their smallest places, and their checkpoints, fit. least: the bytes of both."""
    if least + beside <= memory:
        return
    remedy = f"give --memory {-(-(least + beside) // 1_000_000)}MB or more, or lower data.batch_size"
    if run.ssd is None:
        remedy = f"name a folder on an SSD with --ssd, or {remedy}"
    raise UserError(
        f"--memory: {in_units(memory)} are too few; tables and checkpoints need {in_units(least)} at least, and the "
        f"rest of the run {in_units(beside)}; {remedy}"
    )


def options_of(uses: Sequence[Use], device: Device, may_leave: bool) -> list[Cost]:
    """Returns what a table costs in memory, and on an SSD with frames of many sizes."""
    tiers: list[Tier] = [in_memory()]
    if may_leave:
        tiers += [ssd.Config(bytes=size) for size in tiering.sizes(uses)]
    return [tiering.cost(uses, tier, device) for tier in tiers]


def _needed(
    run: Run, dataset: Dataset, specs: Sequence[TableSpec], saving: Callable[[Mapping[str, Tier]], int]
) -> tuple[int, int]:
    """Returns the bytes of memory that a run needs beside tables that may leave it, and the least that these may have.

    The latter are with what checkpoints take for them.

    On an SSD a table has frames for all batches under way. How many those are nobody knows before they are read.
    """
    needs = preflight.estimate(reuse.placed(run, dataset, _small(specs)), dataset)
    parts = [part for spec in specs if reuse.may_leave(spec) for part in spec.components]
    copies = 1 + run.checkpoint.background
    on_ssd, held = (
        [copies * dataclasses.replace(part, tier=tier).bytes_of(part.rows, part.dim) for part in parts]
        for tier in (SMALLEST, in_memory())
    )
    checkpoints = saving(_small(specs))
    least = sum(held) if run.ssd is None else min(sum(held), sum(map(min, on_ssd, held)) + checkpoints)
    return needs.bytes_host - sum(on_ssd) - checkpoints, least


def _beside_rank(
    run: Run,
    dataset: Dataset,
    specs: Sequence[TableSpec],
    grid: Grid,
    saving: Callable[[Mapping[str, Tier]], int],
) -> int:
    """Returns the bytes of memory that a rank needs beside its tables and their checkpoints."""
    needs = preflight.estimate(reuse.placed(run, dataset, _small(specs)), dataset, grid.size, grid.local_size)
    return needs.bytes_host - needs.host["tables"] - saving(_small(specs))


def _small(specs: Sequence[TableSpec]) -> dict[str, Tier]:
    """Returns the smallest place of each table that may leave memory, so that any machine can measure a step."""
    return {spec.name: SMALLEST for spec in specs if reuse.may_leave(spec)}
