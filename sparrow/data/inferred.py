"""A first schema for a log, guessed from its beginning; notes say where a person should look."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError, suggest
from sparrow.data.read import Log, open_log
from sparrow.data.schema import Column, Schema, Table
from sparrow.features import as_numbers, is_text

LABELS = ("label", "click", "clicked", "is_click", "is_clicked", "target", "y", "conversion", "converted", "purchase")
GROUPS = ("request_id", "impression_id", "query_id", "session_id", "request", "query", "session", "sess_id")
TIMES = ("ts", "time", "timestamp", "datetime", "date", "event_time", "created_at")
YES = ("yes", "y", "true", "t", "1", "click", "clicked", "positive", "buy", "bought")
TRUTH = "true_p"  # the column in which `sparrow generate` tells the click's probability

_ID_WORDS = frozenset(
    re.findall(
        r"\w+",
        "id ids idx index code type category cat class group user item article ad advertiser campaign creative product "
        "sku brand shop seller store site app publisher page channel slot position device os browser model country "
        "region state city zip language lang referrer environment gender hour weekday dow month",
    )
)
_FEW = 64


@dataclass(frozen=True)
class _Seen:
    """A column of the sample: its name's words, values present (flat, for lists) and those that are distinct."""

    name: str
    words: tuple[str, ...]
    type: pa.DataType
    values: pa.Array
    distinct: pa.Array
    rows: int

    @property
    def is_id(self) -> bool:
        return bool(self.words) and self.words[-1] in _ID_WORDS

    @property
    def is_number(self) -> bool:
        return pa.types.is_integer(self.type) or pa.types.is_floating(self.type) or pa.types.is_decimal(self.type)


def infer(inputs: Sequence[str | Path], label: str | None = None, rows: int = 100_000) -> Schema:
    """A schema from a log's first `rows` rows; its unsure guesses carry notes, its tables and numbers are unfitted.

    inputs: see `open_log`. label: the label's column, when its name does not say so. Raises UserError when there is
    no label, or when the column has not two values.
    """
    return infer_log(open_log(inputs), label, rows)


def infer_log(log: Log, label: str | None = None, rows: int = 100_000) -> Schema:
    """`infer` for a log that is open."""
    sample = log.sample(rows)
    if not sample.num_rows:
        raise UserError(f"{log.files[0]}: no rows; give a log with at least one")
    seen = {name: _look(name, sample[name]) for name in sample.column_names}
    columns = {_label_name(seen, label): Column(kind="label")}
    (label_name,) = columns
    columns[label_name] = Column(kind="label", **_positive(seen[label_name]))  # type: ignore[arg-type]
    for role, named in (("time", _times(seen.values())), ("group", _groups(seen.values()))):
        for i, name in enumerate(n for n in named if n not in columns):
            note = f"{role} is {next(n for n, c in columns.items() if c.kind == role)}" if i else None
            columns[name] = Column(kind="ignore" if i else role, note=note)  # type: ignore[arg-type]
    if log.source.format == "criteo":
        columns |= {n: Column(kind="numeric", transform="log") for n in seen if n[0] == "I"}
        columns |= {n: Column(kind="categorical", table=n) for n in seen if n[0] == "C"}
    columns |= {name: _feature(s) for name, s in seen.items() if name not in columns}
    columns = {name: columns[name] for name in seen}  # in the log's order
    _share_tables(columns, seen)
    tables = {c.table: Table() for c in columns.values() if c.table is not None}
    return Schema(columns=columns, tables=tables, source=log.source)


