"""Plan which tables are in memory and which on an SSD, and what they cost there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from sparrow.cli._parse import overrides, parse
from sparrow.cli.tables import parsed
from sparrow.core.errors import UserError, require

if TYPE_CHECKING:
    from sparrow.apps.placement import Placed, Placement
    from sparrow.trained.run import Run


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Plan which tables are in memory and which on an SSD. Any setting of a run can be set:
    --data.batch_size 4096.

    The beginning of the training part says how often rows are used again. So it is known how many
    rows a cache of any size would lack, and memory is divided so that the disk has the least to do.
    --tiers.folder names a folder on an SSD. Without one all tables stay in memory.
    """

    run: tyro.conf.Positional[Path]
    """A run file, or a prepared log, for a run with default settings."""
    memory: str | None = None
    """Bytes that the training may have, such as 12GiB; by default what is free."""
    reads: float | None = None
    """Random reads/s of 4 KiB that the SSD does; by default it is measured, which takes some
    seconds.
    """
    examples: int = 1_000_000
    """Read at most so many of the training part."""
    ranks: int = 1
    """Say what memory each rank has of a job of so many. Memory is divided for one process."""
    out: Path | None = None
    """The plan file, RUN_DIR.plan.toml by default."""


def main(arguments: Sequence[str]) -> None:
    """`sparrow plan PREPARED|RUN.toml --memory 12GiB --tiers.folder DIR [--any.leaf value]`."""
    known, rest = parse(Arguments, arguments, "plan", unknown=True)
    require(least=1, examples=known.examples, ranks=known.ranks)
    require(above=0, reads=known.reads)
    from sparrow import data
    from sparrow.apps.placement import place
    from sparrow.cli import _show
    from sparrow.core.memory import available_bytes, resident_bytes
    from sparrow.extensions.tiers.settings import Config
    from sparrow.extensions.tiers.tiering import Device
    from sparrow.trained.run import Run
    from sparrow.training.defaults import defaults

    settings = overrides(rest)
    run = (
        Run.of(known.run, defaults(known.run, settings))
        if known.run.is_dir()
        else Run.load(known.run, settings)
    )
    out = known.out or Path(f"{run.run_dir}.plan.toml")
    if out.suffix != ".toml":
        raise UserError(f"--out {out}: not a name for a plan file; end it in .toml")
    free = available_bytes()
    if known.memory is None and free is None:
        raise UserError(
            "--memory: this system does not tell how much is free; give it, such as --memory 12GiB"
        )
    memory = parsed(known.memory, "--memory") if known.memory else int(free or 0) + resident_bytes()
    device = None if known.reads is None else Device(reads_per_s=known.reads)
    dataset = data.open(run.data.path)
    with _show.progress_bar() as progress:
        placement = place(
            run,
            dataset,
            memory=memory,
            device=device,
            examples=known.examples,
            progress=progress,
            ranks=known.ranks,
        )
    show_placement(placement, run)
    out.parent.mkdir(parents=True, exist_ok=True)
    placement.save(out, run)
    folder = run.settings_of(Config).folder
    where = "" if folder is None else f" --tiers.folder {folder}"
    _show.out.print(
        f"{out}: `sparrow train {known.run} --sharding.plan {out}{where}` trains so", soft_wrap=True
    )


def show_placement(placement: Placement, run: Run) -> None:
    """Print what each table costs where it is put, and what memory and disk allow."""
    from sparrow.apps.smaller.budget import in_units
    from sparrow.cli import _show
    from sparrow.extensions.tiers.settings import Config

    table = _show.Table(
        title=f"tables of {run.run_dir}, {placement.batch_size:,} examples a batch",
        title_justify="left",
    )
    for name in (
        "table",
        "rows",
        "bytes",
        "lookups",
        "miss, %",
        "tier",
        "in memory",
        "ms",
        "at most/s",
        "bound by",
    ):
        table.add_column(name, justify="left" if name in ("table", "tier", "bound by") else "right")
    for name, placed in placement.tables.items():
        table.add_row(name, *_placed_cells(placed, placement.batch_size))
    _show.out.print(table)
    tables = in_units(placement.bytes_tables)
    others_bytes = in_units(placement.bytes_beside)
    memory = in_units(placement.bytes_memory)
    disk = "no folder is named with --tiers.folder"
    if run.settings_of(Config).folder:
        allows = "no table is there"
        if placement.ms_disk:
            allows = f"{placement.examples_per_s:,.0f} examples/s at most"
        reads = f"{placement.device.reads_per_s:,.0f} reads/s of 4 KiB"
        processor = f"{1e6 * placement.device.processor_s:.1f} us of the processor each"
        disk = f"{reads}, {processor}; {allows}"
    lines = (
        f"memory: {tables} of tables and {others_bytes} beside them, of {memory}",
        f"disk: {disk}",
        (
            "lookups: of an example; miss: of the different rows of a batch; ms: predicted, of a"
            " batch; at most/s: examples that what bounds the table allows"
        ),
    )
    for line in lines:
        _show.out.print(line, markup=False, soft_wrap=True)
    if placement.ranks:
        table = _show.Table(
            title=f"memory of each of {len(placement.ranks)} ranks", title_justify="left"
        )
        for name in ("rank", "tables", "beside them", "together"):
            table.add_column(name, justify="right")
        for rank, size in enumerate(placement.ranks):
            sizes = (size, placement.bytes_beside_rank, size + placement.bytes_beside_rank)
            table.add_row(str(rank), *map(in_units, sizes))
        _show.out.print(table)


def _placed_cells(placed: Placed, batch_size: int) -> list[str]:
    from sparrow.apps.smaller.budget import in_units

    cost = placed.cost
    bound = "processor" if cost.ms_processor >= cost.ms_disk else "disk"
    slower = max(cost.ms_processor, cost.ms_disk)
    return [
        f"{placed.rows:,}",
        in_units(placed.bytes_table),
        f"{placed.lookups / batch_size:,.2f}",
        f"{100 * cost.miss_ratio:.2f}" if cost.tier.is_on else "",
        cost.tier.name,
        in_units(cost.bytes),
        f"{cost.ms:,.3f}",
        f"{batch_size / slower * 1e3:,.0f}" if slower else "",
        bound,
    ]
