"""Columns of times: how text and integers write them, and the columns that are made of a time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError
from sparrow.data.meaning.names import Words, tells_time
from sparrow.features.ids import is_text
from sparrow.features.schema import Column
from sparrow.features.times import (
    FORMATS,
    as_times,
    misfits_of,
    part_of,
    ticks_per_second,
    time_format,
)

_WEEK_S = 7 * 86400
DAYS = ("%Y%m%d", "%Y%m%d%H", "%y%m%d%H", "%Y%m%d%H%M%S")


def parts_of_time(name: str, stem: str, column: Column, values: pa.Array) -> dict[str, Column]:
    """Returns columns of the hour and the day of the week of a time, where the values are of more
    than a week.

    Args:
        name: the time's.
        stem: what the columns' names begin with.
        column: says how the time is written.
        values: the time's in the sample, none missing.
    """
    try:
        times_N = as_times(values, name, 0, column.format)
    except UserError:  # it is told when the log is prepared
        return {}
    unit = ticks_per_second(float(np.median(times_N))) if len(times_N) else None
    if unit is None or np.ptp(times_N) <= _WEEK_S * unit:
        return {}
    columns: dict[str, Column] = {}
    for part in ("hour", "weekday"):
        part_name = f"{stem}_{part}"
        note = f"the {part} of {name}, in UTC; rows to be scored need {name}, too"
        if len(np.unique(part_of(times_N, part))) > 1:
            columns[part_name] = Column(
                kind="categorical",
                source=name,
                part=part,
                table=part_name,
                format=column.format,
                note=note,
            )
    return columns


def time_reading(
    kind: pa.DataType, values: pa.Array, words: Words, named: bool
) -> tuple[str | None, str | None, str | None] | None:
    """Returns format and note of a column that tells times, and the first text that is none; or
    None for another.

    Args:
        kind: the column's type.
        values: the column's in the sample, none missing.
        words: of its name.
        named: whether the name says that it is a time.
    """
    look: tuple[str | None, str | None] | None = None
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        look = None, None
    elif is_text(kind):
        look = time_of(values)
        plain = ("%s", *DAYS[:3])
        near = nearly_time(values) if look is None else None
        if near is not None and (named or near[0] not in plain):
            return near
        look = look if look and (named or look[0] not in plain) else None
    elif pa.types.is_integer(kind) and (
        named or (words[-1:] == ("time",) and pc.min(values).as_py() > 5e8)
    ):
        look = time_of(values)
        look = look if look and look[0] != "%s" else (None, None)
    elif pa.types.is_integer(kind) and tells_time(words):
        look = numbered_time(values)
    elif pa.types.is_floating(kind) and named:
        is_whole = pc.all(pc.equal(values, pc.round(values))).as_py()
        look = "%s", "numbers with a fraction, taken for seconds since 1970"
        if is_whole:
            look = None, None
    return (*look, None) if look else None


def numbered_time(values: pa.Array) -> tuple[str | None, str | None] | None:
    """Returns format and note of integers that are days, such as 20261121, or units since 1970 of
    1998 to 2039.
    """
    low, high = (float(x.as_py()) for x in (pc.min(values), pc.max(values)))
    if any(9e8 * unit <= low and high < 2.2e9 * unit for unit in (1, 10**3, 10**6)):
        return None, None
    look = time_of(values)
    return look if look and look[0] in DAYS else None


def time_of(values: pa.Array) -> tuple[str | None, str | None] | None:
    """Returns format and note of a column of times, or None when not all texts or integers look
    like times.

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
    swapped = format.replace("%d", "%D").replace("%m", "%d").replace("%D", "%m")
    if swapped in FORMATS and not format.startswith("%Y"):
        try:
            rightly, wrongly = (as_times(values, "", 0, f) for f in (format, swapped))
        except UserError:
            return format, None
        in_order = [(np.diff(times) >= 0).all() for times in (rightly, wrongly)]
        near = 2 * np.ptp(wrongly) < np.ptp(rightly)
        # clocks of 12 hours: the month is first
        alike = np.ptp(wrongly) == np.ptp(rightly) and format.endswith("%p")
        if in_order == [False, True] or (in_order[0] == in_order[1] and (near or alike)):
            # a log's rows stand in order, and close together in time
            format, swapped = swapped, format
        note = f"day or month may come first, both fit: {format!r} is taken, not {swapped!r}"
        return format, note
    return format, None


def nearly_time(values: pa.Array) -> tuple[str | None, str | None, str] | None:
    """Returns format and note of a column of times in which some texts are none, and the first of
    these.

    It is None where more than one in ten of the texts, none of which is missing, is no time.
    """
    misfits = np.ones(len(values), bool)
    best: str | None = None
    for format in (None, *FORMATS[:-1]):
        if 10 * misfits_of(values[:100], format).sum() <= min(len(values), 100):
            bad = misfits_of(values, format)
            if bad.sum() < misfits.sum():
                misfits = bad
                best = format
    if not 0 < 10 * misfits.sum() <= len(values):
        return None
    format, note = time_of(values.filter(pa.array(~misfits))) or (best, None)
    return format, note, str(values[int(np.argmax(misfits))].as_py())
