from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest

from sparrow.core import UserError
from sparrow.features.counts import NOTHING, Counted, by_row, frozen, numbers
from sparrow.features.hashing import hash_ids, row_hashes
from sparrow.features.schema import Column

KINDS = ("seen", "positives", "rate")
IDS = pa.array(["a", None, "b", "a"])


def coded(ids: pa.Array) -> pa.DictionaryArray:
    codes = ids.dictionary_encode()
    return pa.DictionaryArray.from_arrays(
        codes.indices, pa.array(hash_ids(codes.dictionary).view(np.uint64))
    )


def test_hashes_are_those_of_the_ids_and_0_is_missing() -> None:
    assert np.array_equal(row_hashes(coded(IDS)), hash_ids(IDS))
    assert np.array_equal(row_hashes(coded(pa.nulls(3, pa.int64()))), [0, 0, 0])


def test_counts_sum_up_by_hash_and_a_new_id_has_none() -> None:
    counted = Counted.sum_by_hash(np.array([7, 3, 7]), np.array([[1, 2, 4], [0, 1, 3]]))
    assert counted.hashes_V.tolist() == [3, 7]
    assert counted.at(np.array([7, 5, 3, 9])).tolist() == [[5, 0, 2, 0], [3, 0, 1, 0]]
    assert counted.totals_2.tolist() == [7, 4]
    assert NOTHING.at(np.array([7, 0])).tolist() == [[0, 0], [0, 0]]
    assert NOTHING.totals_2.tolist() == [0, 0]


def test_numbers_are_what_is_said_of_them() -> None:
    hashes_N, counts_2N, totals_2N = (
        np.array([3, 0, 9]),
        np.array([[4, 4, 0], [1, 1, 0]]),
        np.array([[9], [4]]),
    )
    found = {
        kind: numbers(Column(kind="numeric", counts=kind), hashes_N, counts_2N, totals_2N)
        for kind in KINDS
    }
    assert found["seen"][[0, 2]].tolist() == [4, 0]
    assert found["positives"][[0, 2]].tolist() == [1, 0]
    assert all(np.isnan(x_N[1]) for x_N in found.values())
    rate = numbers(Column(kind="numeric", counts="rate", prior=2.0), hashes_N, counts_2N, totals_2N)
    assert rate[[0, 2]] == pytest.approx([(1 + 2 * 0.45) / 6, 0.45])


def test_a_file_keeps_them(tmp_path: Path) -> None:
    counted = Counted.sum_by_hash(
        hash_ids(pa.array(["a", "b", "a"])), np.array([[1, 1, 1], [1, 0, 0]])
    )
    counted.save(tmp_path / "counts")
    found = Counted.load(tmp_path / "counts")
    assert found.digest == counted.digest != NOTHING.digest
    column = Column(kind="numeric", counts="seen")
    assert frozen(column, found, coded(IDS))[[0, 2, 3]].tolist() == [2, 1, 2]
    NOTHING.save(tmp_path / "nothing")
    assert Counted.load(tmp_path / "nothing").digest == NOTHING.digest
    (tmp_path / "counts").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="missing or damaged"):
        Counted.load(tmp_path / "counts")


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_by_row_are_those_of_the_ids(kind: Literal["seen", "positives", "rate"]) -> None:
    column = Column(kind="numeric", counts=kind)
    for counted in (
        NOTHING,
        Counted.sum_by_hash(hash_ids(pa.array(["a", "b"])), np.array([[3, 2], [1, 2]])),
    ):
        found_R = by_row(column, counted)
        assert np.isnan(found_R[0])
        assert len(found_R) == len(counted.hashes_V) + 2
        want_U = frozen(column, counted, coded(pa.array([None, "new", "a", "b"])))
        row_U = [
            0,
            1,
            *(
                int(np.searchsorted(counted.hashes_V, h)) + 2
                for h in hash_ids(pa.array(["a", "b"]))
            ),
        ]
        at_U = row_U if len(counted.hashes_V) else [0, 1, 1, 1]
        assert np.array_equal(found_R[at_U], want_U, equal_nan=True)
