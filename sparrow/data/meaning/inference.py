"""A first schema for a log, guessed from its beginning; notes say where a person should look."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Float64s, Int64s
from sparrow.core.errors import UserError
from sparrow.data import meaning
from sparrow.data.logs.read import Log, open_log, with_candidates
from sparrow.data.meaning.labels import label_columns
from sparrow.data.meaning.names import GROUPS, TIMES, WEIGHTS, is_measure, tells_time
from sparrow.data.meaning.outcomes import FIRST_ROWS, LEFT_OUT, check_outcomes, names_of, suspected
from sparrow.data.meaning.sample import SampledColumn, look
from sparrow.data.shaping.steps import REQUEST
from sparrow.features.ids import as_ids, is_text
from sparrow.features.labels import labels
from sparrow.features.numeric import as_numbers
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.features.types import is_unnamed

TRUTH = "true_p"  # the column in which `sparrow generate` tells the click's probability

# ends the notes about integers that look like names because some values come again
_IF = "numeric if it measures"
_FEATURES = ("categorical", "numeric")
_FEW = 64
_ALL_APART = 200  # rows, of which none can have the id of another by chance alone


def infer(
    inputs: Sequence[str | Path],
    label: str | None = None,
    rows: int = FIRST_ROWS,
    impressions: str | None = None,
) -> Schema:
    """Returns a schema guessed from a log's beginning. Guesses that are unsure carry notes; nothing
    is fitted.

    Args:
        inputs: see `open_log`.
        label: the label's column, when its name does not say so.
        rows: how many of the log's first rows are looked at, at most.
        impressions: the column that says how many showings a row stands for, of which the label
            counts some.

    Raises:
        UserError: when there is no label, or when its column has not two values and is neither
            rating nor probability.
    """
    return infer_log(open_log(inputs), label, rows, impressions)


def infer_log(
    log: Log,
    label: str | Sequence[str] | None = None,
    rows: int = FIRST_ROWS,
    impressions: str | None = None,
    outcomes: Sequence[str] = (),
) -> Schema:
    """Returns what `infer` does, for a log that is open.

    Args:
        log: the log.
        label: one label or several, the monitored one first.
        rows: see `infer`.
        outcomes: columns that are left out, because they are known only after the label.

    Raises:
        UserError: like `infer`, for a log without rows, and for outcomes that are no columns, or
            labels.
    """
    log = with_candidates(log)
    if log.source.candidates:
        label = label or meaning.requests.label_of(log)
    names = names_of(label)
    sample = log.sample(rows)
    if not sample.num_rows:
        raise UserError(f"{log.name}: no rows; give a log with at least one")
    check_outcomes(outcomes, log, names)
    try:
        sampled = {name: look(name, sample[name]) for name in sample.column_names}
        inferred = _inferred(log, names, impressions, sampled, outcomes)
        return suspected(inferred, {name: s.bare for name, s in sampled.items()})
    except UserError as error:
        if log.source.names and not log.source.header and log.source.format != "criteo":
            error = UserError(
                f"{error}; the log's first line was taken for a row, as it does not look like a"
                " header"
            )
        raise log.located(error, 0) from None


def _inferred(
    log: Log,
    names: Sequence[str],
    impressions: str | None,
    sampled: dict[str, SampledColumn],
    outcomes: Sequence[str],
) -> Schema:
    columns = {name: Column(kind="ignore", note=LEFT_OUT) for name in outcomes}
    known = {name: s for name, s in sampled.items() if name not in columns}
    if impressions is not None:
        columns |= meaning.impressions.count_columns(known, names, impressions)
    for label in () if impressions is not None else names or (None,):
        for name, column in label_columns(known, label).items():
            if column.kind == "label" or name not in columns:
                columns[name] = column
    repair = log.source.bad_rows == "repair"
    columns |= _times((s for s in sampled.values() if s.name not in columns), repair)
    sure = [REQUEST] if log.source.candidates else []
    groups, lone = _groups(sampled.values(), sure)
    for i, name in enumerate(n for n in groups if n not in columns):
        group = next((n for n, c in columns.items() if c.kind == "group"), None)
        note = None
        if i:
            note = f"ignored, as the group is {group}"
        elif not (sampled[name].is_id or name in sure):
            note = "by its name the group, and so no feature"
        columns[name] = Column(kind="ignore" if i else "group", note=note)
    if log.source.format == "criteo":
        columns |= {n: Column(kind="numeric", transform="log") for n in known if n[0] == "I"}
        columns |= {n: Column(kind="categorical", table=n) for n in known if n[0] == "C"}
    clicks = _clicks(columns, sampled) if impressions is None else None
    for name, s in sampled.items():
        if name not in columns:
            columns[name] = _feature(s, repair, clicks)
    for name in lone:
        if columns[name].kind in _FEATURES:
            columns[name] = _lone_group(columns[name], sampled[name])
    cells = {name: s.bare for name, s in sampled.items()}
    # the log's; the first label is monitored
    order = dict.fromkeys([*(names if len(names) > 1 else ()), *sampled])
    columns = {name: columns[name] for name in order}
    if log.source.candidates or log.source.joins:
        columns = meaning.requests.ids_of(log, columns, cells)
    _tell_measures_of_items(columns, sampled)
    if any(s.is_list for s in sampled.values()):
        meaning.lists.pair_weights(columns, known)
        meaning.lists.share_tables(columns, sampled)
    if log.source.candidates:
        columns = meaning.requests.with_notes(log, columns, cells)
    for name in [name for name, column in columns.items() if column.kind == "time"]:
        stem = name.rpartition(":")[0] if sampled[name].declared else name
        parts = meaning.times.parts_of_time(name, stem, columns[name], sampled[name].values)
        columns |= {part: column for part, column in parts.items() if part not in columns}
    tables = {c.table: Encoding() for c in columns.values() if c.table is not None}
    return Schema(columns=columns, encodings=tables, source=log.source)


def _times(sampled: Iterable[SampledColumn], repair: bool) -> dict[str, Column]:
    """Returns the time column, with its format, and the other columns that tell times, which are
    ignored.
    """
    times: dict[str, tuple[str | None, str | None, str | None]] = {}
    listed = [s for s in sampled if not s.is_list and len(s.values)]
    gaps = {s.name: s.rows - len(s.values) for s in listed}
    plain = {s.name for s in listed if s.called in TIMES}
    for s in sorted(listed, key=lambda s: (s.called not in TIMES, gaps[s.name] > 0)):
        named = s.called in TIMES or s.words[-1:] in (("ts",), ("timestamp",), ("datetime",))
        may_be_time = not s.is_number or named or tells_time(s.words)
        if may_be_time and (time := meaning.times.time_reading(s.type, s.values, s.words, named)):
            times[s.name] = time
    columns: dict[str, Column] = {}
    for name, (format, note, stray) in times.items():
        first = next(iter(columns), None)
        if first is not None:
            columns[name] = Column(kind="ignore", note=f"ignored, as the time is {first}")
        elif gaps[name] and name not in plain:  # what is plainly the time is refused, with a remedy
            note = f"a time, missing in some rows ({gaps[name]:,}); fill it in to split by it"
            columns[name] = Column(kind="ignore", note=note)
        elif stray is not None and (repair or name not in plain):
            note = (
                f"a time, but {stray!r} is not {format or 'ISO 8601'!r} as most are; mend it to"
                " split by it"
            )
            columns[name] = Column(kind="ignore", note=note)
        else:
            columns[name] = Column(kind="time", format=format, note=note)
    return columns


def _groups(sampled: Iterable[SampledColumn], sure: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the columns that name requests or sessions, and those that are only called so, as
    most rows are alone.

    A group is what rows are compared within and drawn with. A row that has its value alone is
    neither. By the end of its name a column is a group only if it names many.

    sure: columns that are groups whatever rows share.
    """
    groups: list[tuple[bool, int, str]] = []
    lone: list[str] = []
    for s in sampled:
        if pa.types.is_floating(s.type) or s.is_list:
            continue
        for place, name in enumerate(GROUPS):
            ends = (
                s.called.endswith(f"_{name}")
                and "per" not in s.words
                and 100 * len(s.distinct) >= s.rows
            )
            if s.called == name or ends:
                if s.name in sure or 2 * _rows_in_company(s) >= s.rows:
                    groups.append((s.called != name, place, s.name))
                else:
                    lone.append(s.name)
                break
    return [name for _, _, name in sorted(groups)], lone


