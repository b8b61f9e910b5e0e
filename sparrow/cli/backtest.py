"""Train on the past and test on the next window of time, several times."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro

from sparrow.cli._flags import columns
from sparrow.cli._parse import parse


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train on the past and test on the next window of time, several times.

    The last rows in time are divided into windows. For each, a model is trained on what lies before
    it and tested on it. Any setting of a run can be set, as for `sparrow train`: --model.dim 32.
    """

    log: tyro.conf.Positional[str]
    """A raw log as `sparrow prepare` reads it: a file, a glob or a folder. It needs a time
    column.
    """
    out: Path
    """A folder for the prepared logs and runs of all windows. The same command goes on where it was
    stopped.
    """
    windows: int = 4
    """How many windows, of equally many rows."""
    share: float = 0.5
    """Share of the rows, the last in time, that the windows divide."""
    valid: float = 0.1
    """Share of the rows, right before each window, for validation."""
    schema: Path | None = None
    """A schema file to obey; what was fitted in it is fitted anew for each window."""
    label: str | None = None
    """The column to predict, when it cannot be guessed; of several, such as click,like, the first
    is judged.
    """
    impressions: str | None = None
    """The column that says how many showings a row stands for, of which --label counts some."""
    outcomes: str | None = None
    """Columns that are known only after the label, such as watch_time,share: they are left out."""
    run: Path | None = None
    """A run file, such as recipes/demo.toml, with settings of the runs; its run_dir and log do not
    count.
    """


def main(arguments: Sequence[str]) -> int:
    """`sparrow backtest LOG --out FOLDER [--windows 4] [--any.leaf value]`."""
    known, rest = parse(Arguments, arguments, "backtest", unknown=True)
    from sparrow.apps.backtest import Plan, backtest, draw, mean_and_spread, shown_metrics
    from sparrow.cli import _show
    from sparrow.cli._parse import overrides
    from sparrow.core.config import flatten, read_toml
    from sparrow.core.extensions import with_names_of_today
    from sparrow.features.schema import Schema

    settings = {
        "log.tensorboard": False,
        **(with_names_of_today(flatten(read_toml(known.run))) if known.run else {}),
        **with_names_of_today(overrides(rest)),
    }
    windows = backtest(
        [known.log],
        known.out,
        Plan(windows=known.windows, share=known.share, valid=known.valid),
        schema=Schema.load(known.schema) if known.schema else None,
        label=columns(known.label),
        impressions=known.impressions,
        outcomes=columns(known.outcomes),
        run=settings,
        announce=lambda text: _show.err.print(text, markup=False, soft_wrap=True),
    )
    rows = [
        (
            f"window {i}, trained on {window.rows['train']:,} rows",
            {"examples": window.rows["test"], **window.values},
        )
        for i, window in enumerate(windows, 1)
    ]
    test_rows = sum(window.rows["test"] for window in windows)
    for name, values in zip(("mean", "standard deviation"), mean_and_spread(windows), strict=True):
        rows.append((f"{name} of the windows", {"examples": test_rows, **values}))
    _show.out.print(
        _show.metrics_table(rows, f"{known.log}: each window tested by a model of what came before")
    )
    if draw(windows, known.out / "backtest.png"):
        names = " and ".join(metric.label for metric in shown_metrics(windows))
        _show.out.print(
            f"{known.out}/backtest.png: {names} of the windows, ± 2 standard errors", soft_wrap=True
        )
    return 0
