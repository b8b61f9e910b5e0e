"""Features that may know the outcome, because they were made after it or of it; measured on a log's
beginning.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from operator import itemgetter
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Array, Bools, Float64s, Int64s
from sparrow.core.errors import UserError, suggest
from sparrow.data.logs.read import Log
from sparrow.features.ids import is_text
from sparrow.features.labels import labels
from sparrow.features.numeric import as_numbers
from sparrow.features.schema import SUSPECT, Column, Schema
from sparrow.features.types import is_list

FIRST_ROWS = 100_000  # of a log, from which its columns' meaning is inferred
LEFT_OUT = "an outcome, as --outcomes says"
REMEDY = "; if it is known only afterwards"
QUOTE = '"'

_SEED = 306_482_917  # one that nobody else draws with
_FEATURES = ("numeric", "categorical", "list", "vector")
_BUCKETS = 64
_PRIOR = 5  # rows
_LEAST = 5  # rows; fewer prove nothing
_PURE = 0.98
# what a value that is known before multiplies the odds of an outcome by at most, and mostly
_ODDS = (10.0, 3.0)
_CERTAIN = 4.0  # nats: what is measured is e^-4 as likely as the most that such a value may do
_COMMON = 0.8  # an outcome of so many rows is no surprise
_NEAR_ALL = 0.98
_STRONG = 0.9
_FAR = 3.0


class Outcome(NamedTuple):
    """A label by which columns are measured.

    y_N: 0 and 1, or NaN where it is missing. words: what these are called in what is said.
    is_sharp: whether one of them may be certain; above and below the mean of a probability none is.
    """

    y_N: Float64s
    words: tuple[str, str] = ("0", "1")
    is_sharp: bool = True


def names_of(label: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the names of labels, of which there may be one, several or none."""
    return (label,) if isinstance(label, str) else tuple(dict.fromkeys(label or ()))


def suspected(schema: Schema, cells: Mapping[str, pa.Array]) -> Schema:
    """Returns the schema with notes at the features that may know the outcome, and at no others;
    see `suspects`.

    Args:
        schema: says what the columns are. It need not be fitted.
        cells: the log's columns [N], of its first rows.
    """
    bare = {
        n: replace(c, note=None) if (c.note or "").startswith(SUSPECT) else c
        for n, c in schema.columns.items()
    }
    plain = {name: column for name, column in bare.items() if _is_plain(column)}
    key = (
        None
        if schema.split_key is None
        else schema.columns[schema.split_key].source or schema.split_key
    )
    measured = suspects(
        {name: cells[column.source or name] for name, column in plain.items()},
        {
            name: outcome
            for name in schema.labels
            if (outcome := _label(schema, name, cells)) is not None
        },
        cells.get(key) if key is not None else None,
    )
    for name, text in measured.items():
        note = plain[name].note
        flag = flag_of([plain[name].source or name])
        text = f"{SUSPECT}{text}{REMEDY}, {flag} leaves it out"
        bare[name] = replace(plain[name], note=f"{text}; {note}" if note else text)
    return replace(schema, columns=bare)


def without(schema: Schema, outcomes: Collection[str]) -> Schema:
    """Returns the schema without what is made of these columns of the log, none of which is a
    label.
    """
    columns = dict(schema.columns)
    for name, column in schema.columns.items():
        if not set(schema.sources(name)).isdisjoint(outcomes):
            columns[name] = Column(kind="ignore", source=column.source, note=LEFT_OUT)
    features = {name for name, column in columns.items() if column.kind in _FEATURES}
    groups: dict[str, tuple[str, ...]] = {}
    for group, names in schema.groups.items():
        left = tuple(name for name in names if name in features)
        if left:
            groups[group] = left
    tables = {column.table for column in columns.values()}
    encodings = {name: table for name, table in schema.encodings.items() if name in tables}
    return replace(schema, columns=columns, groups=groups, encodings=encodings)


def flag_of(outcomes: Iterable[str]) -> str:
    """Returns the flag of `sparrow prepare` that leaves columns out, as a shell takes it."""
    cells = [
        f'"{name.replace(QUOTE, 2 * QUOTE)}"' if {",", QUOTE} & set(name) else name
        for name in outcomes
    ]
    return f"--outcomes {shlex.quote(','.join(cells))}"


