"""Columns of text that is neither a list nor a time: ids, or numbers with odd texts among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from sparrow.data.meaning.names import TIMES
from sparrow.data.meaning.sample import SampledColumn
from sparrow.features.ids import is_text
from sparrow.features.schema import Column

NONE = (
    *(
        "?",
        "-",
        "--",
        "---",
        ".",
        "*",
        "na",
        "n/a",
        "n.a.",
        "#n/a",
        "<na>",
        "nan",
        "nat",
        "null",
        "(null)",
        "<null>",
    ),
    *(
        "nil",
        "none",
        "unknown",
        "unk",
        "undefined",
        "undef",
        "missing",
        "not available",
        "no data",
        "empty",
        "#value!",
    ),
)
_SIGNED = r"^[-+]?[$€£¥]?\s?(\d{1,3}(,\d{3})+|\d+)([.,]\d+)?\s?[%€$£¥]?$"


def text_column(
    sampled: SampledColumn, repair: bool, feature: Callable[[SampledColumn], Column]
) -> Column:
    """Returns the feature that a column of text or of booleans is.

    Args:
        sampled: the column.
        repair: whether text that is no number is to be missing where most are numbers.
        feature: says what a column of numbers is.
    """
    name = sampled.name
    count = len(sampled.distinct)
    if not (is_text(sampled.type) or pa.types.is_boolean(sampled.type)):
        reason = f"ignored, as {sampled.type} is neither a number nor an id"
        return Column(kind="ignore", note=reason)
    note = None
    if sampled.called in TIMES:
        examples = " and ".join(repr(text) for text in sampled.distinct[:2].to_pylist())
        reason = f"by its name a time, but its texts, such as {examples}, have no format in common"
        note = f"{reason}; mend them to split by it"
    elif is_text(sampled.type):
        share, odd, numbers = numbers_in(sampled.values)
        codes = odd.filter(pc.match_substring_regex(odd, r"^0\d+$"))
        if repair and share >= 0.9 and len(odd):
            return Column(
                kind="numeric",
                note=f"text of numbers; others, such as {odd[0].as_py()!r}, are missing",
            )
        if share and not sampled.is_id and not len(codes) and stands_for_none(odd, sampled.values):
            column = _spelled(sampled, odd, numbers, feature)
            if column.kind == "numeric":
                return column
        if lost := digits_lost(sampled.values):
            note = f"ids of many digits, but {lost}, which has lost them; write ids in full"
        elif len(codes):
            note = (
                f"numbers with zeros before them, such as {codes[0].as_py()!r}; numeric if they"
                " measure"
            )
        elif share >= 0.9 and len(odd):
            note = (
                f"text, though most are numbers ({odd[0].as_py()!r} is not); numeric with"
                " --bad-rows repair"
            )
        elif not sampled.is_id and (signed := sign_of_number(sampled.values)):
            note = (
                f"text of numbers such as {signed!r}, taken for ids; to have them measured write"
                " them as 1234.5"
            )
        elif count > 100 and count > 0.5 * len(sampled.values):
            note = f"text of {count} values in {len(sampled.values)} rows; ignore it if it is prose"
    return Column(kind="categorical", table=name, note=note)


def _spelled(
    sampled: SampledColumn,
    odd: pa.Array,
    numbers: pa.Array,
    feature: Callable[[SampledColumn], Column],
) -> Column:
    """Returns what a column of text would be as numbers, with its odd texts missing."""
    if not len(odd) and pa.types.is_integer(numbers.type):
        return Column(kind="ignore")  # somebody made text of them: they are names
    spelled = replace(
        sampled, type=numbers.type, values=numbers, distinct=numbers.unique(), bare=numbers
    )
    column = feature(spelled)
    missing = tuple(odd.to_pylist())
    if not missing or column.kind != "numeric":
        return column
    cells = f"{len(sampled.values) - len(numbers):,} of {sampled.rows:,} cells"
    most = f"{', '.join(map(repr, missing[:3]))}{', ...' if len(missing) > 3 else ''}"
    note = (
        f"text of numbers, but for {cells}: {most}, taken for missing; categorical if these mean"
        " something"
    )
    return replace(column, missing=missing, note=note)


def numbers_in(values: pa.Array) -> tuple[float, pa.Array, pa.Array]:
    """Returns which of the texts are numbers, and the numbers.

    The numbers are integers where all of them are, else float64. Texts that a number would not give
    back are none ("007", more than 15 digits).

    Returns:
        The share of the texts that are numbers, the distinct texts that are neither numbers nor
        blank, and the numbers that the others spell.
    """
    texts = pc.utf8_trim_whitespace(values.cast(pa.string()))
    coded = r"^[-+]?(0\d|\d{16})"
    number = pc.and_not(
        pc.match_substring_regex(texts, r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"),
        pc.match_substring_regex(texts, coded),
    )
    number_texts = texts.filter(number)
    odd = texts.filter(pc.invert(number)).unique()
    are_integers = pc.all(pc.match_substring_regex(number_texts, r"^-?\d+$")).as_py()
    share = pc.mean(number.cast(pa.int8())).as_py() or 0.0
    numbers = number_texts.cast(pa.int64() if are_integers else pa.float64())
    return share, odd.filter(pc.not_equal(odd, "")), numbers


def digits_lost(values: pa.Array) -> str | None:
    """Returns how many values are written like 1.42e+19 among integers of as many digits, and the
    first; or None.
    """
    rounded = pc.match_substring_regex(values, r"^\s*[-+]?\d(\.\d*)?[eE]\+?(1[5-9]|[2-9]\d)\s*$")
    if (
        not pc.any(rounded).as_py()
        or not pc.any(pc.match_substring_regex(values, r"^\s*[-+]?\d{16,}\s*$")).as_py()
    ):
        return None
    first = values.filter(rounded)
    return f"{len(first):,} of {len(values):,} are written like {first[0].as_py()!r}"


def sign_of_number(texts: pa.Array) -> str | None:
    """Returns the first of texts that are numbers with a sign of a unit or with commas, such as
    13.5%, $1,200 or 0,5.

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