def _rows_in_company(sampled: SampledColumn) -> int:
    """Returns how many rows have a value that another row has, too."""
    counts_U = pc.value_counts(sampled.values).field("counts").to_numpy(zero_copy_only=False)
    return int(counts_U[counts_U > 1].sum())


def _lone_group(column: Column, sampled: SampledColumn) -> Column:
    """Returns the feature that a column is if it is only called like a group. Its values are
    names.
    """
    share = _rows_in_company(sampled) / sampled.rows
    reason = (
        f"by its name a group, but {share:.0%} of the rows looked at share its value with"
        " another one"
    )
    note = f"{reason}, so it is a feature; kind group if rows of one value are to be compared"
    if column.kind == "numeric":
        return Column(kind="categorical", table=sampled.name, note=note)
    return replace(column, note=note)


def _measures(sampled: SampledColumn, repair: bool) -> bool:
    return sampled.is_number or _text(sampled, repair, None).kind == "numeric"


def _text(sampled: SampledColumn, repair: bool, clicks: Float64s | None) -> Column:
    feature = partial(_feature, repair=False, clicks=clicks)
    return meaning.texts.text_column(sampled, repair, feature)


def _clicks(columns: dict[str, Column], sampled: dict[str, SampledColumn]) -> Float64s | None:
    """Returns the sample's first label, 0 and 1, or None where it cannot be read; the log is
    refused later.
    """
    name = next(name for name, column in columns.items() if column.kind == "label")
    try:
        return labels(sampled[name].bare, name, columns[name], training=True, row0=0)
    except UserError:
        return None


