"""Does one model, or one way of training, differ from another? Both score the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparrow.analysis import elements, picture
from sparrow.analysis.external_scores import column_scores, file_scores
from sparrow.analysis.scores import Rows, label_number, score_part, unit_numbers
from sparrow.core.comparison import settings_differences
from sparrow.core.errors import UserError
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.metrics import METRICS, Metric, Streaming, metric_of
from sparrow.metrics.intervals import Estimate, mean, t_quantile
from sparrow.metrics.metric import LEAST
from sparrow.trained.log import open_log
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore

LEVEL = 0.95
HEADER = ("", "A", "B", "B - A", "95 % interval", "verdict")
SEEDS = 3  # runs a side, below which nothing is said of other seeds
# settings that do not make two runs different in kind
OWN = ("run_dir", "seed", "threads", "device", "data.path")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A metric of A, of B (means over their runs), B - A with its 95 % interval, and what follows.

    spread_a, spread_b: standard deviations over the runs of a side, NaN for a single one. verdict:
    "B better" or
    "A better" (of a metric that is best near 1 "differs") where the interval does not hold 0 and B
    - A is beyond the metric's floor, "equal" where the whole interval is within the floor, else
    "unclear", or "undefined". With fewer than SEEDS runs on a side it is about these models alone:
    "B better here", "A better here", "differs here", "equal here".
    """

    metric: str
    a: float
    b: float
    spread_a: float
    spread_b: float
    low: float
    high: float
    verdict: str

    @property
    def value(self) -> float:
        """B - A."""
        return self.b - self.a


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """What was compared, how, and how it came out.

    settings: name, value in A, value in B, where they differ.
    """

    names_a: tuple[str, ...]
    names_b: tuple[str, ...]
    split: str
    label: str
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    settings: tuple[tuple[str, str, str], ...]
    rows_a: Rows  # of the first run of each side
    rows_b: Rows


