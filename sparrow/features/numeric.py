"""Numeric columns: read as float64, standardised with values fitted on the training part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Float32s, Float64s
from sparrow.core.errors import UserError, first_line
from sparrow.features.cells import as_id_texts, as_number_texts, spelt_as_id
from sparrow.features.schema import WORDS

_LARGEST = float(np.finfo(np.float32).max)
_LEAST = 2.0**-150  # what float32 cannot tell from 0
_UNIT = 1074  # every float64 is a multiple of 2^-1074
TAIL = 2.0  # standard deviations
_CHUNK = 1 << 14
_SPLIT = 2.0**27 + 1


def as_numbers(column: pa.Array, name: str, row0: int, *, with_words: bool = False) -> Float64s:
    """Returns an array of numbers, booleans or text [N] as float64. Missing values and empty text
    become NaN.

    Args:
        column: the array. Text must spell numbers.
        name: the column's, for errors.
        row0: the log's row of the array's first entry, for errors.
        with_words: whether text may be a word, see `sparrow.features.cells.as_number_texts`, and
            bytes are text.

    Raises:
        UserError: for other types, for text that spells no number (it names the row), for infinite
            numbers, and for numbers that float32 cannot hold.
    """
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_text |= with_words and (pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
    try:
        if is_text:
            column = _spelt(column) if with_words else _trimmed(column)
        if pa.types.is_temporal(kind):  # arrow would cast it, to a number whose unit nobody chose
            raise pa.ArrowInvalid("a time")
        x_N = (
            column.cast(pa.float64(), safe=False).fill_null(math.nan).to_numpy(zero_copy_only=False)
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        remedy = "make the column kind categorical, list or ignore"
        if is_text:
            first = misfits(column, pa.float64())[0]
            remedy = (
                f"mend it, name it in columns.{name}.missing, prepare with --bad-rows repair, or"
                f" {remedy}"
            )
            value = column[first].as_py()
            raise UserError(
                f"column {name!r}, row {row0 + first}: {value!r} is no number; {remedy}"
            ) from None
        reason = f"{kind} where a number is needed ({first_line(error)})"
        raise UserError(f"column {name!r}: {reason}; {remedy}") from None
    bad = np.flatnonzero(np.abs(x_N) > _LARGEST)
    if len(bad):
        remedy = "mend the row or leave the value blank"
        raise UserError(
            f"column {name!r}, row {row0 + bad[0]}: {x_N[bad[0]]:g} is infinite in float32;"
            f" {remedy}"
        )
    return x_N


def _trimmed(texts: pa.Array) -> pa.Array:
    """Text without white space around it, missing where nothing is left."""
    texts = pc.utf8_trim_whitespace(texts)
    return pc.if_else(pc.equal(texts, ""), None, texts)


def _spelt(texts: pa.Array) -> pa.Array:
    """Text or bytes as text that numbers are read from, or the numbers where that can be told
    fast.
    """
    try:
        return texts.cast(pa.large_string()).cast(pa.float64())
    except pa.ArrowInvalid:
        return _trimmed(as_number_texts(texts))


def misfits(values: pa.Array, kind: pa.DataType, first: int = 0) -> list[int]:
    """Returns the places of the values that do not cast to `kind`. Finds them by halving.

    Args:
        values: the array.
        kind: the type.
        first: the place of the array's first value.
    """
    try:
        values.cast(kind)
        return []
    except pa.ArrowInvalid:
        if len(values) == 1:
            return [first]
        half = len(values) // 2
        return misfits(values[:half], kind, first) + misfits(values[half:], kind, first + half)


def without(column: pa.Array, missing: Sequence[str], *, with_words: bool = False) -> pa.Array:
    """Returns an array in which the values that are written like one of `missing` are missing.

    White space around a value does not count. with_words: -999.0 and -999 are written alike, and so
    are True and true.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    # written like none of them; what makes numbers of the column refuses it
    if pa.types.is_nested(column.type):
        return column
    texts = pc.utf8_trim_whitespace(column.cast(pa.large_string()))
    if with_words:
        texts = as_id_texts(texts, WORDS)
        missing = [spelt_as_id(text) for text in missing]
    return pc.if_else(pc.is_in(texts, pa.array(missing, pa.large_string())), None, column)


def squash(x_N: Float64s, kind: str | None) -> Float64s:
    """Returns float64 [N] before standardising: sign(x) * log(1 + |x|) for kind "log", else x
    itself.
    """
    return np.sign(x_N) * np.log1p(np.abs(x_N)) if kind == "log" else x_N


