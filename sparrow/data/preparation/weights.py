"""Weights and impressions of training rows, summed up: a label's base rate, and what a row counts
on average.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Bools, Float64s, Int64s
from sparrow.data.batches.parts import PARTS
from sparrow.features.numeric import Statistics
from sparrow.features.schema import Column, Schema

# of training, beside what is summed up for each part
_WEIGHTS, _IMPRESSIONS = "weights", "impressions"


class WeightSums:
    """Sums over the rows that have a label, and over its ones.

    They are of the weights of training rows; of labels that are shares of a row also of the
    impressions of each part. moments: by name; it tells what is summed up, the label, and whether
    it is of the ones.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self.moments: defaultdict[str, Statistics] = defaultdict(Statistics)

    def tasks(self, batch: pa.RecordBatch, parts_N: Int64s) -> list[Callable[[], None]]:
        """Returns what takes in typed rows; the order does not matter. parts_N: the part of each
        row.
        """
        tasks: list[Callable[[], None]] = [partial(self._add_weights, batch, parts_N == 0)]
        for label in self._schema.labels:
            tasks.append(partial(self._add_label, label, batch, parts_N))
        return tasks

    def weights(self, label: str) -> tuple[int, int] | None:
        """Returns the weights of the ones of a label, and of all rows that have it, unless these
        are 0.
        """
        sums = self._sums(_WEIGHTS, label)
        return sums if sums[1] else None

    def impressions(self, part: str, label: str) -> tuple[int, int] | None:
        """Returns the impressions that are ones of a label, and all that have it; None for one that
        is no share.
        """
        return self._sums(part, label) if self._schema.is_share(label) else None

    def shown(self) -> dict[str, float]:
        """Returns how many impressions each label has in training; nothing where rows do not stand
        for some.
        """
        labels = self._schema.labels if self._schema.role("impressions") else ()
        moments = {label: self.moments[_key(PARTS[0], label, False)] for label in labels}
        return {label: known.mean * known.count for label, known in moments.items()}

    def with_mean(self, column: Column) -> Column:
        """Returns the column of weights with their mean over impressions, unless all of training's
        are 0.
        """
        weights, shown = self.moments[_WEIGHTS].total, self.moments[_IMPRESSIONS].total
        return (
            replace(column, mean=float(Fraction(weights, shown))) if weights and shown else column
        )

    def _sums(self, name: str, label: str) -> tuple[int, int]:
        return (
            self.moments[_key(name, label, True)].total,
            self.moments[_key(name, label, False)].total,
        )

    def _numbers(self, batch: pa.RecordBatch) -> tuple[Float64s, Float64s]:
        """Returns the weight and the impressions of each row, float64 [N]."""
        unweighted_N = np.ones(batch.num_rows)
        columns = {
            name: batch.column(name).to_numpy().astype(np.float64) for name in self._schema.weights
        }
        weights_N = np.prod([unweighted_N, *columns.values()], axis=0)
        return weights_N, columns.get(str(self._schema.role("impressions")), unweighted_N)

    def _add_label(self, label: str, batch: pa.RecordBatch, parts_N: Int64s) -> None:
        w_N, shown_N = self._numbers(batch)
        y_N = batch.column(label).to_numpy().astype(np.float64)
        summed = [(_WEIGHTS, 0, w_N)]
        if self._schema.is_share(label):
            summed += [(part, place, shown_N) for place, part in enumerate(PARTS)]
        for name, place, x_N in summed:
            at_N = (parts_N == place) & ~np.isnan(y_N)
            self.moments[_key(name, label, False)].add(x_N[at_N])
            self.moments[_key(name, label, True)].add((x_N * y_N)[at_N])

    def _add_weights(self, batch: pa.RecordBatch, train_N: Bools) -> None:
        w_N, shown_N = self._numbers(batch)
        self.moments[_WEIGHTS].add(w_N[train_N])
        self.moments[_IMPRESSIONS].add(shown_N[train_N])


def _key(name: str, label: str, is_one: bool) -> str:
    return f"{name}:{label}:{'ones' if is_one else 'known'}"
