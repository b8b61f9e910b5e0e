from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from sparrow.core import UserError
from sparrow.features.numeric import transform
from sparrow.features.vectors import (
    as_vectors,
    broken,
    numbers_of,
    packed,
    transform_vectors,
    unpacked,
)

X = [[0.5, -1.0, 2.0], [1e-3, 0.0, -0.25]]
WANTED = np.array([X[0], [np.nan] * 3, X[1]])


def numbers(column: pa.Array, size: int = 3, separator: str | None = None) -> np.ndarray:
    return numbers_of(as_vectors(column, "v", 7, size, separator))


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("of", [pa.list_, pa.large_list, lambda kind: pa.list_(kind, 3)])
def test_lists_of_any_type(kind: pa.DataType, of: object) -> None:
    column = pa.array([X[0], None, X[1]], of(kind))
    rounded = WANTED.astype(kind.to_pandas_dtype()).astype(np.float64)
    assert np.array_equal(numbers(column), rounded.astype(np.float32), equal_nan=True)
    assert np.array_equal(numbers(column.slice(1)), rounded[1:].astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("texts", "separator"),
    [
        (["0.5,-1.0,2.0", None, "0.001, 0,-.25"], ","),
        (["[0.5, -1, 2]", "", "[1e-3,0.0,-2.5E-1]"], "json"),
        (["[ 0.5 -1.\n  2. ]", " ", "[0.001 0. -0.25]"], None),  # as numpy prints them
        (["(0.5|-1|2)", "[]", "0.001|0|-0.25"], "|"),
    ],
)
def test_text(texts: list[str | None], separator: str | None) -> None:
    for kind in (pa.string(), pa.large_string()):
        found = numbers(pa.array(texts, kind), separator=separator)
        assert np.array_equal(found, WANTED.astype(np.float32), equal_nan=True)


def test_a_list_of_nothing_and_integers() -> None:
    assert np.isnan(numbers(pa.array([[], None], pa.list_(pa.float32())))).all()
    assert np.isnan(numbers(pa.nulls(2))).all() and numbers(pa.nulls(0)).shape == (0, 3)
    assert numbers(pa.array([[1, 2, 3]])).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (
            pa.array([X[0], X[0][:2]]),
            r"column 'v', row 8: a vector of 2 numbers where others have 3; mend it or leave",
        ),
        (pa.array([X[0], None, X[0] * 2]), r"row 9: a vector of 6 numbers"),
        (
            pa.array([None, X[0], [0.0, float("nan"), 1.0]]),
            r"row 9: number 1 of the vector is nan, which is not fini",
        ),
        (
            pa.array([[0.0, 1.0, -float("inf")]]),
            r"row 7: number 2 of the vector is -inf, which is not finite",
        ),
        (
            pa.array([[0.0, 1.0, 1e39]]),
            r"row 7: number 2 of the vector is 1e\+39, which is not finite",
        ),
        (pa.array([[0.0, None, 1.0]]), r"row 7: number 1 of the vector is missing; mend it"),
        (pa.array(["1,2,3", "1,x,3"]), r"row 8: number 1 of the vector is 'x', which is no number"),
        (pa.array(["1,2,3", "1,,3"]), r"row 8: number 1 of the vector is missing"),
        (
            pa.array(["1,2,3", "1,nan,3"]),
            r"row 8: number 1 of the vector is nan, which is not finite",
        ),
        (
            pa.array([1.5]),
            r"column 'v': double where a vector is needed; make the column kind numeric",
        ),
        (pa.array([[[1.0], [2.0], [3.0]]]), r"column 'v': .* where a vector is needed"),
    ],
)
def test_what_is_no_vector_is_refused(column: pa.Array, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        as_vectors(column, "v", 7, 3, ",")
    assert "\n" not in str(caught.value)


def test_bytes_survive_what_arrow_does_with_rows() -> None:
    whole = as_vectors(pa.array([X[0], None, X[1]]), "v", 0, 3)
    assert whole.type == pa.binary(12) and whole.null_count == 1
    moved = (
        pa.chunked_array([whole.slice(2), whole.slice(0, 2)])
        .combine_chunks()
        .take(pa.array([1, 2, 0]))
    )
    assert np.array_equal(numbers_of(moved), WANTED.astype(np.float32), equal_nan=True)
    assert unpacked(packed(np.float32([[1, 2], [3, 4]])).slice(1)).tolist() == [[3, 4]]
    assert unpacked(pa.nulls(0, pa.binary(8))).shape == (0, 2)


@pytest.mark.parametrize("kind", ["standard", "log", "none"])
def test_each_number_is_that_of_a_numeric_column(kind: str) -> None:
    x_NS = np.random.default_rng(0).normal(0, 3, (50, 4)).astype(np.float32)
    means, stds = (0.5, 0.0, -1.0, 3.0), (1.0, 0.1, 2.0, 5.0)
    there = np.arange(50) % 7 != 0
    found = transform_vectors(packed(x_NS[there], there), kind, means, stds)
    for i in range(4):
        wanted = transform(
            np.where(there, x_NS[:, i], np.nan).astype(np.float64), kind, means[i], stds[i]
        )
        assert np.array_equal(found[:, i], wanted)
    assert not found[~there].any()


def test_what_is_broken_is_what_is_refused() -> None:
    """Row by row, whatever the others are; a vector that is missing as a whole is not broken."""
    rows = [
        X[0],
        None,
        X[0][:2],
        [],
        [0.0, float("nan"), 1.0],
        [0.0, None, 1.0],
        [1e39, 0, 0],
        [0, -float("inf"), 0],
        X[1],
    ]
    texts = [
        "0.5,-1,2",
        None,
        "[0.5,-1]",
        "",
        "0,nan,1",
        "0,,1",
        "1e39,0,0",
        "a,b,c",
        " ( 1, 2,3) ",
    ]
    for raw, separator in ((pa.array(rows, pa.list_(pa.float64())), None), (pa.array(texts), ",")):
        for column, size in ((raw, 3), (raw.slice(2), 3), (raw, 2), (raw.slice(0, 0), 3)):
            found = broken(column, "v", size, separator)
            refused = []
            for i in range(len(column)):
                try:
                    as_vectors(column.slice(i, 1), "v", 0, size, separator)
                    refused.append(False)
                except UserError:
                    refused.append(True)
            assert found.tolist() == refused
        assert found.shape == (0,)
