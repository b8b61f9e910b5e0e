"""A run directory and its prepared log -> one HTML file that says how good the model is, where, and at what cost."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparrow import data
from sparrow.analysis import elements, parts, picture
from sparrow.analysis.importance import Importance, importance
from sparrow.analysis.scores import Rows, label_number, score_part
from sparrow.analysis.slices import judged, slices
from sparrow.analysis.stored import stored, turnover
from sparrow.analysis.usage import ColumnUse, usage
from sparrow.core.errors import UserError, require
from sparrow.core.files import write_text
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.parts import PARTS, PAYS
from sparrow.features.encodings import kind_of
from sparrow.features.schema import Schema
from sparrow.metrics import Streaming
from sparrow.metrics.intervals import METRICS, Estimate
from sparrow.metrics.places import names as places
from sparrow.trained.build import check_schema
from sparrow.trained.scorer import Restored, restore
from sparrow.training import profiling

REPEATS = 3
MOST_ROWS, SHUFFLED = 20_000, 600_000  # rows
AT_ONCE = 4096  # rows whose scores are made at once, at least, where columns are shuffled
MOST_COLUMNS = 5  # sliced by default, the most important ones

Section = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What every section looks at."""

    run_dir: Path
    found: Restored
    dataset: Dataset
    split: str
    label: int
    rows: Rows
    told: Progress


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
    progress: Progress | None = None,
) -> Path:
    """Write one HTML file about a run. Returns its path.

    It needs memory for the scores of a part, the drawn rows, and 8 bytes a row of the tables.

    Args:
        run_dir: the run directory.
        split: the part that is looked at closely.
        label: the name of the label that is judged; by default the first.
        by: columns to slice the part by; by default the most important ones and the time.
        rows: how many rows of the part, drawn at random, permutation importance shuffles. By default so many that all
            columns together shuffle `SHUFFLED`, and at most `MOST_ROWS`. 0 leaves it out.
        out: the file; by default `run_dir/report.html`.
        which: the checkpoint, see `restore`.
        device: see `restore`.
        progress: is told how far it is.

    Raises:
        UserError: for a run that cannot be restored, an empty part, or a column that the log does not keep.
    """
    require(least=0, rows=rows)
    run_dir, told = Path(run_dir), progress or (lambda what, done, total: None)
    found = restore(run_dir, which=which, device=device)
    dataset = data.open(found.run.data.path)
    check_schema(found.schema, dataset.schema, dataset.path)
    for name in by:
        slices(dataset, split, name)  # a wrong name should not cost an hour
    number = label_number(found.schema, label)
    source = _Source(
        run_dir=run_dir,
        found=found,
        dataset=dataset,
        split=split,
        told=told,
        label=number,
        rows=score_part(found, dataset, split, told, number),
    )
    if rows is None:
        features = len(dataset.schema.dense) + len(dataset.schema.sparse)
        rows = min(MOST_ROWS, SHUFFLED // (REPEATS * max(features, 1)))
    weighed = _importance(source, rows)
    estimates = source.rows.estimates()
    sections = [
        _verdict(source, estimates),
        _learning(source),
        _calibration(source, estimates["calibration"]),
        _slices(source, by or _columns(dataset.schema, weighed)),
        _importances(weighed, split, min(rows, dataset.rows(split))),
        _time(source),
        *_groups(source),
        *_tables(source),
        ("Settings", f"<pre>{elements.escape((run_dir / 'run.toml').read_text(encoding='utf-8'))}</pre>"),
    ]
    path = Path(out) if out is not None else run_dir / "report.html"
    write_text(path, elements.page(*_head(source, estimates), sections))
    return path


def _head(source: _Source, estimates: dict[str, Estimate]) -> tuple[str, str, list[tuple[str, str]]]:
    found, counts = source.found, {part: source.dataset.rows(part) for part in ("train", "valid", "test")}
    labels = found.schema.labels
    others = "".join(f"{n}, " for n in labels if n != labels[source.label])
    predicts = labels[source.label] + (f" (and {others[:-2]}: --label)" if others else "")
    under = f"{found.name}, step {found.step:,}, predicts {predicts}; data {source.dataset.path}: " + ", ".join(
        f"{part} {n:,}" for part, n in counts.items()
    )
    names = {"auc": "AUC", "gauc": "GAUC (within sessions)", "ne": "normalised entropy", "calibration": "calibration"}
    cards = [(f"{estimates[n].value:.4f}", what) for n, what in names.items() if n in estimates]
    cards = [(value.replace("nan", "-"), f"{what}, {source.split}") for value, what in cards]
    trained = sum(p.numel() for p in found.model.parameters())
    return f"Report on {source.run_dir.resolve().name}", under, [*cards, (f"{trained:,}", "dense weights")]


# -- quality ----------------------------------------------------------------------------------------------------


def _verdict(source: _Source, estimates: dict[str, Estimate]) -> Section:
    judged_rows: dict[str, tuple[int, dict[str, Estimate]]] = {}
    words = _in_words(source.split, estimates)
    beside = parts.Alone(source.found, source.dataset)
    for part in dict.fromkeys(("valid", "test", source.split)):
        if not source.dataset.rows(part):
            continue
        dataset, found = source.dataset, source.found
        rows = source.rows
        if part != source.split:
            rows = score_part(found, dataset, part, source.told, source.label)
        rate = dataset.manifest["base_rate"][found.schema.labels[source.label]]  # by weights, as each metric is
        kept = dataset.schema.split.negatives
        constant = torch.full_like(rows.scores_N, rate / (rate + (1 - rate) / kept))  # of the whole log
        name = f"{part}: {found.name}{found.through(dataset.fingerprint, part)}"
        scored = {name: rows, f"{part}: always the training rate": rows.by(constant)}
        apart = beside.scores(part, source.label)
        scored |= {f"{part}: {name} alone": rows.by(scores_N) for name, scores_N in apart.items()}
        if apart and part == source.split:
            words += " " + parts.in_words(part, rows, apart, beside.whole)
        for name, loader in () if source.label else dataset.baselines(part):
            scored[f"{part}: {name} (baseline)"] = rows.by(torch.cat([batch.dense_BC[:, 0] for batch in loader]))
        judged_rows |= {name: (len(r.known().scores_N), r.estimates()) for name, r in scored.items()}
    lines = [[name, count, *_cells(found)] for name, (count, found) in judged_rows.items()]
    units = "rows" if source.rows.sessions_N is None else "sessions"
    html = elements.text(words)
    html += elements.table(*elements.without_gaps(["", "rows", *METRICS], lines))
    html += elements.text(
        "± is half of a 95 % interval, for other " + units + " of the same kind. NE is logloss over that of always "
        "saying the rows' own rate: 1 is useless, lower is better. Calibration is predicted positives over positives. "
        "ECE is how far the mean score of like scores is from their rate; noise alone makes it more than 0.",
        soft=True,
    )
    if source.rows.sessions_N is not None:
        lines = [[name, *_cells(found, places())] for name, (_, found) in judged_rows.items()]
        html += elements.heading("Within groups: where the positives are placed") + elements.table(
            ["", *places()], lines
        )
        told = "Means over the groups that have a positive. Equal scores are ordered at random, so the line of always "
        html += elements.text(told + "the training rate is what chance gets.", soft=True)
    return "Verdict", html + _progressive(source)


def _progressive(source: _Source) -> str:
    fifths = _results(source).get("progressive", [])
    if not fifths or source.label:
        return ""
    names = [n for n in METRICS if n in fifths[0]]
    lines = [
        [f"part {i} of {len(fifths)}", round(f["examples"]), *("-" if f[n] is None else float(f[n]) for n in names)]
        for i, f in enumerate(fifths, 1)
    ]
    title = elements.heading("Progressive validation: each batch predicted, then trained on")
    return title + elements.table(["", "examples", *names], lines)


def _in_words(split: str, estimates: dict[str, Estimate]) -> str:
    ne, calibration = estimates["ne"], estimates["calibration"]
    if not math.isfinite(ne.value):
        return f"The {split} rows are all of one class: neither AUC nor NE is defined there."
    gain = 1 - ne.value
    words = f"On {split}, the model takes away {100 * gain:.1f} % of the loss of always saying the rate of positives"
    if gain < 0:
        words = f"On {split}, the model is {-100 * gain:.1f} % worse than always saying the rate of positives"
    if abs(gain) < 1.96 * ne.error:
        words = f"On {split}, the model's loss cannot be told from that of always saying the rate of positives"
    words += f" (NE {ne.value:.4f})."
    off = calibration.value - 1
    if abs(off) < 1.96 * calibration.error:
        return f"{words} Its scores add up to the positives, within the noise of these rows."
    return f"{words} It predicts {100 * abs(off):.1f} % {'more' if off > 0 else 'fewer'} positives than there are."


def _learning(source: _Source) -> Section:
    train, valid = picture.log_of(source.run_dir)
    if not train and not valid:
        return "Learning", elements.text(f"{source.run_dir}/log.jsonl holds no record to draw.")

    def paint(figure: Any) -> None:
        axes = figure.subplots(1, 3)
        for axis, name, title in zip(
            axes, ("logloss", "ne", "auc"), ("logloss", "normalised entropy", "AUC"), strict=True
        ):
            picture.over_examples(axis, train, valid, name, title)

    kind = "each batch judged before the step that learns it"
    kind += "; after the first epoch these rows were seen before" if source.found.run.loop.epochs > 1 else ""
    words = f"The line is the training log ({kind}), a point for every {source.found.run.log.every} steps."
    words += f" Both are of {source.found.schema.labels[0]} alone." if len(source.found.schema.labels) > 1 else ""
    return "Learning", elements.image(
        picture.svg(paint, height=2.7), "Logloss, NE and AUC over examples"
    ) + elements.text(words, soft=True)


def reliability(rows: Rows) -> tuple[list[float], list[float], list[float], list[float]]:
    """Returns four lists over groups of equal weight, in order of score.

    They are the mean prediction, the share of positives, its standard error, and the worth. The worth is how many rows
    of one weight would tell as much: (sum w)^2 / sum w^2 of all rows (Kish 1965), in which the unit of the weights
    cancels, times the group's share of the weight. The error is Agresti and Coull's (1998), so that none of 20 does not
    mean never.
    """
    rows, stream = rows.known(), Streaming()
    stream.update(rows.scores_N, rows.labels_N, rows.weights_N)
    points = stream.reliability()
    worth_Q = points.weights_Q
    if rows.weights_N is not None:
        w_N = rows.weights_N.double()
        worth_Q = worth_Q * (w_N.sum() / w_N.square().sum())
    likely_Q = (points.labels_Q * worth_Q + 2) / (worth_Q + 4)
    errors_Q = (likely_Q * (1 - likely_Q) / (worth_Q + 4)).sqrt()
    return points.predictions_Q.tolist(), points.labels_Q.tolist(), errors_Q.tolist(), worth_Q.tolist()


def _calibration(source: _Source, whole: Estimate) -> Section:
    rows = source.rows.known()
    predictions, shares, errors, worth = reliability(rows)
    scores, mass = rows.scores_N.numpy(), None if rows.weights_N is None else rows.weights_N.numpy()

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
        picture.reliability(left, {source.split: (predictions, shares, errors)})
        right.hist(scores, bins=40, weights=mass, color=picture.BLUE)
        right.set_title("rows by score" if mass is None else "weight by score", loc="left")
        right.set_xlabel("score")

    html = elements.image(picture.svg(paint, height=3), "Share of positives by score, and a histogram of the scores")
    size = f"about {worth[0] if worth else 0:,.0f} rows each"
    size += "" if mass is None else " (the number of rows of one weight that would tell as much)"
    words = f"{len(worth)} groups of equal weight in order of score, {size} "
    words += (
        f"with 95 % intervals. Predicted positives over positives: {elements.with_error(whole.value, whole.error)}."
    )
    return "Calibration", html + elements.text(words, soft=True)


def _columns(schema: Schema, weighed: Sequence[Importance]) -> list[str]:
    """Returns the columns to slice by, by default: the time, and the columns that matter most."""
    features = [one.column for one in weighed] or list(schema.dense + schema.sparse)
    kept = [name for name in features if name in schema.columns and schema.columns[name].kind != "vector"]
    return list(dict.fromkeys([*schema.of_kind("time"), *kept]))[:MOST_COLUMNS]  # its hour leans on the time, too


def _slices(source: _Source, by: Sequence[str]) -> Section:
    words = "NE compares with each slice's own rate of positives"
    words += "" if source.rows.sessions_N is None else ", GAUC ranks within sessions' rows of the slice"
    words += (
        ". Intervals are of 95 %: of many slices one in twenty lies outside by chance. A number's or a time's slice "
        "begins where the one above it ends. A dash: the slice is of one class."
    )
    html = ""
    for name in by:
        source.told("slices", by.index(name), len(by))
        found = judged(source.rows, source.dataset, source.split, name)
        lines = [[one.value, one.rows, elements.share(one.rate), *_cells(one.estimates)] for one in found]
        html += elements.heading(name)
        dots = _dots_by_slice([one.value for one in found], [one.estimates for one in found])
        html += elements.image(dots, f"AUC, NE and calibration by {name}")
        html += elements.table(*elements.without_gaps(["", "rows", "label rate", *METRICS], lines))
    if "by frequency" in html:
        words += " no. 3 by frequency: the third most frequent id in training, whose text the log does not keep."
    return f"By slice, {source.split}", elements.text(words, soft=True) + html


def _dots_by_slice(names: Sequence[str], found: Sequence[dict[str, Estimate]]) -> str:
    def paint(figure: Any) -> None:
        titles = {"auc": "AUC", "ne": "NE", "calibration": "calibration"}
        for axis, (metric, title) in zip(figure.subplots(1, 3, sharey=True), titles.items(), strict=True):
            values, errors = [e[metric].value for e in found], [e[metric].error for e in found]
            picture.dots(axis, names, values, errors, title, line=1.0 if metric == "calibration" else None)

    return picture.svg(paint, height=0.75 + 0.24 * len(names))


# -- what it leans on -------------------------------------------------------------------------------------------


def _importance(source: _Source, rows: int) -> list[Importance]:
    if not rows:
        return []
    drawn = source.dataset.loader(min(rows, source.dataset.rows(source.split)), split=source.split, shuffle=True)
    whole, size = next(iter(drawn)), max(AT_ONCE, source.found.run.data.batch_size)
    return importance(
        source.found.scores,
        whole,
        source.found.schema,
        batch_size=size,
        label=source.label,
        repeats=REPEATS,
        told=source.told,
    )


def _importances(weighed: Sequence[Importance], split: str, rows: int) -> Section:
    if not weighed or not math.isfinite(weighed[0].ne):
        why = "the rows drawn are all of one class" if weighed else "left out (--rows 0)"
        return "Feature importance", elements.text(f"Nothing to show: {why}.")
    shown = weighed[:30]
    scale = 1 / 1.96 if REPEATS > 1 else math.nan  # the whiskers of `dots` are 1.96 errors; here they are one spread

    def paint(figure: Any) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        names = [one.column for one in shown]
        picture.dots(left, names, [o.ne for o in shown], [o.ne_spread * scale for o in shown], "rise of NE", 0.0)
        picture.dots(right, names, [o.auc for o in shown], [o.auc_spread * scale for o in shown], "fall of AUC", 0.0)

    html = elements.image(picture.svg(paint, height=0.75 + 0.24 * len(shown)), "Rise of NE and fall of AUC by column")
    html += elements.text(
        f"Each column's values were shuffled among {rows:,} rows of {split}, drawn at random, {REPEATS} times, "
        "and the rows scored again: what the model loses is what it takes from the column. Whiskers are one standard "
        "deviation over the shuffles. Columns that say the same hide each other, and importance to this model is not "
        "importance to people.",
        soft=True,
    )
    if len(shown) < len(weighed):
        html += elements.text(f"The first {len(shown)} of {len(weighed)} columns are drawn.", soft=True)
    lines = [
        [o.column, *(f"{v:.5f} ± {s:.5f}" for v, s in ((o.ne, o.ne_spread), (o.auc, o.auc_spread)))] for o in weighed
    ]
    return "Feature importance", html + elements.table(["column", "rise of NE", "fall of AUC"], lines)


# -- what it costs ----------------------------------------------------------------------------------------------


def _time(source: _Source) -> Section:
    title = "Time of a step"
    try:
        profile = profiling.read(source.run_dir)
        if profile is None:
            return title, elements.text("Not measured: train with --profile and report again.")
        kinds = {
            name: [(str(row["part"]), float(row["ms_per_step"]), float(row["share"])) for row in profile[name]]
            for name in ("parts", "kinds")
        }
    except (ValueError, KeyError, TypeError):
        place = f"{source.run_dir / 'profile.json'}: damaged"
        raise UserError(f"{place}; delete it, or train again with --profile") from None

    def paint(figure: Any) -> None:
        titles = {"parts": "ms per step by part", "kinds": "ms per step by kind of work"}
        for axis, (name, words) in zip(figure.subplots(1, 2), titles.items(), strict=True):
            axis.barh(range(len(kinds[name])), [ms for _, ms, _ in kinds[name]], height=0.6, color=picture.BLUE)
            axis.set_yticks(range(len(kinds[name])), [part for part, _, _ in kinds[name]])
            axis.invert_yaxis()
            axis.set_title(words, loc="left")

    html = elements.image(picture.svg(paint, height=2.6), "Milliseconds per step by part and by kind of work")
    lines = {name: [[part, f"{ms:.2f}", elements.share(of)] for part, ms, of in rows] for name, rows in kinds.items()}
    titles = {"parts": "part", "kinds": "kind of work"}
    tables = [elements.table([titles[name], "ms per step", "share"], rows) for name, rows in lines.items()]
    html += elements.beside(*tables)
    words = f"Of {profile['steps']} steps early in the run. look: scores judged for the log. Kinds of work count the "
    words += "operators alone, without Python between them. trace.json.gz beside the run's log shows each of them."
    return title, html + elements.text(words, soft=True)


def _groups(source: _Source) -> list[Section]:
    dataset = source.dataset
    dedup = source.found.run.data.dedup
    lines = []
    for group, names in dataset.schema.groups.items():
        saved = sum(dataset.manifest["saved_bytes"][part][group] for part in PARTS)
        once = dedup == "on" or (dedup == "auto" and dataset.pays(group))
        factor, how = dataset.factor(group), "once for each run" if once else "for every row"
        lines.append([group, ", ".join(names), f"{factor:.2f}", elements.size(saved), how])
    if not lines:
        return []
    header = ["group", "columns", "rows a run", "less to store", "looked up"]
    words = (
        f"A group is stored once for each run of equal rows. It is looked up once from {PAYS} rows a run on; in one "
        f"process only if it has a list (--data.dedup {dedup}). "
        "Less to store: all parts, as numbers, before compression."
    )
    return [("Rows that repeat", elements.table(header, lines) + elements.text(words, soft=True))]


def _tables(source: _Source) -> list[Section]:
    parts = tuple(p for p in ("valid", "test") if source.dataset.rows(p))
    tables, columns = usage(source.found, source.dataset, parts, source.told)
    if not tables:
        return [("Tables", elements.text("The log has no id columns, and the model no tables."))]
    lines = []
    for t in tables:
        hit_R = t.hits_R[t.hits_R > 0]
        median, most = (int(hit_R.median()), int(hit_R.max())) if len(hit_R) else (0, 0)
        sizes = [elements.size(t.bytes_weight), elements.size(t.bytes_weight + t.bytes_state)]
        used = [elements.share(t.share_never), median, most, elements.share(t.share_of_top(0.01))]
        lines.append([t.name, ", ".join(t.columns), t.hits_R.numel(), t.component.dim, *sizes, *used])
    total = sum(t.bytes_weight + t.bytes_state for t in tables)
    header = ["table", "columns", "rows", "dim", "weights", "with optimizer"]
    header += ["never used", "median hits", "most hits", "top 1 %"]

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        for t in sorted(tables, key=lambda t: -t.hits_R.numel())[:6]:
            sorted_R = t.hits_R.sort(descending=True).values.double().cumsum(0)
            at = np.unique(np.geomspace(1, len(sorted_R), 200).astype(np.int64))
            axis.plot(at / len(sorted_R), sorted_R[at - 1] / sorted_R[-1].clamp(min=1), linewidth=1.3, label=t.name)
        axis.set_xscale("log")
        axis.set_ylim(0, 1.02)
        axis.xaxis.set_major_formatter(lambda x, _: f"{100 * x:g} %")
        axis.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.0f} %")
        axis.set_xlabel("share of a table's rows, the most used first")
        axis.set_title("share of the lookups in training", loc="left")
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))

    html = elements.text(f"{len(tables)} tables, {elements.size(total)} with what the optimizer keeps of each row.")
    html += elements.table(header, lines)
    found = _results(source).get("tables", {})
    html += stored(found, tables) + turnover(found)
    html += elements.image(picture.svg(paint, height=2.7), "Share of the lookups by share of the rows")
    html += elements.text(
        "Hits are lookups of a row by one pass over the training part; median and most are of the rows that were used. "
        "top 1 %: the share of lookups that the most used hundredth of the rows gets.",
        soft=True,
    )
    return [("Tables", html), ("Unknown ids", _unknown(source, parts, columns))]


