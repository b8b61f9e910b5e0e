from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.data.logs.read import Log, open_log, with_candidates
from sparrow.data.logs.tables import table_log
from sparrow.data.meaning.inference import infer_log
from sparrow.data.shaping import candidates
from sparrow.features.schema import Column, Schema, Source, Split
from tests.data.logs.reading import rows_of, write

SOURCE = Source(candidates="inview", clicked="chosen", parallel=("score",))


def requests(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with lists of 0 to 5 candidates, some of them missing, with clicks among them."""
    random = np.random.default_rng(seed)
    made = []
    for i in range(count):
        shown = random.choice(50, int(random.integers(0, 6)), replace=False).tolist()
        chosen = [x for x in shown if random.random() < 0.3]
        scores = random.normal(size=len(shown)).round(3).tolist()
        row = {
            "user": f"u{i % 7}",
            "inview": shown,
            "chosen": chosen,
            "score": scores,
            "history": [i % 3, 5],
        }
        if i % 11 == 3:
            row |= {"inview": None, "chosen": None, "score": None}
        elif shown and i % 13 == 4:
            row |= {"inview": [None, *shown[1:]], "chosen": None}
        made.append(row)
    return made


def by_hand(rows: list[dict[str, Any]], file: int = 0) -> list[dict[str, Any]]:
    """The same rows, one a candidate, made in the plainest way."""
    return [
        {
            "user": row["user"],
            "inview": item,
            "score": row["score"][k],
            "history": row["history"],
            "clicked": int(item is not None and item in (row["chosen"] or [])),
            "request": (file << 40) + i,
        }
        for i, row in enumerate(rows)
        for k, item in enumerate(row["inview"] or [])
    ]


def cut(rows: list[dict[str, Any]], folder: Path) -> tuple[list[Path], list[dict[str, Any]]]:
    """Files of unlike sizes with small row groups, and the rows by hand."""
    table, paths, hand = pa.Table.from_pylist(rows), [], []
    for i, (low, high) in enumerate([(0, 1), (1, 40), (40, 40), (40, len(rows))]):
        paths.append(folder / f"{i}.parquet")
        pq.write_table(table.slice(low, high - low), paths[-1], row_group_size=16)
        hand += by_hand(rows[low:high], i)
    return paths, hand


@pytest.mark.parametrize("piece", [1 << 16, 7])
def test_each_candidate_becomes_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """As by hand, over several files, in pieces of any size, of which none cuts a request."""
    monkeypatch.setattr(candidates, "PIECE_ROWS", piece)
    rows = requests(200)
    paths, hand = cut(rows, tmp_path)
    log = open_log(paths, SOURCE)
    assert rows_of(log) == hand == log.sample(10**6).to_pylist()
    assert rows_of(table_log(pa.Table.from_pylist(rows), SOURCE)) == by_hand(rows)
    ends: list[int] = []
    for batch in log.batches({"request": pa.int64(), "inview": pa.int64()}):
        numbers = batch.column("request").to_pylist()
        assert not ends or numbers[0] not in ends
        ends.append(numbers[-1])
    assert len(ends) > (50 if piece == 7 else 1)
    empty = sum(not row["inview"] for row in rows[40:])
    assert (
        f"3.parquet: {empty} rows without candidates, which make no rows, first at row "
        in log.notes()[-1]
    )


@pytest.mark.parametrize("sign", ["json", "|", " "])
def test_lists_may_be_text(tmp_path: Path, sign: str) -> None:
    rows = [row for row in requests(60) if row["inview"] and None not in row["inview"]]
    lists = ("inview", "chosen", "score", "history")

    def text(values: list) -> str:
        return '"' + json.dumps(values) + '"' if sign == "json" else sign.join(map(str, values))

    lines = [",".join([row["user"], *(text(row[name] or []) for name in lists)]) for row in rows]
    log = open_log(
        [write(tmp_path / "log.csv", "\n".join(["user," + ",".join(lists), *lines]) + "\n")], SOURCE
    )
    assert log.source.separator == sign
    hand = [
        {**row, "inview": str(row["inview"]), "score": str(row["score"])} for row in by_hand(rows)
    ]
    history = [text(row.pop("history")).strip('"') for row in hand]  # is no list of candidates
    found = rows_of(log)
    assert [row.pop("history") for row in found] == history and found == hand


def test_clicks_may_be_written_in_the_candidates(tmp_path: Path) -> None:
    """MIND's behaviors.tsv: found out without a word."""
    lines = [
        "1\tU1\t11/11/2019 9:05:58 AM\tN5 N6\tN1-1 N-2-0",
        "2\tU2\t11/12/2019 6:11:30 PM\t\tN1-0 N7-0 N5-1",
    ]
    file = write(tmp_path / "behaviors.tsv", "\n".join(lines) + "\n")
    log = with_candidates(open_log([file]))
    assert (log.source.candidates, log.source.clicked, log.source.separator) == ("c4", "-", " ")
    rows = [
        (row["c0"], row["c1"], row["c4"], row["clicked"], row["request"]) for row in rows_of(log)
    ]
    second = [(2, "U2", "N1", 0, 1), (2, "U2", "N7", 0, 1), (2, "U2", "N5", 1, 1)]
    assert rows == [(1, "U1", "N1", 1, 0), (1, "U1", "N-2", 0, 0), *second]
    unmarked = write(tmp_path / "new.tsv", "3\tU1\t11/13/2019 9:05:58 AM\tN5\tN1 N-2\n")
    scored = open_log([unmarked], log.source)  # asks for no clicks
    assert [batch.column("c4").to_pylist() for batch in scored.batches({"c4": pa.string()})] == [
        ["N1", "N-2"]
    ]
    with pytest.raises(
        UserError, match=r"new\.tsv, line 1: 'N1' in 'c4' ends in neither -0 nor -1; mend it"
    ):
        rows_of(scored)


def test_lists_are_found_by_name_and_ids(tmp_path: Path) -> None:
    rows = [
        {
            "impression_id": i,
            "article_ids_inview": [i, i + 1, i + 2][: 2 + i % 2],
            "article_ids_clicked": [i],
            "position": [1, 2, 3][: 2 + i % 2],
            "history": [i, 3],
        }
        for i in range(50)
    ]
    table = pa.Table.from_pylist(rows)
    log = with_candidates(table_log(table))
    source = log.source
    assert (source.candidates, source.clicked) == ("article_ids_inview", "article_ids_clicked")
    assert source.parallel == ("position",)
    strays = [row | {"article_ids_clicked": [99]} for row in rows]
    for other in (pa.Table.from_pylist(strays), table.drop_columns(["article_ids_clicked"])):
        assert with_candidates(table_log(other)).source.candidates is None
    assert with_candidates(table_log(table, Source(candidates=""))).types == {
        n: table[n].type for n in table.column_names
    }


def test_a_single_clicked_id_in_text_is_a_list_too(tmp_path: Path) -> None:
    rows = "".join(f"u{i % 9},{i} {i + 1} {i + 2},{i + 1}\n" for i in range(300))
    log = with_candidates(
        open_log([write(tmp_path / "log.csv", f"user,ids_inview,ids_clicked\n{rows}")])
    )
    assert (log.source.candidates, log.source.clicked) == ("ids_inview", "ids_clicked")
    assert [row["clicked"] for row in rows_of(log)] == [0, 1, 0] * 300
    counts = "".join(f"u{i % 9},{i} {i + 1} {i + 2},{i % 3}\n" for i in range(10, 310))
    other = with_candidates(
        open_log([write(tmp_path / "log.csv", f"user,ids_inview,clicks\n{counts}")])
    )
    assert other.source.candidates is None


@pytest.mark.parametrize("where", [3, 1500])
def test_few_clicked_ids_that_are_no_candidates_are_told(tmp_path: Path, where: int) -> None:
    """Whether the first one is among the rows that are looked at or not."""
    clicks = [[i if i % 3 else i + 1] for i in range(2000)]
    clicks[where] = [9999]
    path = tmp_path / "log.parquet"
    inview = [[i, i + 1, i + 2] for i in range(2000)]
    pq.write_table(
        pa.table({"user": [1, 2] * 1000, "ids_inview": inview, "ids_clicked": clicks}), path
    )
    words = (
        rf"log\.parquet, row {where}: '9999' in 'ids_clicked' is not among the 3 of 'ids_inview';"
        r" mend it, or "
    )
    with pytest.raises(UserError, match=words) as caught:
        data.prepare([path], tmp_path / "out")
    assert "\n" not in str(caught.value)
    made = data.prepare([path], tmp_path / "out", source=Source(bad_rows="repair"))
    assert sum(made.rows.values()) == 3 * 1999


SHOWN = {
    "user": ["a", "b", "c"],
    "inview": [[1, 2], [3], [4, 5]],
    "chosen": [[2], [], [4]],
    "n": [[1, 2], [3], [4, 5]],
}


@pytest.mark.parametrize(
    ("change", "source", "words"),
    [
        (
            {"chosen": [[2], [9], [4]]},
            {},
            r"^LOG, row 1: '9' in 'chosen' is not among the 1 of 'inview'; mend it, or ",
        ),
        (
            {"n": [[1, 2], [3], [4]]},
            {},
            r"^LOG, row 2: 2 values in 'inview' and 1 in 'n'; mend it, or prepare with ",
        ),
        (
            {
                "inview": [[1, 2], None, [4, 5]],
                "n": [[1, 2], None, [4, 5]],
                "chosen": [[], [3], []],
            },
            {},
            r"^LOG, row 1: '3' in 'chosen'",
        ),
        (
            {"inview": [1, 2, 3]},
            {},
            r"^source\.candidates: column 'inview' is int64, which is no list; name one of",
        ),
        (
            {"chosen": [1, 2, 3]},
            {},
            r"^source\.clicked: column 'chosen' is int64, which is no list",
        ),
        (
            {"inview": ["a", "b", "c"]},
            {},
            r"^source\.candidates: no row's 'inview' is a list of two or more; ",
        ),
        (
            {},
            {"candidates": "inviews"},
            r"^source\.candidates: no column 'inviews'; did you mean 'inview'\?",
        ),
        ({}, {"parallel": ("m",)}, r"^source\.parallel: no column 'm'; known: chosen, "),
        (
            {"clicked": [1, 2, 3]},
            {},
            r"^source\.candidates: the label becomes column 'clicked', which is taken; rename",
        ),
        (
            {"inview": [["1-0", "2"], ["3-1"], []]},
            {"clicked": "-"},
            r"^LOG, row 0: '2' in 'inview' ends in neither -0 nor",
        ),
        (
            {},
            {"clicked": "chose"},
            r"^source\.clicked: no column 'chose' in .*; did you mean 'chosen'\?",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, change: dict, source: dict, words: str) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table(SHOWN | change), path)
    told = Source(**{"candidates": "inview", "clicked": "chosen", "parallel": ("n",)} | source)
    with pytest.raises(UserError, match=words.replace("LOG", str(path))) as caught:
        data.prepare([path], tmp_path / "out", source=told, split=Split(valid=0, test=0))
    assert "\n" not in str(caught.value)


def test_text_is_named_by_its_line(tmp_path: Path) -> None:
    file = write(tmp_path / "log.csv", 'user,inview,chosen\n"a\nb",1 2,1\nc,3 4,5\n')
    log = open_log([file], Source(candidates="inview", clicked="chosen"))
    with pytest.raises(
        UserError, match=r"log\.csv, line 4: '5' in 'chosen' is not among the 2 of 'inview'"
    ):
        rows_of(log)


def test_rows_are_left_out_and_counted_when_repairing(tmp_path: Path) -> None:
    """Whatever is asked for: each pass has the same rows."""
    path = tmp_path / "log.parquet"
    change = {"chosen": [[9], [], [4]], "n": [[1, 2], [3, 3], [4, 5]]}
    pq.write_table(pa.table(SHOWN | change), path)
    log = open_log(
        [path], Source(candidates="inview", clicked="chosen", parallel=("n",), bad_rows="repair")
    )
    for wanted in ({"user": pa.string()}, log.types):
        (batch,) = log.batches(wanted)
        assert batch.column("user").to_pylist() == ["c", "c"]
        assert log.notes() == [
            f"{path}: 1 rows left out (lists of different lengths), first at row 1: '1 and 2'",
            f"{path}: 1 rows left out (a clicked id that is no candidate), first at row 0: '9'",
        ]


def test_numbers_in_text_are_repaired_too(tmp_path: Path) -> None:
    file = write(tmp_path / "log.csv", "inview,clicks,score\n1 2,1,0.5 x\n3 4,3,y 7\n")
    told = Source(candidates="inview", clicked="clicks", parallel=("score",), bad_rows="repair")
    log = open_log([file], told)
    (batch,) = log.batches({"score": pa.float64()})
    assert batch.column("score").cast(pa.float64()).to_pylist() == [0.5, None, None, 7]
    (note,) = log.notes()
    assert note.endswith(
        "log.csv: 2 rows made without 'score', which is not of its kind, first at line 2: 'x'"
    )


def test_an_error_names_the_row_of_the_file_and_the_candidate(tmp_path: Path) -> None:
    paths, _ = cut(requests(200), tmp_path)
    table = pq.read_table(paths[3])
    scores = table["score"].to_pylist()
    row = next(i for i in range(100, len(scores)) if len(scores[i] or ()) > 2)
    scores[row][2] = float("inf")
    pq.write_table(table.set_column(3, "score", pa.array(scores)), paths[3])
    schema = Schema(
        columns={"clicked": Column(kind="label"), "score": Column(kind="numeric")}, source=SOURCE
    )
    with pytest.raises(
        UserError, match=rf"3\.parquet, row {row}: column 'score', candidate 2: inf is infinite"
    ):
        data.prepare(paths, tmp_path / "out", schema=schema)


def test_it_is_prepared_like_the_log_made_by_hand(tmp_path: Path) -> None:
    """To the bit, and a group of what a request shares is stored once for each request."""
    rows = [row for row in requests(400) if row["inview"] and None not in row["inview"]]
    paths, hand = cut(rows, tmp_path)
    pq.write_table(pa.Table.from_pylist(hand), tmp_path / "hand.parquet")
    schema = infer_log(open_log(paths, SOURCE))
    assert {name: column.kind for name, column in schema.columns.items()} == {
        "user": "categorical",
        "inview": "categorical",
        "score": "numeric",
        "history": "list",
        "clicked": "label",
        "request": "group",
    }
    schema = Schema(
        columns=schema.columns,
        encodings=schema.encodings,
        source=SOURCE,
        groups={"asked": ("user", "history")},
    )
    made = data.prepare(paths, tmp_path / "made", schema=schema, split=Split(by="ratio"))
    same = data.prepare(
        [tmp_path / "hand.parquet"],
        tmp_path / "same",
        schema=schema,
        source=Source(),
        split=Split(by="ratio"),
    )
    assert made.rows == same.rows and min(made.rows.values()) > 0
    for part in ("train", "valid", "test"):
        for file in sorted((tmp_path / "made" / part).iterdir()):
            assert file.read_bytes() == (tmp_path / "same" / part / file.name).read_bytes()
    numbers = pq.read_table(tmp_path / "made" / "train" / "part-00000.parquet")[
        "request"
    ].to_pylist()
    runs = pq.read_table(tmp_path / "made" / "train" / "group-asked.parquet").num_rows
    assert runs <= len(set(numbers)) < len(numbers) / 2
    again = Schema.load(tmp_path / "made" / "schema.toml").source
    assert (again.candidates, again.clicked, again.parallel) == ("inview", "chosen", ("score",))


def test_a_log_to_be_scored_needs_no_clicks(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(requests(50)).drop_columns(["chosen"])
    log: Log = table_log(table, SOURCE)
    assert "clicked" not in log.types
    assert [{**row, "clicked": None} for row in rows_of(log)] == [
        {**row, "clicked": None}
        for row in by_hand([row | {"chosen": []} for row in table.to_pylist()])
    ]


def even(count: int, most: int = 5) -> pa.Table:
    """Requests of one to `most` candidates, with a score for each."""
    shown = [[(7 * i + k) % 60 for k in range(1 + i % most)] for i in range(count)]
    scores = [[k / 7 for k in range(len(x))] for x in shown]
    return pa.table({"inview": shown, "clicks": [x[:1] for x in shown], "score": scores})


@pytest.mark.parametrize("place", [0, 37, 1500])
@pytest.mark.parametrize("cells", [-1, 1])
def test_a_parallel_list_a_cell_short_names_its_row(tmp_path: Path, place: int, cells: int) -> None:
    """It is found to be parallel all the same, wherever that row is; it was taken for a list
    without a word.
    """
    table = even(1800)
    scores = table["score"].to_pylist()
    scores[place] = scores[place][:-1] if cells < 0 else [*scores[place], 0.5]
    table = table.set_column(2, "score", pa.array(scores))
    pq.write_table(table, tmp_path / "log.parquet")
    shown = len(table["inview"][place])
    words = (
        rf"log\.parquet, row {place}: {shown} values in 'inview' and {shown + cells} in 'score';"
        r" mend it, or "
    )
    with pytest.raises(UserError, match=words):
        data.prepare([tmp_path / "log.parquet"], tmp_path / "out")
    made = data.prepare(
        [tmp_path / "log.parquet"], tmp_path / "out", source=Source(bad_rows="repair")
    )
    assert made.schema.source.parallel == ("score",) and "score" in made.schema.dense
    assert any(
        "1 rows left out (lists of different lengths), first at row" in note for note in made.notes
    )
    assert sum(made.rows.values()) == sum(map(len, table["inview"].to_pylist())) - shown


@pytest.mark.parametrize("most", [4, 10])
def test_lists_of_lengths_of_their_own_do_not_go_along(tmp_path: Path, most: int) -> None:
    """Even where nearly all are cut at the length that nearly all candidates have, and so agree by
    chance.
    """
    random = np.random.default_rng(0)
    lengths = [
        [most if random.random() < 0.97 else int(random.integers(1, most)) for _ in range(1000)]
        for _ in "ab"
    ]
    shown, history = ([list(range(n)) for n in each] for each in lengths)
    table = pa.table({"inview": shown, "clicks": [x[:1] for x in shown], "history": history})
    assert np.mean(np.equal(*lengths)) > 0.9
    assert with_candidates(table_log(table)).source.parallel == ()