def check_outcomes(outcomes: Sequence[str], log: Log, chosen: Sequence[str]) -> None:
    """Check that columns can be left out of a log's features. chosen: the columns of its labels.

    Raises:
        UserError: for a column that the log lacks, and for a label.
    """
    for name in outcomes:
        if name not in log.types:
            raise UserError(f"outcomes: no column {name!r} in {log.name}{suggest(name, log.types)}")
        if name in chosen:
            raise UserError(f"outcomes: {name!r} is a label; name it as one of them, and not both")


def suspects(
    cells: Mapping[str, pa.Array], outcomes: Mapping[str, Outcome], key: pa.Array | None
) -> dict[str, str]:
    """Returns column -> what was measured, of the columns that may know an outcome.

    One of three things makes a column suspect. (1) Where it is filled in (or is missing, is not 0,
    or has not its most frequent value), nearly all rows have one outcome. (2) Values that tell the
    outcome for certain hold most of the rows with it. (3) The column alone orders the rows with an
    AUC near 1, or with one that is high and far beyond those of all others. Rates of values and
    ranges of values are taken from one half of the rows and judged on the other one, so that rare
    values prove nothing. Where a column is suspect, fewer rows show the first two of others,
    because outcomes seldom come alone.

    Args:
        cells: the features [N].
        outcomes: the labels [N].
        key: [N], such as sessions, whose rows of one value are in the same half, or None. If they
            have one outcome, the first of them counts.
    """
    measured: dict[str, str] = {}
    for label, (y_N, words, is_sharp) in outcomes.items():
        key_N = np.arange(len(y_N)) if key is None else _codes(key)
        judged_N = ~np.isnan(y_N) & _are_apart(key_N, y_N)
        is_second_N = (np.random.default_rng(_SEED).random(len(y_N)) < 0.5)[key_N]
        place_N = (2 * is_second_N + (y_N == 1))[judged_N].astype(np.int64)
        counts = np.bincount(place_N, minlength=4).reshape(2, 2)
        if not counts.all():
            continue
        judged = pa.array(judged_N)
        columns = {
            name: _Column.from_values(values.filter(judged), place_N)
            for name, values in cells.items()
        }
        notes: dict[str, str] = {}
        for odds in _ODDS if is_sharp else ():
            certain = {
                name: column.certain(label, words, odds)
                for name, column in columns.items()
                if name not in notes
            }
            notes |= {name: text for name, text in certain.items() if text}
            if not notes:
                break
        aucs = {name: column.auc() for name, column in columns.items()}
        far = _far([*notes], aucs, counts.sum(0))
        ordinary = [auc for name, auc in aucs.items() if name not in (*notes, *far)]
        comparison = f"; the others reach {max(ordinary):.3f}" if ordinary else ""
        notes |= {
            name: f"alone it orders {label} with an AUC of {aucs[name]:.3f}{comparison}"
            for name in far
        }
        measured = {**notes, **measured}
    return {name: measured[name] for name in cells if name in measured}


def _is_plain(column: Column) -> bool:
    """Returns whether a column is a feature made of one column of the log as it stands."""
    is_derived = column.part or column.cross or column.counts or column.transform == "missing"
    return column.kind in _FEATURES and not is_derived


def _label(schema: Schema, name: str, cells: Mapping[str, pa.Array]) -> Outcome | None:
    """Returns a label of the sample, or None where it cannot be read; the log is refused later.

    A count is taken for 0 or above 0. Only rows of few impressions tell then, because of many some
    are clicked anyway: of no more than half of the rows without a click have. A probability is
    taken for above its mean or not.
    """
    column = schema.columns[name]
    shown = schema.role("impressions")
    raw = cells[column.source or name]
    with_words = schema.source.has_words
    try:
        if shown is None or column.probability:
            y_N = labels(raw, name, column, training=False, row0=0, with_words=with_words)
        else:
            y_N = as_numbers(raw, name, 0, with_words=with_words)
            shown_N = as_numbers(
                cells[schema.columns[shown].source or shown], shown, 0, with_words=with_words
            )
    except UserError:
        return None
    if column.probability:
        mean = np.nan if np.isnan(y_N).all() else np.nanmean(y_N)
        return Outcome(np.where(np.isnan(y_N), np.nan, y_N > mean), is_sharp=False)
    if shown is None:
        return Outcome(y_N)
    without_click_N = (y_N == 0) & (shown_N > 0)
    most = np.median(shown_N[without_click_N]) if without_click_N.any() else 0
    is_told_N = ~np.isnan(y_N) & (shown_N > 0) & (shown_N <= most)
    return Outcome(np.where(is_told_N, y_N > 0, np.nan), ("0", "above 0"))


