"""A first schema for a log, guessed from its beginning; notes say where a person should look."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Float64s, Int64s
from sparrow.core.errors import UserError, suggest
from sparrow.data.logs.read import Log, open_log, with_candidates
from sparrow.data.meaning.looks import digits_lost, list_of, numbers_in, sign_of_number, stands_for_none
from sparrow.data.meaning.names import (
    GROUPS,
    LABELS,
    RATINGS,
    TIMES,
    WEIGHTS,
    YES,
    Words,
    bare_label,
    is_id,
    is_measure,
    words_of,
)
from sparrow.data.meaning.numbers import is_count, is_uneven, tells_apart
from sparrow.data.meaning.requests import ids_of, label_of, noted
from sparrow.data.meaning.times import parts_of_time, time_told
from sparrow.data.meaning.vectors import vector_of
from sparrow.data.shaping.structs import is_list
from sparrow.features.ids import as_ids, as_lists, is_text, trimmed
from sparrow.features.numeric import as_numbers
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.features.transforms import labels

OUTCOME = "looks like an outcome"
TRUTH = "true_p"  # the column in which `sparrow generate` tells the click's probability

_IF = "numeric if it measures"  # ends the notes about integers that look like names because some values come again
_DECLARED = (":token", ":float", ":token_seq", ":float_seq")
_FEW = 64
_ALL_APART = 200  # rows, of which none can have the id of another by chance alone


@dataclass(frozen=True)
class _Seen:
    """A column of the sample: its name's words, its values (flat, for lists; missing ones left out), the distinct ones.

    declared: the type that a header such as user_id:token states (RecBole's atomic files), or "". spelled: separator
    and weights of text that is a list. bare: the column as it stands in the sample.
    """

    name: str
    words: Words
    declared: str
    type: pa.DataType
    values: pa.Array
    distinct: pa.Array
    rows: int
    bare: pa.Array
    spelled: tuple[str | None, str | None] | None = None

    @property
    def is_id(self) -> bool:
        return is_id(self.words)

    @property
    def is_list(self) -> bool:
        return self.spelled is not None or is_list(self.type)

    @property
    def is_number(self) -> bool:
        return pa.types.is_integer(self.type) or pa.types.is_floating(self.type) or pa.types.is_decimal(self.type)

    @property
    def called(self) -> str:
        return "_".join(self.words)


def infer(inputs: Sequence[str | Path], label: str | None = None, rows: int = 100_000) -> Schema:
    """Returns a schema guessed from a log's beginning. Guesses that are unsure carry notes; nothing is fitted.

    Args:
        inputs: see `open_log`.
        label: the label's column, when its name does not say so.
        rows: how many of the log's first rows are looked at, at most.

    Raises:
        UserError: when there is no label, or when its column has not two values and is no rating.
    """
    return infer_log(open_log(inputs), label, rows)


def infer_log(log: Log, label: str | None = None, rows: int = 100_000) -> Schema:
    """Returns what `infer` does, for a log that is open.

    Raises:
        UserError: like `infer`, and for a log without rows.
    """
    log = with_candidates(log)
    label, sample = label or label_of(log), log.sample(rows)
    if not sample.num_rows:
        raise UserError(f"{log.name}: no rows; give a log with at least one")
    try:
        return _inferred(log, label, {name: _look(name, sample[name]) for name in sample.column_names})
    except UserError as error:
        if log.source.names and not log.source.header and log.source.format != "criteo":
            error = UserError(f"{error}; the log's first line was taken for a row, as it does not look like a header")
        raise log.located(error, 0) from None


def _inferred(log: Log, label: str | None, seen: dict[str, _Seen]) -> Schema:
    columns = _labels(seen, label)
    repair = log.source.bad_rows == "repair"
    columns |= _times((s for s in seen.values() if s.name not in columns), repair)
    for i, name in enumerate(n for n in _groups(seen.values()) if n not in columns):
        group = next((n for n, c in columns.items() if c.kind == "group"), None)
        note = f"ignored, as the group is {group}" if i else None
        columns[name] = Column(kind="ignore" if i else "group", note=note)
    if log.source.format == "criteo":
        columns |= {n: Column(kind="numeric", transform="log") for n in seen if n[0] == "I"}
        columns |= {n: Column(kind="categorical", table=n) for n in seen if n[0] == "C"}
    clicks = _clicks(columns, seen)
    columns |= {name: _feature(s, repair, clicks) for name, s in seen.items() if name not in columns}
    cells = {name: s.bare for name, s in seen.items()}
    columns = ids_of(log, {name: columns[name] for name in seen}, cells)  # in the log's order
    _tell_measures_of_items(columns, seen)
    _pair_weights(columns, seen)
    _share_tables(columns, seen)
    columns = noted(log, columns, cells)
    for name in [name for name, column in columns.items() if column.kind == "time"]:
        stem = name.rpartition(":")[0] if seen[name].declared else name
        made = parts_of_time(name, stem, columns[name], seen[name].values)
        columns |= {of: column for of, column in made.items() if of not in columns}
    tables = {c.table: Encoding() for c in columns.values() if c.table is not None}
    return Schema(columns=columns, encodings=tables, source=log.source)


def _look(name: str, column: pa.ChunkedArray) -> _Seen:
    stem, _, declared = name.rpartition(":") if name.endswith(_DECLARED) else (name, "", "")
    bare = values = column.combine_chunks()
    kind, spelled = values.type, None
    if is_text(kind):
        bare = values = trimmed(values)
    if is_text(kind) and values.null_count < len(values):
        spelled = (None, None) if declared == "token_seq" else list_of(values.drop_null()) if not declared else None
    if spelled is not None:
        values = as_lists(values, name, int, None, *spelled)[0]
    elif is_list(kind):
        values = values.flatten()
        values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    if pa.types.is_float16(values.type):
        values = values.cast(pa.float32())
    values = values.drop_null()
    if is_list(kind) and pa.types.is_floating(values.type):
        values = values[:_FEW]  # of vectors there may be many, and of each only its type is asked
    if pa.types.is_floating(values.type):
        values = values.filter(pc.invert(pc.is_nan(values)))
    distinct = values.unique() if not pa.types.is_nested(values.type) else values
    return _Seen(name, words_of(stem), declared, kind, values, distinct, len(column), bare, spelled)


def _labels(seen: dict[str, _Seen], label: str | None) -> dict[str, Column]:
    """Returns the label's column, and those that look like labels too.

    The latter are ignored, because a model cannot know them before the impression.
    """
    two = [s.name for s in seen.values() if len(s.distinct) <= 2 and not s.is_list]
    named = [name for word in LABELS for name in two if word in (seen[name].called, bare_label(seen[name].words))]
    scales = [s for s in seen.values() if s.words and _scale(s)]
    rated = [s.name for s in scales if s.words[-1] in RATINGS[:3] or s.called == "y"]
    scored = [s.name for s in scales if s.words[-1] in RATINGS[3:]]
    if label is not None and label not in seen:
        raise UserError(f"label: no column {label!r}{suggest(label, seen)}")
    wide = [s.name for s in seen.values() if s.called in LABELS[:4]]
    candidates = [name for name in two if len(seen[name].distinct) == 2]
    guessed = _guessed(candidates, seen)
    chosen = label or next(iter([*named, *rated, *wide, *guessed, *scored]), None)
    if chosen is None:
        remedy = "a log of clicks alone needs a column of 0 and 1, and rows of what was shown and not clicked"
        if candidates:
            remedy = f"with --label NAME name one of the columns of two values: {', '.join(candidates)}"
        raise UserError(f"label: no column is named like one (label, click, target, ...); {remedy}")
    found = seen[chosen]
    if label is None and chosen in rated and guessed and len(found.values) < found.rows:
        which = f"{chosen!r} is a rating that some rows lack, and {guessed[0]!r} has two values"
        raise UserError(f"label: {which}; name the label with --label NAME, and leave out rows without it")
    if len(found.distinct) <= 2 and not found.is_list:
        settings: dict[str, Any] = _positive(found)
        if chosen in guessed and chosen not in (label, *named, *rated, *wide):
            told = "taken for the label, as no column is named like one; if another is, name it with --label"
            settings["note"] = f"{told}; {settings['note']}" if "note" in settings else told
    elif chosen in (*rated, *scored):
        scale, least = sorted(found.distinct.to_pylist()), _scale(found)
        note = f"a rating of {scale[0]:g} to {scale[-1]:g}: from {least:g} on counts as 1, the upper 40 % of the scale"
        settings = {"threshold": least, "note": note}
    else:
        remedy = "name a column of two values, add one to the log, or give it a threshold in a schema"
        raise UserError(f"label: column {chosen!r} has {len(found.distinct)} values where a label has two; {remedy}")
    note = f"{OUTCOME}, unknown before {chosen}; make it kind 'label' to train both"
    others = {name: Column(kind="ignore", note=note) for name in named if name != chosen}
    return {chosen: Column(kind="label", **settings)} | others


def _guessed(candidates: Sequence[str], seen: dict[str, _Seen]) -> list[str]:
    """Returns the column of two values that is the last one, or else the only one called is_... or has_..., if any.

    Else it is the only one of two values, if one of them says yes.
    """
    asked = [name for name in candidates if seen[name].words[:1] in (("is",), ("has",))]
    last = next(reversed(seen))
    if last in candidates or len(asked) == 1:
        return [last] if last in candidates else asked
    says_yes = [n for n in candidates if any(str(v).lower() in (*YES, "1.0") for v in seen[n].distinct.to_pylist())]
    return says_yes if len(candidates) == 1 else []


def _scale(seen: _Seen) -> float | None:
    """Returns the least of a rating's upper 40 %, when it has 3 to 20 distinct numbers."""
    if not seen.is_number or not 3 <= len(seen.distinct) <= 20:
        return None
    scale = sorted(float(x) for x in seen.distinct.to_pylist())
    return scale[-max(1, round(0.4 * len(scale)))]


def _positive(seen: _Seen) -> dict[str, str]:
    """Returns what counts as 1 where the values are not 0 and 1.

    Of two texts it is a word for yes, else the rarer one. Of two numbers it is the larger one.
    """
    values = seen.distinct.to_pylist()
    if len(values) < 2 or set(values) == {0, 1}:
        return {}
    counts = {str(v["values"]): v["counts"] for v in pc.value_counts(seen.values).to_pylist()}
    yes = [v for v in counts if v.strip().lower() in YES]
    positive = str(max(values)) if seen.is_number else yes[0] if yes else min(counts, key=lambda v: counts[v])
    return {"positive": positive, "note": f"of {' and '.join(map(repr, counts))}, {positive!r} counts as 1"}


def _times(seen: Iterable[_Seen], repair: bool) -> dict[str, Column]:
    """Returns the time column, with its format, and the other columns that tell times, which are ignored."""
    found: dict[str, tuple[str | None, str | None, str | None]] = {}
    listed = [s for s in seen if not s.is_list and len(s.values)]
    gaps, plain = {s.name: s.rows - len(s.values) for s in listed}, {s.name for s in listed if s.called in TIMES}
    for s in sorted(listed, key=lambda s: (s.called not in TIMES, gaps[s.name] > 0)):
        named = s.called in TIMES or s.words[-1:] in (("ts",), ("timestamp",), ("datetime",))
        if told := time_told(s.type, s.values, s.words, named):
            found[s.name] = told
    columns: dict[str, Column] = {}
    for name, (format, note, stray) in found.items():
        first = next(iter(columns), None)
        if first is not None:
            columns[name] = Column(kind="ignore", note=f"ignored, as the time is {first}")
        elif gaps[name] and name not in plain:  # what is plainly the time is refused, with a remedy
            note = f"a time, missing in some rows ({gaps[name]:,}); fill it in to split by it"
            columns[name] = Column(kind="ignore", note=note)
        elif stray is not None and (repair or name not in plain):
            note = f"a time, but {stray!r} is not {format or 'ISO 8601'!r} as most are; mend it to split by it"
            columns[name] = Column(kind="ignore", note=note)
        else:
            columns[name] = Column(kind="time", format=format, note=note)
    return columns


def _groups(seen: Iterable[_Seen]) -> list[str]:
    """Returns the columns that name requests or sessions; by the end of their names only if they name many."""
    found: list[tuple[bool, int, str]] = []
    for s in seen:
        if pa.types.is_floating(s.type) or s.is_list:
            continue
        for place, name in enumerate(GROUPS):
            ends = s.called.endswith(f"_{name}") and "per" not in s.words and 100 * len(s.distinct) >= s.rows
            if s.called == name or ends:
                found.append((s.called != name, place, s.name))
                break
    return [name for _, _, name in sorted(found)]


def _measures(seen: _Seen, repair: bool) -> bool:
    return seen.is_number or _text(seen, repair, None).kind == "numeric"


def _clicks(columns: dict[str, Column], seen: dict[str, _Seen]) -> Float64s | None:
    """Returns the sample's first label, 0 and 1, or None where it cannot be read; the log is refused later."""
    name = next(name for name, column in columns.items() if column.kind == "label")
    try:
        return labels(seen[name].bare, name, columns[name], training=True, row0=0)
    except UserError:
        return None


def _feature(seen: _Seen, repair: bool, clicks: Float64s | None) -> Column:
    name, count = seen.name, len(seen.distinct)
    if name == TRUTH:
        return Column(kind="baseline", note="the probability that the log was drawn from")
    if (vector := vector_of(seen.bare, seen.type)) is not None:
        return vector
    if seen.is_list:
        return _list(seen)
    if pa.types.is_nested(seen.type):
        return Column(kind="ignore", note=f"ignored, as {seen.type} is neither a number nor an id")
    if _is_row_number(seen):
        return Column(kind="ignore", note="ignored, as it numbers the rows")
    if count == 0 or (count == 1 and len(seen.values) == seen.rows):
        return Column(kind="ignore", note=f"ignored, as it has {'one value' if count else 'no values'}")
    if count == seen.rows >= _ALL_APART and (seen.is_id or not _measures(seen, repair)):
        return Column(kind="ignore", note="ignored, as every row has another value")
    if seen.declared == "token":
        return Column(kind="categorical", table=name, note="by its header")
    if not seen.is_number:
        return _text(seen, repair, clicks)
    if seen.called in WEIGHTS and pc.min(seen.values).as_py() >= 0 and len(seen.values) == seen.rows:
        return Column(kind="weight", note="by its name, of the sample")
    if seen.words[-1:] in (("id",), ("ids",)) and not pa.types.is_integer(seen.type):
        as_ids(seen.bare, name, lambda i: i)  # refuses what lost digits or has a fraction
        return Column(kind="categorical", table=name, note="whole floats, by the name ids")
    if pa.types.is_integer(seen.type) and not seen.declared:
        note, told = _names(seen, clicks), "an integer; categorical if it is a code"
        return Column(kind="categorical", table=name, note=note) if note else _numeric(seen, told)
    if seen.is_id and pc.all(pc.equal(seen.values, pc.round(seen.values))).as_py():
        return Column(kind="categorical", table=name, note="whole floats, by its name an id or code")
    if not seen.is_id and _spread(seen.values) >= 2.0**53:
        return _numeric(seen, "beyond 2^53; if these are ids they have lost digits: write them as integers or strings")
    if "propensity" in seen.words:
        return _numeric(seen, "a propensity? ignore it unless it is known when a model is asked")
    if seen.words[-1:] == ("weight",):
        return _numeric(seen, "kind weight if it is the weight of a sample")
    return _numeric(seen, "by its name an id; write ids as integers or strings" if seen.is_id else None)


def _names(seen: _Seen, clicks: Float64s | None) -> str | None:
    """Returns why integers are names, or None where they measure or count."""
    count = len(seen.distinct)
    if seen.is_id:
        return "an integer, by its name an id or code"
    if is_measure(seen.words):
        return None
    x_N = _int64(seen.values)
    if count <= min(_FEW, seen.rows // 100):
        return None if is_count(x_N) else f"an integer of {count} values, taken for ids"
    if _spread(seen.values) >= 2.0**31:
        return "an integer, spread as hashes are; numeric if it is a measure"
    if 2 * np.unique(x_N, return_counts=True)[1].max() > len(x_N):
        return None  # mostly 0, such as gains: a measure of what seldom happens
    if is_uneven(x_N):
        return f"an integer, of which some come far more often than their neighbours; {_IF}"
    if clicks is not None and len(seen.values) == seen.rows and tells_apart(x_N, clicks):
        return f"an integer, of which each value tells more than a range of values; {_IF}"
    return None


def _tell_measures_of_items(columns: dict[str, Column], seen: dict[str, _Seen]) -> None:
    """Makes numbers of integers that look like names only because what they measure, such as a film, comes again."""
    ids = [n for n, c in columns.items() if c.kind == "categorical" and not _is_told_by_values(c)]
    for name in [n for n, c in columns.items() if _is_told_by_values(c)]:
        x_N = _int64(seen[name].bare.fill_null(0))
        for item in ids:
            coded = pc.dictionary_encode(seen[item].bare, null_encoding="encode")
            item_N = coded.indices.to_numpy(zero_copy_only=False)
            _, first, place_N = np.unique(item_N, return_index=True, return_inverse=True)
            if len(first) < 0.9 * len(x_N) and (x_N[first][place_N] == x_N).all():
                if not is_uneven(x_N[first]):
                    told = f"an integer that each {item} has; categorical if it is a code"
                    columns[name] = _numeric(seen[name], told)
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


def _list(seen: _Seen) -> Column:
    kind = seen.values.type
    if seen.declared == "float_seq" or (len(seen.distinct) and not (pa.types.is_integer(kind) or is_text(kind))):
        return Column(kind="ignore", note=f"a list of {kind}; ids are integers or strings")
    if seen.spelled is None:
        return Column(kind="list", table=seen.name)
    separator, weights = seen.spelled
    at = "as JSON" if separator == "json" else f"cut at {separator!r}" if separator else "cut at white space"
    note = f"text that looks like a list, {at}; categorical if it is one value"
    note = f"text that looks like a list of id:weight, {at}" if weights else note
    return Column(kind="list", table=seen.name, separator=separator, weights=weights, note=note)


def _text(seen: _Seen, repair: bool, clicks: Float64s | None) -> Column:
    name, count = seen.name, len(seen.distinct)
    if not (is_text(seen.type) or pa.types.is_boolean(seen.type)):
        return Column(kind="ignore", note=f"ignored, as {seen.type} is neither a number nor an id")
    note = None
    if seen.called in TIMES:
        such = " and ".join(repr(text) for text in seen.distinct[:2].to_pylist())
        note = f"by its name a time, but its texts, such as {such}, have no format in common; mend them to split by it"
    elif is_text(seen.type):
        share, odd, numbers = numbers_in(seen.values)
        codes = odd.filter(pc.match_substring_regex(odd, r"^0\d+$"))
        if repair and share >= 0.9 and len(odd):
            other = odd[0].as_py()
            return Column(kind="numeric", note=f"{share:.0%} of the texts are numbers; others, as {other!r}, missing")
        if share and not seen.is_id and not len(codes) and stands_for_none(odd, seen.values):
            column = _spelled(seen, odd, numbers, clicks)
            if column.kind == "numeric":
                return column
        if lost := digits_lost(seen.values):
            note = f"ids of many digits, but {lost}, which has lost them; write ids in full"
        elif len(codes):
            note = f"numbers with zeros before them, such as {codes[0].as_py()!r}; numeric if they measure"
        elif share >= 0.9 and len(odd):
            note = f"text, though most are numbers ({odd[0].as_py()!r} is not); numeric with --bad-rows repair"
        elif not seen.is_id and (signed := sign_of_number(seen.values)):
            note = f"text of numbers such as {signed!r}, taken for ids; to have them measured write them as 1234.5"
        elif count > 100 and count > 0.5 * len(seen.values):
            note = f"text of {count} values in {len(seen.values)} rows; ignore it if it is prose"
    return Column(kind="categorical", table=name, note=note)


def _spelled(seen: _Seen, odd: pa.Array, numbers: pa.Array, clicks: Float64s | None) -> Column:
    """Returns what a column of text would be as numbers, with its odd texts missing."""
    if not len(odd) and pa.types.is_integer(numbers.type):
        return Column(kind="ignore")  # somebody made text of them: they are names
    of_numbers = replace(seen, type=numbers.type, values=numbers, distinct=numbers.unique(), bare=numbers)
    column, missing = _feature(of_numbers, False, clicks), tuple(odd.to_pylist())
    if not missing or column.kind != "numeric":
        return column
    cells = f"{len(seen.values) - len(numbers):,} of {seen.rows:,} cells"
    most = f"{', '.join(map(repr, missing[:3]))}{', ...' if len(missing) > 3 else ''}"
    note = f"text of numbers, but for {cells}: {most}, taken for missing; categorical if these mean something"
    return replace(column, missing=missing, note=note)


def _is_row_number(seen: _Seen) -> bool:
    """Returns whether a column without a meaning of its own counts the rows, like the index that pandas writes."""
    if not pa.types.is_integer(seen.type) or len(seen.values) < seen.rows:
        return False
    unnamed = not seen.words or seen.words[0] == "unnamed"
    steps = np.diff(seen.values.to_numpy(zero_copy_only=False))
    return bool((unnamed or seen.rows >= 1000) and (steps == 1).all())


def _numeric(seen: _Seen, note: str | None) -> Column:
    size = np.abs(as_numbers(seen.values, seen.name, 0))
    heavy = size.max() > 100 and size.max() > 10 * np.nanmedian(size)
    return Column(kind="numeric", transform="log" if heavy else "standard", note=note)


def _pair_weights(columns: dict[str, Column], seen: dict[str, _Seen]) -> None:
    """Takes a list of numbers for the weights of a list of ids, if it is named after it and as long in every row."""
    for name in [n for n, c in columns.items() if c.kind == "list" and c.weights is None and is_list(seen[n].type)]:
        for other, theirs in seen.items():
            suffix = theirs.called.removeprefix(seen[name].called)
            if not is_list(theirs.type) or suffix not in ("_weights", "_weight", "_scores", "_score"):
                continue
            lengths = [pc.list_value_length(s.bare).fill_null(0) for s in (seen[name], theirs)]
            if lengths[0].equals(lengths[1]) and columns[other].kind in ("ignore", "list", "vector"):
                columns[name] = replace(columns[name], weights=other, note=f"weighted by {other}, by its name")
                columns[other] = Column(kind="ignore", note=f"the weights of {name}")


def _share_tables(columns: dict[str, Column], seen: dict[str, _Seen]) -> None:
    """Gives a list the table of the column whose ids it repeats: by its values or, where some are shared, its name."""
    singles = [name for name, c in columns.items() if c.kind == "categorical"]
    for name in [n for n, c in columns.items() if c.kind == "list"]:
        ids = seen[name].distinct
        best = None
        best_score = 0.0
        for other in singles:
            theirs = seen[other].distinct
            if not len(ids) or (seen[name].spelled is None and is_text(ids.type) != is_text(theirs.type)):
                continue
            mine, others = _comparable(ids), _comparable(theirs)
            both = pc.sum(pc.is_in(mine, value_set=others)).as_py()
            score = both / (len(mine) + len(others) - both)  # Jaccard: dense small integers overlap by accident
            strong = both >= 0.5 * len(ids) and score >= 0.2
            if (strong or (both and other.lower() in name.lower())) and score > best_score:
                best, best_score = other, score
        if best is not None:
            note = f"shares the table of {best}, whose ids it repeats"
            columns[name] = replace(columns[name], table=columns[best].table, note=note)
        singles.append(name)


def _comparable(ids: pa.Array) -> pa.Array:
    """Returns ids as the bytes that are hashed, so that 12 is the same in text and out of it."""
    ids = as_ids(ids, "", lambda i: i)
    return (ids if is_text(ids.type) else ids.cast(pa.large_string())).cast(pa.large_binary())
