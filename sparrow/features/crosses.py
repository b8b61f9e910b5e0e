"""Crosses: features made of several id columns, whose id is a hash of theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Int64s
from sparrow.features.hashing import hash_ids, mix
from sparrow.features.ids import is_text
from sparrow.features.words import Words


def typed_cross(parts: Sequence[pa.Array], name: str, words: Words | None) -> pa.DictionaryArray:
    """Returns the coded ids [N] of a cross.

    Args:
        parts: the ids [N] of each column that it is made of.
        name: of the cross.
        words: takes in the texts of ids.
    """
    ids_N = crossed([hash_ids(part) for part in parts])
    coded = pa.array(ids_N.view(np.uint64), mask=ids_N == 0).dictionary_encode()
    if words is not None:
        raw = pa.DictionaryArray.from_arrays(coded.indices, _texts(parts, coded))
        words.count(name, raw, coded.dictionary)
    return coded


def crossed(hashes: Sequence[Int64s]) -> Int64s:
    """Returns an id int64 [N] in [1, 2^63) of the ids of some columns; 0 where one of them is
    missing.

    h = mix(number of columns); for each column's hash x: h = mix(h ^ x);
    id = max(h mod 2^63, 1). See `hash_ids`.

    Args:
        hashes: of each column, int64 [N] in [0, 2^63), 0 where missing.
    """
    h_N = mix(np.full(len(hashes[0]), len(hashes), np.uint64))
    for x_N in hashes:
        h_N = mix(h_N ^ x_N.view(np.uint64))
    ids_N = np.maximum((h_N & np.uint64((1 << 63) - 1)).view(np.int64), 1)
    return np.where(np.logical_and.reduce([x_N != 0 for x_N in hashes]), ids_N, 0)


def _texts(parts: Sequence[pa.Array], coded: pa.DictionaryArray) -> pa.Array:
    """Returns the texts [U] of the ids of a cross, such as "berlin & 5".

    Args:
        parts: the ids [N] of each column that it is made of, as the log has them.
        coded: the cross [N], of whose distinct ids [U] the first row of each tells the text.
    """
    rows_N = np.flatnonzero(coded.is_valid().to_numpy(zero_copy_only=False))
    _, first_U = np.unique(coded.indices.drop_null().to_numpy(), return_index=True)
    rows = pa.array(rows_N[first_U])
    texts = []
    for part in parts:
        ids = part.take(rows)
        text = ids if is_text(ids.type) else ids.cast(pa.string())
        texts.append(text.cast(pa.large_binary()))
    between = pa.scalar(b" & ", pa.large_binary())  # not all that a log calls text is UTF-8
    return pc.binary_join_element_wise(*texts, between)