def _unknown(source: _Source, parts: Sequence[str], columns: dict[str, dict[str, ColumnUse]]) -> str:
    schema, lines = source.found.schema, []
    for name, uses in columns.items():
        column = schema.columns[name]
        encoding = schema.encodings[column.table or ""]
        knows = kind_of(encoding).unknown is not None
        missing = [_part(use.missing, use.rows) for use in uses.values()]
        unknown = [_part(use.unknown, use.ids) if knows else "" for use in uses.values()]
        untrained = [_part(uses[part].untrained, uses[part].ids) for part in parts]
        lines.append([name, encoding.kind, *missing, *unknown, *untrained])
    all_parts = ("train", *parts)
    header = [f"{what}, {part}" for what in ("missing", "unknown") for part in all_parts]
    header = ["column", "encoding", *header, *(f"untrained, {part}" for part in parts)]
    return elements.table(header, lines) + elements.text(
        "missing: rows without a value, for lists empty ones. unknown: ids that the table does not know, in training "
        "not yet (a hash knows every id). untrained: ids whose row no training row looked up, so that its vector is "
        "still the random one it began with.",
        soft=True,
    )


# -- small things -----------------------------------------------------------------------------------------------


def _results(source: _Source) -> dict[str, Any]:
    """Returns what the run found at its end; nothing for one that was killed."""
    try:
        return dict(json.loads((source.run_dir / "results.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _part(above: int, below: int) -> str:
    return elements.share(above / below if below else math.nan)


def _cells(estimates: dict[str, Estimate], names: Sequence[str] = METRICS) -> list[str]:
    return [elements.with_error(estimates[n].value, estimates[n].error) if n in estimates else "" for n in names]
