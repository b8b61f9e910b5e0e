from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.core import UserError
from sparrow.features import as_ids, as_lists, encode, hash_ids


def row_of(i: int) -> int:
    return 100 + i


def test_range_counts_from_one_and_sends_the_rest_to_zero() -> None:
    ids = as_ids(pa.array([5, 9, 4, 10, None, -(1 << 63), (1 << 63) - 1]), "x", row_of)
    assert encode(ids, "x", 5, 9).tolist() == [1, 5, 0, 0, 0, 0, 0]
    assert encode(pa.array(["5", "9", None]), "x", 5, 9).tolist() == [1, 5, 0]
    with pytest.raises(UserError, match=r"'x'.*numbers integers.*'k'.*hash"):
        encode(pa.array(["5", "k"]), "x", 5, 9)


def test_without_a_range_ids_are_hashed() -> None:
    ids = pa.array([3, None, 3])
    assert encode(ids, "x", None, None).tolist() == hash_ids(ids).tolist()


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (pa.array([None, 2.5]), r"'x', row 101: 2.5 \(double\) is not an id; write ids as integers or strings"),
        (pa.array([1, 1 << 63], pa.uint64()), r"'x', row 101: id 9223372036854775808 .* as strings"),
    ],
)
def test_what_is_no_id_is_named_with_its_row(array: pa.Array, words: str) -> None:
    with pytest.raises(UserError, match=words):
        as_ids(array, "x", row_of)


def test_kinds_of_ids() -> None:
    assert as_ids(pa.array([True, None]), "x", row_of).to_pylist() == ["true", None]
    assert as_ids(pa.array(["a", None, "a"]).dictionary_encode(), "x", row_of).to_pylist() == ["a", None, "a"]
    assert as_ids(pa.nulls(2, pa.float64()), "x", row_of).to_pylist() == [None, None]
    assert encode(as_ids(pa.array([], pa.string()), "x", row_of), "x", None, None).tolist() == []


LISTS = st.lists(st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=6)), max_size=12)


@settings(max_examples=80)
@given(LISTS, st.one_of(st.none(), st.integers(1, 4)), st.integers(0, 3), st.sampled_from(["list", "large", "sliced"]))
def test_lists_lose_nulls_and_then_all_but_the_last(rows: list, most: int | None, start: int, kind: str) -> None:
    item = pa.int32()
    array = pa.array(rows, pa.large_list(item) if kind == "large" else pa.list_(item))
    if kind == "sliced":
        array, rows = array.slice(start), rows[start:]
    values, offsets = as_lists(array, "x", 0, most)
    want = [[i for i in row or [] if i is not None][-(most or 99) :] for row in rows]
    assert [values.to_pylist()[a:b] for a, b in itertools.pairwise(offsets)] == want


def test_text_is_a_list_cut_at_spaces() -> None:
    values, offsets = as_lists(pa.array([" 3 15 ", "", None, "7"]), "x", 0, None)
    assert values.to_pylist() == ["3", "15", "7"]
    assert offsets.tolist() == [0, 2, 2, 2, 3]


def test_a_bad_element_is_named_with_its_row() -> None:
    with pytest.raises(UserError, match=r"'x', row 12: 1.5"):
        as_lists(pa.array([[], None, [1.5]]), "x", 10, None)
    with pytest.raises(UserError, match=r"'x': int64 where the schema says list"):
        as_lists(pa.array([1]), "x", 0, None)


def test_fixed_size_lists() -> None:
    values, offsets = as_lists(pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)), "x", 0, None)
    assert values.to_pylist() == [1, 2, 3, 4]
    assert np.diff(offsets).tolist() == [2, 0, 2]
