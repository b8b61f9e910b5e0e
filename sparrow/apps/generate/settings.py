"""What a generated log is like."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from sparrow.core.errors import UserError

_LOW = {
    "rows": 1,
    "users": 1,
    "items": 1,
    "days": 1,
    "session_rows": 1,
    "numeric": 0,
    "categorical": 0,
    "zipf": 0,
    "drift": 0,
    "history": 0,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a generated log is like. The same settings give the same log.

    Args:
        rows: impressions.
        seed: what everything is drawn from. The same seed gives the same log.
        numeric: numeric columns, num_*.
        categorical: context columns, cat_*.
        users: distinct users, drawn by Zipf's law.
        items: distinct items, drawn by Zipf's law.
        zipf: exponent of Zipf's law.
        click_rate: mean click probability.
        missing: share of missing values in columns that have any.
        days: days from the log's beginning to its end.
        drift: how much popularity and quality of items move over the span. At 0 they stay, and at 1
            the log's ends have a correlation of 0.5.
        session_rows: mean number of rows of a session.
        history: longest list of items a user liked; 0 leaves the column out.

    Raises:
        UserError: for a number out of range.
    """

    rows: int = 200_000
    seed: int = 0
    numeric: int = 6
    categorical: int = 8
    users: int = 20_000
    items: int = 5_000
    zipf: float = 1.05
    click_rate: float = 0.2
    missing: float = 0.05
    days: int = 7
    drift: float = 1.0
    session_rows: float = 5
    history: int = 20

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            low = _LOW.get(f.name, -math.inf)
            if not (math.isfinite(value) and value >= low):
                raise UserError(f"{f.name}: {value} is out of range; use {low:g} or more")
        if not 0 < self.click_rate < 1:
            raise UserError(
                f"click_rate: {self.click_rate} is no rate of clicks; use one between 0 and 1"
            )
        if not 0 <= self.missing < 1:
            raise UserError(
                f"missing: {self.missing} is no share of values; use 0 or more and less than 1"
            )
