"""Does one model, or one way of training, differ from another? Both score the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparrow import data
from sparrow.analysis import elements, picture
from sparrow.analysis.others import column_scores, file_scores
from sparrow.analysis.scores import Rows, label_number, score_part
from sparrow.core.config import differences, to_dict
from sparrow.core.errors import UserError
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.metrics import Streaming
from sparrow.metrics.intervals import Estimate, mean, t_quantile
from sparrow.trained.build import check_schema
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore

LEVEL = 0.95
HEADER = ("", "A", "B", "B - A", "95 % interval", "verdict")
LOWER_IS_BETTER = ("logloss", "ne", "ece")
FLOOR = 1e-4  # what is smaller matters to nobody: other threads or ranks of the same run change the seventh digit
SHARES = {"logloss": 1e-4, "ece": 1e-2}  # of A's value: these two are small where positives are rare
OWN = ("run_dir", "seed", "threads", "device", "data.path")  # settings that do not make two runs different in kind


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A metric of A, of B (means over their runs), B - A with its 95 % interval, and what follows.

    spread_a, spread_b: standard deviations over the runs of a side, NaN for a single one. verdict: "B better" or
    "A better" (of calibration "differs") where the interval does not hold 0 and B - A is beyond the metric's floor,
    "equal" where the whole interval is within the floor, else "unclear", or "undefined".
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
    progress: Progress | None = None,
) -> Comparison:
    """Score the same rows with A and B. Returns whether B differs.

    Each side is run directories, or another system's scores: the name of a baseline column of the prepared log, or a
    file with a score for each row of the part (see `file_scores`). At least one is a run; its log has the rows.

    With one run a side, the interval is paired: by sessions, or by rows where the log has no group column (see
    `sparrow.metrics.intervals`). With several a side, the spread over a side's runs is added to it (Welch 1947), so
    that it covers new rows and new seeds.

    Args:
        side_a: the runs or scores of side A.
        side_b: those of side B.
        split: the part whose rows are scored.
        label: the name of the label that is judged; by default the first.
        which: the checkpoint, see `restore`.
        device: see `restore`.
        progress: is told how far it is.

    Raises:
        UserError: for runs whose rows, labels, weights or sessions are not the same, and for scores that are not of
            these rows.
    """
    names = list(dict.fromkeys(map(str, [*side_a, *side_b])))
    scored: dict[str, _Scored] = {}
    first: _Scored | None = None
    for name in sorted(names, key=lambda name: not Path(name).is_dir()):  # runs come first
        if first is None or Path(name).is_dir():
            scored[name] = _of_run(name, split, label, which, device, progress)
            first = first or scored[name]
            _check_same(first, scored[name], split)
        else:
            scored[name] = _of_others(name, first, split)
    sides = [[scored[str(name)] for name in side] for side in (side_a, side_b)]
    estimates = [[one.rows.estimates() for one in side] for side in sides]
    differences = [_difference(m, *([e[m] for e in side] for side in estimates)) for m in estimates[0][0]]
    first_a, first_b = sides[0][0], sides[1][0]
    return Comparison(
        names_a=tuple(map(str, side_a)),
        names_b=tuple(map(str, side_b)),
        split=split,
        label=first_a.label,
        differences=tuple(differences),
        notes=tuple(_notes(sides, split)),
        settings=tuple(_settings(first_a.run, first_b.run)),
        rows_a=first_a.rows,
        rows_b=first_b.rows,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Scored:
    """Scores with their name and the log that their rows are in. run: None for those of another system.

    whole: all rows of the part. through: what `Restored.through` says of the part.
    """

    path: str
    whole: Rows
    dataset: Dataset
    label: str
    run: Run | None = None
    through: str = ""

    @cached_property
    def rows(self) -> Rows:
        """The rows that have the label."""
        return self.whole.known()


def _of_run(
    path: str, split: str, label: str | None, which: str, device: str | None, progress: Progress | None
) -> _Scored:
    found = restore(path, which=which, device=device)
    dataset = data.open(found.run.data.path)
    check_schema(found.schema, dataset.schema, dataset.path)
    number, told = label_number(found.schema, label), progress or (lambda what, done, total: None)
    return _Scored(
        path=path,
        whole=score_part(found, dataset, split, told, number),
        dataset=dataset,
        label=found.schema.labels[number],
        run=found.run,
        through=found.through(dataset.fingerprint, split),
    )


def _of_others(name: str, first: _Scored, split: str) -> _Scored:
    """Another system's scores of the rows of the first run."""
    if Path(name).is_file():
        scores_N = file_scores(Path(name), first.whole, split, first.label)
    else:
        scores_N = column_scores(first.dataset, split, name, first.label)
    return _Scored(path=name, whole=first.whole.by(scores_N), dataset=first.dataset, label=first.label)


