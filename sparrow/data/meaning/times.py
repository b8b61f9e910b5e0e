"""Integers that are times, and the columns that are made of a time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError
from sparrow.data.meaning.looks import time_of
from sparrow.features.schema import Column
from sparrow.features.times import as_times, part_of, ticks_per_second

_WEEK_S = 7 * 86400
DAYS = ("%Y%m%d", "%Y%m%d%H", "%y%m%d%H", "%Y%m%d%H%M%S")


def parts_of_time(name: str, stem: str, column: Column, values: pa.Array) -> dict[str, Column]:
    """Returns columns of the hour and the day of the week of a time, where the values are of more than a week.

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
    made: dict[str, Column] = {}
    for part in ("hour", "weekday"):
        of, note = f"{stem}_{part}", f"of {name}, in UTC: what is to be scored has to have it then"
        if len(np.unique(part_of(times_N, part))) > 1:
            made[of] = Column(kind="categorical", source=name, part=part, table=of, format=column.format, note=note)
    return made


def numbered_time(values: pa.Array) -> tuple[str | None, str | None] | None:
    """Returns format and note of integers that are days, such as 20261121, or units since 1970 of 1998 to 2039."""
    low, high = (float(x.as_py()) for x in (pc.min(values), pc.max(values)))
    if any(9e8 * unit <= low and high < 2.2e9 * unit for unit in (1, 10**3, 10**6)):
        return None, None
    look = time_of(values)
    return look if look and look[0] in DAYS else None