def _codes(values: pa.Array) -> Int64s:
    """Returns the numbers [N] of values, below N. Missing ones are no values alike."""
    indices = (
        values.indices
        if pa.types.is_dictionary(values.type)
        else pc.dictionary_encode(values).indices
    )
    code_N = np.asarray(indices.fill_null(-1), np.int64)
    return np.unique(
        np.where(code_N < 0, -1 - np.arange(len(code_N)), code_N), return_inverse=True
    )[1]


def _are_apart(key_N: Int64s, y_N: Float64s) -> Bools:
    """Returns which rows [N] tell something of their own: the first one of each key, if its rows
    have one outcome.
    """
    _, first, rows = np.unique(key_N, return_index=True, return_counts=True)
    positives = np.bincount(key_N, y_N == 1)
    is_both = (rows > 1) & (positives > 0)
    is_first_N = np.zeros(len(y_N), bool)
    is_first_N[first] = True
    return (
        is_first_N
        if is_both.any() and np.mean((positives == rows)[is_both]) >= 0.9
        else np.ones(len(y_N), bool)
    )


@dataclass(frozen=True, kw_only=True)
class _Column:
    """The distinct values [K] of a column.

    values: as text or numbers. counts: [K, 2, 2], rows of each half (0, 1) with each outcome (0,
    1). numbers: [K], of values that are numbers, else NaN. is_missing: [K].
    """

    values: pa.Array
    counts: Int64s
    numbers: Float64s
    is_missing: Bools

    @classmethod
    def from_values(cls, values: pa.Array, place_N: Int64s) -> _Column:
        """Returns what a column [N] is. place_N: 2 * half + outcome."""
        if is_list(values.type):
            values = pc.list_value_length(values)
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        coded = pc.dictionary_encode(values, null_encoding="encode")
        values = coded.dictionary
        size = len(coded.dictionary)
        code_N = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        counts = np.bincount(4 * code_N + place_N, minlength=4 * size).reshape(size, 2, 2)
        numbers = _numbers(values)
        is_blank = (
            np.asarray(pc.equal(values, "").fill_null(True))
            if is_text(values.type)
            else np.isnan(numbers)
        )
        return cls(values=values, counts=counts, numbers=numbers, is_missing=is_blank)

    def certain(self, label: str, words: tuple[str, str], odds: float) -> str | None:
        """Returns how the column tells an outcome for certain, or None: of several ways that of the
        most rows.

        label: its name. words: of its outcomes, see `Outcome`. odds: see `_implied`.
        """
        ways: list[tuple[float, str]] = []
        for place, is_inside_K in self._parts():
            inside = is_inside_K.astype(np.int64) @ self._rows_K2
            outside = self._rows_K2.sum(0) - inside
            if (outcome := _implied(inside, outside, odds)) is not None:
                within = float(inside[outcome] / inside.sum())
                elsewhere = float(outside[outcome] / outside.sum())
                share = inside[outcome] / (inside + outside)[outcome]
                text = (
                    f"where it is {place} ({inside.sum():,} rows), {label} is {words[outcome]} in"
                    f" {within:.1%}"
                )
                ways.append((share, f"{text}, elsewhere in {elsewhere:.1%}"))
        for cells, outcome in product(self._cells, (0, 1)):
            inside, outside = _pure_rows(cells, outcome)
            share = float(inside[outcome] / (inside + outside)[outcome])
            if share >= 0.5 and _implied(inside, outside, odds) == outcome:
                right = inside[outcome] / inside.sum()
                text = (
                    f"its values alone tell {share:.0%} of the rows where {label} is"
                    f" {words[outcome]}"
                )
                ways.append((share, f"{text}, and are right in {right:.1%}"))
        return max(ways, key=itemgetter(0))[1] if ways else None

    def auc(self) -> float:
        """Returns the AUC of the column alone: by the rates of its values or ranges, or by its
        order, either way.
        """
        aucs = [_cross_fitted(cells) for cells in self._cells]
        if (self.is_missing | ~np.isnan(self.numbers)).all():
            ordered = self._rows_K2[self._order_K]
            rising = _auc(np.arange(len(ordered)), ordered)
            aucs += [rising, 1 - rising]
        return max(aucs)

    def _parts(self) -> Iterator[tuple[str, Bools]]:
        """Yields some of the values [K] that are a part of their own, and a name of it. Others are
        left over.
        """
        frequent = int(self._rows_K.argmax())
        is_zero_K = self.numbers == 0
        value = repr(self.values[frequent].as_py())
        parts = {"missing": self.is_missing, "filled in": ~self.is_missing}
        if not self.is_missing[frequent]:
            is_frequent_K = np.arange(len(self.numbers)) == frequent
            parts |= {value: is_frequent_K, f"not {value}": ~is_frequent_K}
        if is_zero_K.any():
            rest = "neither 0 nor missing" if self.is_missing.any() else "not 0"
            parts |= {"0": is_zero_K, rest: ~is_zero_K & ~self.is_missing}
        for name, is_part_K in parts.items():
            if is_part_K.any() and not is_part_K.all():
                yield name, is_part_K

    @cached_property
    def _rows_K2(self) -> Int64s:
        """Rows [K, 2] with each outcome, of both halves."""
        return self.counts[:, 0] + self.counts[:, 1]

    @cached_property
    def _rows_K(self) -> Int64s:
        return self._rows_K2[:, 0] + self._rows_K2[:, 1]

    @cached_property
    def _order_K(self) -> Int64s:
        """The places of the numbers from the least one on, and then of missing ones."""
        return np.argsort(self.numbers, kind="stable")

    @cached_property
    def _cells(self) -> list[Int64s]:
        """Counts [Q, 2, 2] of values, of which those that come once are one, and of ranges of
        numbers.
        """
        single_K = self._rows_K == 1
        cells = [
            np.concatenate([self.counts[~single_K], self.counts[single_K].sum(0, keepdims=True)])
        ]
        if (~np.isnan(self.numbers)).sum() > 2:
            ends_K = np.cumsum(self._rows_K[self._order_K])
            range_K = np.where(
                self.is_missing[self._order_K], _BUCKETS, (ends_K - 1) * _BUCKETS // int(ends_K[-1])
            )
            starts = np.flatnonzero(np.diff(range_K, prepend=-1))
            cells.append(np.add.reduceat(self.counts[self._order_K], starts))
        return cells