def _check_same(one: _Scored, other: _Scored, split: str) -> None:
    """Check that two runs were measured on the same rows.

    Raises:
        UserError: when they were not.
    """
    remedy = "compare runs on one prepared log, or on logs prepared from the same rows with the same split"
    labels = [scored.label for scored in (one, other)]
    if labels[0] != labels[1]:
        raise UserError(f"{other.path}: predicts {labels[1]}, and {one.path} predicts {labels[0]}; {remedy}")
    counts = [len(scored.rows.labels_N) for scored in (one, other)]
    if counts[0] != counts[1]:
        place = f"{other.path}: its prepared log has {counts[1]:,} {split} rows"
        raise UserError(f"{place}, and that of {one.path} {counts[0]:,}; {remedy}")
    for what in ("labels", "weights", "sessions"):
        mine, theirs = (getattr(scored.rows, f"{what}_N") for scored in (one, other))
        if (mine is None) != (theirs is None) or (mine is not None and not torch.equal(mine, theirs)):
            raise UserError(f"{other.path}: the {what} of its {split} rows are not those of {one.path}; {remedy}")


def _difference(metric: str, side_a: Sequence[Estimate], side_b: Sequence[Estimate]) -> Difference:
    a, b = mean(side_a), mean(side_b)
    values = [[e.value for e in side] for side in (side_a, side_b)]
    spreads = [float(np.std(side, ddof=1)) if len(side) > 1 else math.nan for side in values]
    half = (b - a).error * t_quantile(LEVEL, math.inf)
    if min(map(len, values)) > 1 and math.isfinite(half):
        parts = [spread**2 / len(side) for spread, side in zip(spreads, values, strict=True)]
        total = (b - a).error ** 2 + sum(parts)
        noise = sum(part**2 / (len(side) - 1) for part, side in zip(parts, values, strict=True))
        half = math.sqrt(total) * t_quantile(LEVEL, total**2 / noise if noise else math.inf)  # Welch-Satterthwaite
    low, high = b.value - a.value - half, b.value - a.value + half
    return Difference(
        metric=metric,
        a=a.value,
        b=b.value,
        spread_a=spreads[0],
        spread_b=spreads[1],
        low=low,
        high=high,
        verdict=_verdict(metric, a.value, b.value, low, high),
    )


def _verdict(metric: str, a: float, b: float, low: float, high: float) -> str:
    floor = SHARES[metric] * a if metric in SHARES else FLOOR
    if not math.isfinite(high - low):
        return "undefined"
    if max(-low, high) <= floor:
        return "equal"
    if low <= 0 <= high or abs(b - a) <= floor:
        return "unclear"
    if metric == "calibration":  # nearer to 1 is better, and that is not what the interval is of
        return "differs"
    return "B better" if (b < a) == (metric in LOWER_IS_BETTER) else "A better"


