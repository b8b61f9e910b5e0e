"""A run directory and its prepared log -> one HTML file that says how good the model is, where, and
at what cost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparrow.analysis import elements, parts, picture
from sparrow.analysis.importance import Importance, measure_importance
from sparrow.analysis.scores import Rows, label_number, score_part
from sparrow.analysis.slices import judge_slices, slices
from sparrow.analysis.table_stats import id_turnover, storage_table
from sparrow.analysis.usage import ColumnUse, count_usage
from sparrow.core.errors import UserError, require
from sparrow.core.files import write_text
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.parts import PARTS, PAYS
from sparrow.features.encodings import kind_of
from sparrow.features.schema import Schema
from sparrow.metrics import METRICS, Metric, Streaming, headlines, labels_of
from sparrow.metrics.intervals import Estimate
from sparrow.metrics.metric import topk_names
from sparrow.trained.log import open_log
from sparrow.trained.scorer import Restored, restore
from sparrow.training import profiling

REPEATS = 3
MOST_ROWS, SHUFFLED = 20_000, 600_000  # rows
AT_ONCE = 4096  # rows whose scores are made at once, at least, where columns are shuffled
MOST_COLUMNS = 5  # sliced by default, the most important ones
DOTS = {"auc": "AUC", "ne": "NE", "calibration": "calibration"}  # what is drawn of slices

Section = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What every section looks at."""

    run_dir: Path
    restored: Restored
    dataset: Dataset
    split: str
    label: int
    rows: Rows
    progress: Progress


