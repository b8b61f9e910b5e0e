"""Runs of equal rows: where they begin, and which of them are the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow import features
from sparrow.core.arrays import Array, Bools, Int64s, UInt64s
from sparrow.core.mixing import splitmix64

Column = tuple[Array, Int64s | None]
"""Integers [N]; or those of lists [M], and where each list begins and the last one ends [N + 1]."""


def mixed(x: Array) -> UInt64s:
    """Returns another number for each int64 or uint64, which looks random (SplitMix64's finaliser,
    a bijection).
    """
    return splitmix64(x.view(np.int64)).view(np.uint64)


def bits(column: pa.ChunkedArray | pa.Array) -> Column:
    """Returns a column's numbers as integers of their bits."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    starts = None
    if pa.types.is_fixed_size_binary(array.type):  # vectors: lists of one length
        numbers_NS = features.vectors.unpacked(array)
        return (
            numbers_NS.reshape(-1).view(np.int32),
            np.arange(len(array) + 1) * numbers_NS.shape[1],
        )
    if pa.types.is_large_list(array.type):
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        array = array.flatten()
    values = array.to_numpy(zero_copy_only=False)
    return values.view(f"i{values.itemsize}"), starts


def begins(columns: Sequence[Column], rows: int) -> Bools:
    """Returns where rows [N] differ from the one before in a column, number by number. The first
    one does.
    """
    differs = np.zeros(rows, np.bool_)
    differs[:1] = True
    for values, starts in columns:
        if starts is None:
            differs[1:] |= values[1:] != values[:-1]
            continue
        lengths = np.diff(starts)
        differs[1:] |= lengths[1:] != lengths[:-1]
        row_M = np.repeat(np.arange(rows), lengths)
        # of rows as long as the one before, whose numbers lie just before
        at_M = np.flatnonzero(~differs[row_M])
        differs[row_M[at_M[values[at_M] != values[at_M - lengths[row_M[at_M]]]]]] = True
    return differs


def fingerprints(columns: Sequence[Column], rows: int) -> UInt64s:
    """Returns a number for each row [N], the same for equal rows and hardly ever for others."""
    prints = np.zeros(rows, np.uint64)
    for values, starts in columns:
        if starts is None:
            prints = mixed(prints ^ mixed(values.astype(np.int64)))
            continue
        lengths = np.diff(starts)
        place = np.arange(len(values)) - np.repeat(starts[:-1], lengths)
        # odd: one other number is another sum
        factors = mixed(np.arange(-lengths.max(initial=0), 0)) | np.uint64(1)
        sums = np.append(np.uint64(0), np.cumsum(factors[place] * values.astype(np.uint64)))
        prints = mixed(prints ^ (sums[starts[1:]] - sums[starts[:-1]]) ^ mixed(lengths))
    return prints


def first_of(numbers_N: Array, count: int) -> Int64s:
    """Returns for each of the numbers [N], which are below `count`, the place where it first
    occurs.
    """
    at_N = np.arange(len(numbers_N))
    first = np.empty(count, np.int64)
    first[numbers_N[::-1]] = at_N[::-1]  # of equal ones the last assignment stays
    return first[numbers_N]


def first_equal(columns: Sequence[Column], rows: int) -> Int64s:
    """Returns for each row [N] the first row that equals it.

    It is found by fingerprint and then compared number by number. A row with the fingerprint of an
    earlier row but other content stands for itself.
    """
    coded = pa.array(fingerprints(columns, rows)).dictionary_encode()
    first_N = first_of(coded.indices.to_numpy(), len(coded.dictionary))
    repeats = np.flatnonzero(first_N != np.arange(rows))
    for values, starts in columns:
        earlier = first_N[repeats]
        if starts is None:
            same = values[repeats] == values[earlier]
        else:
            lengths = np.diff(starts)
            same = lengths[repeats] == lengths[earlier]
            counts = np.where(same, lengths[repeats], 0)
            place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            at_M = np.repeat(starts[repeats], counts) + place
            earlier_at_M = np.repeat(starts[earlier], counts) + place
            row_M = np.repeat(np.arange(len(repeats)), counts)
            same[row_M[values[at_M] != values[earlier_at_M]]] = False
        first_N[repeats[~same]] = repeats[~same]
        repeats = repeats[same]
    return first_N
