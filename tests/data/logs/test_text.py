"""Delimiters, headers, encodings, quotes and lines of text."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pytest

from sparrow.core import UserError
from sparrow.data.logs.read import open_log
from sparrow.data.logs.text import CRITEO
from sparrow.features.schema import Source
from tests.data.logs.reading import rows, rows_of, write


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("id,click\n7,1\n", Source(format="csv")),
        ("user,city\nann,rome\n", Source(format="csv")),
        ("7,1\n8,0\n", Source(format="csv", header=False, names=("c0", "c1"))),
        ("38, Private, - 50000.\n", Source(format="csv", header=False, names=("c0", "c1", "c2"))),
        ("Customer,Price (€),New?,Done\nann,€3.50,yes,Y\n", Source(format="csv")),
        ("who@where,1st\nann,\nbob,4\n", Source(format="csv")),
        ("ann@x.org,rome\nbob@x.org,\n", Source(format="csv", header=False, names=("c0", "c1"))),
        ("user_id:token\trating:float\n1\t3\n", Source(format="tsv")),
        (
            "\t".join(["0"] * 14 + ["68fd1e64"] * 26) + "\n",
            Source(format="criteo", header=False, names=CRITEO),
        ),
    ],
)
def test_dialects_are_found_out(tmp_path: Path, text: str, source: Source) -> None:
    assert open_log([write(tmp_path / "log.txt", text)]).source == source


@pytest.mark.parametrize(
    "text", ['{"id": 7}\n{"id": 8}\n', '[{"id": 7}]', '[\n  {\n    "id": 7\n  }\n]\n']
)
def test_json_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"log\.json: JSON, .*convert it to Parquet"):
        open_log([write(tmp_path / "log.json", text)])


def test_criteo_columns_have_their_types_also_when_blank(tmp_path: Path) -> None:
    line = "\t".join(["1"] + [""] * 13 + ["123"] + [""] * 25)
    (row,) = rows(write(tmp_path / "x", line + "\n"))
    assert (row["label"], row["I1"], row["C1"], row["C2"]) == (1, None, "123", None)


def test_a_later_value_of_another_type_is_named_with_its_column(tmp_path: Path) -> None:
    text = "a,b,c\n" + "1,2,3\n" * 10 + "1,2,zz\n"
    log = open_log([write(tmp_path / "x.csv", text)])
    with pytest.raises(
        UserError,
        match=(
            r"x\.csv, line 12: column 'c' has 'zz' where int64 .*--bad-rows repair, .*categorical"
        ),
    ):
        list(log.batches({"a": pa.int64(), "c": pa.int64()}))


def test_long_csv_comes_in_bounded_batches(tmp_path: Path) -> None:
    pacsv.write_csv(
        pa.table({"a": range(2_000_000), "b": ["0123456789"] * 2_000_000}), tmp_path / "x.csv"
    )
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
    assert open_log([write(tmp_path / "y.csv", "a^b\n1^2\n")], told).types == {
        "a": pa.int64(),
        "b": pa.int64(),
    }
    with pytest.raises(
        UserError, match=r"source.delimiter: '::' cannot part cells; give one ASCII character"
    ):
        open_log([file], Source(format="csv", delimiter="::"))


def test_blanks_behind_delimiters_are_no_part_of_names_and_no_values(tmp_path: Path) -> None:
    file = write(tmp_path / "x.csv", "\n click, x ,y:float\n1, 2, a\n0, NA, \n1, , b\n")
    log = open_log([file])
    assert log.types == {"click": pa.int64(), "x": pa.int64(), "y:float": pa.string()}
    assert [row["x"] for row in rows(file)] == [2, None, None]
    assert [row["y:float"] for row in rows(file)] == [" a", None, " b"]
    assert [b.schema.names for b in log.batches({"x": pa.int64()})] == [["x"]]
    with pytest.raises(UserError, match="two columns are named 'x'"):
        open_log([write(tmp_path / "y.csv", "x, x\n1,2\n")])


def test_encodings(tmp_path: Path) -> None:
    text = "label,café\n0,crème\n1,brûlée\n"
    want = [{"label": 0, "café": "crème"}, {"label": 1, "café": "brûlée"}]
    for encoding in ("latin-1", "cp1252", "utf-16-le", "utf-8-sig", "utf-16", "utf-8"):
        (tmp_path / "x.csv").write_bytes(text.encode(encoding))
        told = Source(encoding=encoding)
        log = open_log(
            [tmp_path / "x.csv"], told if encoding not in ("utf-16", "utf-8-sig") else None
        )
        assert pa.Table.from_batches(log.batches(log.types)).to_pylist() == want, encoding
        assert log.source.encoding == (encoding if encoding != "utf-8-sig" else "utf-8")
    with pytest.raises(
        UserError, match=r"source.encoding: no encoding 'latin-9x'; give one that Python knows"
    ):
        open_log([tmp_path / "x.csv"], Source(encoding="latin-9x"))


def test_text_that_is_not_utf8_is_named_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes("label,café\n0,é\n".encode("latin1"))
    with pytest.raises(
        UserError, match=r"x.csv, line 1: byte 0xE9 cannot be utf-8; set encoding in .*\[source\]"
    ):
        open_log([tmp_path / "x.csv"])
    (tmp_path / "y.csv").write_bytes(b"a,b\n" + b"1,x\n" * 300_000 + b"1,\xe9\n")
    with pytest.raises(
        UserError, match=r"y.csv, line 300002: byte 0xE9 cannot be utf-8; set encoding"
    ):
        rows(tmp_path / "y.csv")
    repair = Source(bad_rows="repair")
    log = open_log([tmp_path / "y.csv"], repair)
    assert sum(b["b"].null_count for b in log.batches(log.types)) == 1
    assert log.notes() == [
        f"{tmp_path}/y.csv: 1 cells of 'b' taken for missing, first at line 300002:"
        f" '\N{REPLACEMENT CHARACTER}'"
    ]
    with pytest.raises(UserError, match=r"x.csv.*cannot be ascii; set encoding"):
        rows_of(open_log([tmp_path / "x.csv"], Source(encoding="ascii")))


@pytest.mark.parametrize("mode", ["stop", "repair"])
@pytest.mark.parametrize(
    "rest",
    [
        '3,"x\n4,5\n',
        '3,"x\n4,5',
        '"3,x\n4,5\n',
        pytest.param('"x\n' + "4,5\n" * 3_000_000, id="long"),
    ],
)
def test_a_quote_that_stays_open_swallows_nothing(tmp_path: Path, mode: str, rest: str) -> None:
    file = write(tmp_path / "x.csv", f"a,b\n1,2\n{rest}")
    with pytest.raises(
        UserError, match=r"(line 3: a quote is opened there and|is a quote opened there and) never"
    ):
        rows_of(open_log([file], Source(bad_rows=mode)))  # type: ignore[arg-type]


def test_lines_and_their_ends(tmp_path: Path) -> None:
    want = [{"a": 1, "b": "x\ny"}, {"a": 2, "b": "z"}]
    for text in (
        'a,b\r\n1,"x\ny"\r\n2,z\r\n\r\n\r\n',
        '\ufeffa,b\n1,"x\ny"\n2,z',
        '\n"a","b"\n1,"x\ny"\n2,z\n\n',
    ):
        assert rows(write(tmp_path / "x.csv", text)) == want, text
    assert rows(write(tmp_path / "x.csv", "a,b\r1,x\r2,z\r")) == [
        {"a": 1, "b": "x"},
        {"a": 2, "b": "z"},
    ]


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
    assert log.notes() == [
        f"{tmp_path}/x.csv: 800,000 lines are blank or lie within a quoted cell; they are no rows"
    ]


def test_integers_beyond_64_bits_stay_whole(tmp_path: Path) -> None:
    file = write(tmp_path / "x.csv", "id,n\n12345678901234567890,1.5\n12345678901234567891,2e30\n")
    assert rows(file)[1] == {"id": "12345678901234567891", "n": 2e30}


TABLE = "user,item,click\n" + "".join(f"u{i},{i * 7 % 50},{i % 2}\n" for i in range(300))


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    ("before", "delimiter", "comments"),
    [
        ("sep=;\n", ";", 0),
        ('"sep=;"\n', ";", 0),
        ("SEP=\t\n", "\t", 0),
        ("sep=,\n", ",", 0),
        ("sep=^\n", "^", 0),
        ("\n\n", ";", 0),
        ("# exported by Ann, Bob; on 2026-03-01\n", ",", 1),
        ("# exported by Ann, Bob\n#\n\n# of the shop\n", ";", 3),
        ("sep=;\n# a comment\n", ";", 1),
        ("#\n" * 500, ",", 500),
    ],
)
def test_lines_above_the_header(
    tmp_path: Path, before: str, delimiter: str, comments: int, mark: str, newline: str
) -> None:
    text = (before + TABLE.replace(",", delimiter)).replace("\n", newline)
    log = open_log([write(tmp_path / "x.csv", mark + text)])
    assert rows_of(log) == rows(write(tmp_path / "plain.csv", TABLE))
    told = [note for note in log.notes() if "comments" in note]
    assert len(told) == (comments > 0)
    assert not told or f"{comments} lines of comments above the header, first: '#" in told[0]
    again = open_log([tmp_path / "x.csv"], log.source)  # as a run reads it that was prepared of it
    assert rows_of(again) == rows_of(log)


def test_lines_are_counted_from_the_file_s_first(tmp_path: Path) -> None:
    for before in ("", "\n", "# a\n", "sep=,\n\n# a\n"):
        write(tmp_path / "x.csv", before + TABLE + "u,7,1,2\n")
        with pytest.raises(
            UserError, match=rf"x\.csv, line {before.count(chr(10)) + 302}: 4 cells where 3"
        ):
            rows(tmp_path / "x.csv")
        log = open_log([tmp_path / "x.csv"], Source(bad_rows="repair"))
        assert len(rows_of(log)) == 300
        assert (
            f"1 lines left out (wrong number of cells), first at line {before.count(chr(10)) + 302}"
            in str(log.notes())
        )


def test_a_header_or_a_row_may_begin_with_a_number_sign(tmp_path: Path) -> None:
    for text in (
        "#user,click\n7,1\n8,0\n",
        "# made by Ann\n#user,click\n7,1\n8,0\n",
        "# a\n#user,click\n7,1\n8,0\n",
    ):
        assert [list(row.values()) for row in rows(write(tmp_path / "x.csv", text))] == [
            [7, 1],
            [8, 0],
        ]
    assert len(rows(write(tmp_path / "x.tsv", "#fun\t1\n#b\t0\ncat\t3\n#dog\t4\n"))) == 4
    assert len(rows(write(tmp_path / "x.tsv", "a\tb\n#fun\t1\n#b\t0\ncat\t3\n"))) == 3
    assert len(rows(write(tmp_path / "x.tsv", "a\tb\n" + "#fun\t1\n" * 9))) == 9
    assert len(rows(write(tmp_path / "x.tsv", "#fun\t1\n" * 9))) == 9


def test_a_separator_that_is_told_otherwise(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"source\.delimiter: '\|\|' cannot part cells; give one ASCII character"
    ):
        open_log([write(tmp_path / "x.csv", TABLE)], Source(delimiter="||"))
    text = "sep=;\n" + TABLE.replace(",", "|")
    assert len(rows_of(open_log([write(tmp_path / "x.csv", text)], Source(delimiter="|")))) == 300


@pytest.mark.parametrize(
    "title", ["Clicks of March\n", "Clicks of March\n\n", "Clicks\nof March\n", "item,click\n"]
)
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_a_title_above_the_header(tmp_path: Path, title: str, delimiter: str) -> None:
    file = write(tmp_path / "x.csv", (title + TABLE).replace(",", delimiter))
    first = title.partition("\n")[0].replace(",", delimiter)
    words = (
        rf"line 1: '{first}' is \d of the 3 cells that the lines below it have; mend it, or begin"
        r" it with #"
    )
    for bad_rows in ("stop", "repair"):
        with pytest.raises(UserError, match=words):
            open_log([file], Source(bad_rows=bad_rows))  # type: ignore[arg-type]
    lines = title.count("\n") - title.count("\n\n")
    commented = "\n".join(
        f"#{line}" if i < lines else line for i, line in enumerate(file.read_text().split("\n"))
    )
    assert len(rows(write(tmp_path / "x.csv", commented))) == 300  # the remedy


@pytest.mark.parametrize(
    "footer", ["Total,,150", "total:, ,150\n", '"Grand Total",7,\r\n', "Summe,,\n"]
)
def test_totals_below_the_table_are_named(tmp_path: Path, footer: str) -> None:
    log = open_log([write(tmp_path / "x.csv", TABLE + footer)])
    assert len(rows_of(log)) == 301
    (note,) = log.notes()
    assert "1 rows look like totals of those above, and count as rows; delete the line" in note
    assert f"first at line 302: {footer.strip()!r}" in note


@pytest.mark.parametrize("last", ["Total,7,1\n", "u1,,1\n", "totally,,1\n", "\n\n"])
def test_other_last_lines_are_no_totals(tmp_path: Path, last: str) -> None:
    log = open_log([write(tmp_path / "x.csv", TABLE + last)])
    rows_of(log)
    assert not [note for note in log.notes() if "totals" in note]
