"""What the command line prints: bars, tables, one line for an event."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table

from sparrow.core.progress import Progress

err = Console(stderr=True, highlight=False)
# files get tables that are not cut
out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)

SLIM = SIMPLE  # for tables of many columns
EVERY = 10.0  # seconds between two lines of progress, where no bar can be drawn


def notes(texts: Iterable[str]) -> None:
    """Print notes for a person, a line each."""
    for text in texts:
        out.print(f"note: {text}", markup=False, soft_wrap=True)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Gives a bar to work that reports (what, done, total)."""
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    about = TextColumn("{task.description}")
    with Bar(about, *columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        tasks: dict[str, Any] = {}
        last_print = time.monotonic()

        def report(label: str, count: int, total: int) -> None:
            nonlocal last_print
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total or None)
            bar.update(tasks[label], completed=count, total=total or None)
            if not err.is_terminal and time.monotonic() - last_print > EVERY:
                last_print = time.monotonic()
                err.print(
                    f"{label}: {count:,}" + (f" of {total:,}" if total else ""),
                    markup=False,
                    soft_wrap=True,
                )

        yield report


class TrainView:
    """Draws a training run from its events."""

    def __init__(self) -> None:
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self.bar = Bar(*columns, console=err, transient=True, disable=not err.is_terminal)
        self.task: Any = None
        self.labels: list[str] = []
        self.began = self.printed_at = time.monotonic()

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        """The trainer's listener."""
        from sparrow.trained.labels import split_labels

        if event == "begin":
            self.labels = values["labels"]
            self.bar.start()
            self.task = self.bar.add_task("", total=values["total"], completed=values["step"])
        elif event == "progress":
            self._progress(values)
        elif event == "evaluation":
            for name, metrics in split_labels(self.labels, values):
                text = f"step {values['step']}: {name} {numbers(metrics)}"
                err.print(text, markup=False, soft_wrap=True)
        elif event == "note":
            err.print(values["text"], markup=False, soft_wrap=True)

    def _progress(self, values: dict[str, Any]) -> None:
        from sparrow.trained.labels import first_label_suffix

        text = f"{values['examples_per_s']:,.0f} examples/s"
        if "ne" in values:
            text += f"  NE{first_label_suffix(self.labels)} {values['ne']:.4f}"
        if "hit_rate" in values:
            text += f"  in caches {values['hit_rate']:.1%}"
        if "live_rate" in values:
            text += f"  ids with rows {values['live_rate']:.1%}"
        self.bar.update(self.task, completed=values["step"], description=text)
        if not err.is_terminal and time.monotonic() - self.printed_at > EVERY:
            self.printed_at = time.monotonic()
            seconds_a_step = (time.monotonic() - self.began) / values["step"]
            left = (values["total"] - values["step"]) * seconds_a_step
            err.print(f"step {values['step']}/{values['total']}: {text}  {left:,.0f} s to go")


def numbers(values: Mapping[str, Any]) -> str:
    """Returns the metrics that are there as text, such as `auc 0.7512  ne 0.9012`."""
    from sparrow.metrics import METRICS  # it needs torch, for which preparing a log should not wait

    return "  ".join(f"{name} {values[name]:.4f}" for name in METRICS if name in values)


def metrics_table(rows: Sequence[tuple[str, Mapping[str, Any]]], title: str) -> Table:
    """Returns a table of named rows of metrics. Columns that no row has are left out. A dash is
    undefined.
    """
    from sparrow.metrics import METRICS

    names = [name for name in METRICS if any(name in values for _, values in rows)]
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("examples", *names):
        table.add_column(name, justify="right")
    for label, values in rows:
        cells = ["" if n not in values else figure(values[n]) for n in names]
        table.add_row(escape(label), f"{values['examples']:,.0f}", *cells)
    return table


def figure(value: float) -> str:
    """Returns a metric with four digits. A dash is undefined."""
    return "-" if math.isnan(value) else f"{value:.4f}"
