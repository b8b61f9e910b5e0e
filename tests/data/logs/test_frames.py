from __future__ import annotations

import datetime

import pyarrow as pa
import pytest

from sparrow.core import UserError
from sparrow.data.logs.frames import as_table, columns_read

pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")


def test_frames_of_all_libraries_are_one_table() -> None:
    table = pa.table({"a": [1, 2], "b": ["x", None], "c": [[1], []]})
    indexed = table.to_pandas().set_index(pd.Index(["i", "j"]))
    for frame in (table, table.to_batches()[0], pl.from_arrow(table), indexed, table.to_reader()):
        read = as_table(frame)
        assert read.column_names == ["a", "b", "c"]
        assert read.to_pylist() == table.to_pylist()


def test_only_columns_that_are_asked_for_are_read() -> None:
    times = pa.array([datetime.time(1)], pa.time64("us"))
    table = pa.table({"a": [1], "who": [{"age": 3, "name": "x"}], "t": times})
    assert columns_read(table, {"a", "who.age", "z"}).to_pylist() == [{"a": 1, "who.age": 3}]
    with pytest.raises(UserError, match=r"column 't' is left out, as time64\[us\]"):
        columns_read(table, {"a", "t"})
    with pytest.raises(UserError, match="two columns are named 'a'; rename one"):
        columns_read(pa.Table.from_arrays([pa.array([1])] * 2, ["a", "a"]), {"a"})


@pytest.mark.parametrize("frame", [None, 3, "abc"])
def test_what_is_no_frame(frame: object) -> None:
    kind = f"builtins.{type(frame).__name__}"
    with pytest.raises(UserError, match=f"frame: a {kind} cannot be read .*; give a thing$"):
        as_table(frame, "a thing")


def test_a_lack_of_memory_is_no_fault_of_the_frame() -> None:
    class Large:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            raise pa.ArrowMemoryError("malloc of size 9 failed")

    with pytest.raises(MemoryError, match="malloc of size 9 failed"):
        as_table(Large())
