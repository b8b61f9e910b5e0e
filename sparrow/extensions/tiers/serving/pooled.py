"""`PooledVectors`: the vectors of long lists that were looked up before (SDM, arXiv 2110.11489)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from sparrow.core.arrays import Float32s, Int64s

_BESIDE = 400  # bytes of an entry beside its ids and its vector, about

Key = tuple[int, bytes, bytes]
"""A feature, and the rows and weights of a list. Entries are found by its hash, and then compared
byte by byte.
"""


class PooledVectors:
    """Keeps the vectors of lists, and forgets those that were not asked for the longest. Threads
    may share it.

    Args:
        bytes: of all of them.
        length: shorter lists have none.
        any_order: whether lists with the same rows and weights in any order share a vector.
    """

    table = ":lists"  # of all tables

    def __init__(self, bytes: int, length: int, any_order: bool) -> None:
        self.length = length
        self._most = int(bytes)
        self._any_order = any_order
        self._vectors: OrderedDict[Key, Tensor] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    @property
    def counters(self) -> Mapping[str, int]:
        """So far: lists whose vector was known, and others."""
        return {"hits": self.hits, "misses": self.misses}

    def key(self, feature: int, rows_N: Int64s, weights_N: Float32s | None) -> Key:
        """Returns what tells a list from others.

        Args:
            feature: the number of the feature that pools it.
            rows_N: its rows.
            weights_N: their weights, if they have some.
        """
        bits_N = None if weights_N is None else weights_N.view(np.int32)
        if self._any_order and bits_N is None:
            rows_N = rows_N[np.argsort(rows_N, kind="stable")]
        elif self._any_order and bits_N is not None:
            order_N = np.lexsort((bits_N, rows_N))
            rows_N = rows_N[order_N]
            bits_N = bits_N[order_N]
        return feature, rows_N.tobytes(), b"" if bits_N is None else bits_N.tobytes()

    def find(self, key: Key) -> Tensor | None:
        """Returns the vector float32 [D] of a list, or None."""
        with self._lock:
            vector_D = self._vectors.get(key)
            if vector_D is None:
                self.misses += 1
                return None
            self.hits += 1
            self._vectors.move_to_end(key)
            return vector_D

    def put(self, key: Key, vector_D: Tensor) -> None:
        """Keep the vector of a list. It is not to change afterwards."""
        size = _size(key, vector_D)
        if size > self._most:
            return
        with self._lock:
            if key in self._vectors:
                return
            self._vectors[key] = vector_D
            self._bytes += size
            while self._bytes > self._most:
                self._bytes -= _size(*self._vectors.popitem(last=False))


def _size(key: Key, vector_D: Tensor) -> int:
    return len(key[1]) + len(key[2]) + 4 * len(vector_D) + _BESIDE
