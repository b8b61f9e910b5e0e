from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow.core import UserError
from sparrow.data.logs.read import open_log
from sparrow.data.logs.tables import table_log
from sparrow.features.schema import Source
from tests.data.logs.reading import rows_of

ROWS = [
    {
        "user": {"age": 30, "home": {"city": "rome", "tags": ["x"]}},
        "shown": [{"id": 1, "at": 0.5}, {"id": 2, "at": 1.5}],
    },
    {"user": None, "shown": None},
    {"user": {"age": None, "home": None}, "shown": []},
    {
        "user": {"age": 5, "home": {"city": None, "tags": []}},
        "shown": [{"id": 3, "at": None}, None],
    },
]
FLAT = [
    {
        "user.age": 30,
        "user.home.city": "rome",
        "user.home.tags": ["x"],
        "shown.id": [1, 2],
        "shown.at": [0.5, 1.5],
    },
    {
        "user.age": None,
        "user.home.city": None,
        "user.home.tags": None,
        "shown.id": None,
        "shown.at": None,
    },
    {
        "user.age": None,
        "user.home.city": None,
        "user.home.tags": None,
        "shown.id": [],
        "shown.at": [],
    },
    {
        "user.age": 5,
        "user.home.city": None,
        "user.home.tags": [],
        "shown.id": [3, None],
        "shown.at": [None, None],
    },
]


def test_structs_become_columns(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    for i, (low, high) in enumerate([(0, 1), (1, 4)]):
        pq.write_table(table.slice(low, high - low), tmp_path / f"{i}.parquet")
    for log in (table_log(table), open_log([tmp_path])):
        assert rows_of(log) == FLAT == log.sample(9).to_pylist()
        assert log.types["user.age"] == pa.int64() and "user" not in log.types
        first, *_ = log.batches({"user.home.city": pa.string()})
        assert first.schema.names == ["user.home.city"]
    assert rows_of(table_log(table.slice(2))) == FLAT[2:]


def test_lists_of_structs_can_be_candidates() -> None:
    table = pa.Table.from_pylist([ROWS[0] | {"clicked": [2]}, ROWS[2] | {"clicked": []}])
    log = table_log(table, Source(candidates="shown.id", clicked="clicked"))
    assert [(r["shown.id"], r["shown.at"], r["clicked"], r["user.age"]) for r in rows_of(log)] == [
        (1, 0.5, 0, 30),
        (2, 1.5, 1, 30),
    ]


def test_two_columns_of_one_name_are_refused() -> None:
    table = pa.table({"a": [{"b": 1}], "a.b": [2]})
    with pytest.raises(
        UserError,
        match=r"column 'a\.b': there is one of this name and a struct with this field; rename",
    ):
        table_log(table)


def test_dictionaries_in_structs_are_read_as_what_they_stand_for() -> None:
    words = pa.array(["x", "y", "x"]).dictionary_encode()
    log = table_log(pa.table({"s": pa.StructArray.from_arrays([words], ["word"])}))
    assert log.types == {"s.word": pa.string()}
    assert rows_of(log) == [{"s.word": "x"}, {"s.word": "y"}, {"s.word": "x"}]
