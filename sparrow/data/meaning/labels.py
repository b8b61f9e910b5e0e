"""Which columns of a log are labels, when people or names say so, or when their values do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError, suggest
from sparrow.data.meaning.names import CLICKS, IMPRESSIONS, LABELS, RATINGS, YES, bare_label
from sparrow.data.meaning.sample import SampledColumn
from sparrow.features.numeric import as_numbers
from sparrow.features.schema import Column

OUTCOME = "looks like an outcome"


def label_columns(sampled: dict[str, SampledColumn], label: str | None) -> dict[str, Column]:
    """Returns the label's column, and those that look like labels too.

    The latter are ignored, because a model cannot know them before the impression.
    """
    two = [s.name for s in sampled.values() if len(s.distinct) <= 2 and not s.is_list]
    named: list[str] = []
    for word in LABELS:
        named += [n for n in two if word in (sampled[n].called, bare_label(sampled[n].words))]
    scales = [s for s in sampled.values() if s.words and _scale(s)]
    rated = [s.name for s in scales if s.words[-1] in RATINGS[:3] or s.called == "y"]
    scored = [s.name for s in scales if s.words[-1] in RATINGS[3:]]
    if label is not None and label not in sampled:
        raise UserError(f"label: no column {label!r}{suggest(label, sampled)}")
    wide = [s.name for s in sampled.values() if s.called in LABELS[:4]]
    candidates = [name for name in two if len(sampled[name].distinct) == 2]
    guessed = _guessed(candidates, sampled)
    chosen = label or next(iter([*named, *rated, *wide, *guessed, *scored]), None)
    if chosen is None:
        remedy = _remedy_without_label(sampled, candidates)
        raise UserError(f"label: no column is named like one (label, click, target, ...); {remedy}")
    column = sampled[chosen]
    if label is None and chosen in rated and guessed and len(column.values) < column.rows:
        reason = f"{chosen!r} is a rating that some rows lack, and {guessed[0]!r} has two values"
        raise UserError(
            f"label: {reason}; name the label with --label NAME, and leave out rows without it"
        )
    values = column.distinct if column.is_list else column.present.unique()
    if len(values) <= 2 and not column.is_list:
        settings: dict[str, Any] = _positive(column)
        if chosen in guessed and chosen not in (label, *named, *rated, *wide):
            hint = (
                "taken for the label, as no column is named like one; if another is, name it with"
                " --label"
            )
            settings["note"] = f"{hint}; {settings['note']}" if "note" in settings else hint
    elif chosen in rated or (chosen in scored and not is_probability(column)):
        scale = sorted(column.distinct.to_pylist())
        least = _scale(column)
        note = (
            f"a rating of {scale[0]:g} to {scale[-1]:g}: from {least:g} on counts as 1, the upper"
            " 40 % of the scale"
        )
        settings = {"threshold": least, "note": note}
    elif is_probability(column):
        settings = {"probability": True, "note": "numbers in 0..1, taken for probabilities"}
    else:
        raise _no_label(column, values)
    note = f"{OUTCOME}, unknown before {chosen}; make it kind 'label' to train both"
    ignored = {name: Column(kind="ignore", note=note) for name in named if name != chosen}
    return {chosen: Column(kind="label", **settings)} | ignored


def _remedy_without_label(sampled: dict[str, SampledColumn], candidates: Sequence[str]) -> str:
    """Returns what to do where no column looks like a label. candidates: those of two values."""
    names = {s.called: s.name for s in sampled.values()}
    counts = next((names[word] for word in CLICKS if word in names), None)
    shown = next((names[word] for word in IMPRESSIONS if word in names), None)
    if counts and shown:
        return f"if rows stand for several showings, say --label {counts} --impressions {shown}"
    if candidates:
        return f"with --label NAME name one of the columns of two values: {', '.join(candidates)}"
    return (
        "a log of clicks alone needs a column of 0 and 1, and rows of what was shown and not"
        " clicked"
    )


def _no_label(column: SampledColumn, values: Any) -> UserError:
    """Returns the error of a column that cannot be a label. values: its different ones."""
    remedy = "name a column of two values or of probabilities, or give it a threshold in a schema"
    if column.is_number and (pc.min(column.values).as_py() or 0) >= 0:
        remedy += "; if it counts, name the column of what it is out of with --impressions"
    odd = None if column.is_list else _odd(column)
    if odd is not None:
        remedy = f"mend or delete the row, such as one of totals; or {remedy}"
        value = column.bare[odd].as_py()
        return UserError(f"label {column.name!r}, row {odd}: {value!r} is no label; {remedy}")
    examples = ", ".join(map(str, values[:4].to_pylist()))
    examples += ", ..." if len(values) > 4 else ""
    content = f"{len(values)} values where a label has two: {examples}"
    return UserError(f"label: column {column.name!r} has {content}; {remedy}")


def _odd(column: SampledColumn) -> int | None:
    """Returns the row of the one value that is none of two that all others are, or None."""
    counts = sorted(pc.value_counts(column.present).to_pylist(), key=lambda pair: pair["counts"])
    if len(counts) != 3 or counts[0]["counts"] > 1 or counts[1]["counts"] < 3:
        return None
    return int(pc.index(column.bare, pa.scalar(counts[0]["values"], column.bare.type)).as_py())


def is_probability(sampled: SampledColumn) -> bool:
    """Returns whether a column holds numbers in 0..1, not all of them whole."""
    if sampled.is_list or not sampled.is_number or not len(sampled.values):
        return False
    if pa.types.is_integer(sampled.type):
        return False
    x_N = as_numbers(sampled.distinct, sampled.name, 0)
    return bool((x_N >= 0).all() and (x_N <= 1).all() and (x_N != np.round(x_N)).any())


def _guessed(candidates: Sequence[str], sampled: dict[str, SampledColumn]) -> list[str]:
    """Returns the column of two values that is the last one, or else the only one called
    is_... or has_..., if any.

    Else it is the only one of two values, if one of them says yes.
    """
    questions = [name for name in candidates if sampled[name].words[:1] in (("is",), ("has",))]
    last = next(reversed(sampled))
    if last in candidates or len(questions) == 1:
        return [last] if last in candidates else questions
    says_yes = [
        n
        for n in candidates
        if any(str(v).lower() in (*YES, "1.0") for v in sampled[n].distinct.to_pylist())
    ]
    return says_yes if len(candidates) == 1 else []


def _scale(sampled: SampledColumn) -> float | None:
    """Returns the least of a rating's upper 40 %, when it has 3 to 20 distinct numbers."""
    if not sampled.is_number or not 3 <= len(sampled.distinct) <= 20:
        return None
    scale = sorted(float(x) for x in sampled.distinct.to_pylist())
    return scale[-max(1, round(0.4 * len(scale)))]


def _positive(sampled: SampledColumn) -> dict[str, str]:
    """Returns what counts as 1 where the values are not 0 and 1.

    Of two texts it is a word for yes, else the rarer one. Of two numbers it is the larger one.
    """
    values = sampled.present.unique().to_pylist()
    if len(values) < 2 or set(values) in ({0, 1}, {"0", "1"}):
        return {}
    counts = {str(v["values"]): v["counts"] for v in pc.value_counts(sampled.present).to_pylist()}
    yes = [v for v in counts if v.strip().lower() in YES]
    if sampled.is_number:
        positive = str(max(values))
    else:
        positive = yes[0] if yes else min(counts, key=lambda v: counts[v])
    (negative,) = counts.keys() - {positive}
    return {
        "positive": positive,
        "negative": negative,
        "note": f"of {' and '.join(map(repr, counts))}, {positive!r} counts as 1",
    }