def report(
    run_dir: str | Path,
    *,
    split: str = "test",
    label: str | None = None,
    by: Sequence[str] = (),
    rows: int | None = None,
    out: str | Path | None = None,
    which: str = "best",
    device: str | None = None,
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write one HTML file about a run. Returns its path.

    It needs memory for the scores of a part, the drawn rows, and 8 bytes a row of the tables.

    Args:
        run_dir: the run directory.
        split: the part that is looked at closely.
        label: the name of the label that is judged; by default the first.
        by: columns to slice the part by; by default the most important ones and the time.
        rows: how many rows of the part, drawn at random, permutation importance shuffles. By
            default so many that all columns together shuffle `SHUFFLED`, and at most `MOST_ROWS`. 0
            leaves it out.
        out: the file; by default `run_dir/report.html`.
        which: the checkpoint, see `restore`.
        device: see `restore`.
        data_dir: the prepared log; by default that of the run, see `restore`.
        progress: shows how far it is.

    Raises:
        UserError: for a run that cannot be restored, an empty part, or a column that the log does
            not keep.
    """
    require(least=0, rows=rows)
    run_dir = Path(run_dir)
    progress = progress or (lambda *_: None)
    restored = restore(run_dir, which=which, device=device, data_dir=data_dir)
    dataset = open_log(restored)
    for name in by:
        slices(dataset, split, name)  # a wrong name should not cost an hour
    number = label_number(restored.schema, label)
    source = _Source(
        run_dir=run_dir,
        restored=restored,
        dataset=dataset,
        split=split,
        progress=progress,
        label=number,
        rows=score_part(restored, dataset, split, progress, number),
    )
    if rows is None:
        features = len(dataset.schema.dense) + len(dataset.schema.sparse)
        rows = min(MOST_ROWS, SHUFFLED // (REPEATS * max(features, 1)))
    weighed = _importance(source, rows)
    estimates = source.rows.estimates()
    sections = [
        *elements.suspects(restored.schema.suspects),
        _verdict(source, estimates),
        _learning(source),
        _calibration(source, estimates["calibration"]),
        _slices(source, by or _columns(dataset.schema, weighed), estimates),
        _importances(weighed, split, min(rows, dataset.rows(split))),
        _time(source),
        *_groups(source),
        *_tables(source),
        (
            "Settings",
            f"<pre>{elements.escape((run_dir / 'run.toml').read_text(encoding='utf-8'))}</pre>",
        ),
    ]
    path = Path(out) if out is not None else run_dir / "report.html"
    write_text(path, elements.page(*_head(source, estimates), sections))
    return path


def _head(
    source: _Source, estimates: dict[str, Estimate]
) -> tuple[str, str, list[tuple[str, str]]]:
    restored = source.restored
    sizes = ", ".join(
        f"{part} {source.dataset.rows(part):,}" for part in ("train", "valid", "test")
    )
    labels = restored.schema.labels
    more_labels = "".join(f"{n}, " for n in labels if n != labels[source.label])
    predicts = labels[source.label] + (f" (and {more_labels[:-2]}: --label)" if more_labels else "")
    under = (
        f"{restored.name}, step {restored.step:,}, predicts {predicts}; data {source.dataset.path}:"
        f" {sizes}"
    )
    cards = []
    for metric in headlines():
        if metric.name in estimates:
            value = f"{estimates[metric.name].value:.4f}".replace("nan", "-")
            cards.append((value, f"{metric.title}, {source.split}"))
    trained = sum(p.numel() for p in restored.model.parameters())
    return (
        f"Report on {source.run_dir.resolve().name}",
        under,
        [*cards, (f"{trained:,}", "dense weights")],
    )


# -- quality ---------------------------------------------------------------------------------------


def _verdict(source: _Source, estimates: dict[str, Estimate]) -> Section:
    judged_rows: dict[str, tuple[int, dict[str, Estimate]]] = {}
    words = _in_words(source.split, estimates)
    alone = parts.Alone(source.restored, source.dataset)
    for part in dict.fromkeys(("valid", "test", source.split)):
        if not source.dataset.rows(part):
            continue
        dataset = source.dataset
        restored = source.restored
        rows = source.rows
        if part != source.split:
            rows = score_part(restored, dataset, part, source.progress, source.label)
        # by weights, as each metric is
        rate = dataset.manifest["base_rate"][restored.schema.labels[source.label]]
        share_kept = dataset.schema.split.negatives
        # of the whole log
        constant = torch.full_like(rows.scores_N, rate / (rate + (1 - rate) / share_kept))
        name = f"{part}: {restored.name}{restored.through(dataset.fingerprint, part)}"
        scored = {name: rows, f"{part}: always the training rate": rows.by(constant)}
        apart = alone.scores(part, source.label)
        scored |= {f"{part}: {name} alone": rows.by(scores_N) for name, scores_N in apart.items()}
        if apart and part == source.split:
            words += " " + parts.in_words(part, rows, apart, alone.compared)
        for name, loader in () if source.label else dataset.baselines(part):
            scored[f"{part}: {name} (baseline)"] = rows.by(
                torch.cat([batch.dense_BC[:, 0] for batch in loader])
            )
        judged_rows |= {
            name: (len(r.known().scores_N), r.estimates()) for name, r in scored.items()
        }
    lines = [[name, count, *_cells(values)] for name, (count, values) in judged_rows.items()]
    units = "rows" if source.rows.sessions_N is None else "sessions"
    html = elements.text(words)
    html += elements.table(*elements.without_empty_columns(["", "rows", *METRICS], lines))
    meanings = [m.meaning for m in METRICS.values() if m.meaning and m.name in estimates]
    interval = f"± is half of a 95 % interval, for other {units} of the same kind."
    html += elements.text(" ".join([interval, *meanings]), soft=True)
    if any("mrr" in values for _, values in judged_rows.values()):
        lines = [[name, *_cells(values, topk_names())] for name, (_, values) in judged_rows.items()]
        html += elements.heading("Within groups: where the positives are placed")
        html += elements.table(["", *topk_names()], lines)
        html += elements.text(
            "Means over the groups that have a positive. Equal scores are ordered at random, so the"
            " line of always the training rate is what chance gets.",
            soft=True,
        )
    return "Verdict", html + _progressive(source)


def _progressive(source: _Source) -> str:
    fifths = _results(source).get("progressive", [])
    if not fifths or source.label:
        return ""
    names = [n for n in METRICS if n in fifths[0]]
    lines = [
        [
            f"part {i} of {len(fifths)}",
            round(f["examples"]),
            *("-" if f[n] is None else float(f[n]) for n in names),
        ]
        for i, f in enumerate(fifths, 1)
    ]
    title = elements.heading("Progressive validation: each batch predicted, then trained on")
    return title + elements.table(["", "examples", *names], lines)


def _in_words(split: str, estimates: dict[str, Estimate]) -> str:
    ne = estimates["ne"]
    calibration = estimates["calibration"]
    if not math.isfinite(ne.value):
        return f"The {split} rows are all of one class: neither AUC nor NE is defined there."
    gain = 1 - ne.value
    constant = "always saying the rate of positives"
    if abs(gain) < 1.96 * ne.error:
        words = f"On {split}, the model's loss cannot be told from that of {constant}"
    elif gain < 0:
        words = f"On {split}, the model is {-100 * gain:.1f} % worse than {constant}"
    else:
        words = f"On {split}, the model takes away {100 * gain:.1f} % of the loss of {constant}"
    words += f" (NE {ne.value:.4f})."
    off = calibration.value - 1
    if abs(off) < 1.96 * calibration.error:
        return f"{words} Its scores add up to the positives, within the noise of these rows."
    return (
        f"{words} It predicts {100 * abs(off):.1f} % {'more' if off > 0 else 'fewer'} positives"
        " than there are."
    )


def _learning(source: _Source) -> Section:
    train, valid = picture.log_of(source.run_dir)
    metrics = picture.curves_of(train, valid)
    if not train and not valid:
        return "Learning", elements.text(f"{source.run_dir}/log.jsonl holds no record to draw.")

    def paint(figure: Any) -> None:
        axes = figure.subplots(1, len(metrics), squeeze=False)[0]
        for axis, metric in zip(axes, metrics, strict=True):
            picture.over_examples(axis, train, valid, metric.name, metric.title)

    kind = "each batch judged before the step that learns it"
    if source.restored.run.loop.epochs > 1:
        kind += "; after the first epoch these rows were seen before"
    words = (
        f"The line is the training log ({kind}), a point for every {source.restored.run.log.every}"
        " steps."
    )
    labels = source.restored.schema.labels
    if len(labels) > 1:
        words += f" Both are of {labels[0]} alone."
    drawn = elements.image(picture.svg(paint, height=2.7), f"{labels_of(metrics)} over examples")
    return "Learning", drawn + elements.text(words, soft=True)


def reliability(rows: Rows) -> tuple[list[float], list[float], list[float], list[float]]:
    """Returns four lists over groups of equal weight, in order of score.

    They are the mean prediction, the share of positives, its standard error, and the worth. The
    worth is how many rows of one weight would tell as much: (sum w)^2 / sum w^2 of all rows (Kish
    1965), in which the unit of the weights cancels, times the group's share of the weight. The
    error is Agresti and Coull's (1998), so that none of 20 does not mean never.
    """
    rows = rows.known()
    stream = Streaming()
    stream.update(rows.scores_N, rows.labels_N, rows.weights_N)
    points = stream.reliability()
    worth_Q = points.weights_Q
    if rows.weights_N is not None:
        w_N = rows.weights_N.double()
        worth_Q = worth_Q * (w_N.sum() / w_N.square().sum())
    likely_Q = (points.labels_Q * worth_Q + 2) / (worth_Q + 4)
    errors_Q = (likely_Q * (1 - likely_Q) / (worth_Q + 4)).sqrt()
    return (
        points.predictions_Q.tolist(),
        points.labels_Q.tolist(),
        errors_Q.tolist(),
        worth_Q.tolist(),
    )


def _calibration(source: _Source, estimate: Estimate) -> Section:
    rows = source.rows.known()
    predictions, shares, errors, worth = reliability(rows)
    scores = rows.scores_N.numpy()
    mass = None if rows.weights_N is None else rows.weights_N.numpy()

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
        picture.reliability(left, {source.split: (predictions, shares, errors)})
        right.hist(scores, bins=40, weights=mass, color=picture.BLUE)
        right.set_title("rows by score" if mass is None else "weight by score", loc="left")
        right.set_xlabel("score")

    html = elements.image(
        picture.svg(paint, height=3), "Share of positives by score, and a histogram of the scores"
    )
    size = f"about {worth[0] if worth else 0:,.0f} rows each"
    if mass is not None:
        size += " (the number of rows of one weight that would tell as much)"
    words = f"{len(worth)} groups of equal weight in order of score, {size} "
    ratio = elements.with_error(estimate.value, estimate.error)
    words += f"with 95 % intervals. Predicted positives over positives: {ratio}."
    return "Calibration", html + elements.text(words, soft=True)


def _columns(schema: Schema, weighed: Sequence[Importance]) -> list[str]:
    """Returns the columns to slice by, by default: the time, and the columns that matter most."""
    features = [entry.column for entry in weighed] or list(schema.dense + schema.sparse)
    scalars = [
        name
        for name in features
        if name in schema.columns and schema.columns[name].kind != "vector"
    ]
    # its hour leans on the time, too
    return list(dict.fromkeys([*schema.of_kind("time"), *scalars]))[:MOST_COLUMNS]


def _slices(source: _Source, by: Sequence[str], estimates: dict[str, Estimate]) -> Section:
    words = "NE compares with each slice's own rate of positives"
    if source.rows.sessions_N is not None:
        words += ", GAUC ranks within sessions' rows of the slice"
    words += (
        ". Intervals are of 95 %: of many slices one in twenty lies outside by chance. A number's"
        " or a time's slice begins where the one above it ends. A dash: the slice is of one class."
    )
    html = ""
    # few groups lie within a slice
    metrics = [m for m in headlines() if m.name in estimates and not m.needs_groups]
    for name in by:
        source.progress("slices", by.index(name), len(by))
        lines = []
        dots = []
        for piece in judge_slices(source.rows, source.dataset, source.split, name):
            lines.append(
                [piece.value, piece.rows, elements.share(piece.rate), *_cells(piece.estimates)]
            )
            dots.append(
                [(piece.estimates[m.name].value, piece.estimates[m.name].error) for m in metrics]
            )
        dotted = _dots_by_slice(metrics, [str(line[0]) for line in lines], dots)
        html += elements.heading(name) + elements.image(dotted, f"{labels_of(metrics)} by {name}")
        html += elements.table(
            *elements.without_empty_columns(["", "rows", "label rate", *METRICS], lines)
        )
    if "by frequency" in html:
        words += (
            " no. 3 by frequency: the third most frequent id in training, whose text the log does"
            " not keep."
        )
    return f"By slice, {source.split}", elements.text(words, soft=True) + html


def _dots_by_slice(metrics: Sequence[Metric], names: Sequence[str], dots: Sequence[Any]) -> str:
    """dots: of each slice, for each metric, its value and its error."""

    def paint(figure: Any) -> None:
        axes = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
        for number, (axis, metric) in enumerate(zip(axes, metrics, strict=True)):
            values, errors = (
                zip(*(slice_dots[number] for slice_dots in dots), strict=True) if dots else ((), ())
            )
            picture.dots(
                axis,
                names,
                values,
                errors,
                metric.label,
                line=1.0 if metric.better == "near 1" else None,
            )

    return picture.svg(paint, height=0.75 + 0.24 * len(names))


# -- what it leans on ------------------------------------------------------------------------------


def _importance(source: _Source, rows: int) -> list[Importance]:
    if not rows:
        return []
    drawn = source.dataset.loader(
        min(rows, source.dataset.rows(source.split)), split=source.split, shuffle=True
    )
    batch = next(iter(drawn))
    size = max(AT_ONCE, source.restored.run.data.batch_size)
    return measure_importance(
        source.restored.scores,
        batch,
        source.restored.schema,
        batch_size=size,
        label=source.label,
        repeats=REPEATS,
        progress=source.progress,
    )


def _importances(weighed: Sequence[Importance], split: str, rows: int) -> Section:
    if not weighed or not math.isfinite(weighed[0].ne):
        why = "the rows drawn are all of one class" if weighed else "left out (--rows 0)"
        return "Feature importance", elements.text(f"Nothing to show: {why}.")
    shown = weighed[:30]
    # the whiskers of `dots` are 1.96 errors; here they are one spread
    scale = 1 / 1.96 if REPEATS > 1 else math.nan

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        names = [entry.column for entry in shown]
        picture.dots(
            left,
            names,
            [o.ne for o in shown],
            [o.ne_spread * scale for o in shown],
            "rise of NE",
            0.0,
        )
        picture.dots(
            right,
            names,
            [o.auc for o in shown],
            [o.auc_spread * scale for o in shown],
            "fall of AUC",
            0.0,
        )

    html = elements.image(
        picture.svg(paint, height=0.75 + 0.24 * len(shown)), "Rise of NE and fall of AUC by column"
    )
    html += elements.text(
        f"Each column's values were shuffled among {rows:,} rows of {split}, drawn at random,"
        f" {REPEATS} times, and the rows scored again: what the model loses is what it takes from"
        " the column. Whiskers are one standard deviation over the shuffles. Columns that say the"
        " same hide each other, and importance to this model is not importance to people.",
        soft=True,
    )
    if len(shown) < len(weighed):
        html += elements.text(
            f"The first {len(shown)} of {len(weighed)} columns are drawn.", soft=True
        )
    lines = [
        [o.column, *(f"{v:.5f} ± {s:.5f}" for v, s in ((o.ne, o.ne_spread), (o.auc, o.auc_spread)))]
        for o in weighed
    ]
    return "Feature importance", html + elements.table(
        ["column", "rise of NE", "fall of AUC"], lines
    )


# -- what it costs ---------------------------------------------------------------------------------


def _time(source: _Source) -> Section:
    title = "Time of a step"
    try:
        profile = profiling.read(source.run_dir)
        if profile is None:
            return title, elements.text("Not measured: train with --profile and report again.")
        kinds = {
            name: [
                (str(row["part"]), float(row["ms_per_step"]), float(row["share"]))
                for row in profile[name]
            ]
            for name in ("parts", "kinds")
        }
    except (ValueError, KeyError, TypeError):
        place = f"{source.run_dir / 'profile.json'}: damaged"
        raise UserError(f"{place}; delete it, or train again with --profile") from None

    def paint(figure: Any) -> None:
        titles = {"parts": "ms per step by part", "kinds": "ms per step by kind of work"}
        for axis, (name, words) in zip(figure.subplots(1, 2), titles.items(), strict=True):
            axis.barh(
                range(len(kinds[name])),
                [ms for _, ms, _ in kinds[name]],
                height=0.6,
                color=picture.BLUE,
            )
            axis.set_yticks(range(len(kinds[name])), [part for part, _, _ in kinds[name]])
            axis.invert_yaxis()
            axis.set_title(words, loc="left")

    html = elements.image(
        picture.svg(paint, height=2.6), "Milliseconds per step by part and by kind of work"
    )
    tables = []
    for name, column in (("parts", "part"), ("kinds", "kind of work")):
        lines = [[part, f"{ms:.2f}", elements.share(share)] for part, ms, share in kinds[name]]
        tables.append(elements.table([column, "ms per step", "share"], lines))
    html += elements.side_by_side(*tables)
    words = (
        f"Of {profile['steps']} steps early in the run. look: scores judged for the log. Kinds of"
        " work count the operators alone, without Python between them. trace.json.gz beside the"
        " run's log shows each of them."
    )
    return title, html + elements.text(words, soft=True)


def _groups(source: _Source) -> list[Section]:
    dataset = source.dataset
    dedup = source.restored.run.data.dedup
    lines = []
    for group, names in dataset.schema.groups.items():
        saved = sum(dataset.manifest["saved_bytes"][part][group] for part in PARTS)
        once = dedup == "on" or (dedup == "auto" and dataset.pays(group))
        factor = dataset.factor(group)
        how = "once for each run" if once else "for every row"
        lines.append([group, ", ".join(names), f"{factor:.2f}", elements.size(saved), how])
    if not lines:
        return []
    header = ["group", "columns", "rows a run", "less to store", "looked up"]
    words = (
        f"A group is stored once for each run of equal rows. It is looked up once from {PAYS} rows"
        f" a run on; in one process only if it has a list (--data.dedup {dedup}). Less to store:"
        " all parts, as numbers, before compression."
    )
    return [("Rows that repeat", elements.table(header, lines) + elements.text(words, soft=True))]


def _tables(source: _Source) -> list[Section]:
    parts = tuple(p for p in ("valid", "test") if source.dataset.rows(p))
    tables, columns = count_usage(source.restored, source.dataset, parts, source.progress)
    if not tables:
        return [("Tables", elements.text("The log has no id columns, and the model no tables."))]
    lines = []
    for t in tables:
        hit_R = t.hits_R[t.hits_R > 0]
        median, most = (int(hit_R.median()), int(hit_R.max())) if len(hit_R) else (0, 0)
        sizes = [elements.size(t.bytes_weight), elements.size(t.bytes_weight + t.bytes_state)]
        used = [elements.share(t.share_never), median, most, elements.share(t.share_of_top(0.01))]
        lines.append(
            [t.name, ", ".join(t.columns), t.hits_R.numel(), t.component.dim, *sizes, *used]
        )
    total = sum(t.bytes_weight + t.bytes_state for t in tables)
    header = ["table", "columns", "rows", "dim", "weights", "with optimizer"]
    header += ["never used", "median hits", "most hits", "top 1 %"]

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        for t in sorted(tables, key=lambda t: -t.hits_R.numel())[:6]:
            sorted_R = t.hits_R.sort(descending=True).values.double().cumsum(0)
            at = np.unique(np.geomspace(1, len(sorted_R), 200).astype(np.int64))
            axis.plot(
                at / len(sorted_R),
                sorted_R[at - 1] / sorted_R[-1].clamp(min=1),
                linewidth=1.3,
                label=t.name,
            )
        axis.set_xscale("log")
        axis.set_ylim(0, 1.02)
        axis.xaxis.set_major_formatter(lambda x, _: f"{100 * x:g} %")
        axis.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.0f} %")
        axis.set_xlabel("share of a table's rows, the most used first")
        axis.set_title("share of the lookups in training", loc="left")
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))

    html = elements.text(
        f"{len(tables)} tables, {elements.size(total)} with what the optimizer keeps of each row."
    )
    html += elements.table(header, lines)
    results = _results(source).get("tables", {})
    html += storage_table(results, tables) + id_turnover(results)
    html += elements.image(
        picture.svg(paint, height=2.7), "Share of the lookups by share of the rows"
    )
    html += elements.text(
        "Hits are lookups of a row by one pass over the training part; median and most are of the"
        " rows that were used. top 1 %: the share of lookups that the most used hundredth of the"
        " rows gets.",
        soft=True,
    )
    return [("Tables", html), ("Unknown ids", _unknown(source, parts, columns))]


def _unknown(
    source: _Source, parts: Sequence[str], columns: dict[str, dict[str, ColumnUse]]
) -> str:
    schema = source.restored.schema
    lines = []
    for name, uses in columns.items():
        column = schema.columns[name]
        encoding = schema.encodings[column.table or ""]
        knows = kind_of(encoding).unknown is not None
        missing = [_part(use.missing, use.rows) for use in uses.values()]
        unknown = [_part(use.unknown, use.ids) if knows else "" for use in uses.values()]
        untrained = [_part(uses[part].untrained, uses[part].ids) for part in parts]
        lines.append([name, encoding.kind, *missing, *unknown, *untrained])
    part_names = ("train", *parts)
    header = [f"{state}, {part}" for state in ("missing", "unknown") for part in part_names]
    header = ["column", "encoding", *header, *(f"untrained, {part}" for part in parts)]
    return elements.table(header, lines) + elements.text(
        "missing: rows without a value, for lists empty ones. unknown: ids that the table does not"
        " know, in training not yet (a hash knows every id). untrained: ids whose row no training"
        " row looked up, so that its vector is still the random one it began with.",
        soft=True,
    )


# -- small things ----------------------------------------------------------------------------------


def _results(source: _Source) -> dict[str, Any]:
    """Returns the results of a run; nothing for one that was killed."""
    try:
        return dict(json.loads((source.run_dir / "results.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _part(above: int, below: int) -> str:
    return elements.share(above / below if below else math.nan)


def _cells(estimates: dict[str, Estimate], names: Iterable[str] = METRICS) -> list[str]:
    return [
        elements.with_error(estimates[n].value, estimates[n].error) if n in estimates else ""
        for n in names
    ]
