"""Times: integers as they are, everything else as microseconds since 1970, UTC."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Bools, Float64s, Int64s
from sparrow.core.errors import UserError
from sparrow.features.ids import is_text
from sparrow.features.schema import PARTS_OF_TIME, Schema
from sparrow.features.skew import Skew
from sparrow.features.types import is_number

FORMATS = (
    "%Y-%m-%d %H:%M:%S",
    "%Y-%m-%dT%H:%M:%S",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%d",
    "%Y/%m/%d %H:%M:%S",
    "%Y/%m/%d %H:%M",
    "%Y/%m/%d",
    *(
        date + time
        for date in ("%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y")
        for time in (" %H:%M:%S", " %H:%M", " %I:%M:%S %p", " %I:%M %p", "")
    ),
    "%d/%b/%Y:%H:%M:%S",
    "%a, %d %b %Y %H:%M:%S",
    "%a %b %d %H:%M:%S %Y",
    "%d %b %Y %H:%M:%S",
    "%d-%b-%Y %H:%M:%S",
    "%d-%b-%Y",
    "%b-%Y",
    "%Y%m%d%H%M%S",
    "%Y%m%d%H",
    "%Y%m%d",
    "%y%m%d%H",
    "%s",
)
"""What `sparrow prepare` looks for in text, in this order; "%s" is seconds since 1970."""

VALUES_OF_PART: dict[PARTS_OF_TIME, tuple[int, int]] = {
    "hour": (0, 23),
    "weekday": (0, 6),
    "day": (1, 31),
    "month": (1, 12),
}
"""The least and the greatest value that a part of a time can have."""

UNITS = (1, 10**3, 10**6, 10**9)  # of time that a second has
_YEAR_S = 366 * 86400
_LATEST_S = 10**13
_ISO = "ISO 8601, such as 2026-11-21 10:00:00"
_LONGEST_ISO = "%Y-%m-%dT%H:%M:%S"
_OFFSET = r"(?P<sign>[-+])(?P<hours>\d\d):?(?P<minutes>\d\d)?"
_TAIL = rf"(?P<fraction>\.\d+)?(?P<zone>\s*(?:Z|z|UTC|GMT|{_OFFSET}))?$"


def as_times(column: pa.Array, name: str, row0: int, format: str | None = None) -> Int64s:
    """Returns times int64 [N] of an arrow array.

    Integers stay. Timestamps, dates and text become microseconds since 1970. In text a fraction of
    a second and a zone (Z, UTC, +01:00) may follow. A time without a zone is taken for UTC.

    Args:
        column: the array.
        name: the column's, for errors.
        row0: the log's row of the array's first entry, for errors.
        format: of text (or of numbers such as 20261121), as strptime takes it. "%s" is for seconds
            since 1970 with or without a fraction. By default text is ISO 8601.

    Raises:
        UserError: for a time that is missing or does not fit. It names the row.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count:
        _refuse(column, column.is_null(), name, row0, "missing")
    kind = column.type
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return _numpy(column.cast(pa.timestamp("us"), safe=False))
    if pa.types.is_integer(kind) and format not in (None, "%s"):
        column = column.cast(pa.string())
    if is_text(column.type):
        return _parsed(pc.utf8_trim_whitespace(column.cast(pa.string())), name, row0, format)
    if not is_number(kind):
        raise UserError(
            f"time {name!r}: {kind} is not a time; write times as integers, timestamps or text"
        )
    if format == "%s":
        return _seconds(column, name, row0)
    try:
        return _numpy(column.cast(pa.int64()))
    except pa.ArrowInvalid:
        x_N = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        words = (
            f"no whole number; if these are seconds since 1970, set columns.{name}.format to '%s'"
        )
        _refuse(
            column, pa.array((x_N != np.round(x_N)) | (np.abs(x_N) >= 2.0**63)), name, row0, words
        )
        raise


