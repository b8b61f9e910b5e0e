from __future__ import annotations

import bz2
import gzip
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from sparrow.core import UserError
from sparrow.data.logs.read import CRITEO, Log, open_log, table_log, types_for
from sparrow.features.schema import Column, Encoding, Schema, Source


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


def test_a_cut_off_gzip_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"12345,2\n" * 90_000)[:900])
    with pytest.raises(UserError, match=r"x\.csv\.gz.*(Truncated|whole)"):
        rows(tmp_path / "x.csv.gz")


def test_a_later_value_of_another_type_is_named_with_its_column(tmp_path: Path) -> None:
    text = "a,b,c\n" + "1,2,3\n" * 10 + "1,2,zz\n"
    log = open_log([write(tmp_path / "x.csv", text)])
    with pytest.raises(
        UserError, match=r"x\.csv, line 12: column 'c' has 'zz' where int64 .*--bad-rows repair, .*categorical"
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


def test_other_delimiters_are_found_out_and_kept(tmp_path: Path) -> None:
    for sign in ";|":
        file = write(tmp_path / "x.csv", f"label{sign}x, y{sign}z\n0{sign}a,b{sign}1\n")
        assert open_log([file]).source == Source(format="csv", delimiter=sign)
        assert rows(file) == [{"label": 0, "x, y": "a,b", "z": 1}]
    told = Source(format="csv", delimiter="^")
    assert open_log([write(tmp_path / "y.csv", "a^b\n1^2\n")], told).types == {"a": pa.int64(), "b": pa.int64()}
    with pytest.raises(UserError, match=r"source.delimiter: '::' cannot part cells; give one ASCII character"):
        open_log([file], Source(format="csv", delimiter="::"))


def test_encodings(tmp_path: Path) -> None:
    text = "label,café\n0,crème\n1,brûlée\n"
    want = [{"label": 0, "café": "crème"}, {"label": 1, "café": "brûlée"}]
    for encoding in ("latin-1", "cp1252", "utf-16-le", "utf-8-sig", "utf-16", "utf-8"):
        (tmp_path / "x.csv").write_bytes(text.encode(encoding))
        told = Source(encoding=encoding)
        log = open_log([tmp_path / "x.csv"], told if encoding not in ("utf-16", "utf-8-sig") else None)
        assert pa.Table.from_batches(log.batches(log.types)).to_pylist() == want, encoding
        assert log.source.encoding == (encoding if encoding != "utf-8-sig" else "utf-8")
    with pytest.raises(UserError, match=r"source.encoding: no encoding 'latin-9x'; give one that Python knows"):
        open_log([tmp_path / "x.csv"], Source(encoding="latin-9x"))


def test_text_that_is_not_utf8_is_named_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes("label,café\n0,é\n".encode("latin1"))
    with pytest.raises(UserError, match=r"x.csv, line 1: byte 0xE9 cannot be utf-8; set encoding in .*\[source\]"):
        open_log([tmp_path / "x.csv"])
    (tmp_path / "y.csv").write_bytes(b"a,b\n" + b"1,x\n" * 300_000 + b"1,\xe9\n")
    with pytest.raises(UserError, match=r"y.csv, line 300002: byte 0xE9 cannot be utf-8; set encoding"):
        rows(tmp_path / "y.csv")
    repair = Source(bad_rows="repair")
    log = open_log([tmp_path / "y.csv"], repair)
    assert sum(b["b"].null_count for b in log.batches(log.types)) == 1
    assert log.notes() == [
        f"{tmp_path}/y.csv: 1 cells of 'b' taken for missing, first at line 300002: '\N{REPLACEMENT CHARACTER}'"
    ]
    with pytest.raises(UserError, match=r"x.csv.*cannot be ascii; set encoding"):
        rows_of(open_log([tmp_path / "x.csv"], Source(encoding="ascii")))


def rows_of(log: Log) -> list[dict]:
    return pa.Table.from_batches(log.batches(log.types)).to_pylist()


def test_repair_leaves_out_and_counts(tmp_path: Path) -> None:
    text = 'a,b,c\n1,x,2\n\n"3","y\nz",4\n5,short\n6,w,seven\n8,v,9,10\n11,u,inf\n'
    log = open_log([write(tmp_path / "x.csv", text)], Source(bad_rows="repair"))
    types = {"a": pa.int64(), "b": pa.string(), "c": pa.float64()}
    want = [(1, "x", 2.0), (3, "y\nz", 4.0), (6, "w", None), (11, "u", None)]
    for _ in range(2):  # each pass counts anew
        assert [tuple(r.values()) for r in pa.Table.from_batches(log.batches(types)).to_pylist()] == want
        assert (log.repairs.rows, log.repairs.left_out) == (4, 2)
    x = tmp_path / "x.csv"
    assert log.notes() == [
        f"{x}: 2 lines left out (wrong number of cells), first at line 6: '5,short'",
        f"{x}: 2 cells of 'c' taken for missing, first at line 7: 'seven'",
        f"{x}: 2 lines are blank or lie within a quoted cell; they are no rows",
    ]


@pytest.mark.parametrize("mode", ["stop", "repair"])
@pytest.mark.parametrize(
    "rest", ['3,"x\n4,5\n', '3,"x\n4,5', '"3,x\n4,5\n', pytest.param('"x\n' + "4,5\n" * 3_000_000, id="long")]
)
def test_a_quote_that_stays_open_swallows_nothing(tmp_path: Path, mode: str, rest: str) -> None:
    file = write(tmp_path / "x.csv", f"a,b\n1,2\n{rest}")
    with pytest.raises(UserError, match=r"(line 3: a quote is opened there and|is a quote opened there and) never"):
        rows_of(open_log([file], Source(bad_rows=mode)))  # type: ignore[arg-type]


def test_lines_and_their_ends(tmp_path: Path) -> None:
    want = [{"a": 1, "b": "x\ny"}, {"a": 2, "b": "z"}]
    for text in ('a,b\r\n1,"x\ny"\r\n2,z\r\n\r\n\r\n', '\ufeffa,b\n1,"x\ny"\n2,z', '\n"a","b"\n1,"x\ny"\n2,z\n\n'):
        assert rows(write(tmp_path / "x.csv", text)) == want, text
    assert rows(write(tmp_path / "x.csv", "a,b\r1,x\r2,z\r")) == [{"a": 1, "b": "x"}, {"a": 2, "b": "z"}]


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_sample_has_the_last_row(tmp_path: Path, end: str) -> None:
    """Also of a file that does not end in a line break; its types are those of all rows."""
    (tmp_path / "log.csv").write_text("label,x\n0,1\n1,2\n0,2.5" + end)
    log = open_log([tmp_path / "log.csv"])
    assert log.sample(100)["x"].to_pylist() == [1, 2, 2.5]


def test_quoted_line_breaks_may_cross_blocks(tmp_path: Path) -> None:
    cell = '"' + "text, and\n more " * 40 + '"'
    log = open_log([write(tmp_path / "x.csv", "a,b\n" + f"1,{cell}\n" * 20_000)])
    batches = list(log.batches(log.types))
    assert len(batches) > 1
    assert sum(b.num_rows for b in batches) == 20_000
    assert log.notes() == [f"{tmp_path}/x.csv: 800,000 lines are blank or lie within a quoted cell; they are no rows"]


def test_columns_may_stand_in_another_order_but_must_be_there(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.csv", "a,b,c\n1,x,2\n"), write(tmp_path / "2.csv", "c,a,b\n5,4,y\n")
    assert rows(one, two) == [{"a": 1, "b": "x", "c": 2}, {"a": 4, "b": "y", "c": 5}]
    log = open_log([one, write(tmp_path / "3.csv", "a,c\n1,2\n")])
    assert sum(b.num_rows for b in log.batches({"a": pa.int64()})) == 2
    with pytest.raises(UserError, match=r"3\.csv: no column 'b', which other files have; did you mean|known: a, c"):
        next(log.batches(log.types))
    with pytest.raises(UserError, match=r"4\.csv: two columns are named 'a'"):
        open_log([one, write(tmp_path / "4.csv", "a,b,a\n1,2,3\n")])
    parquets = [pa.table({"a": pa.array([1], pa.int32()), "b": ["x"]}), pa.table({"b": ["y"], "a": [1 << 40]})]
    for i, table in enumerate(parquets):
        pq.write_table(table, tmp_path / f"{i}.parquet")
    assert rows(tmp_path / "0.parquet", tmp_path / "1.parquet")[1] == {"a": 1 << 40, "b": "y"}
    pq.write_table(pa.table({"a": ["no"], "b": ["z"]}), tmp_path / "2.parquet")
    with pytest.raises(UserError, match=r"2\.parquet: column 'a' is string where earlier files have int64"):
        rows(*sorted(tmp_path.glob("*.parquet")))


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    file = write(tmp_path / "x.csv", "a,b\n1,2\n")
    log = open_log([file])
    reading = log.batches(log.types)
    next(reading)
    file.write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(UserError, match=r"x\.csv: changed while it was read; copy it first"):
        next(reading)
    with pytest.raises(UserError, match=r"x\.csv: changed while it was read"):
        next(log.batches(log.types))


def test_integers_beyond_64_bits_stay_whole(tmp_path: Path) -> None:
    file = write(tmp_path / "x.csv", "id,n\n12345678901234567890,1.5\n12345678901234567891,2e30\n")
    assert rows(file)[1] == {"id": "12345678901234567891", "n": 2e30}


def test_compressed_files_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(gzip.compress(b"a,b\n1,2\n"))
    (tmp_path / "y.csv.gz").write_bytes(b"a,b\n1,2\n")
    (tmp_path / "z.csv.bz2").write_bytes(bz2.compress(b"a,b\n1,2\n"))
    for file in tmp_path.iterdir():
        assert rows(file) == [{"a": 1, "b": 2}]


@pytest.mark.parametrize("codec", ["gzip", "zstd", "bz2"])
def test_a_cut_off_compressed_file_is_named(tmp_path: Path, codec: str) -> None:
    text = b"a,b\n" + b"".join(b"%d,2\n" % (i * 7919 % 65_537) for i in range(200_000))
    with pa.CompressedOutputStream(str(tmp_path / "whole"), codec) as stream:
        stream.write(text)
    packed = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut.csv").write_bytes(packed[: len(packed) * 3 // 4])
    with pytest.raises(UserError, match=r"cut\.csv.*(Truncated|check that it is whole)"):
        rows(tmp_path / "cut.csv")


def test_uris(tmp_path: Path) -> None:
    (tmp_path / "day=1").mkdir()
    for name in ("1.csv", "2.csv", "3.txt", "day=1/4.csv"):
        write(tmp_path / name, f"a,b\n{name[-5]},x\n")
    uri = tmp_path.as_uri().replace("%3D", "=")

    def found(*texts: str) -> list[int]:
        return [r["a"] for r in rows(*texts)]

    assert found(f"{uri}/2.csv", f"{uri}/1.csv") == [2, 1]
    assert found(f"{uri}/*.csv") == [1, 2]
    assert found(f"{uri}/[13].*") == [1, 3]
    assert found(f"{uri}/day=*/*.csv") == [4]
    assert found(f"{uri}/**/*.csv") == [1, 2, 4]
    assert found(uri) == [1, 2, 3]
    pq.write_table(pa.table({"a": [9]}), tmp_path / "x.parquet")
    assert found(f"{uri}/x.parquet") == [9]
    for text, words in [
        (f"{uri}/nowhere.csv", "no such file"),
        (f"{uri}/n*.csv", "no such file"),
        ("nonsense://bucket/x", "cannot be looked up: .*check the address"),
    ]:
        with pytest.raises(UserError, match=words):
            open_log([text])


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
    code = "import sys, sparrow.data.logs.read, sparrow.data.logs.inference; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_parquet_comes_in_batches_of_bounded_bytes(tmp_path: Path) -> None:
    """Lists that grow through the file, a name with a dot, and text that repeats."""
    lists = pa.array([[]] * 200_000 + [list(range(300))] * 20_000, pa.list_(pa.int64()))
    words = pa.array(["x" * 2000] * 220_000, pa.large_string())
    pq.write_table(pa.table({"a.b": lists, "word": words}), tmp_path / "log.parquet", row_group_size=100_000)
    log = open_log([tmp_path / "log.parquet"])
    for name in ("a.b", "word"):
        rows = [(batch.num_rows, batch.nbytes) for batch in log.batches({name: log.types[name]})]
        assert sum(count for count, _ in rows) == 220_000
        assert max(size for _, size in rows) < 3 * (1 << 23)
