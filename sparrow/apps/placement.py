"""Which tables of a run are in memory, which on an SSD, and how many bytes of memory each gets for
its frames.

For every table the time of a batch is predicted for memory and for frames of many sizes, from its
miss-ratio curve and from what the disk does. Of each table one of these is chosen, so that all fit
into memory and the times have the least sum. MTrainS (arXiv 2305.01515, section 5) places tables by
bandwidth and capacity too; it has the slowest tier as fast as possible.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparrow.apps.fewer.knapsack import choose, smallest
from sparrow.apps.smaller.budget import in_units
from sparrow.core.config import to_dict, write_toml
from sparrow.core.errors import UserError
from sparrow.core.files import write_text
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings.sizes import memory_bytes
from sparrow.embeddings.spec import Component, TableSpec, Tier, in_memory
from sparrow.extensions.tiers import reuse, ssd, tiering
from sparrow.extensions.tiers.disk import bytes_of_kept_blocks, bytes_of_saving
from sparrow.extensions.tiers.settings import Config
from sparrow.extensions.tiers.tiering import Cost, Device, Use
from sparrow.sharding.plan import Grid, read
from sparrow.trained.run import Run
from sparrow.training import preflight

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
    def may_leave(self) -> bool:
        """Whether its rows can be elsewhere than in memory."""
        return all(use.component.policy is None for use in self.uses)

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
        tiers = {name: table.cost.tier for name, table in self.tables.items() if table.may_leave}
        plan = dataclasses.replace(read(run.sharding.plan), tiers=tiers)
        header = f"Made by sparrow plan, for {in_units(self.bytes_memory)} of memory."
        write_text(path, write_toml(to_dict(plan), header=header))


def place(
    run: Run,
    dataset: Dataset,
    *,
    memory: int,
    device: Device | None = None,
    examples: int = reuse.EXAMPLES,
    progress: Progress = reuse.silent,
    ranks: int = 1,
) -> Placement:
    """Returns the placement with the least predicted time of one process.

    Args:
        run: its settings. Its tables may go to disk only if `tiers.folder` is set.
        dataset: the prepared log.
        memory: bytes that the run may have.
        device: what the disk does; None measures it.
        examples: how many are read, at most, to learn how tables are used.
        progress: shows how far it is.
        ranks: how many, for the memory that each of them needs with tables in these places.

    Raises:
        UserError: when memory is too small, the disk cannot be measured, or the run's plan is not
            for so many ranks.
    """
    if torch.device(run.device).type != "cpu":
        raise UserError(
            f"device: {run.device!r}, and only memory of the host is divided; use --device cpu"
        )
    run = preflight.resolved(run, dataset)
    grid = _grid(run, ranks)
    all_tables = reuse.tables_for(run, dataset)
    specs = list(itertools.chain.from_iterable(tables.specs for tables in all_tables))
    small = reuse.placed(run, dataset, _small(specs))
    needs = preflight.estimate(small, dataset)  # before anything else takes memory
    saving = _saving(run, specs, needs)

    def needed(costs: Mapping[str, Cost]) -> int:
        """Returns the bytes of memory of tables in their places, and of checkpoints, which may be
        of a copy.
        """
        tables = (1 + run.checkpoint.background) * sum(cost.bytes for cost in costs.values())
        return tables + saving({name: cost.tier for name, cost in costs.items()})

    rest, least = _needed(run, specs, needs, saving)
    _check(least, memory, rest, run)  # before anything is read
    rank_needs = needs
    if ranks > 1:
        rank_needs = preflight.estimate(small, dataset, ranks, grid.local_size)
    saving_rank = _saving(run, specs, rank_needs)
    if device is None:
        folder = run.settings_of(Config).folder
        device = Device() if folder is None else tiering.probe_disk(Path(folder))
    uses = reuse.uses(run, dataset, examples, progress)
    can_leave = {spec.name: _has_folder(run) and reuse.may_leave(spec) for spec in specs}
    options = {
        name: options_of(table_uses, device, can_leave[name]) for name, table_uses in uses.items()
    }
    all_in_memory = {name: costs[0] for name, costs in options.items()}
    fewest = min(_smallest(options), all_in_memory, key=needed)
    _check(needed(fewest), memory, rest, run)
    chosen = _divide_all(options, memory - rest, needed, fewest)
    tiers = {name: cost.tier for name, cost in chosen.items()}
    placed = [dataclasses.replace(spec, tier=tiers.get(spec.name, spec.tier)) for spec in specs]
    return Placement(
        tables={n: Placed(uses=tuple(uses[n]), cost=cost) for n, cost in chosen.items()},
        device=device,
        batch_size=run.data.batch_size,
        bytes_beside=rest + needed(chosen) - sum(cost.bytes for cost in chosen.values()),
        bytes_memory=memory,
        ranks=tuple(preflight.bytes_of_ranks(run, placed, grid)) if ranks > 1 else (),
        bytes_beside_rank=(
            _rest_of_rank(rank_needs, specs, saving_rank) + saving_rank(tiers) if ranks > 1 else 0
        ),
    )


def _smallest(options: Mapping[str, Sequence[Cost]]) -> dict[str, Cost]:
    """Returns for each table the place that takes the fewest bytes, the quickest of several."""
    return {
        name: min(costs, key=lambda cost: (cost.bytes, cost.ms)) for name, costs in options.items()
    }


def _grid(run: Run, ranks: int) -> Grid:
    per_host = run.sharding.ranks_per_host or ranks
    if ranks % per_host:
        raise UserError(
            f"ranks: {ranks} are not whole hosts of sharding.ranks_per_host {per_host}; change one"
            " of them"
        )
    return Grid(ranks // per_host, per_host)


def divide(options: Mapping[str, Sequence[Cost]], budget: int) -> dict[str, Cost]:
    """Returns the option of each table so that all times have the least sum. It is exact, see
    `choose`.

    Args:
        options: table -> what it costs in each of its places.
        budget: the most bytes of all together.

    Raises:
        UserError: when no choice fits.
    """
    numbers = choose(
        [[(cost.bytes, cost.ms) for cost in costs] for costs in options.values()], budget
    )
    return {
        name: costs[number] for (name, costs), number in zip(options.items(), numbers, strict=True)
    }


def _divide_all(
    options: Mapping[str, Sequence[Cost]],
    budget: int,
    needed: Callable[[Mapping[str, Cost]], int],
    fewest: Mapping[str, Cost],
) -> Mapping[str, Cost]:
    """Returns the choice of `divide` that leaves enough for checkpoints.

    How much these take depends on the choice. So it is found by trying, to a thousandth of the
    budget.

    Args:
        options: table -> what it costs in each of its places.
        budget: the most bytes of tables and checkpoints.
        needed: a choice -> the bytes of both.
        fewest: a choice that fits.
    """
    low = 0
    high = budget - smallest(
        [[(cost.bytes, cost.ms) for cost in costs] for costs in options.values()]
    )
    left = 0
    chosen = fewest
    while high - low > max(budget // 1000, 1):
        tried = divide(options, budget - left)
        if needed(tried) <= budget:
            high = left
            chosen = tried
        else:
            low = left
        left = (low + high) // 2
    return chosen


def _has_folder(run: Run) -> bool:
    return run.settings_of(Config).folder is not None


def _check(least: int, memory: int, rest: int, run: Run) -> None:
    """Check that tables in their smallest places, and their checkpoints, fit. least: the bytes of
    both.
    """
    if least + rest <= memory:
        return
    remedy = f"give --memory {-(-(least + rest) // 1_000_000)}MB or more, or lower data.batch_size"
    if not _has_folder(run):
        remedy = f"name a folder on an SSD with --tiers.folder, or {remedy}"
    raise UserError(
        f"--memory: {in_units(memory)} are too few; tables and checkpoints need {in_units(least)}"
        f" at least, and the rest of the run {in_units(rest)}; {remedy}"
    )


def options_of(uses: Sequence[Use], device: Device, may_leave: bool) -> list[Cost]:
    """Returns the costs of a table in memory, and on an SSD with frames of many sizes."""
    tiers: list[Tier] = [in_memory()]
    if may_leave:
        tiers += [ssd.Config(bytes=size) for size in tiering.sizes(uses)]
    return [tiering.cost(uses, tier, device) for tier in tiers]


Saving = Callable[[Mapping[str, Tier]], int]
"""Table -> its place, to the bytes of memory that checkpoints take beyond what is used in turn with
them.
"""


def _saving(run: Run, specs: Sequence[TableSpec], needs: preflight.Needs) -> Saving:
    """Returns how memory for checkpoints depends on places. needs: with the tables in the places of
    `_small`.
    """

    def components(tiers: Mapping[str, Tier]) -> list[Component]:
        placed = [dataclasses.replace(spec, tier=tiers.get(spec.name, spec.tier)) for spec in specs]
        return [part for spec in placed for part in spec.components]

    largest_turn = max(size for part, size in needs.turns.items() if part != "a checkpoint")
    copies = needs.turns["a checkpoint"] - bytes_of_saving(components(_small(specs)))

    def saving(tiers: Mapping[str, Tier]) -> int:
        parts = components(tiers)
        return bytes_of_kept_blocks(parts, run.checkpoint.keep) + max(
            copies + bytes_of_saving(parts) - largest_turn, 0
        )

    return saving


def _needed(
    run: Run, specs: Sequence[TableSpec], needs: preflight.Needs, saving: Saving
) -> tuple[int, int]:
    """Returns the bytes of memory that a run needs beside its tables, and the least that these may
    have.

    The latter are with what checkpoints take for them.

    On an SSD a table has frames for all batches under way. How many those are nobody knows before
    they are read.
    """
    copies = 1 + run.checkpoint.background

    def sizes(tiers: Mapping[str, Tier]) -> list[int]:
        placed = [
            dataclasses.replace(spec, tier=tiers.get(spec.name, in_memory())) for spec in specs
        ]
        return [
            copies * memory_bytes(part, part.rows, part.dim)
            for spec in placed
            for part in spec.components
        ]

    on_ssd = sizes(_small(specs))
    held = sizes({})
    checkpoints = saving(_small(specs))
    least = sum(held)
    if _has_folder(run):
        least = min(least, sum(map(min, on_ssd, held)) + checkpoints)
    return needs.bytes_host - sum(on_ssd) - checkpoints, least


def _rest_of_rank(needs: preflight.Needs, specs: Sequence[TableSpec], saving: Saving) -> int:
    """Returns the bytes of memory that a rank needs beside its tables and their checkpoints."""
    return needs.bytes_host - needs.host["tables"] - saving(_small(specs))


def _small(specs: Sequence[TableSpec]) -> dict[str, Tier]:
    """Returns the smallest place of each table that may leave memory, so that any machine can
    measure a step.
    """
    return {spec.name: SMALLEST for spec in specs if reuse.may_leave(spec)}