def tamed(z_N: Float64s) -> Float64s:
    """Returns standardised numbers with tamed tails: beyond TAIL standard deviations they grow like
    a logarithm.

    Few rows of training are there. A model continues along the slope that it learned from the
    others, and errs when more come to be there, as they do when a log's numbers drift.
    """
    near_N = z_N.clip(-TAIL, TAIL)
    return near_N + np.sign(z_N) * np.log1p(np.abs(z_N - near_N))


def untamed(z_N: Float64s) -> Float64s:
    """Returns the inverse of `tamed`."""
    near_N = np.clip(z_N, -TAIL, TAIL)
    return near_N + np.sign(z_N) * np.expm1(np.abs(z_N - near_N))


def transform(
    x_N: Float64s,
    kind: str | None,
    mean: float | Float64s | None,
    std: float | Float64s | None,
    low: float | Float64s | None = None,
    high: float | Float64s | None = None,
) -> Float32s:
    """Returns float32 [N] for the model, or [C, N] for some columns of one kind.

    Numbers are clipped to low..high, squashed, and become (x - mean) / std unless the kind is
    "none". The tails of "standard" numbers are tamed; the logarithm has tamed those of "log" ones.
    A missing number (NaN) becomes 0.

    Args:
        x_N: the numbers, NaN where missing.
        kind: see `Column.transform`. "missing" gives 1 for a missing number, else 0.
        mean, std: of the squashed numbers of training, for columns float64 [C, 1].
        low, high: the range of training's numbers, for columns float64 [C, 1].
    """
    if kind == "missing":
        return np.isnan(x_N).astype(np.float32)
    if low is not None and high is not None:
        x_N = x_N.clip(low, high)
    if kind != "none":
        assert mean is not None
        assert std is not None
        x_N = (squash(x_N, kind) - mean) / std
        x_N = tamed(x_N) if kind == "standard" else x_N
    return np.where(np.isnan(x_N), 0.0, x_N.clip(-_LARGEST, _LARGEST)).astype(np.float32)


@dataclass
class Statistics:
    """Count, mean and spread of numbers, NaN left out: the same to the bit in whatever order and
    pieces they come.

    Numbers that float32 would make 0 count as 0: the squares of such small ones could not be exact.
    low, high: the least and the greatest of what `widen` took in, which may be on another scale.
    total, squares: exact sums of x and of x * x, in units of 2^-_UNIT.
    """

    count: int = 0
    total: int = 0
    squares: int = 0
    low: float = math.inf
    high: float = -math.inf

    def add(self, x_N: Float64s) -> None:
        """Takes in float64 [N]."""
        x_N = x_N[~np.isnan(x_N)]
        x_N = np.where(np.abs(x_N) < _LEAST, 0.0, x_N)
        self.count += len(x_N)
        for first in range(0, len(x_N), _CHUNK):
            x = x_N[first : first + _CHUNK]
            self.total += _sum(x)
            near = x * x
            high = x * _SPLIT - (x * _SPLIT - x)  # 26 of x's 53 digits
            low = x - high
            # Dekker 1971
            self.squares += _sum(near) + _sum(high * high - near + 2 * high * low + low * low)

    def widen(self, x_N: Float64s) -> None:
        """Takes the range of float64 [N] into account, NaN left out."""
        x_N = x_N[~np.isnan(x_N)]
        self.low = min(self.low, float(x_N.min(initial=math.inf)))
        self.high = max(self.high, float(x_N.max(initial=-math.inf)))

    def merge(self, other: Statistics) -> None:
        """Takes in what another one has."""
        self.count = self.count + other.count
        self.total = self.total + other.total
        self.squares += other.squares
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)

    @property
    def mean(self) -> float:
        """The mean, rounded once; 0 of nothing."""
        return float(Fraction(self.total, self.count << _UNIT)) if self.count else 0.0

    @property
    def std(self) -> float:
        """The population standard deviation; 1 for a constant."""
        variance = (self.count * self.squares << _UNIT) - self.total**2
        return math.sqrt(Fraction(variance, self.count**2 << 2 * _UNIT)) if variance > 0 else 1.0


def _sum(x_N: Float64s) -> int:
    """The exact sum of at most _CHUNK numbers, in units of 2^-_UNIT (Rump, Ogita and Oishi 2008).

    What is left of each number above a common unit adds up without rounding; the rest comes in the
    next round.
    """
    total = 0
    while top := float(np.abs(x_N).max()):
        sigma = math.ldexp(2.0 * _CHUNK, math.frexp(top)[1])
        high_N = x_N + sigma - sigma
        total += int(Fraction(float(high_N.sum())) * (1 << _UNIT))
        x_N = x_N - high_N
    return total
