"""What the command line prints: bars, tables, one line for an event."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from sparrow.core.progress import Progress

err = Console(stderr=True, highlight=False)
out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)  # files get tables that are not cut

SLIM = SIMPLE  # for tables of many columns
EVERY = 10.0  # seconds between two lines of progress, where no bar can be drawn
METRICS = ("auc", "gauc", "logloss", "ne", "calibration", "ece")


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
        said = time.monotonic()

        def report(what: str, done: int, total: int) -> None:
            nonlocal said
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total or None)
            bar.update(tasks[what], completed=done, total=total or None)
            if not err.is_terminal and time.monotonic() - said > EVERY:
                said = time.monotonic()
                err.print(f"{what}: {done:,}" + (f" of {total:,}" if total else ""), markup=False, soft_wrap=True)

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
        self.began = self.said = time.monotonic()

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        """The trainer's listener."""
        from sparrow.trained.labels import by_label

        if event == "begin":
            self.labels = values["labels"]
            self.bar.start()
            self.task = self.bar.add_task("", total=values["total"], completed=values["step"])
        elif event == "progress":
            self._progress(values)
        elif event == "evaluation":
            for name, one in by_label(self.labels, values):
                err.print(f"step {values['step']}: {name} {numbers(one)}", markup=False, soft_wrap=True)
        elif event == "note":
            err.print(values["text"], markup=False, soft_wrap=True)

    def _progress(self, values: dict[str, Any]) -> None:
        from sparrow.trained.labels import of_first

        text = f"{values['examples_per_s']:,.0f} examples/s"
        if "ne" in values:
            text += f"  NE{of_first(self.labels)} {values['ne']:.4f}"
        if "hit_rate" in values:
            text += f"  in caches {values['hit_rate']:.1%}"
        if "live_rate" in values:
            text += f"  ids with rows {values['live_rate']:.1%}"
        self.bar.update(self.task, completed=values["step"], description=text)
        if not err.is_terminal and time.monotonic() - self.said > EVERY:
            self.said = time.monotonic()
            left = (values["total"] - values["step"]) / values["step"] * (time.monotonic() - self.began)
            err.print(f"step {values['step']}/{values['total']}: {text}  {left:,.0f} s to go")


def calibrated_table(of: Mapping[str, Any]) -> Table:
    """Returns a table of what `calibrate` found on the test part."""
    names = ("ne", "ece", "calibration", "auc")
    title = f"{of['kind']} calibrator of step {of['step']}, fitted to the valid part; on the test part"
    table = Table(title=title, title_justify="left")
    for name in ("", *names):
        table.add_column(name, justify="right" if name else "left")
    for label, sides in of["test"].items():
        for side, values in sides.items():
            table.add_row(f"{label}, {side}", *(f"{values[name]:.4f}" for name in names))
    return table


def calibrated_worse(of: Mapping[str, Any], run_dir: Path) -> Iterator[str]:
    """Yields a note for each label of whose test part the calibrator makes both NE and ECE worse."""
    for label, sides in of["test"].items():
        if all(sides["after"][name] > sides["before"][name] for name in ("ne", "ece")):
            undo = f"`sparrow calibrate {run_dir} none` takes the calibrator away"
            yield f"{label}: NE and ECE of the test part are worse after it; {undo}"


def numbers(values: Mapping[str, Any]) -> str:
    """Returns the metrics that are there as text, such as `auc 0.7512  ne 0.9012`."""
    return "  ".join(f"{name} {values[name]:.4f}" for name in METRICS if name in values)


def metrics_table(rows: Sequence[tuple[str, Mapping[str, Any]]], title: str) -> Table:
    """Returns a table of named rows of metrics. Columns that no row has are left out. A dash is undefined."""
    names = [name for name in METRICS if any(name in values for _, values in rows)]
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("examples", *names):
        table.add_column(name, justify="right")
    for label, values in rows:
        cells = ["" if n not in values else _figure(values[n]) for n in names]
        table.add_row(escape(label), f"{values['examples']:,.0f}", *cells)
    return table


def places_table(rows: Sequence[tuple[str, Mapping[str, Any]]], ks: Sequence[int]) -> Table:
    """Returns a table of how high the positives of groups are placed, with a line for each k of a row that has groups.

    Args:
        rows: a name and what `evaluate` found.
        ks: what it was found for.
    """
    table = Table(title="within groups", title_justify="left")
    for name in ("", "groups", "without a positive", "k", "recall@k", "ndcg@k", "hit rate@k", "mrr"):
        table.add_column(name, justify="right" if name else "left")
    for label, values in rows:
        first = (escape(label), *(f"{values.get(n, 0):,}" for n in ("ranked_groups", "groups_without_positive")))
        for k in sorted(set(ks)) if "mrr" in values else ():
            cells = [_figure(values[f"{name}@{k}"]) for name in ("recall", "ndcg", "hit_rate")]
            table.add_row(*first, str(k), *cells, _figure(values["mrr"]) if first[0] else "")
            first = ("", "", "")
    return table


def _figure(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def folder_table(place: str, manifest: Mapping[str, Any]) -> Table:
    """Returns a table of what a model folder has: files and bytes of its parts.

    Args:
        place: where it is.
        manifest: its own.
    """
    number = manifest.get("number")  # of a delta
    kind = f"delta number {number} of {manifest['model']}" if number else manifest["model"]
    table = Table(title=f"{place}: {kind}, step {manifest['step']}", title_justify="left")
    for name in ("part", "files", "bytes"):
        table.add_column(name, justify="left" if name == "part" else "right")
    parts: dict[str, list[int]] = {}
    for name, of in manifest["files"].items():
        parts.setdefault(name.partition("/")[0], []).append(of["bytes"])
    for name, sizes in parts.items():
        table.add_row(name, f"{len(sizes):,}", f"{sum(sizes):,}")
    table.add_section()
    table.add_row("all", f"{sum(map(len, parts.values())):,}", f"{sum(map(sum, parts.values())):,}")
    return table