def _numbers(values: pa.Array) -> Float64s:
    """Returns values [K] as float64; NaN where one is missing or no number."""
    try:
        if not is_text(values.type):
            numbers = values.cast(pa.int8()) if pa.types.is_boolean(values.type) else values
            return np.asarray(
                numbers.cast(pa.float64(), safe=False).fill_null(math.nan), np.float64
            )
        texts = pc.utf8_trim_whitespace(values.cast(pa.large_string()))  # bytes may spell text
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return np.where(np.asarray(values.is_null()), np.nan, 1.0)  # its values have no order
    is_number = pc.match_substring_regex(
        texts, r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"
    ).fill_null(False)
    x_K = np.full(len(values), np.nan)
    x_K[np.asarray(is_number)] = texts.filter(is_number).cast(pa.float64())
    return x_K


def _implied(inside: Int64s, outside: Int64s, odds: float) -> int | None:
    """Returns the outcome that nearly all rows inside have, if nothing that is known before tells
    as much; or None.

    By the bound of Chernoff the rows inside have a chance of e^-(m KL) at most, if the odds of each
    were `odds` times those of the rows outside. An outcome that most rows of the log have proves
    nothing.

    Args:
        inside: rows with each outcome (0, 1).
        outside: the same of the other rows.
        odds: what a value that is known before may multiply the odds of an outcome by.
    """
    rows = int(inside.sum())
    total = inside + outside
    if rows < _LEAST:
        return None
    for outcome in (1, 0):
        if inside[outcome] < _PURE * rows or total[outcome] > _COMMON * total.sum():
            continue
        ratio = odds * (outside[outcome] + 0.5) / (outside[1 - outcome] + 0.5)
        share = inside[outcome] / rows
        most = ratio / (1 + ratio)
        if share > most and rows * _divergence(share, most) > _CERTAIN:
            return outcome
    return None


