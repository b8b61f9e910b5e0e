"""Numeric columns: read as float64, standardised with values fitted on the training part."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError

Floats = npt.NDArray[np.float64]

_LARGEST = float(np.finfo(np.float32).max)


def as_numbers(column: pa.Array, name: str, row0: int) -> Floats:
    """A number or boolean array [N] as float64, missing -> NaN; text that spells numbers counts too.

    Empty text is missing. row0: the log's row of the array's first entry. Raises UserError for other types, and for
    infinite values and those that float32 cannot hold.
    """
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = pc.utf8_trim_whitespace(column)
        column = pc.if_else(pc.equal(column, ""), None, column)
    try:
        if pa.types.is_temporal(kind):  # arrow would cast it, to a number whose unit nobody chose
            raise pa.ArrowInvalid("a time")
        x_N = column.cast(pa.float64(), safe=False).fill_null(math.nan).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        remedy = "make the column kind categorical, list or ignore"
        words = str(error).splitlines()[0]
        raise UserError(f"column {name!r}: {kind} where a number is needed ({words}); {remedy}") from None
    bad = np.flatnonzero(np.abs(x_N) > _LARGEST)
    if len(bad):
        remedy = "mend the row or leave the value blank"
        raise UserError(f"column {name!r}, row {row0 + bad[0]}: {x_N[bad[0]]:g} is infinite in float32; {remedy}")
    return x_N


def squash(x_N: Floats, kind: str | None) -> Floats:
    """Float64 [N] before standardising: sign(x) * log(1 + |x|) for kind "log", else x itself."""
    return np.sign(x_N) * np.log1p(np.abs(x_N)) if kind == "log" else x_N


def transform(x_N: Floats, kind: str | None, mean: float | None, std: float | None) -> npt.NDArray[np.float32]:
    """Float32 [N] for the model: squashed, then (x - mean) / std unless kind is "none"; missing (NaN) -> 0."""
    if kind != "none":
        assert mean is not None
        assert std is not None
        x_N = (squash(x_N, kind) - mean) / std
    return np.where(np.isnan(x_N), 0.0, np.clip(x_N, -_LARGEST, _LARGEST)).astype(np.float32)


@dataclass
class Moments:
    """Count, mean and spread of a stream of numbers, NaN left out (Chan, Golub and LeVeque 1983, pairwise update)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def add(self, x_N: Floats) -> None:
        """Take in float64 [N]."""
        x_N = x_N[~np.isnan(x_N)]
        if not len(x_N):
            return
        mean, count = float(x_N.mean()), self.count + len(x_N)
        self.squares += float(((x_N - mean) ** 2).sum()) + (mean - self.mean) ** 2 * self.count * len(x_N) / count
        self.mean += (mean - self.mean) * len(x_N) / count
        self.count = count

    @property
    def std(self) -> float:
        """Population standard deviation; 1 for a constant, up to the rounding of its mean."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        return std if std > 1e-12 * abs(self.mean) else 1.0
