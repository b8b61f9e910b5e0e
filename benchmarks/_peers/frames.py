"""The log of a spec.json (`small_logs.py`) as data frames, for the peers that read it."""

from __future__ import annotations

from typing import Any, TypeAlias

import pandas as pd

Frame: TypeAlias = pd.DataFrame


def parts(spec: dict[str, Any]) -> list[Frame]:
    """Train, valid and test without the dropped columns; of each time there is the hour and the day
    of the week.

    Text among numbers is NaN, as missing values are.
    """
    return [_part(spec["files"][name], spec) for name in ("train", "valid", "test")]


def clock(spec: dict[str, Any]) -> list[str]:
    """The names of the columns that `parts` makes of times."""
    return [f"{time}_{part}" for time in spec["times"] for part in ("hour", "weekday")]


def _part(file: str, spec: dict[str, Any]) -> Frame:
    if file.endswith(".parquet"):
        frame = pd.read_parquet(file)
    else:
        frame = pd.read_csv(file, dtype=dict.fromkeys(spec["categorical"], str))
    for name in spec["times"]:
        column = frame.pop(name)
        time = pd.to_datetime(
            column, unit="s" if pd.api.types.is_numeric_dtype(column) else None, utc=True
        )
        frame[f"{name}_hour"], frame[f"{name}_weekday"] = time.dt.hour, time.dt.dayofweek
    for name in frame.columns.difference([*spec["categorical"], *spec["lists"], *spec["dropped"]]):
        frame[name] = pd.to_numeric(frame[name], errors="coerce")
    return frame.drop(columns=spec["dropped"])