def _feature(sampled: SampledColumn, repair: bool, clicks: Float64s | None) -> Column:
    name = sampled.name
    if name == TRUTH:
        return Column(kind="baseline", note="the probability that the log was drawn from")
    may_be_vector = is_text(sampled.type) or pa.types.is_nested(sampled.type)
    vector = meaning.vectors.vector_of(sampled.bare, sampled.type) if may_be_vector else None
    if vector is not None:
        return vector
    if sampled.is_list:
        return meaning.lists.list_column(sampled)
    if reason := _reason_to_ignore(sampled, repair):
        return Column(kind="ignore", note=f"ignored, as {reason}")
    if sampled.declared == "token":
        return Column(kind="categorical", table=name, note="by its header")
    if not sampled.is_number:
        return _text(sampled, repair, clicks)
    if (
        sampled.called in WEIGHTS
        and pc.min(sampled.values).as_py() >= 0
        and len(sampled.values) == sampled.rows
    ):
        return Column(kind="weight", note="by its name, of the sample")
    if sampled.words[-1:] in (("id",), ("ids",)) and not pa.types.is_integer(sampled.type):
        as_ids(sampled.bare, name, lambda i: i)  # refuses what lost digits or has a fraction
        return Column(kind="categorical", table=name, note="whole floats, by the name ids")
    if pa.types.is_integer(sampled.type) and not sampled.declared:
        reason = _names(sampled, clicks)
        if reason is None:
            return _numeric(sampled, "an integer; categorical if it is a code")
        return Column(kind="categorical", table=name, note=reason)
    if sampled.is_id and pc.all(pc.equal(sampled.values, pc.round(sampled.values))).as_py():
        return Column(
            kind="categorical", table=name, note="whole floats, by its name an id or code"
        )
    if not sampled.is_id and _spread(sampled.values) >= 2.0**53:
        return _numeric(
            sampled,
            "beyond 2^53; if these are ids they have lost digits: write them as integers or"
            " strings",
        )
    if "propensity" in sampled.words:
        return _numeric(sampled, "a propensity? ignore it unless it is known when a model is asked")
    if sampled.words[-1:] == ("weight",):
        return _numeric(sampled, "kind weight if it is the weight of a sample")
    hint = "by its name an id; write ids as integers or strings" if sampled.is_id else None
    return _numeric(sampled, hint)


