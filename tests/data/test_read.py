from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from sparrow.core import UserError
from sparrow.data import open_log
from sparrow.data.read import CRITEO, types_for
from sparrow.data.schema import Column, Schema, Source, Table


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def rows(*inputs: Path | str) -> list[dict]:
    log = open_log(inputs)
    return pa.Table.from_batches(log.batches(log.types)).to_pylist()


def test_every_dialect_reads_alike(tmp_path: Path) -> None:
    want = [{"a": 1, "b": "x"}, {"a": None, "b": "y"}]
    pq.write_table(pa.table({"a": [1, None], "b": ["x", "y"]}), tmp_path / "log.parquet")
    with pa.CompressedOutputStream(str(tmp_path / "log.csv.zst"), "zstd") as stream:
        stream.write(b"a,b\n1,x\n,y\n")
    files = [tmp_path / "log.parquet", tmp_path / "log.csv.zst", write(tmp_path / "log.csv", "a,b\n1,x\n,y\n")]
    files += [write(tmp_path / "log.tsv.gz", "a\tb\n1\tx\nNA\ty\n")]
    for file in files:
        assert rows(file) == want, file


def test_globs_folders_and_order(tmp_path: Path) -> None:
    for i in (2, 1, 3):
        write(tmp_path / f"{i}.csv", f"a,b\n{i},x\n")
    assert [r["a"] for r in rows(tmp_path / "3.csv", str(tmp_path / "[12].csv"))] == [3, 1, 2]
    assert [r["a"] for r in rows(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("id,click\n7,1\n", Source(format="csv")),
        ("user,city\nann,rome\n", Source(format="csv")),
        ("7,1\n8,0\n", Source(format="csv", header=False, names=("c0", "c1"))),
        ("38, Private, - 50000.\n", Source(format="csv", header=False, names=("c0", "c1", "c2"))),
        ("user_id:token\trating:float\n1\t3\n", Source(format="tsv")),
        ("\t".join(["0"] * 14 + ["68fd1e64"] * 26) + "\n", Source(format="criteo", header=False, names=CRITEO)),
    ],
)
def test_dialects_are_found_out(tmp_path: Path, text: str, source: Source) -> None:
    assert open_log([write(tmp_path / "log.txt", text)]).source == source


def test_criteo_columns_have_their_types_also_when_blank(tmp_path: Path) -> None:
    line = "\t".join(["1"] + [""] * 13 + ["123"] + [""] * 25)
    (row,) = rows(write(tmp_path / "x", line + "\n"))
    assert (row["label"], row["I1"], row["C1"], row["C2"]) == (1, None, "123", None)


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
        tables={"h": Table(encoding="hash"), "r": Table(encoding="range"), "u": Table()},
    )
    types = types_for(schema, log)
    assert types == {"n": pa.int64(), "h": pa.string(), "r": pa.int64(), "u": pa.int64()}
    assert next(log.batches(types)).to_pylist() == [{"n": 1, "h": "007", "r": 5, "u": 9}]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "", r"a\.csv: empty"),
        ("a.csv", "a,b\n", r"a\.csv: no rows"),
        ("a.csv", "a,b\n1,2\n3\n", r"a\.csv, after row 0: .*Expected 2 columns, got 1: 3; mend the file"),
        ("a.csv", "a,a\n1,2\n", r"two columns are named 'a'"),
        ("a.csv", "\0\1\2\n", r"neither Parquet nor text"),
        ("a.parquet", "PAR1 and then nothing", r"a\.parquet: not a whole Parquet file"),
    ],
)
def test_malformed_files_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        rows(write(tmp_path / name, text))
    assert "\n" not in str(caught.value)


def test_a_cut_off_gzip_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"12345,2\n" * 90_000)[:900])
    with pytest.raises(UserError, match=r"x\.csv\.gz.*(Truncated|whole)"):
        rows(tmp_path / "x.csv.gz")


def test_a_later_value_of_another_type_is_named_with_its_column(tmp_path: Path) -> None:
    text = "a,b,c\n" + "1,2,3\n" * 10 + "1,2,zz\n"
    log = open_log([write(tmp_path / "x.csv", text)])
    with pytest.raises(
        UserError, match=r"x\.csv, after row 0: column 'c': invalid value 'zz' where int64 .*categorical"
    ):
        list(log.batches({"a": pa.int64(), "c": pa.int64()}))


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


def test_long_csv_comes_in_bounded_batches(tmp_path: Path) -> None:
    pacsv.write_csv(pa.table({"a": range(2_000_000), "b": ["0123456789"] * 2_000_000}), tmp_path / "x.csv")
    log = open_log([tmp_path / "x.csv"])
    sizes = [batch.num_rows for batch in log.batches({"a": pa.int64()})]
    assert sum(sizes) == 2_000_000
    assert max(sizes) < 1_000_000


def test_text_that_is_not_utf8_or_comma_separated_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes("label,é\n0,1\n".encode("latin1"))
    with pytest.raises(UserError, match=r"latin.csv: its first line is not UTF-8; convert it"):
        open_log([tmp_path / "latin.csv"])
    (tmp_path / "semi.csv").write_text("label;x\n0;1\n")
    with pytest.raises(UserError, match=r"semi.csv: looks separated by ';'"):
        open_log([tmp_path / "semi.csv"])