def compare(
    side_a: Sequence[str | Path],
    side_b: Sequence[str | Path],
    *,
    split: str = "test",
    label: str | None = None,
    which: str = "best",
    device: str | None = None,
    data_dir: str | Path | None = None,
    units: str | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Score the same rows with A and B. Returns whether B differs.

    Each side is run directories, or another system's scores: the name of a baseline column of the
    prepared log, or a file with a score for each row of the part (see `file_scores`). At least one
    is a run; its log has the rows.

    With one run a side, the interval is paired: by `units`, else by sessions, or by rows where the
    log has no group column (see `sparrow.metrics.intervals`). It is about these models, as the
    verdict says. With several a side, the spread over a side's runs is added to it (Welch 1947), so
    that it covers new rows and new seeds.

    Args:
        side_a: the runs or scores of side A.
        side_b: those of side B.
        split: the part whose rows are scored.
        label: the name of the label that is judged; by default the first.
        which: the checkpoint, see `restore`.
        device: see `restore`.
        data_dir: the prepared log; by default that of each run, see `restore`.
        units: the column of what is independent of each other, such as the users.
        progress: shows how far it is.

    Raises:
        UserError: for runs whose rows, labels, weights or sessions are not the same, and for scores
            that are not of these rows.
    """
    names = list(dict.fromkeys(map(str, [*side_a, *side_b])))
    scored: dict[str, _Scored] = {}
    score = partial(
        _score_run,
        split=split,
        label=label,
        which=which,
        device=device,
        data_dir=data_dir,
        units=units,
        progress=progress,
    )
    first: _Scored | None = None
    for name in sorted(names, key=lambda name: not Path(name).is_dir()):  # runs come first
        if first is None or Path(name).is_dir():
            scored[name] = score(name)
            first = first or scored[name]
            _check_same(first, scored[name], split)
        else:
            scored[name] = _read_scores(name, first, split)
    sides = [[scored[str(name)] for name in side] for side in (side_a, side_b)]
    estimates = [[scores.rows.estimates() for scores in side] for side in sides]
    differences = []
    has_seeds = _has_seeds(sides)
    for metric in estimates[0][0]:
        if not all(metric in by_metric for side in estimates for by_metric in side):
            continue  # the models of one side measure what it is made of
        estimates_a, estimates_b = ([by_metric[metric] for by_metric in side] for side in estimates)
        differences.append(_difference(metric, estimates_a, estimates_b, has_seeds=has_seeds))
    first_a = sides[0][0]
    first_b = sides[1][0]
    return Comparison(
        names_a=tuple(map(str, side_a)),
        names_b=tuple(map(str, side_b)),
        split=split,
        label=first_a.label,
        differences=tuple(differences),
        notes=tuple(_notes(sides, split, units)),
        settings=tuple(_settings(first_a.run, first_b.run)),
        rows_a=first_a.rows,
        rows_b=first_b.rows,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Scored:
    """Scores with their name and the log that their rows are in. run: None for those of another
    system.

    part_rows: all rows of the part. through: what `Restored.through` says of the part.
    """

    path: str
    part_rows: Rows
    dataset: Dataset
    label: str
    run: Run | None = None
    through: str = ""

    @cached_property
    def rows(self) -> Rows:
        """The rows that have the label."""
        return self.part_rows.known()


def _score_run(
    path: str,
    *,
    split: str,
    label: str | None,
    which: str,
    device: str | None,
    data_dir: str | Path | None,
    units: str | None,
    progress: Progress | None,
) -> _Scored:
    restored = restore(path, which=which, device=device, data_dir=data_dir)
    dataset = open_log(restored)
    number = label_number(restored.schema, label)
    rows = score_part(restored, dataset, split, progress or (lambda *_: None), number)
    return _Scored(
        path=path,
        part_rows=(
            rows if units is None else replace(rows, units_N=unit_numbers(dataset, split, units))
        ),
        dataset=dataset,
        label=restored.schema.labels[number],
        run=restored.run,
        through=restored.through(dataset.fingerprint, split),
    )


def _read_scores(name: str, first: _Scored, split: str) -> _Scored:
    """Read another system's scores of the rows of the first run."""
    if Path(name).is_file():
        schema = first.dataset.schema
        column = schema.columns[first.label]
        counted = None if column.probability else schema.role("impressions")
        scores_N = file_scores(Path(name), first.part_rows, split, first.label, column, counted)
    else:
        scores_N = column_scores(first.dataset, split, name, first.label)
    return _Scored(
        path=name, part_rows=first.part_rows.by(scores_N), dataset=first.dataset, label=first.label
    )


def _check_same(first: _Scored, second: _Scored, split: str) -> None:
    """Check that two runs were measured on the same rows.

    Raises:
        UserError: when they were not.
    """
    remedy = (
        "compare runs on one prepared log, or on logs prepared from the same rows with the same"
        " split"
    )
    labels = [scored.label for scored in (first, second)]
    if labels[0] != labels[1]:
        raise UserError(
            f"{second.path}: predicts {labels[1]}, and {first.path} predicts {labels[0]}; {remedy}"
        )
    counts = [len(scored.rows.labels_N) for scored in (first, second)]
    if counts[0] != counts[1]:
        place = f"{second.path}: its prepared log has {counts[1]:,} {split} rows"
        raise UserError(f"{place}, and that of {first.path} {counts[0]:,}; {remedy}")
    for field in ("labels", "weights", "sessions", "units"):
        first_N = getattr(first.rows, f"{field}_N")
        second_N = getattr(second.rows, f"{field}_N")
        if (first_N is None) != (second_N is None) or (
            first_N is not None and not torch.equal(first_N, second_N)
        ):
            raise UserError(
                f"{second.path}: the {field} of its {split} rows are not those of {first.path};"
                f" {remedy}"
            )


def _has_seeds(sides: Sequence[Sequence[_Scored]]) -> bool:
    """Whether each side has runs enough to tell of other seeds. Another system's scores are as they
    are.
    """
    return all(len(side) >= SEEDS or all(scores.run is None for scores in side) for side in sides)


def _difference(
    metric: str, side_a: Sequence[Estimate], side_b: Sequence[Estimate], *, has_seeds: bool = True
) -> Difference:
    a = mean(side_a)
    b = mean(side_b)
    values = [[e.value for e in side] for side in (side_a, side_b)]
    spreads = [float(np.std(side, ddof=1)) if len(side) > 1 else math.nan for side in values]
    half = (b - a).error * t_quantile(LEVEL, math.inf)
    if max(map(len, values)) > 1 and math.isfinite(half):
        several = [
            (spread, len(side))
            for spread, side in zip(spreads, values, strict=True)
            if len(side) > 1
        ]
        total = (b - a).error ** 2 + sum(spread**2 / count for spread, count in several)
        noise = sum((spread**2 / count) ** 2 / (count - 1) for spread, count in several)
        # Welch-Satterthwaite
        half = math.sqrt(total) * t_quantile(LEVEL, total**2 / noise if noise else math.inf)
    low = b.value - a.value - half
    high = b.value - a.value + half
    return Difference(
        metric=metric,
        a=a.value,
        b=b.value,
        spread_a=spreads[0],
        spread_b=spreads[1],
        low=low,
        high=high,
        verdict=_verdict(metric_of(metric), a.value, b.value, low, high, has_seeds=has_seeds),
    )


def _verdict(
    metric: Metric, a: float, b: float, low: float, high: float, *, has_seeds: bool = True
) -> str:
    floor = metric.floor(a)
    suffix = "" if has_seeds else " here"
    if not math.isfinite(high - low):
        return "undefined"
    if max(-low, high) <= floor:
        return f"equal{suffix}"
    if low <= 0 <= high or abs(b - a) <= floor:
        return "unclear"
    if metric.better == "near 1":  # that is not what the interval is of
        return f"differs{suffix}"
    return f"{'B' if metric.cost(b) < metric.cost(a) else 'A'} better{suffix}"


def _notes(sides: Sequence[Sequence[_Scored]], split: str, column: str | None) -> list[str]:
    rows, (many_a, many_b) = sides[0][0].rows, map(len, sides)
    unit_N = rows.sessions_N if rows.units_N is None else rows.units_N
    count = len(rows.labels_N) if unit_N is None else int(unit_N.unique().numel())
    kind = "rows" if unit_N is None else "sessions" if column is None else f"values of {column}"
    units = f"{count:,} {kind}"
    notes = [f"95 % intervals, paired over the {units} of {split}: for other rows of the same kind"]
    if column is None:
        notes.append(
            f"{kind} count as independent; where those of one user are not, --units COLUMN takes"
            " users"
        )
    if max(many_a, many_b) > 1:
        notes[0] += (
            f", and other seeds ({many_a} and {many_b} runs, Welch; in brackets their standard"
            " deviation)"
        )
    if not _has_seeds(sides):
        notes.append(
            "here: of these models as they are. Training noise may be larger than their"
            f" difference: train each with {SEEDS} seeds or more and compare A1,A2,A3 with B1,B2,B3"
        )
    shares = [
        f"of {m.label} {100 * m.least_share:g}%"
        for m in METRICS.values()
        if m.least_share is not None
    ]
    floors = f"{LEAST:g} ({', '.join(shares)} of A's)"
    notes.append(
        f"differences up to {floors} count as none: equal, where the interval is within that"
    )
    notes += _notes_of_sides(sides)
    if count < 50:
        notes.append(f"{units} are few: the intervals are rough")
    return notes


def _notes_of_sides(sides: Sequence[Sequence[_Scored]]) -> list[str]:
    """Returns what a person should know of the runs and of their logs."""
    notes: list[str] = []
    for name, side in zip("AB", sides, strict=True):
        seeds = [scores.run.seed for scores in side if scores.run is not None]
        if len(set(seeds)) < len(seeds):
            notes.append(
                f"{name}: seeds {seeds} repeat, so its runs are not independent and their spread is"
                " too small"
            )
    for scores in (*sides[0], *sides[1]):
        if scores.run is not None or not Path(scores.path).is_file():
            continue
        order = (
            f"its rows are taken in the prepared log's order, which only a column {scores.label} in"
            " it can prove"
        )
        notes.append(f"{scores.path}: {order}")
    shared = {scores.path for scores in sides[0]} & {scores.path for scores in sides[1]}
    if shared:
        notes.append(f"on both sides: {', '.join(sorted(shared))}")
    if len({scores.dataset.fingerprint for scores in (*sides[0], *sides[1])}) > 1:
        notes.append(
            "the logs were prepared differently; their labels, weights and sessions agree row"
            " by row"
        )
    for name, side in zip("AB", sides, strict=True):
        if any(scores.through for scores in side):
            kinds = dict.fromkeys(
                scores.through.removeprefix(", ") or "no calibrator"
                for scores in side
                if scores.run
            )
            notes.append(f"{name}: scores pass through {', '.join(kinds)}")
    return notes


def _settings(a: Run | None, b: Run | None) -> list[tuple[str, str, str]]:
    """Returns the settings of the run files that differ; none where a side is no run."""
    if a is None or b is None:
        return []
    changed = [item for item in settings_differences(a, b) if item[0] not in OWN]
    return [
        (name, "" if value_a is None else str(value_a), "" if value_b is None else str(value_b))
        for name, value_a, value_b in changed
    ]


def to_html(comparison: Comparison) -> str:
    """Returns the comparison as one HTML file in the report's style."""
    shown = [d for d in comparison.differences if d.verdict != "undefined"]

    def paint(figure: Any) -> None:
        for axis, d in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            picture.dots(
                axis, [""], [d.value], [(d.high - d.low) / 2 / 1.96], f"{d.metric}, B - A", 0.0
            )
            axis.locator_params(axis="x", nbins=3)

    def curves(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        sides = {"A": comparison.rows_a, "B": comparison.rows_b}
        picture.reliability(left, {name: _curve(rows) for name, rows in sides.items()})
        scores = (rows.scores_N.numpy() for rows in sides.values())
        right.hist2d(*scores, bins=60, cmap="Blues", norm="log", rasterized=True)
        right.set(xlabel="score of A", ylabel="score of B")
        right.set_title("rows by both scores, darker for more", loc="left")

    html = elements.table(HEADER, lines(comparison))
    html += elements.image(picture.svg(paint, height=1.2), "B - A with intervals") if shown else ""
    html += "".join(
        elements.text(note[0].upper() + note[1:] + ".", soft=True) for note in comparison.notes
    )
    scores = elements.image(
        picture.svg(curves, height=3.2), "Calibration of both, and their scores row by row"
    )
    settings = elements.text("None, but perhaps the seed, the directory and the prepared log.")
    if comparison.settings:
        settings = elements.table(
            ["setting", "A", "B"],
            [[name, a or "-", b or "-"] for name, a, b in comparison.settings],
        )
    sections = [
        ("Difference", html),
        ("Scores of the first run of each", scores),
        ("Settings that differ", settings),
    ]
    under = f"A: {', '.join(comparison.names_a)}. B: {', '.join(comparison.names_b)}."
    under += f" Part: {comparison.split}. Label: {comparison.label}."
    cards = [(d.verdict, d.metric) for d in comparison.differences]
    return elements.page("B against A", under, cards, sections)


def lines(comparison: Comparison) -> list[tuple[str, ...]]:
    """Returns the table's cells under HEADER. With several runs a side, their standard deviation is
    in brackets.
    """

    def side(value: float, spread: float) -> str:
        return (
            f"{elements.cell(value)} ({spread:.4f})"
            if math.isfinite(spread)
            else elements.cell(value)
        )

    return [
        (
            d.metric,
            side(d.a, d.spread_a),
            side(d.b, d.spread_b),
            *(
                ("-", "-")
                if d.verdict == "undefined"
                else (f"{d.value:+.4f}", f"{d.low:+.4f} to {d.high:+.4f}")
            ),
            d.verdict,
        )
        for d in comparison.differences
    ]


def _curve(rows: Rows) -> picture.Curve:
    stream = Streaming()
    stream.update(rows.scores_N, rows.labels_N, rows.weights_N)
    points = stream.reliability(12)
    return points.predictions_Q.tolist(), points.labels_Q.tolist(), []