def _reason_to_ignore(sampled: SampledColumn, repair: bool) -> str | None:
    """Returns why a column has nothing to learn from, or None."""
    count = len(sampled.distinct)
    if pa.types.is_nested(sampled.type):
        return f"{sampled.type} is neither a number nor an id"
    if _is_row_number(sampled):
        return "it numbers the rows"
    if is_unnamed(sampled.name):
        return "it has no name, like an index that pandas wrote; name it to use it"
    if count == 0 or (count == 1 and len(sampled.values) == sampled.rows):
        return f"it has {'one value' if count else 'no values'}"
    if count == sampled.rows >= _ALL_APART and (sampled.is_id or not _measures(sampled, repair)):
        return "every row has another value"
    return None


def _names(sampled: SampledColumn, clicks: Float64s | None) -> str | None:
    """Returns why integers are names, or None where they measure or count."""
    count = len(sampled.distinct)
    if sampled.is_id:
        return "an integer, by its name an id or code"
    if is_measure(sampled.words):
        return None
    x_N = _int64(sampled.values)
    if count <= min(_FEW, sampled.rows // 100):
        is_count = meaning.numbers.is_count(x_N)
        return None if is_count else f"an integer of {count} values, taken for ids"
    if _spread(sampled.values) >= 2.0**31:
        return "an integer, spread as hashes are; numeric if it is a measure"
    if 2 * np.unique(x_N, return_counts=True)[1].max() > len(x_N):
        return None  # mostly 0, such as gains: a measure of what seldom happens
    if meaning.numbers.is_uneven(x_N):
        return f"an integer, of which some come far more often than their neighbours; {_IF}"
    has_all = len(sampled.values) == sampled.rows
    if clicks is not None and has_all and meaning.numbers.tells_apart(x_N, clicks):
        return f"an integer, of which each value tells more than a range of values; {_IF}"
    return None


def _tell_measures_of_items(columns: dict[str, Column], sampled: dict[str, SampledColumn]) -> None:
    """Makes numbers of integers that look like names only because what they measure, such as a
    film, comes again.
    """
    ids = [n for n, c in columns.items() if c.kind == "categorical" and not _is_told_by_values(c)]
    for name in [n for n, c in columns.items() if _is_told_by_values(c)]:
        x_N = _int64(sampled[name].bare.fill_null(0))
        for item in ids:
            coded = pc.dictionary_encode(sampled[item].bare, null_encoding="encode")
            item_N = coded.indices.to_numpy(zero_copy_only=False)
            _, first, place_N = np.unique(item_N, return_index=True, return_inverse=True)
            if len(first) < 0.9 * len(x_N) and (x_N[first][place_N] == x_N).all():
                if not meaning.numbers.is_uneven(x_N[first]):
                    note = f"an integer that each {item} has; categorical if it is a code"
                    columns[name] = _numeric(sampled[name], note)
                break


def _is_told_by_values(column: Column) -> bool:
    return column.kind == "categorical" and str(column.note).endswith(_IF)


def _int64(values: pa.Array) -> Int64s:
    return values.cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False)


def _spread(values: pa.Array) -> float:
    """Returns the largest of whole numbers if they are spread evenly up to it, else 0.

    Ids are spread so. Counts and times are not.
    """
    x_N = np.abs(values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
    top = float(x_N.max(initial=0.0))
    even = np.median(x_N) >= top / 16 and np.ptp(x_N) >= top / 2 and (x_N == np.round(x_N)).all()
    return top if len(x_N) and even else 0.0


def _is_row_number(sampled: SampledColumn) -> bool:
    """Returns whether a column without a meaning of its own counts the rows, like the index that
    pandas writes.
    """
    if not pa.types.is_integer(sampled.type) or len(sampled.values) < sampled.rows:
        return False
    unnamed = not sampled.words or sampled.words[0] == "unnamed"
    steps = np.diff(sampled.values.to_numpy(zero_copy_only=False))
    return bool((unnamed or sampled.rows >= 1000) and (steps == 1).all())


def _numeric(sampled: SampledColumn, note: str | None) -> Column:
    size = np.abs(as_numbers(sampled.values, sampled.name, 0))
    heavy = size.max() > 100 and size.max() > 10 * np.nanmedian(size)
    return Column(kind="numeric", transform="log" if heavy else "standard", note=note)