def _look(name: str, column: pa.ChunkedArray) -> _Seen:
    words = re.findall(r"[a-z]+|\d+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name.split(":")[0]).lower())
    values = column.combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if _is_list(kind):
        values = values.flatten()
        values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    if pa.types.is_float16(values.type):
        values = values.cast(pa.float32())
    values = values.drop_null()
    if pa.types.is_floating(values.type):
        values = values.filter(pc.invert(pc.is_nan(values)))
    distinct = values.unique() if not pa.types.is_nested(values.type) else values
    return _Seen(name, tuple(words), kind, values, distinct, len(column))


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _label_name(seen: dict[str, _Seen], label: str | None) -> str:
    if label is not None:
        if label not in seen:
            raise UserError(f"label: no column {label!r}{suggest(label, seen)}")
        values = seen[label].distinct
        if len(values) > 2 or _is_list(seen[label].type):
            remedy = "name a column of two values, or add one to the log"
            raise UserError(f"label: column {label!r} has {len(values)} values where a label has two; {remedy}")
        return label
    two = [s.name for s in seen.values() if len(s.distinct) <= 2 and not _is_list(s.type)]
    for name in LABELS:
        for found in two:
            if "_".join(seen[found].words) == name:
                return found
    candidates = [name for name in two if len(seen[name].distinct) == 2]
    remedy = (
        f"name one of the columns of two values: {', '.join(candidates)}" if candidates else "add a column of 0 and 1"
    )
    raise UserError(f"label: no column is named like one (label, click, target, ...); with --label NAME {remedy}")


def _positive(seen: _Seen) -> dict[str, str]:
    """What counts as 1 where the values are not 0 and 1: a word for yes, else the rarer text; the larger number."""
    values = seen.distinct.to_pylist()
    if len(values) < 2 or set(values) == {0, 1}:
        return {}
    counts = {str(v["values"]): v["counts"] for v in pc.value_counts(seen.values).to_pylist()}
    yes = [v for v in counts if v.strip().lower() in YES]
    positive = str(max(values)) if seen.is_number else yes[0] if yes else min(counts, key=lambda v: counts[v])
    return {"positive": positive, "note": f"of {' and '.join(map(repr, counts))}, {positive!r} counts as 1"}


def _times(seen: Iterable[_Seen]) -> list[str]:
    def is_time(s: _Seen) -> bool:
        if pa.types.is_timestamp(s.type) or pa.types.is_date(s.type):
            return True
        named = "_".join(s.words) in TIMES or s.words[-1:] in (("ts",), ("timestamp",))
        return named and pa.types.is_integer(s.type)

    found = [s for s in seen if is_time(s)]
    return [s.name for s in sorted(found, key=lambda s: "_".join(s.words) not in TIMES)]


def _groups(seen: Iterable[_Seen]) -> list[str]:
    named = {"_".join(s.words): s.name for s in seen if not pa.types.is_floating(s.type) and not _is_list(s.type)}
    return [named[name] for name in GROUPS if name in named]


def _feature(seen: _Seen) -> Column:
    name, count = seen.name, len(seen.distinct)
    if name == TRUTH:
        return Column(kind="baseline", note="the probability that the log was drawn from")
    if _is_list(seen.type):
        if count and not pa.types.is_integer(seen.values.type) and not is_text(seen.values.type):
            return Column(kind="ignore", note=f"a list of {seen.values.type}; ids are integers or strings")
        return Column(kind="list", table=name)
    if pa.types.is_nested(seen.type):
        return Column(kind="ignore", note=f"{seen.type} is neither a number nor an id")
    if seen.words[-1:] in (("id",), ("ids",)) and seen.is_number and not pa.types.is_integer(seen.type) and count:
        remedy = "write ids as integers below 2^63 or as strings, or say in a schema that the column is numeric"
        value = f"{seen.values[0].as_py()!r} ({seen.type})"
        raise UserError(f"column {name!r}: {value} is not an id, though its name says so; {remedy}")
    if count == 0 or (count == 1 and len(seen.values) == seen.rows):
        return Column(kind="ignore", note="one value" if count else "no values")
    if count == seen.rows >= 1000 and (not seen.is_number or seen.is_id):
        return Column(kind="ignore", note="every row has another value")
    if not seen.is_number:
        if not (is_text(seen.type) or pa.types.is_boolean(seen.type)):
            return Column(kind="ignore", note=f"{seen.type} is neither a number nor an id")
        return Column(kind="categorical", table=name)
    if pa.types.is_integer(seen.type):
        if seen.is_id:
            return Column(kind="categorical", table=name, note="an integer, by its name an id or code")
        if count <= min(_FEW, seen.rows // 100):
            return Column(kind="categorical", table=name, note=f"an integer of {count} values")
        return _numeric(seen, "an integer; categorical if it is a code" if seen.values[0].as_py() >= 0 else None)
    return _numeric(seen, "by its name an id; write ids as integers or strings" if seen.is_id else None)


def _numeric(seen: _Seen, note: str | None) -> Column:
    size = np.abs(as_numbers(seen.values, seen.name, 0))
    heavy = size.max() > 100 and size.max() > 10 * np.nanmedian(size)
    return Column(kind="numeric", transform="log" if heavy else "standard", note=note)


def _share_tables(columns: dict[str, Column], seen: dict[str, _Seen]) -> None:
    """Give a list the table of the column whose ids it repeats: by its values or, where some are shared, its name."""
    singles = [name for name, c in columns.items() if c.kind == "categorical"]
    for name in [n for n, c in columns.items() if c.kind == "list"]:
        ids, best, best_score = seen[name].distinct, None, 0.0
        for other in singles:
            theirs = seen[other].distinct
            if is_text(ids.type) != is_text(theirs.type) or not len(ids):
                continue
            kind = pa.large_binary() if is_text(ids.type) else pa.int64()
            ids, theirs = ids.cast(kind, safe=False), theirs.cast(kind, safe=False)
            both = pc.sum(pc.is_in(ids, value_set=theirs)).as_py()
            score = both / (len(ids) + len(theirs) - both)  # Jaccard: dense small integers overlap by accident
            strong = both >= 0.5 * len(ids) and score >= 0.2
            if (strong or (both and other.lower() in name.lower())) and score > best_score:
                best, best_score = other, score
        if best is not None:
            note = f"shares the table of {best}, whose ids it repeats"
            columns[name] = replace(columns[name], table=columns[best].table, note=note)
        singles.append(name)
