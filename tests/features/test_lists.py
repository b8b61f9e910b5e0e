"""Lists: what is cut, what is dropped, and the weights beside the ids."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.core import UserError
from sparrow.features.lists import as_lists

LISTS = st.lists(
    st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=6)), max_size=12
)


@settings(max_examples=80)
@given(
    LISTS,
    st.one_of(st.none(), st.integers(1, 4)),
    st.integers(0, 3),
    st.sampled_from(["list", "large", "sliced"]),
)
def test_lists_lose_nulls_and_then_all_but_the_last(
    rows: list, most: int | None, start: int, kind: str
) -> None:
    item = pa.int32()
    array = pa.array(rows, pa.large_list(item) if kind == "large" else pa.list_(item))
    if kind == "sliced":
        array, rows = array.slice(start), rows[start:]
    values, offsets, _ = as_lists(array, "x", int, most)
    want = [[i for i in row or [] if i is not None][-(most or 99) :] for row in rows]
    assert [values.to_pylist()[a:b] for a, b in itertools.pairwise(offsets)] == want


def test_text_is_a_list_cut_at_spaces() -> None:
    values, offsets, _ = as_lists(pa.array([" 3 15 ", "", None, "7"]), "x", int, None)
    assert values.to_pylist() == ["3", "15", "7"]
    assert offsets.tolist() == [0, 2, 2, 2, 3]


def test_a_bad_element_is_named_with_its_row() -> None:
    with pytest.raises(UserError, match=r"'x', row 12: 1.5"):
        as_lists(pa.array([[], None, [1.5]]), "x", lambda i: 10 + i, None)
    with pytest.raises(UserError, match=r"'x': int64 where the schema says list"):
        as_lists(pa.array([1]), "x", int, None)


def test_fixed_size_lists() -> None:
    values, offsets, _ = as_lists(
        pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2)), "x", int, None
    )
    assert values.to_pylist() == [1, 2, 3, 4]
    assert np.diff(offsets).tolist() == [2, 0, 2]


@pytest.mark.parametrize(
    ("separator", "texts", "want"),
    [
        (
            "|",
            ["Action|Comedy", " a | b|", "", None, "x"],
            [["Action", "Comedy"], ["a", "b"], [], [], ["x"]],
        ),
        (",", ["3,7", "-1"], [["3", "7"], ["-1"]]),
        ("^", ["a^b^c"], [["a", "b", "c"]]),
        ("::", ["a::b"], [["a", "b"]]),
        ("json", ["[1, 2,3]", "[]", None, " [ -4 ] "], [["1", "2", "3"], [], [], ["-4"]]),
        (
            "json",
            ['["a", "b c"]', '[null, "x"]', "['p', 'q', None]"],
            [["a", "b c"], ["x"], ["p", "q"]],
        ),
        (
            "json",
            ['["a,b", "\\"c\\""]', "[12345678901234567890]", '["é\\u00e9"]'],
            [["a,b", '"c"'], [str(0)], ["éé"]],
        ),
    ],
)
@pytest.mark.parametrize("start", [0, 1])
def test_text_is_cut_as_the_schema_says(
    separator: str, texts: list, want: list, start: int
) -> None:
    want = [[str(12345678901234567890) if x == "0" else x for x in row] for row in want]
    column = pa.array(["x|y", *texts]).slice(1).slice(start)
    values, offsets, _ = as_lists(column, "x", int, None, separator)
    assert [values.to_pylist()[a:b] for a, b in itertools.pairwise(offsets)] == want[start:]


@pytest.mark.parametrize(
    "text", ["[1,", "1, 2", "[[1]]", '{"a": 1}', "[1 2]", '["a]', '["a" "b"]', "[,]"]
)
def test_what_is_no_json_array_is_named(text: str) -> None:
    with pytest.raises(UserError, match=r"column 'x', row 11: .* is no flat JSON array of ids"):
        as_lists(pa.array(["[1]", text]), "x", lambda i: 10 + i, None, "json")


def test_weights_within_the_text() -> None:
    column = pa.array(["7:0.5 8:2", None, "a:b:1e1", " :9 c:0"])
    values, offsets, weights = as_lists(column, "x", int, None, None, ":")
    assert (values.to_pylist(), offsets.tolist()) == (["7", "8", "a:b", "c"], [0, 2, 2, 3, 4])
    assert weights is not None
    assert weights.dtype == np.float32
    assert weights.tolist() == [0.5, 2, 10, 0]
    values, offsets, weights = as_lists(pa.array([["a:1", None, "b:2"]]), "x", int, 1, None, ":")
    assert (values.to_pylist(), weights.tolist()) == (["b"], [2])  # type: ignore[union-attr]
    for text, words in [
        ("7:0.5 8", "'8' has no weight"),
        ("7:x", "no number"),
        ("7:inf", "is not a finite number"),
    ]:
        with pytest.raises(UserError, match=rf"'x'.*{words}"):
            as_lists(pa.array([text]), "x", int, None, None, ":")


def test_an_empty_array_has_no_weights() -> None:
    ids, weights = pa.array(["[1, 2]", "[]", None, "[ ]"]), pa.array(["[0.5, 1]", "[]", "[]", None])
    values, offsets, w_M = as_lists(ids, "x", int, None, "json", weights)
    assert (values.to_pylist(), offsets.tolist()) == (["1", "2"], [0, 2, 2, 2, 2])
    assert w_M is not None and w_M.tolist() == [0.5, 1]


@pytest.mark.parametrize(
    "weights", [pa.array([[1, 2, 3], None, [4.5]]), pa.array(["1|2|3", "", "4.5"])]
)
def test_weights_in_a_column_of_their_own(weights: pa.Array) -> None:
    ids = pa.array(["a||c", None, "d"])
    with pytest.raises(
        UserError, match=r"'x', row 1: 0 ids and 1 weights; give each id one weight"
    ):
        as_lists(pa.array(["a|b|c", None]), "x", int, None, "|", pa.array([[1, 2, 3], [1]]))
    values, offsets, numbers = as_lists(ids, "x", int, 2, "|", weights)
    assert (values.to_pylist(), offsets.tolist()) == (["a", "c", "d"], [0, 2, 2, 3])
    assert numbers is not None
    assert numbers.tolist() == [1, 3, 4.5]
    with pytest.raises(UserError, match=r"'x', row 0: weight None is not a finite number"):
        as_lists(
            pa.array([["a"]]), "x", int, None, None, pa.array([[None]], pa.list_(pa.float32()))
        )
