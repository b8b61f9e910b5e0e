"""`sparrow train --profile`: where the time of steps goes."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from sparrow.cli import _show
from sparrow.training import profiling


def show(run_dir: Path) -> None:
    """Print where the time of a profiled run's steps went."""
    profile = profiling.read(run_dir)
    if profile is None:
        _show.out.print(f"no profile: the run has fewer than {profiling.WARM_STEPS + 1} steps")
        return
    for title, rows in (("by part", profile["parts"]), ("by kind of work", profile["kinds"])):
        table = Table(
            title=f"time of a step {title}, of {profile['steps']} steps", title_justify="left"
        )
        table.add_column("")
        for name in ("ms per step", "share"):
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(row["part"], f"{row['ms_per_step']:.2f}", f"{row['share']:.1%}")
        _show.out.print(table)
    _show.out.print(
        f"{run_dir}/trace.json.gz: open it in Perfetto (ui.perfetto.dev) or chrome://tracing",
        soft_wrap=True,
    )
