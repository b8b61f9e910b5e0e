"""The one hash by which ids of any kind become 63-bit numbers; other languages can reproduce it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Int64s, UInt64s
from sparrow.core.mixing import splitmix64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


def hash_ids(ids: pa.Array) -> Int64s:
    """Stable ids int64 [N] in [1, 2^63) of a string, binary or integer array [N]; missing -> 0.

    An id is hashed as bytes: a string's UTF-8, an integer's decimal text ("-12"), so that the id 12
    is the same in a CSV, an int32 and a uint64 column. With all arithmetic modulo 2^64:

        mix(z): z += 0x9E3779B97F4A7C15; z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
                z = (z ^ z >> 27) * 0x94D049BB133111EB; return z ^ z >> 31
        h = mix(number of bytes)
        for each 8 bytes, little-endian, the last ones padded with zeros: h = mix(h ^ word)
        id = max(h mod 2^63, 1)

    Source: the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), chained over words.
    """
    encoded = ids.dictionary_encode()  # each distinct id is hashed once
    texts = encoded.dictionary
    if pa.types.is_integer(texts.type):
        texts = texts.cast(pa.large_string())
    hashes = _hash_texts(texts.cast(pa.large_binary())) & np.uint64((1 << 63) - 1)
    # the last one is for missing
    hashes = np.append(np.maximum(hashes, np.uint64(1)).astype(np.int64), np.int64(0))
    return hashes[encoded.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)]


def mix(z_N: UInt64s) -> UInt64s:
    """Returns splitmix64 of uint64 [N]: one step and its finaliser."""
    return splitmix64((z_N + _GOLDEN).view(np.int64)).view(np.uint64)


def _hash_texts(texts: pa.LargeBinaryArray) -> UInt64s:
    _, offsets_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    # eight more: the last word may reach beyond the last string
    data = np.zeros(int(offsets[-1]) + 8, np.uint8)
    data[:-8] = np.frombuffer(data_buffer, np.uint8)[: offsets[-1]] if offsets[-1] else 0
    words = np.lib.stride_tricks.sliding_window_view(data, 8)
    starts = offsets[:-1]
    lengths = np.diff(offsets)
    h = mix(lengths.astype(np.uint64))
    active = np.flatnonzero(lengths)
    hashed_bytes = 0
    while len(active):  # once per word of the longest string
        word = words[starts[active] + hashed_bytes].copy().view("<u8")[:, 0]
        unused = np.maximum(8 - (lengths[active] - hashed_bytes), 0).astype(np.uint64)
        h[active] = mix(h[active] ^ (word & (_ALL >> (unused * np.uint64(8)))))
        hashed_bytes += 8
        active = active[lengths[active] > hashed_bytes]
    return h


def hashes_of(distinct: pa.Array) -> Int64s:
    """Returns the hashes of distinct ids, int64 [U]. The ids are integers, or they are hashes
    already (uint64).
    """
    if distinct.type == pa.uint64():
        return distinct.to_numpy(zero_copy_only=False).view(np.int64)
    return hash_ids(distinct)


def row_hashes(coded: pa.DictionaryArray) -> Int64s:
    """Returns the hash of each coded id, int64 [N]; 0 where it is missing. See `hashes_of` for the
    distinct ones.
    """
    hashes_U = np.append(hashes_of(coded.dictionary), 0)
    return hashes_U[coded.indices.fill_null(len(coded.dictionary)).to_numpy(zero_copy_only=False)]
