"""Draws small logs: columns with the meaning that a person would give them, and labels that depend
on them.
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Array = np.ndarray


@dataclass(frozen=True)
class Outcome:
    """A column that depends on the others: the share of ones, and how zeros and ones are
    written.
    """

    rate: float
    zero: Any = 0
    one: Any = 1


@dataclass(frozen=True)
class Scale:
    """A rating that depends on the other columns, of these steps."""

    steps: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log in memory.

    columns: name -> values of the rows. meanings: name -> what a person says that it is, such as
    "numeric", "label yes"
    (the value that counts as 1), "time %d/%m/%Y", "list |" (what cuts it), or two kinds with "or" where a person would
    take either. form: "csv" or "parquet". delimiter: between cells. padded: a blank follows each
    delimiter.
    """

    columns: dict[str, Any]
    meanings: dict[str, str]
    form: str = "csv"
    delimiter: str = ","
    header: bool = True
    padded: bool = False

    def write(self, folder: Path, name: str) -> Path:
        """Writes the log into a folder. Returns its file."""
        path = folder / f"{name}.{self.form}"
        if self.form == "parquet":
            pq.write_table(pa.table(self.columns), path)
            return path
        names = [[f" {name}" if self.padded and i else name for i, name in enumerate(self.columns)]]
        cells = [[_text(value) for value in _plain(values)] for values in self.columns.values()]
        if self.padded:
            cells[1:] = [[f" {cell}" for cell in column] for column in cells[1:]]
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=self.delimiter, lineterminator="\n").writerows(
                [*(names if self.header else []), *zip(*cells, strict=True)]
            )
        return path


def _plain(values: Any) -> list[Any]:
    return values.to_pylist() if isinstance(values, pa.Array) else list(values)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