def _divergence(p: float, q: float) -> float:
    """Returns the Kullback-Leibler divergence of two coins, in nats."""
    return sum(a * math.log(a / b) for a, b in ((p, q), (1 - p, 1 - q)) if a > 0)


def _pure_rows(cells: Int64s, outcome: int) -> tuple[Int64s, Int64s]:
    """Returns rows with each outcome (0, 1), of the cells that have one outcome alone in the other
    half, and of others.

    Args:
        cells: rows [Q, 2, 2] of each half with each outcome.
        outcome: 0 or 1.
    """
    inside = np.zeros(2, np.int64)
    total = cells.sum((0, 1))
    for half in (0, 1):
        fitted = cells[:, half]
        is_pure = (fitted[:, outcome] >= 2) & (
            fitted[:, 1 - outcome] <= (1 - _PURE) * fitted.sum(1)
        )
        inside = inside + cells[is_pure, 1 - half].sum(0)
    return inside, total - inside


def _cross_fitted(cells: Int64s) -> float:
    """Returns the mean AUC of the two halves, each ordered by the rates of cells in the other one.

    Args:
        cells: rows [Q, 2, 2] of each half with each outcome.
    """
    aucs = []
    for half in (0, 1):
        fitted = cells[:, half]
        mean = fitted[:, 1].sum() / fitted.sum()
        rate_Q = (fitted[:, 1] + _PRIOR * mean) / (fitted.sum(1) + _PRIOR)
        aucs.append(_auc(np.unique(rate_Q, return_inverse=True)[1], cells[:, 1 - half]))
    return sum(aucs) / 2


def _auc(order_Q: Array, cells: Int64s) -> float:
    """Returns the AUC of cells in an order [Q], in which equal ones are tied. cells: rows [Q, 2]
    with each outcome.
    """
    negatives = np.bincount(order_Q, cells[:, 0])
    positives = np.bincount(order_Q, cells[:, 1])
    below = np.cumsum(negatives) - negatives
    ordered = (positives * (below + negatives / 2)).sum()
    return float(ordered / (positives.sum() * negatives.sum()))


def _far(suspect: Sequence[str], aucs: Mapping[str, float], rows: Int64s) -> list[str]:
    """Returns the columns whose AUC is near 1, or high and far beyond those of all others that are
    not suspect anyway.

    AUCs are compared by the distance of two normal distributions that have them.

    Args:
        suspect: columns that are suspect anyway.
        aucs: of all columns.
        rows: with each outcome (0, 1).
    """
    ranked = sorted((name for name in aucs if name not in suspect), key=lambda name: -aucs[name])
    least = {name: _least(aucs[name], rows) for name in ranked}
    far = [name for name in ranked if least[name] >= _NEAR_ALL]
    for count in range(len(ranked), len(far), -1):
        lowest = min(least[name] for name in ranked[:count])
        beyond = aucs[ranked[count]] if count < len(ranked) else 0.5
        if lowest >= _STRONG and _distance(lowest) >= _FAR * _distance(beyond):
            return ranked[:count]
    return far


def _least(auc: float, rows: Int64s) -> float:
    """Returns an AUC less two standard errors (Hanley and McNeil 1982); 0.5 where five of those of
    chance reach it.
    """
    negatives, positives = (float(n) for n in rows)
    if auc - 0.5 < 5 * math.sqrt((negatives + positives + 1) / (12 * negatives * positives)):
        return 0.5
    first = (positives - 1) * (auc / (2 - auc) - auc**2)
    second = (negatives - 1) * (2 * auc**2 / (1 + auc) - auc**2)
    spread = auc * (1 - auc) + first + second
    return auc - 2 * math.sqrt(max(spread, 0.0) / (negatives * positives))


def _distance(auc: float) -> float:
    return math.sqrt(2) * NormalDist().inv_cdf(min(max(auc, 0.5), 1 - 1e-12))
