from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from sparrow.core import UserError
from sparrow.features.hashing import hash_ids
from sparrow.features.ids import as_ids
from sparrow.features.lists import as_lists


def row_of(i: int) -> int:
    return 100 + i


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (
            pa.array([None, 2.5]),
            r"'x', row 101: 2.5 \(double\) is not an id; write ids as integers or strings",
        ),
        (
            pa.array([1.0, 2.0**54]),
            r"'x', row 101: 1.8014398509481984e\+16 \(double\) is not an id",
        ),
        (pa.array([1.0, np.inf]), r"'x', row 101: inf \(double\) is not an id"),
        (pa.array([None, Decimal("2.50")]), r"'x', row 101: Decimal\('2.50'\) .* is not an id"),
    ],
)
def test_what_is_no_id_is_named_with_its_row(array: pa.Array, words: str) -> None:
    with pytest.raises(UserError, match=words):
        as_ids(array, "x", row_of)


def test_kinds_of_ids() -> None:
    assert as_ids(pa.array([True, None]), "x", row_of).to_pylist() == ["true", None]
    assert as_ids(pa.array(["a", None, "a"]).dictionary_encode(), "x", row_of).to_pylist() == [
        "a",
        None,
        "a",
    ]
    assert as_ids(pa.nulls(2, pa.float64()), "x", row_of).to_pylist() == [None, None]
    assert hash_ids(as_ids(pa.array([], pa.string()), "x", row_of)).tolist() == []


def test_white_space_around_text_is_no_part_of_an_id() -> None:
    ids = as_ids(pa.array(["a", " a", "a\t ", "a b", " ", "", None, "\x1ca\r\n"]), "x", row_of)
    assert ids.to_pylist() == ["a", "a", "a", "a b", "", "", None, "a"]
    assert as_ids(pa.array([b" a"]), "x", row_of).to_pylist() == [b" a"]
    assert as_lists(pa.array([[" a"], None]), "x", int, None)[0].to_pylist() == ["a"]


def test_whole_floats_are_the_integers_they_stand_for() -> None:
    ids = as_ids(pa.array([12.0, None, -3.0, float("nan")]), "x", row_of)
    assert ids.to_pylist() == [12, None, -3, None]
    assert hash_ids(ids)[0] == hash_ids(pa.array(["12"]))[0]
    values, offsets, _ = as_lists(pa.array([[1.0, 2.0], None]), "x", int, None)
    assert (values.to_pylist(), offsets.tolist()) == ([1, 2], [0, 2, 2])


@pytest.mark.parametrize("kind", [pa.uint64(), pa.decimal128(38, 0)])
def test_integers_beyond_63_bits_are_hashed_as_their_text(kind: pa.DataType) -> None:
    ids = as_ids(pa.array([5, 1 << 63, None], kind), "x", row_of)
    assert hash_ids(ids).tolist() == hash_ids(pa.array(["5", str(1 << 63), None])).tolist()
    assert as_ids(pa.array([5], kind), "x", row_of).type == pa.int64()
