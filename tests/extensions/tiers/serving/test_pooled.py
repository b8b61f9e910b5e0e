from __future__ import annotations

import numpy as np
import torch

from sparrow.core.arrays import Float32s, Int64s
from sparrow.extensions.tiers.serving.pooled import PooledVectors

A, B, W = np.array([7, 7, 3]), np.array([3, 7, 7]), np.array([1.0, 2.0, 3.0], np.float32)
ONE, TWO = torch.ones(4), torch.full((4,), 2.0)


def kept(
    any_order: bool, rows_N: Int64s, weights_N: Float32s | None = None, feature: int = 0
) -> PooledVectors:
    made = PooledVectors(10_000, 2, any_order)
    made.put(made.key(feature, rows_N, weights_N), ONE)
    return made


def finds(
    of: PooledVectors, rows_N: Int64s, weights_N: Float32s | None = None, feature: int = 0
) -> bool:
    return of.find(of.key(feature, rows_N, weights_N)) is not None


def test_a_list_is_its_ids_in_their_order() -> None:
    of = kept(False, A)
    assert (
        finds(of, A) and not finds(of, B) and not finds(of, A[:2]) and not finds(of, A, feature=1)
    )
    assert not finds(of, np.array([7, 3])) and not finds(of, A, np.ones(3, np.float32))
    assert of.counters == {"hits": 1, "misses": 5}


def test_in_any_order_ids_count_as_often_as_they_occur() -> None:
    """An exclusive or of hashes would take {7, 7, 3} for {3}."""
    of = kept(True, A)
    assert finds(of, A) and finds(of, B)
    assert not finds(of, np.array([3])) and not finds(of, np.array([3, 3, 7]))


def test_a_weight_stays_with_its_id() -> None:
    of = kept(True, A, W)
    assert finds(of, A[[2, 1, 0]], W[[2, 1, 0]]) and finds(of, A[[1, 0, 2]], W[[1, 0, 2]])
    assert not finds(of, A, W[[1, 2, 0]]) and not finds(of, A)
    assert not finds(kept(False, A, W), A[[1, 0, 2]], W[[1, 0, 2]])


def test_who_was_not_asked_for_the_longest_is_forgotten() -> None:
    of = PooledVectors(1500, 1, False)
    # three of about 424 bytes have room
    keys = [of.key(0, np.array([row]), None) for row in range(4)]
    for key in keys[:3]:
        of.put(key, ONE)
    assert of.find(keys[0]) is not None
    of.put(keys[3], TWO)
    assert [of.find(key) is not None for key in keys] == [True, False, True, True]
    of.put(of.key(0, np.arange(1000), None), ONE)  # larger than all that may be kept
    assert of.find(keys[3]) is TWO
