"""A request's Python values -> ids and numbers, in C++: no Arrow, no array for each column.

The definition is what the transforms of a log make of the same values: `sparrow.serving.requests`
calls both. So there is no `reference.py` here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from sparrow.core.arrays import Array, Float64s
from sparrow.kernels import Impl, resolve

KINDS = Literal["hash", "vocabulary", "range", "buckets", "number", "refused"]
# a list of dicts, or a dict of lists
Rows = Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]]


class Lookup(NamedTuple):
    """What becomes of a value.

    kind: "hash" gives the hash of an id (`features/hashing.py`), "vocabulary" the row of its hash,
    "range" that of an integer, "buckets" that of a number, "number" the number itself. "refused"
    leaves the column to the definition. keys: the hashes of a vocabulary, int64, ascending; of a
    range, int32, negative where an integer is known; the boundaries of buckets, float64, ascending.
    rows: of the hashes, int64. low: the least integer of a range. numbers: what each row of a
    vocabulary stands for, float64, where the column is one of numbers.
    """

    kind: KINDS
    keys: Array | None = None
    rows: Array | None = None
    low: int = 0
    numbers: Float64s | None = None


class Column(NamedTuple):
    """A column of a plan.

    source: its name in a request. is_list: whether a value is a list of ids. weights: the name of
    the lists of their weights. max_length: so many last ids stay. separator: what cuts a list that
    is text: white space when None; "" leaves such a list to the definition. missing: texts that
    stand for no value; missing_numbers: floats that do.
    """

    source: str
    lookup: Lookup
    is_list: bool = False
    weights: str | None = None
    max_length: int | None = None
    separator: str | None = None
    missing: tuple[str, ...] = ()
    missing_numbers: tuple[float, ...] = ()


class Encoded(NamedTuple):
    """What became of a request's columns. The id columns come before those of numbers.

    values_N: int64, column by column. offsets, lengths: of the rows of all id columns, int64.
    bounds: where the values of each id column begin, and the end. numbers: float64, column by
    column. weights_N: float32, or None. refused: columns that the definition has to encode; they
    have nothing here.
    """

    values_N: Tensor
    offsets: Tensor
    lengths: Tensor
    bounds: tuple[int, ...]
    numbers: Float64s
    weights_N: Tensor | None
    refused: list[int]


class Plan:
    """Columns that are encoded together. Threads may share it.

    Args:
        columns: id columns, then those of numbers.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        # the plan has their addresses
        self._alive = list(chain.from_iterable(column.lookup[1:3] for column in columns))
        self._numbers = {
            c: x.lookup.numbers for c, x in enumerate(columns) if x.lookup.numbers is not None
        }
        self._ids = sum(column.lookup.kind != "number" for column in columns) - len(self._numbers)
        self._is_weighted = any(column.weights for column in columns)
        module: Any = importlib.import_module("sparrow.kernels._cpp")
        self._encode = module.encode
        self._plan = module.encode_plan([_packed(column) for column in columns])

    def encode(
        self, rows: Rows, count: int, further: list[Mapping[str, Any]], has_further: bytes
    ) -> Encoded:
        """Returns what became of a request.

        Args:
            rows: of a request.
            count: of them.
            further: further rows.
            has_further: for each column, whether the further rows have it, 1 or 0.

        Raises:
            TypeError: when rows are something else than a list of dicts or a dict of lists.
        """
        buffer, bounds, refused, ids, lists, numbers = self._encode(
            self._plan, rows, count, further, len(further), has_further
        )
        words = np.frombuffer(buffer, np.int64, ids + 2 * lists + 1 + numbers)
        offsets = ids + lists + 1
        weights = None
        if self._is_weighted:
            weights = np.frombuffer(buffer, np.float32, ids, 8 * len(words))
        encoded = Encoded(
            values_N=torch.from_numpy(words[:ids]),
            offsets=torch.from_numpy(words[ids:offsets]),
            lengths=torch.from_numpy(words[offsets : offsets + lists]),
            bounds=bounds[: self._ids + 1],
            numbers=words[offsets + lists :].view(np.float64),
            weights_N=None if weights is None else torch.from_numpy(weights),
            refused=refused,
        )
        sizes = [len(further) if is_further else count for is_further in has_further]
        return self._numbered(encoded, sizes) if self._numbers else encoded

    def _numbered(self, encoded: Encoded, sizes: Sequence[int]) -> Encoded:
        """Returns ids after those of id columns as the numbers that they stand for. sizes: rows of
        each column.
        """
        rows = sum(size for c, size in enumerate(sizes[: self._ids]) if c not in encoded.refused)
        end = encoded.bounds[self._ids]
        at_id = end
        at_number = 0
        parts = [np.empty(0)]
        for c in range(self._ids, len(sizes)):
            if c in encoded.refused:
                continue
            if c in self._numbers:
                parts.append(self._numbers[c][encoded.values_N[at_id : at_id + sizes[c]].numpy()])
                at_id += sizes[c]
            else:
                parts.append(encoded.numbers[at_number : at_number + sizes[c]])
                at_number += sizes[c]
        return encoded._replace(
            values_N=encoded.values_N[:end],
            offsets=encoded.offsets[: rows + 1],
            lengths=encoded.lengths[:rows],
            numbers=np.concatenate(parts),
            weights_N=None if encoded.weights_N is None else encoded.weights_N[:end],
        )


def planned(columns: Sequence[Column], impl: Impl = "auto") -> Plan | None:
    """Returns the plan; None where the compiled kernels are missing and the definition encodes
    all.
    """
    return Plan(columns) if resolve(impl, torch.device("cpu")) == "cpp" else None


def _packed(column: Column) -> tuple[Any, ...]:
    lookup = column.lookup
    is_buckets = lookup.kind == "buckets"
    keys = 0 if lookup.keys is None else lookup.keys.ctypes.data
    return (
        column.source,
        column.weights,
        get_args(KINDS).index(lookup.kind),
        column.is_list,
        -1 if column.max_length is None else column.max_length,
        column.separator,
        column.missing,
        column.missing_numbers,
        0 if is_buckets else keys,
        0 if lookup.rows is None else lookup.rows.ctypes.data,
        keys if is_buckets else 0,
        0 if lookup.keys is None else len(lookup.keys),
        lookup.low,
    )


__all__ = ["KINDS", "Column", "Encoded", "Lookup", "Plan", "Rows", "planned"]
