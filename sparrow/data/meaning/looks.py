"""What a column of text looks like: a list cut by something, a time, a number."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Int64s
from sparrow.core.errors import UserError
from sparrow.features.ids import as_lists
from sparrow.features.times import FORMATS, as_times, misfits_of, time_format

NONE = (
    *("?", "-", "--", "---", ".", "*", "na", "n/a", "n.a.", "#n/a", "<na>", "nan", "nat", "null", "(null)", "<null>"),
    *("nil", "none", "unknown", "unk", "undefined", "undef", "missing", "not available", "no data", "empty", "#value!"),
)
_VALUES = 20_000
_TOKEN = 40  # characters; a longer one is prose
_SIGNED = r"^[-+]?[$€£¥]?\s?(\d{1,3}(,\d{3})+|\d+)([.,]\d+)?\s?[%€$£¥]?$"
_WEIGHTED = r"^[^:]+:\s*-?\d+(\.\d+)?([eE][-+]?\d+)?$"


def list_of(values: pa.Array) -> tuple[str | None, str | None] | None:
    """Returns separator and weights of a list column, or None when the texts (none missing) do not look like lists.

    Lists have a changing number of short tokens, which come again in other rows and in other places. Prose, names,
    dates, coordinates and prices do not. Words with spaces between them are a list only if few words make many values.
    """
    texts = pc.utf8_trim_whitespace(values[:_VALUES].cast(pa.large_string()))
    distinct = texts.unique()
    array = pc.match_substring_regex(distinct, r"(?s)^\[.*\]$")
    if len(distinct) and pc.all(array).as_py():
        try:
            as_lists(distinct, "", int, None, "json")
            return "json", None
        except UserError:
            return None
    for separator in ("|", "^", ";", ",", None):
        there = pc.mean(pc.match_substring(distinct, separator or " ").cast(pa.int8())).as_py()
        weighted = _weighted_list(texts, distinct, separator) if there else None
        if weighted is not None:
            return separator, ":" if weighted else None
    return None


def _weighted_list(texts: pa.Array, distinct: pa.Array, separator: str | None) -> bool | None:
    """Returns whether the ids of lists cut at the separator have weights; None when it gives no lists."""
    tokens, offsets, _ = as_lists(texts, "", int, None, separator)
    lengths = np.diff(offsets)
    if not len(tokens) or (lengths > 1).mean() < 0.05 or pc.max(pc.utf8_length(tokens)).as_py() > _TOKEN:
        return None
    weighted = bool(pc.all(pc.match_substring_regex(tokens, _WEIGHTED)).as_py())
    if weighted:
        tokens = pc.replace_substring_regex(tokens, r":[^:]*$", "")
    kinds = tokens.unique()
    whole = pc.all(pc.match_substring_regex(kinds, r"^-?\d+$")).as_py()
    if not whole and pc.any(pc.match_substring_regex(kinds, r"^[-+]?\d*\.\d+$")).as_py():
        return None  # numbers with a fraction: coordinates, prices, an embedding
    if separator == "," and whole and _one_number(distinct):
        return None
    moves, strong = _moves(tokens, offsets, lengths), separator in ("|", "^")
    counts = pc.value_counts(tokens).field("counts").to_numpy(zero_copy_only=False)
    often, rare = counts.mean() >= 2, (counts == 1).mean()
    codes = whole or pc.all(pc.match_substring_regex(kinds, r"^[A-Za-z]+\d+$")).as_py()
    if weighted or (codes and (moves or strong)) or (strong and (often or moves)):
        return weighted
    few = len(distinct) > len(kinds) and rare <= 0.1 and len(kinds) <= 1000
    return weighted if moves and often and few else None


def _one_number(distinct: pa.Array) -> bool:
    """Returns whether the texts are numbers written with commas, such as 1,234,567 and 3,14."""
    grouped = pc.match_substring_regex(distinct, r"^-?\d{1,3}(,\d{3})*$")
    decimal = pc.match_substring_regex(distinct, r"^-?\d+(,\d+)?$")
    return pc.all(grouped).as_py() or pc.all(decimal).as_py()


def _moves(tokens: pa.Array, offsets: Int64s, lengths: Int64s) -> bool:
    """Returns whether lists differ in length or are long, and tokens at their ends also stand elsewhere."""
    if len(np.unique(lengths[lengths > 0])) < 2 and lengths.max() < 3:
        return False
    many = np.flatnonzero(lengths > 1)
    last = np.zeros(len(tokens), bool)
    last[offsets[1:][many] - 1] = True
    elsewhere = tokens.filter(pa.array(~last)).unique()
    return pc.mean(pc.is_in(tokens.filter(pa.array(last)), value_set=elsewhere).cast(pa.int8())).as_py() >= 0.3


def time_of(values: pa.Array) -> tuple[str | None, str | None] | None:
    """Returns format and note of a column of times, or None when not all texts or integers look like times.

    None of the values may be missing.
    """
    if pa.types.is_integer(values.type):
        values = values.cast(pa.string())
    texts = values.unique()
    if not pc.all(pc.match_substring_regex(texts[:100], r"\d{2}")).as_py():
        return None
    try:
        as_times(texts, "", 0)
        return None, None
    except UserError:
        pass
    format = time_format(texts)
    if format is None:
        return None
    other = format.replace("%d", "%D").replace("%m", "%d").replace("%D", "%m")
    if other in FORMATS and not format.startswith("%Y"):
        try:
            rightly, wrongly = (as_times(values, "", 0, f) for f in (format, other))
        except UserError:
            return format, None
        in_order = [(np.diff(times) >= 0).all() for times in (rightly, wrongly)]
        near = 2 * np.ptp(wrongly) < np.ptp(rightly)
        alike = np.ptp(wrongly) == np.ptp(rightly) and format.endswith("%p")  # clocks of 12 hours: the month is first
        if in_order == [False, True] or (in_order[0] == in_order[1] and (near or alike)):
            format, other = other, format  # a log's rows stand in order, and close together in time
        return format, f"day or month may come first, both fit: {format!r} is taken, not {other!r}"
    return format, None


def nearly_time(values: pa.Array) -> tuple[str | None, str | None, str] | None:
    """Returns format and note of a column of times in which some texts are none, and the first of these.

    It is None where more than one in ten of the texts, none of which is missing, is no time.
    """
    misfits = np.ones(len(values), bool)
    best: str | None = None
    for format in (None, *FORMATS[:-1]):
        if 10 * misfits_of(values[:100], format).sum() <= min(len(values), 100):
            bad = misfits_of(values, format)
            if bad.sum() < misfits.sum():
                misfits, best = bad, format
    if not 0 < 10 * misfits.sum() <= len(values):
        return None
    format, note = time_of(values.filter(pa.array(~misfits))) or (best, None)
    return format, note, str(values[int(np.argmax(misfits))].as_py())


def numbers_in(values: pa.Array) -> tuple[float, pa.Array, pa.Array]:
    """Returns which of the texts are numbers, and the numbers.

    The numbers are integers where all of them are, else float64. Texts that a number would not give back are none
    ("007", more than 15 digits).

    Returns:
        The share of the texts that are numbers, the distinct texts that are neither numbers nor blank, and the numbers
        that the others spell.
    """
    texts = pc.utf8_trim_whitespace(values.cast(pa.string()))
    coded = r"^[-+]?(0\d|\d{16})"
    number = pc.and_not(
        pc.match_substring_regex(texts, r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"),
        pc.match_substring_regex(texts, coded),
    )
    there, others = texts.filter(number), texts.filter(pc.invert(number)).unique()
    whole = pc.all(pc.match_substring_regex(there, r"^-?\d+$")).as_py()
    share = pc.mean(number.cast(pa.int8())).as_py() or 0.0
    return share, others.filter(pc.not_equal(others, "")), there.cast(pa.int64() if whole else pa.float64())


def digits_lost(values: pa.Array) -> str | None:
    """Returns how many values are written like 1.42e+19 among integers of as many digits, and the first; or None."""
    rounded = pc.match_substring_regex(values, r"^\s*[-+]?\d(\.\d*)?[eE]\+?(1[5-9]|[2-9]\d)\s*$")
    if not pc.any(rounded).as_py() or not pc.any(pc.match_substring_regex(values, r"^\s*[-+]?\d{16,}\s*$")).as_py():
        return None
    first = values.filter(rounded)
    return f"{len(first):,} of {len(values):,} are written like {first[0].as_py()!r}"


def sign_of_number(texts: pa.Array) -> str | None:
    """Returns the first of texts that are numbers with a sign of a unit or with commas, such as 13.5%, $1,200 or 0,5.

    It is None where less than nine in ten of them are numbers, or none has a sign.
    """
    texts = pc.utf8_trim_whitespace(texts.cast(pa.string()))
    numbers = texts.filter(pc.match_substring_regex(texts, _SIGNED))
    signed = numbers.filter(pc.match_substring_regex(numbers, "[%$€£¥,]"))
    return signed[0].as_py() if len(signed) and len(numbers) >= 0.9 * len(texts) else None


def stands_for_none(odd: pa.Array, values: pa.Array) -> bool:
    """Returns whether odd texts [U] among numbers stand for missing ones.

    They do when logs write a missing number so, or when they are a few strays, 1 in 200 at most.
    """
    strays = odd.filter(pc.invert(pc.is_in(pc.utf8_lower(odd), pa.array(NONE))))
    cells = pc.sum(pc.is_in(pc.utf8_trim_whitespace(values.cast(pa.string())), strays)).as_py() or 0
    return len(strays) <= 8 and 200 * cells <= len(values)