def spelt_integers(times: pa.Array, format: str | None) -> pa.Array:
    """Returns times [N] as integers where all are text that spells some, such as seconds since
    1970; else as they are.

    A text file's reader takes such text for integers, too. format: of the column; text with one is
    read by it.
    """
    if format is not None or not is_text(times.type):
        return times
    texts = pc.utf8_trim_whitespace(times.cast(pa.large_string()))
    # shorter ones may be dates
    is_integer = pc.all(pc.match_substring_regex(texts, r"^-?\d{9,18}$")).as_py()
    return texts.cast(pa.int64()) if is_integer else times


def unit_of(kind: pa.DataType, format: str | None) -> int | None:
    """Returns how many units a second has in what `as_times` makes of an array of this type.

    It is None for numbers that stay as they are: each tells its unit by its size.
    """
    return None if is_number(kind) and format is None else 10**6


def seconds_of(times_N: Int64s, unit: int | None = None) -> Int64s:
    """Returns times in whole seconds since 1970.

    Args:
        times_N: the times, as `as_times` gives them.
        unit: how many a second has, see `unit_of`. By default each time's size tells whether it is
            in seconds, milliseconds, microseconds or nanoseconds.
    """
    if unit is not None:
        return times_N // unit
    place_N = np.searchsorted([10**10, 10**13, 10**16], np.abs(times_N), "right")
    return times_N // np.array(UNITS)[place_N]