class Maker:
    """Draws the columns of one log. Each moves the log-odds of the outcomes, which are drawn last.

    random: where all is drawn from. rows: of the log.
    """

    def __init__(self, seed: int, rows: int) -> None:
        self.random = np.random.default_rng(seed)
        self.rows = rows
        self._logit_N = np.zeros(rows)

    def ids(self, of: int | Sequence[Any], effect: float = 0.7, first: int = 1) -> Array:
        """Returns ids of names or of first, first + 1, ...; some are more popular. Each has an
        effect of its own.
        """
        values = np.arange(first, first + of) if isinstance(of, int) else np.array(of)
        values = self.random.permutation(values)
        share = 1 / np.arange(1, len(values) + 1) ** 0.6
        place_N = self.random.choice(len(values), self.rows, p=share / share.sum())
        self._logit_N += self.random.normal(0, effect, len(values))[place_N]
        return values[place_N]

    def codes(self, count: int, low: int, high: int, effect: float = 0.7) -> Array:
        """Returns ids as `ids`, so many of whole numbers from low to high."""
        return self.ids(
            (low + self.random.choice(high - low, count, replace=False)).tolist(), effect
        )

    def hexes(self, count: int, digits: int, effect: float = 0.7) -> Array:
        """Returns ids as `ids`, hexadecimal numbers of so many digits."""
        drawn = self.random.integers(0, 16, (count, digits))
        return self.ids(["".join("0123456789abcdef"[d] for d in row) for row in drawn], effect)

    def hashes(self, count: int, effect: float = 0.7) -> Array:
        """Returns ids as `ids`, whole numbers of 64 bits, half of them below zero."""
        return self.ids(self.random.integers(-(2**63), 2**63 - 1, count).tolist(), effect)

    def trend(self, x_N: Array, slope: float = 0.7) -> Array:
        """Returns numbers as they are; the log-odds rise with their rank."""
        rank_N = np.argsort(np.argsort(x_N, kind="stable"), kind="stable")
        self._logit_N += slope * 3.46 * (rank_N / self.rows - 0.5)
        return x_N

    def counts(self, mean: float, least: int = 0, slope: float = 0.4) -> Array:
        """Returns whole numbers with many small ones and few large ones, with a trend."""
        return self.trend(
            least + self.random.geometric(1 / (1 + mean - least), self.rows) - 1, slope
        )

    def normal(self, mean: float, std: float, digits: int = 1, slope: float = 0.5) -> Array:
        """Returns numbers of a normal distribution, with a trend; whole ones for 0 digits."""
        x_N = self.trend(np.round(self.random.normal(mean, std, self.rows), digits), slope)
        return x_N if digits else x_N.astype(np.int64)

    def amounts(
        self, median: float, spread: float = 0.8, digits: int = 2, slope: float = 0.5
    ) -> Array:
        """Returns numbers of a log-normal distribution, with a trend."""
        x_N = self.trend(
            np.round(median * np.exp(self.random.normal(0, spread, self.rows)), digits), slope
        )
        return x_N if digits else x_N.astype(np.int64)

    def moments(self, first: str, days: float) -> list[datetime.datetime]:
        """Returns times in order, from the first one (ISO) on; there are fewer at night."""
        hours = self.random.random(8 * self.rows) * days * 24
        day_share = 0.55 - 0.45 * np.cos(2 * np.pi * ((hours % 24) - 3) / 24)
        kept = np.sort(hours[self.random.random(len(hours)) < day_share][: self.rows])
        assert len(kept) == self.rows
        start = datetime.datetime.fromisoformat(first)
        return [start + datetime.timedelta(seconds=int(hour * 3600)) for hour in kept]

    def unique(self, pattern: str, low: int, high: int) -> list[str]:
        """Returns another text in every row, of a whole number from low to high in a pattern for
        `str.format`.
        """
        drawn = self.random.choice(high - low, self.rows, replace=False)
        return [pattern.format(low + x) for x in drawn.tolist()]

    def prose(self, words: Sequence[str], least: int = 5, most: int = 12) -> list[str]:
        """Returns a sentence in every row."""
        lengths = self.random.integers(least, most + 1, self.rows)
        texts = [" ".join(self.random.choice(list(words), length)) for length in lengths]
        return [f"{text.capitalize()}." for text in texts]

    def lists(self, of: Sequence[Any], most: int, least: int = 1) -> list[list[Any]]:
        """Returns lists of some of the values, without an order; the first ones are more
        popular.
        """
        effects = self.random.normal(0, 0.5, len(of))
        share = 1 / np.arange(1, len(of) + 1) ** 0.6
        lengths = self.random.integers(least, most + 1, self.rows)
        places = [
            self.random.choice(len(of), n, replace=False, p=share / share.sum()) for n in lengths
        ]
        self._logit_N += [effects[place].sum() for place in places]
        return [[of[i] for i in place] for place in places]

    def per(self, ids: Array, x_N: Array, slope: float = 0.5) -> Array:
        """Returns of numbers those of the first rows with the same id, with a trend: what an item
        has, not a row.
        """
        _, first, place_N = np.unique(ids, return_index=True, return_inverse=True)
        return self.trend(x_N[first][place_N], slope)

    def gone(self, values: Any, share: float, written: Any = None) -> list[Any]:
        """Returns values of which some are missing, and how that is written."""
        gone_N = self.random.random(self.rows) < share
        return [
            written if gone else value for value, gone in zip(list(values), gone_N, strict=True)
        ]

    def log(self, columns: dict[str, tuple[Any, str]], **form: Any) -> Log:
        """Returns the log, once its outcomes are drawn."""
        made = {}
        for name, (values, _) in columns.items():
            if isinstance(values, Outcome | Scale):
                values = self._drawn(values)
            made[name] = values.tolist() if isinstance(values, np.ndarray) else values
        return Log(
            columns=made, meanings={name: meaning for name, (_, meaning) in columns.items()}, **form
        )

    def _drawn(self, of: Outcome | Scale) -> list[Any]:
        score_N = self._logit_N + self.random.logistic(0, 1, self.rows)
        rank_N = np.argsort(np.argsort(score_N)) / self.rows
        if isinstance(of, Scale):
            return [of.steps[int(rank * len(of.steps))] for rank in rank_N]
        return [of.one if rank >= 1 - of.rate else of.zero for rank in rank_N]


def spelled(times: Sequence[datetime.datetime], format: str) -> list[str]:
    """Returns times as text; %-d and %-m are day and month without a zero before them."""
    return [t.strftime(format) for t in times]


def seconds(times: Sequence[datetime.datetime], per_second: int = 1) -> list[int]:
    """Returns times as whole numbers since 1970."""
    return [int(t.replace(tzinfo=datetime.UTC).timestamp()) * per_second for t in times]


Made = Callable[[Maker], Log]
