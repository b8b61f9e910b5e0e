from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow.core import UserError
from sparrow.data.logs.read import open_log
from sparrow.data.logs.tables import table_log
from sparrow.data.logs.text_types import types_for
from sparrow.features.schema import Column, Encoding, Schema, Source
from tests.data.logs.reading import rows, rows_of, write


def test_every_dialect_reads_alike(tmp_path: Path) -> None:
    want = [{"a": 1, "b": "x"}, {"a": None, "b": "y"}]
    pq.write_table(pa.table({"a": [1, None], "b": ["x", "y"]}), tmp_path / "log.parquet")
    with pa.CompressedOutputStream(str(tmp_path / "log.csv.zst"), "zstd") as stream:
        stream.write(b"a,b\n1,x\n,y\n")
    files = [
        tmp_path / "log.parquet",
        tmp_path / "log.csv.zst",
        write(tmp_path / "log.csv", "a,b\n1,x\n,y\n"),
    ]
    files += [write(tmp_path / "log.tsv.gz", "a\tb\n1\tx\nNA\ty\n")]
    for file in files:
        assert rows(file) == want, file


def test_text_is_read_as_the_schema_has_it(tmp_path: Path) -> None:
    log = open_log([write(tmp_path / "x.csv", "n,h,r,u,t\n1,007,5,9,3\n")])
    schema = Schema(
        columns={
            "n": Column(kind="numeric"),
            "h": Column(kind="categorical", table="h"),
            "r": Column(kind="categorical", table="r"),
            "u": Column(kind="categorical", table="u"),
            "t": Column(kind="ignore"),
            "n2": Column(kind="categorical", table="u", source="n"),
        },
        encodings={"h": Encoding(kind="hash"), "r": Encoding(kind="range"), "u": Encoding()},
    )
    types = types_for(schema, log)
    assert types == {"n": pa.int64(), "h": pa.string(), "r": pa.int64(), "u": pa.int64()}
    assert next(log.batches(types)).to_pylist() == [{"n": 1, "h": "007", "r": 5, "u": 9}]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "", r"a\.csv: empty"),
        ("a.csv", "a,b\n", r"a\.csv: no rows"),
        (
            "a.csv",
            "a,b\n1,2\n3\n",
            r"a\.csv, line 3: 1 cells where 2 are expected \('3'\); .*--bad-rows repair",
        ),
        ("a.csv", "a,a\n1,2\n", r"two columns are named 'a'"),
        ("a.csv", "\0\1\2\n", r"neither Parquet nor text"),
        ("a.parquet", "PAR1 and then nothing", r"a\.parquet: not a whole Parquet file"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        rows(write(tmp_path / name, text))
    assert "\n" not in str(caught.value)


def test_missing_and_mixed_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.csv: no such file"):
        open_log([tmp_path / "nowhere.csv"])
    with pytest.raises(UserError, match="inputs: none given"):
        open_log([])
    pq.write_table(pa.table({"a": [1]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"y\.csv: reads as csv where .*x\.parquet is parquet"):
        open_log([tmp_path / "x.parquet", write(tmp_path / "y.csv", "a\n1\n")])
    pq.write_table(pa.table({"b": [1]}), tmp_path / "z.parquet")
    with pytest.raises(UserError, match=r"z\.parquet: no column 'a'"):
        rows(tmp_path / "x.parquet", tmp_path / "z.parquet")


def test_columns_may_stand_in_another_order_but_must_be_there(tmp_path: Path) -> None:
    one, two = (
        write(tmp_path / "1.csv", "a,b,c\n1,x,2\n"),
        write(tmp_path / "2.csv", "c,a,b\n5,4,y\n"),
    )
    assert rows(one, two) == [{"a": 1, "b": "x", "c": 2}, {"a": 4, "b": "y", "c": 5}]
    log = open_log([one, write(tmp_path / "3.csv", "a,c\n1,2\n")])
    assert sum(b.num_rows for b in log.batches({"a": pa.int64()})) == 2
    with pytest.raises(
        UserError, match=r"3\.csv: no column 'b', which other files have; did you mean|known: a, c"
    ):
        next(log.batches(log.types))
    with pytest.raises(UserError, match=r"4\.csv: two columns are named 'a'"):
        open_log([one, write(tmp_path / "4.csv", "a,b,a\n1,2,3\n")])
    parquets = [
        pa.table({"a": pa.array([1], pa.int32()), "b": ["x"]}),
        pa.table({"b": ["y"], "a": [1 << 40]}),
    ]
    for i, table in enumerate(parquets):
        pq.write_table(table, tmp_path / f"{i}.parquet")
    assert rows(tmp_path / "0.parquet", tmp_path / "1.parquet")[1] == {"a": 1 << 40, "b": "y"}
    pq.write_table(pa.table({"a": ["no"], "b": ["z"]}), tmp_path / "2.parquet")
    with pytest.raises(
        UserError, match=r"2\.parquet: column 'a' is string where earlier files have int64"
    ):
        rows(*sorted(tmp_path.glob("*.parquet")))


def test_a_table_is_a_log_too() -> None:
    table = pa.table(
        {
            "id": pa.array(["a", None, "a"]).dictionary_encode(),
            "tags": pa.array([["x"], None, []], pa.list_(pa.string_view())),
            "n": ["1", "two", "3"],
        }
    )
    log = table_log(table)
    assert (log.rows, log.types["id"], log.name) == (3, pa.string(), "the table")
    assert rows_of(log) == table.to_pylist() == log.sample(9).to_pylist()
    log = table_log(table, Source(bad_rows="repair"))
    assert next(log.batches({"n": pa.float64()})).to_pydict() == {"n": [1, None, 3]}
    assert log.notes() == ["the table: 1 cells of 'n' taken for missing, first at row 1: 'two'"]
    with pytest.raises(UserError, match="the table: two columns are named 'a'"):
        table_log(pa.table([pa.array([1]), pa.array([1])], ["a", "a"]))


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys, sparrow.data.logs.read, sparrow.data.meaning.inference; assert 'torch' not in"
        " sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_parquet_comes_in_batches_of_bounded_bytes(tmp_path: Path) -> None:
    """Lists that grow through the file, a name with a dot, and text that repeats."""
    lists = pa.array([[]] * 200_000 + [list(range(300))] * 20_000, pa.list_(pa.int64()))
    words = pa.array(["x" * 400] * 220_000, pa.large_string())
    pq.write_table(
        pa.table({"a.b": lists, "word": words}), tmp_path / "log.parquet", row_group_size=100_000
    )
    log = open_log([tmp_path / "log.parquet"])
    for name in ("a.b", "word"):
        rows = [(batch.num_rows, batch.nbytes) for batch in log.batches({name: log.types[name]})]
        assert sum(count for count, _ in rows) == 220_000
        assert max(size for _, size in rows) < 3 * (1 << 23)