def part_of(times_N: Int64s, part: PARTS_OF_TIME, unit: int | None = None) -> Int64s:
    """Returns the hours 0 to 23, the days of the week from Monday, 0, on, the days of the month or
    the months of times.

    They are those in UTC. Days of the month and months begin with 1.

    Args:
        times_N: the times, as `as_times` gives them.
        part: of the time.
        unit: see `seconds_of`.
    """
    seconds_N = seconds_of(times_N, unit)
    if part == "hour":
        return seconds_N // 3600 % 24
    if part == "weekday":
        return (seconds_N // 86400 + 3) % 7  # 1970 began on a Thursday
    days_N = (seconds_N // 86400).astype("M8[D]")
    months_N = days_N.astype("M8[M]")
    places_N: Int64s = (
        months_N.astype(np.int64) % 12 if part == "month" else (days_N - months_N).astype(np.int64)
    )
    return places_N + 1


def time_format(texts: pa.Array) -> str | None:
    """Returns the first of FORMATS that all these texts fit, as times of 1900 to 2199, or None."""
    texts = pc.utf8_trim_whitespace(texts.cast(pa.string()).drop_null())
    few = texts[:100]
    for format in FORMATS:
        if _strptime(_cut_tail(few, format)[0], format).null_count:
            continue
        years = pc.year(_strptime(_cut_tail(texts, format)[0], format))
        if (
            len(texts)
            and pc.all(
                pc.and_(pc.greater_equal(years, 1900), pc.less(years, 2200)), skip_nulls=False
            ).as_py()
        ):
            return format
    return None


def misfits_of(texts: pa.Array, format: str | None) -> Bools:
    """Returns which texts [N], none missing, are no times of 1900 to 2199 in this format; None is
    ISO 8601.
    """
    texts = pc.utf8_trim_whitespace(texts.cast(pa.string()))
    cores, *_ = _cut_tail(texts if format else _iso(texts), format or _LONGEST_ISO)
    years = pc.year(_strptime(cores, format or _LONGEST_ISO))
    good = pc.and_(pc.greater_equal(years, 1900), pc.less(years, 2200)).fill_null(False)
    return pc.invert(good).to_numpy(zero_copy_only=False)


def _parsed(texts: pa.Array, name: str, row0: int, format: str | None) -> Int64s:
    if format == "%s":
        return _seconds(texts, name, row0)
    if format is None:
        for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
            try:
                return _numpy(texts.cast(kind))  # the fast way: all have a zone, or none has
            except pa.ArrowInvalid:
                pass
    cores, fraction_N, zone_N = _cut_tail(texts if format else _iso(texts), format or _LONGEST_ISO)
    times = _strptime(cores, format or _LONGEST_ISO)
    if times.null_count:
        remedy = f"mend it, set columns.{name}.format to what it is, or make the column 'ignore'"
        words = f"not {repr(format) if format else _ISO}; {remedy}"
        _refuse(texts, times.is_null(), name, row0, words)
    return _numpy(times) + fraction_N - zone_N


def _iso(texts: pa.Array) -> pa.Array:
    """ISO 8601 of different lengths as the longest one."""
    texts = pc.replace_substring_regex(texts, r"^(\d{4}-\d\d-\d\d) ", r"\1T")
    texts = pc.replace_substring_regex(texts, r"^(\d{4}-\d\d-\d\d)$", r"\1T00:00:00")
    return pc.replace_substring_regex(texts, r"^(\d{4}-\d\d-\d\dT\d\d:\d\d)($|[^:\d])", r"\1:00\2")


def _cut_tail(texts: pa.Array, format: str) -> tuple[pa.Array, Int64s, Int64s]:
    """Texts [N] without fraction and zone, and these in microseconds; strptime knows neither."""
    none_N = np.zeros(len(texts), np.int64)
    if not format.endswith(("%S", "%M", "%p")):
        return texts, none_N, none_N
    if not pc.any(
        pc.match_substring_regex(texts, r"\.\d+|[Zz]$|UTC$|GMT$|[-+]\d\d:?(\d\d)?$")
    ).as_py():
        return texts, none_N, none_N
    parts = pc.extract_regex(texts, r"^(?P<core>(?s:.*?))" + _TAIL)
    core, fraction, sign, hours, minutes = (pc.struct_field(parts, i) for i in (0, 1, 3, 4, 5))
    fraction = pc.if_else(pc.equal(fraction, ""), "0", fraction)
    seconds_N = fraction.cast(pa.float64()).to_numpy(zero_copy_only=False)
    fraction_N = np.round(seconds_N * 1e6).astype(np.int64)
    hours_N = _numpy(pc.if_else(pc.equal(hours, ""), "0", hours).cast(pa.int64()))
    minutes_N = _numpy(pc.if_else(pc.equal(minutes, ""), "0", minutes).cast(pa.int64()))
    east_N = np.where(pc.equal(sign, "-").to_numpy(zero_copy_only=False), -1, 1)
    return core, fraction_N, east_N * (hours_N * 60 + minutes_N) * 60_000_000


def _strptime(texts: pa.Array, format: str) -> pa.Array:
    """Timestamps, missing where a text does not fit; strptime would take 31 February for 3
    March.
    """
    times = pc.strptime(texts, format=format, unit="us", error_is_null=True)
    good = pc.and_(pc.greater_equal(pc.year(times), 1000), pc.less_equal(pc.year(times), 9999))
    times = pc.if_else(good, times, None)
    early = pc.less_equal(pc.day(times), 3).fill_null(False)
    if "%d" not in format or not pc.any(early).as_py():
        return times

    def bare(texts: pa.Array) -> pa.Array:  # as people differ in writing it
        return pc.replace_substring_regex(pc.utf8_lower(texts), r"\b0|\s+", "")

    written = bare(
        pc.strftime(times.filter(early).cast(pa.timestamp("s"), safe=False), format=format)
    )
    wrong = pc.not_equal(written, bare(texts.filter(early)))
    return pc.replace_with_mask(times, early, pc.if_else(wrong, None, times.filter(early)))


def _seconds(column: pa.Array, name: str, row0: int) -> Int64s:
    try:
        x_N = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise UserError(
            f"time {name!r}: {error}; write seconds since 1970, or leave columns.{name}.format"
        ) from None
    if (bad := ~(np.abs(x_N) < 2.0**63 / 1e6)).any():
        _refuse(column, pa.array(bad), name, row0, "no number of seconds since 1970")
    return np.round(x_N * 1e6).astype(np.int64)


def _refuse(column: pa.Array, bad: pa.Array, name: str, row0: int, words: str) -> None:
    i = pc.index(bad, True).as_py()
    value = "" if words == "missing" else f"{column[i].as_py()!r} is "
    remedy = "; fill it in, or split by ratio (--split ratio, and the column 'ignore' in a schema)"
    raise UserError(
        f"time {name!r}, row {row0 + i}: {value}{words}{remedy if words == 'missing' else ''}"
    )


def _numpy(array: pa.Array) -> Int64s:
    return array.cast(pa.int64()).to_numpy(zero_copy_only=False)


def ticks_per_second(t: float) -> int | None:
    """Returns the unit of a time since 1970, told by its size: one of UNITS a second; None for
    another number.
    """
    return next((unit for unit in UNITS if 3e8 <= abs(t) / unit < 1e10), None)  # 1979 to 2286


def time_name(time: int) -> str:
    """Returns a time in words: the date and, unless it is midnight, the time of the day; other
    numbers as they are.
    """
    if ticks_per_second(time) is None:
        return str(time)
    return _date(int(seconds_of(np.array([time]))[0]))


def far_times(seconds_N: Int64s | Float64s, low: float, high: float) -> Bools:
    """Returns which times [N] are so far from those of a log that they are probably wrong.

    They are before its first one by more than the time that it spans, and by a year at least; or
    after its last one by more than that, and by five years at least, as a model serves for some
    time after it was trained.

    Args:
        seconds_N: seconds since 1970.
        low: of the log's first row.
        high: of the log's last row.
    """
    span = high - low
    return (seconds_N < low - max(span, _YEAR_S)) | (seconds_N > high + max(span, 5 * _YEAR_S))


def far_words(seconds: int, low: float, high: float) -> str:
    """Returns what to say of a time that is far from those of a log, low..high; all in seconds
    since 1970.
    """
    words = f"{_date(seconds)}, and training's are {_date(int(low))} .. {_date(int(high))}"
    for factor in (10**3, 10**6, 10**9, 60, 3600, 86400):
        for scaled, relation in ((seconds * factor, "larger"), (seconds // factor, "smaller")):
            if (
                scaled
                and abs(scaled) < _LATEST_S
                and not far_times(np.array([scaled]), low, high)[0]
            ):
                return (
                    f"{words}; {factor:,} times {relation} it would be {_date(scaled)}: check its"
                    " unit"
                )
    return f"{words}; check it"


def _date(seconds: int) -> str:
    day = str(np.datetime64(seconds // 86400, "D"))
    clock = seconds % 86400
    return day if not clock else f"{day} {clock // 3600:02}:{clock // 60 % 60:02}:{clock % 60:02}"


def typed_times(schema: Schema, raw: pa.Array, name: str, row0: int, skew: Skew | None) -> pa.Array:
    """Returns the times of a column of that kind. skew: counts far ones."""
    column = schema.columns[name]
    times_N = as_times(raw, name, row0, column.format)
    if skew is not None:
        seconds_N = seconds_of(times_N, unit_of(raw.type, column.format))
        skew.add_times(schema, column.source or name, seconds_N, np.arange(row0, row0 + len(raw)))
    return pa.array(times_N)


def typed_parts(
    schema: Schema, raw: pa.Array, name: str, row0: int, skew: Skew | None = None
) -> pa.Array:
    """Returns a part of each time, an integer; none where the time is missing. skew: counts far
    times.
    """
    column = schema.columns[name]
    assert column.part is not None
    present = raw.drop_null()
    if not len(present):
        return pa.nulls(len(raw), pa.int64())
    source = column.source or name  # which the request or the log has
    times_N = as_times(
        raw.fill_null(present[0]) if raw.null_count else raw, source, row0, column.format
    )
    unit = unit_of(raw.type, column.format)
    missing_N = raw.is_null().to_numpy(zero_copy_only=False)
    if skew is not None and name == schema.parts_of(source)[0]:  # of several parts one tells
        at = np.flatnonzero(~missing_N)
        skew.add_times(schema, source, seconds_of(times_N[at], unit), row0 + at)
    return pa.array(part_of(times_N, column.part, unit), mask=missing_N)