def _notes(sides: Sequence[Sequence[_Scored]], split: str) -> list[str]:
    rows, (many_a, many_b) = sides[0][0].rows, map(len, sides)
    sessions = None if rows.sessions_N is None else int(rows.sessions_N.unique().numel())
    units = f"{len(rows.labels_N):,} rows" if sessions is None else f"{sessions:,} sessions"
    notes = [f"95 % intervals, paired over the {units} of {split}: for other rows of the same kind"]
    if many_a > 1 and many_b > 1:
        notes[0] += f", and other seeds ({many_a} and {many_b} runs, Welch; in brackets their standard deviation)"
    else:
        notes.append(
            "one run of a side says nothing about training noise, which may be larger than the difference: train each "
            "with several seeds and compare A1,A2,A3 with B1,B2,B3"
        )
    shares = f"of logloss {SHARES['logloss']:.2%}, of ECE {SHARES['ece']:.0%} of A's"
    notes.append(f"differences up to {FLOOR:g} ({shares}) count as none: equal, where the interval is within that")
    for name, side in zip("AB", sides, strict=True):
        seeds = [one.run.seed for one in side if one.run is not None]
        if len(set(seeds)) < len(seeds):
            notes.append(f"{name}: seeds {seeds} repeat, so its runs are not independent and their spread is too small")
    shared = {one.path for one in sides[0]} & {one.path for one in sides[1]}
    if shared:
        notes.append(f"on both sides: {', '.join(sorted(shared))}")
    if len({one.dataset.fingerprint for side in sides for one in side}) > 1:
        notes.append("the logs were prepared differently; their labels, weights and sessions agree row by row")
    for name, side in zip("AB", sides, strict=True):
        if any(one.through for one in side):
            kinds = dict.fromkeys(one.through.removeprefix(", ") or "no calibrator" for one in side if one.run)
            notes.append(f"{name}: scores pass through {', '.join(kinds)}")
    if (sessions or len(rows.labels_N)) < 50:
        notes.append(f"{units} are few: the intervals are rough")
    return notes


def _settings(a: Run | None, b: Run | None) -> list[tuple[str, str, str]]:
    """Returns the settings of the run files that differ; none where a side is no run."""
    if a is None or b is None:
        return []
    found = [item for item in differences(to_dict(a), to_dict(b)) if item[0] not in OWN]
    return [(name, "" if one is None else str(one), "" if other is None else str(other)) for name, one, other in found]


def to_html(found: Comparison) -> str:
    """Returns the comparison as one HTML file in the report's style."""
    shown = [d for d in found.differences if d.verdict != "undefined"]

    def paint(figure: Any) -> None:
        for axis, d in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
            picture.dots(axis, [""], [d.value], [(d.high - d.low) / 2 / 1.96], f"{d.metric}, B - A", 0.0)
            axis.locator_params(axis="x", nbins=3)

    def curves(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        sides = {"A": found.rows_a, "B": found.rows_b}
        picture.reliability(left, {name: _curve(rows) for name, rows in sides.items()})
        scores = (rows.scores_N.numpy() for rows in sides.values())
        right.hist2d(*scores, bins=60, cmap="Blues", norm="log", rasterized=True)
        right.set(xlabel="score of A", ylabel="score of B")
        right.set_title("rows by both scores, darker for more", loc="left")

    html = elements.table(HEADER, lines(found))
    html += elements.image(picture.svg(paint, height=1.2), "B - A with intervals") if shown else ""
    html += "".join(elements.text(note[0].upper() + note[1:] + ".", soft=True) for note in found.notes)
    scores = elements.image(picture.svg(curves, height=3.2), "Calibration of both, and their scores row by row")
    settings = elements.text("None, but perhaps the seed, the directory and the prepared log.")
    if found.settings:
        settings = elements.table(["setting", "A", "B"], [[name, a or "-", b or "-"] for name, a, b in found.settings])
    sections = [("Difference", html), ("Scores of the first run of each", scores), ("Settings that differ", settings)]
    under = f"A: {', '.join(found.names_a)}. B: {', '.join(found.names_b)}. Part: {found.split}. Label: {found.label}."
    cards = [(d.verdict, d.metric) for d in found.differences]
    return elements.page("B against A", under, cards, sections)


def lines(found: Comparison) -> list[tuple[str, ...]]:
    """Returns the table's cells under HEADER. With several runs a side, their standard deviation is in brackets."""

    def side(value: float, spread: float) -> str:
        return f"{elements.cell(value)} ({spread:.4f})" if math.isfinite(spread) else elements.cell(value)

    return [
        (
            d.metric,
            side(d.a, d.spread_a),
            side(d.b, d.spread_b),
            *(("-", "-") if d.verdict == "undefined" else (f"{d.value:+.4f}", f"{d.low:+.4f} to {d.high:+.4f}")),
            d.verdict,
        )
        for d in found.differences
    ]


def _curve(rows: Rows) -> picture.Curve:
    stream = Streaming()
    stream.update(rows.scores_N, rows.labels_N, rows.weights_N)
    points = stream.reliability(12)
    return points.predictions_Q.tolist(), points.labels_Q.tolist(), []
