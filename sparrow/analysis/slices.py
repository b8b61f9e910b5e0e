"""A column of a prepared log -> slices of its rows, named as people know the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sparrow.analysis.scores import Rows
from sparrow.core.arrays import Float64s, Int64s
from sparrow.core.errors import UserError, suggest
from sparrow.core.memory import let_go
from sparrow.data.batches.dataset import Dataset
from sparrow.features import words
from sparrow.features.encodings import FIRST, kind_of
from sparrow.features.numeric import untamed
from sparrow.features.schema import Column, Encoding
from sparrow.features.times import ticks_per_second
from sparrow.metrics import METRICS
from sparrow.metrics.intervals import Estimate

MOST = 8  # slices of a column
LEAST = 10  # rows of an id that gets a slice of its own where there are more ids than slices


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Some rows of a part. value: what its rows have in common; rows: how many; rate: their mean
    label, by weight.
    """

    value: str
    rows: int
    rate: float
    estimates: dict[str, Estimate]

    def metrics(self) -> dict[str, float]:
        """Returns the values of its metrics of all rows and of GAUC, label_rate and examples
        (rows).
        """
        values = {name: self.estimates[name].value for name in METRICS if name in self.estimates}
        return {**values, "label_rate": self.rate, "examples": self.rows}


def judge_slices(rows: Rows, dataset: Dataset, split: str, name: str) -> Iterator[Slice]:
    """Yields a column's slices that have rows with a label, with their metrics.

    They are found in about 250 bytes of memory for each of its rows. Estimates have some numbers of
    each row, too. So take from a slice what is needed, and keep it no longer.

    Args:
        rows: all rows of the part, scored.
        dataset, split, name: as for `slices`.

    Raises:
        UserError: as `slices`.
    """
    values, at_N = slices(dataset, split, name)
    for i, value in enumerate(values):
        let_go()  # slices have as many sizes, and holes that one leaves do not fit the next
        has_label_N = ~rows.labels_N.isnan()
        in_slice_N = torch.from_numpy(at_N == i) & has_label_N
        if count := int(in_slice_N.sum()):
            y_N = rows.labels_N[in_slice_N].double()
            w_N = torch.ones_like(y_N)
            if rows.weights_N is not None:
                w_N = rows.weights_N[in_slice_N].double()
            rate = float(w_N @ y_N / w_N.sum())
            yield Slice(value=value, rows=count, rate=rate, estimates=rows.estimates(in_slice_N))


def slices(dataset: Dataset, split: str, name: str) -> tuple[list[str], Int64s]:
    """Returns the names of a column's slices, and the slice of each row [N] of a part, in the log's
    order.

    Ids are sliced by the most frequent values, those of LEAST rows or more, and the rest together.
    Numbers and times are sliced by quantiles, and lists by their length.

    Raises:
        UserError: for a column that the prepared log does not keep, and when what it keeps of the
            column is damaged.
    """
    columns = {n: c for n, c in dataset.schema.columns.items() if c.kind != "ignore"}
    if name not in columns:
        why = (
            " (ignored: give it a kind and prepare again)" if name in dataset.schema.columns else ""
        )
        raise UserError(
            f"slices: no column {name!r} in {dataset.path}{why}{suggest(name, columns)}"
        )
    column = columns[name]
    if column.kind == "vector":
        raise UserError(
            f"slices: {name!r} is a vector, which has no order; name a column of ids, numbers or"
            " times"
        )
    values = dataset.column(name, split)
    if column.kind == "list":
        return _numbers(
            pc.list_value_length(values).to_numpy().astype(np.float64), lambda n: f"{n:g} ids"
        )
    if column.boundaries is not None:
        return _numbers(values.to_numpy().astype(np.float64), _bucket(column.boundaries), least="")
    if column.kind in ("categorical", "group", "session"):
        return _ids(values, _decoder(dataset, name))
    x_N = values.to_numpy().astype(np.float64)
    if column.kind == "time":
        return _numbers(x_N, _as_time)
    return _numbers(_raw(x_N, column), lambda x: f"{x:.4g}")


def _ids(values: pa.ChunkedArray, decode: Callable[[int], str]) -> tuple[list[str], Int64s]:
    # rows without a group have numbers of their own, below 0
    ids_N = np.maximum(values.to_numpy(), 0)
    distinct, at_N, counts = np.unique(ids_N, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    top = order
    if len(order) > MOST:
        top = order[: MOST - 1][counts[order[: MOST - 1]] >= LEAST]
    place = np.full(len(distinct), len(top), np.int64)
    place[top] = np.arange(len(top))
    names = [decode(int(distinct[i])) for i in top]
    rest = (
        f"{len(order) - len(top):,} others"
        if len(top)
        else f"{len(order):,} ids, each in < {LEAST} rows"
    )
    return names + ([rest] if len(top) < len(order) else []), place[at_N]


def _decoder(dataset: Dataset, name: str) -> Callable[[int], str]:
    """Returns what says an id in words: its text where the log keeps it, else what its number
    tells.
    """
    schema = dataset.schema
    column = dataset.schema.columns[name]
    encoding = schema.encodings[column.table] if column.table else Encoding(kind="hash")
    kind = kind_of(encoding)
    texts = words.load(dataset.path, name)
    if column.table and texts:
        known = dataset.transforms.vocabularies.get(column.table)
        rows = kind.rows_of(known, pa.array(np.array(list(texts), np.uint64)))
        texts = {
            row: text
            for row, text in zip(rows.tolist(), texts.values(), strict=True)
            if row >= FIRST
        }
    return lambda row: texts.get(row) or kind.name_of(encoding, row)


def _bucket(boundaries: tuple[float, ...]) -> Callable[[float], str]:
    """Names of a quantile column's rows: that of missing numbers, and FIRST + k - 1 for the k-th
    bucket.
    """
    ends = [
        "missing",
        *(f"≤ {end:.4g}" for end in boundaries),
        f"> {boundaries[-1]:.4g}" if boundaries else "any",
    ]
    return lambda row: ends[max(int(row) - FIRST + 1, 0)]


def _raw(x_N: Float64s, column: Column) -> Float64s:
    """A numeric column's values as they were before it was standardised; missing ones have become
    the mean.
    """
    if column.kind != "numeric" or column.transform in ("none", "missing"):
        return x_N
    assert column.mean is not None
    assert column.std is not None
    x_N = (untamed(x_N) if column.transform == "standard" else x_N) * column.std + column.mean
    return np.sign(x_N) * np.expm1(np.abs(x_N)) if column.transform == "log" else x_N


def _numbers(
    x_N: Float64s, say: Callable[[float], str], least: str = "≤ "
) -> tuple[list[str], Int64s]:
    """Slices that hold about equally many rows, named by the greatest of each, or one for each of a
    few values.
    """
    edges = np.unique(x_N)
    few = len(edges) <= MOST
    if not few:
        edges = np.unique(np.quantile(x_N, np.linspace(0, 1, MOST + 1)[1:], method="higher"))
    return [("" if few else least) + say(edge) for edge in edges], np.searchsorted(edges, x_N)


def _as_time(t: float) -> str:
    """Seconds, milliseconds or microseconds since 1970 as a date, told by their size; other numbers
    as they are.
    """
    unit = ticks_per_second(t)
    return datetime.fromtimestamp(t / unit, UTC).strftime("%Y-%m-%d %H:%M") if unit else f"{t:,.0f}"
