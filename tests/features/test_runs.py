"""Runs of equal rows, and the first of equal ones."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.features.runs import begins, bits, first_equal

ROWS = st.lists(
    st.tuples(
        st.integers(0, 2), st.lists(st.integers(0, 1), max_size=2), st.sampled_from([0.0, -0.0])
    )
)


@given(ROWS)
def test_runs_are_those_of_a_loop(rows: list[tuple[int, list[int], float]]) -> None:
    columns = [
        pa.array([a for a, _, _ in rows], pa.int32()),
        pa.array([b for _, b, _ in rows], pa.large_list(pa.int64())),
        pa.array([c for _, _, c in rows], pa.float32()),
    ]
    plain = [(a, b, str(c)) for a, b, c in rows]  # -0.0 is another number
    want = [i == 0 or row != plain[i - 1] for i, row in enumerate(plain)]
    assert begins([bits(c) for c in columns], len(rows)).tolist() == want
    assert first_equal([bits(c) for c in columns], len(rows)).tolist() == [
        plain.index(row) for row in plain
    ]


def test_equal_fingerprints_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparrow.features.runs.mixed", lambda x: np.zeros(len(x), np.uint64))
    columns = [bits(pa.array([1, 2, 1, 2]))]
    # what differs from the first of its print is by itself
    assert first_equal(columns, 4).tolist() == [0, 1, 0, 3]
