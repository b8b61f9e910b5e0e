from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.data.logs.read import open_log, shape_like
from sparrow.data.logs.tables import table_log
from sparrow.data.meaning.inference import infer_log
from sparrow.features.schema import Column, Join, Schema, Source, Split
from tests.data.logs.reading import rows_of, write

ITEMS = {"movie_id": [7, 3, 12], "year": [1999, None, 2001], "title": ["a", "b", "c"]}


def joined(folder: Path, log: pa.Table, items: dict, **join: str) -> list[dict]:
    pq.write_table(pa.table(items), folder / "items.parquet")
    source = Source(joins=(Join(file=str(folder / "items.parquet"), on="movie_id", **join),))
    return rows_of(table_log(log, source))


@pytest.mark.parametrize("kinds", list(itertools.product(["csv", "parquet"], repeat=2)))
def test_columns_are_added_by_key(tmp_path: Path, kinds: tuple[str, str]) -> None:
    """As arrow's join has them, over several files, with two side tables, of which one is joined by
    the other.
    """
    random = np.random.default_rng(0)
    log = pa.table(
        {
            "movie_id": random.integers(0, 60, 500),
            "click": random.integers(0, 2, 500),
            "row": range(500),
        }
    )
    items = pa.table(
        {
            "movie_id": random.permutation(50),
            "genre": [f"g{i % 5}" for i in range(50)],
            "n": range(50),
        }
    )
    genres = pa.table({"name": [f"g{i}" for i in range(4)], "weight": [0.5, 1.5, 2.5, 3.5]})
    paths = {}
    tables = {"0": log.slice(0, 10), "1": log.slice(10), "items": items, "genres": genres}
    for (name, table), kind in zip(
        tables.items(), [kinds[0], kinds[0], kinds[1], kinds[1]], strict=True
    ):
        paths[name] = tmp_path / f"{name}.{kind}"
        write_table = pacsv.write_csv if kind == "csv" else pq.write_table
        write_table(table, paths[name])
    joins = (
        Join(file=str(paths["items"]), on="movie_id"),
        Join(file=str(paths["genres"]), on="genre", key="name", prefix="genre_"),
    )
    found = open_log([paths["0"], paths["1"]], Source(joins=joins))
    want = log.join(items, "movie_id").join(
        genres.rename_columns(["name", "genre_weight"]), "genre", "name"
    )
    rows = rows_of(found)
    assert list(found.types) == ["movie_id", "click", "row", "genre", "n", "genre_weight"]
    assert sorted(rows, key=lambda row: row["row"]) == rows
    assert rows == want.sort_by("row").select(list(found.types)).to_pylist()
    missing = [sum(row["genre"] is None for row in rows[a:b]) for a, b in ((0, 10), (10, 500))]
    notes = [note for note in found.notes() if "items" in note]
    assert [int(note.split(": ")[1].split(" rows")[0]) for note in notes] == [
        count for count in missing if count
    ]
    assert (
        "rows without a match for movie_id in" in notes[-1]
        and "whose columns are missing there, first at" in notes[-1]
    )
    first = 10 if kinds[0] == "csv" else 20  # a file's
    assert found.sample(20).to_pylist() == rows[:first]


def test_a_number_and_its_text_are_one_key(tmp_path: Path) -> None:
    for keys in ([3, 12, 4], ["3", "12", "4"], [3.0, 12.0, None], pa.array([3, 12, 4], pa.uint8())):
        rows = joined(tmp_path, pa.table({"movie_id": keys}), ITEMS)
        assert [row["title"] for row in rows] == ["b", "c", None]
    rows = joined(
        tmp_path, pa.table({"movie_id": [3, 12, 4]}), ITEMS | {"movie_id": ["007", "3", "x"]}
    )
    assert [row["title"] for row in rows] == ["b", None, None]


def test_text_keeps_its_zeros(tmp_path: Path) -> None:
    """A side table's text is read as the schema has it: 007 is not 7."""
    log = write(tmp_path / "log.csv", "zip,click\n" + "007,1\n7,0\n" * 20)
    side = write(tmp_path / "zips.csv", "zip,code\n007,01\n7,1\n")
    source = Source(joins=(Join(file=str(side), on="zip"),))
    found = next(open_log([log], source).batches({"code": pa.string()}))
    assert found.column("code").to_pylist()[:2] == ["01", "1"]


@pytest.mark.parametrize(
    ("items", "join", "words"),
    [
        (
            {"movie_id": [7, 3, 7]},
            {},
            r"items\.parquet, row 2: key 'movie_id', row 2: 7 is there twice; leave one of ",
        ),
        (
            {"movie_id": [None, None, None]},
            {},
            r"items\.parquet: no row has a key 'movie_id'; join by another",
        ),
        (
            {"click": [1, 2, 3]},
            {"prefix": ""},
            (
                r"items\.parquet: column 'click' is in the log too; rename one, or set a prefix:"
                r" --prefix, or joins = "
            ),
        ),
        (
            {},
            {"key": "id"},
            (
                r"items\.parquet: no column 'id' to join by; known: movie_id, title, year; or write"
                r" on movie"
            ),
        ),
        (
            {},
            {"on": "movie"},
            r"join .*items\.parquet: the log has no column 'movie'; did you mean 'movie_id'\?",
        ),
        (
            {},
            {"on": "tags", "key": "year"},
            (
                r"join .*items\.parquet: on 'tags', which is list<.*>; join by a column with one id"
                r" in each"
            ),
        ),
        (
            {},
            {"prefix": "a_", "columns": {"year": "y"}},
            (
                r"join .*items\.parquet: prefix 'a_' beside columns, which names each column; leave"
                r" one of them out"
            ),
        ),
        ({}, {"file": "nowhere.csv"}, r"nowhere\.csv: no such file; check the path"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, items: dict, join: dict, words: str) -> None:
    pq.write_table(pa.table(ITEMS | items), tmp_path / "items.parquet")
    log = pa.table({"movie_id": [3, 12] * 50, "click": [0, 1] * 50, "tags": [[1], [2]] * 50})
    told = Join(**{"file": str(tmp_path / "items.parquet"), "on": "movie_id"} | join)
    with pytest.raises(UserError, match=words) as caught:
        data.prepare(table_log(log, Source(joins=(told,))), tmp_path / "out")
    assert "\n" not in str(caught.value)
    prefixed = Join(file=str(tmp_path / "items.parquet"), on="movie_id", prefix="item_")
    if "click" in items:
        assert rows_of(table_log(log, Source(joins=(prefixed,))))[0]["item_click"] == 2


def test_a_duplicate_in_text_is_named_by_its_line(tmp_path: Path) -> None:
    side = write(tmp_path / "items.csv", 'movie_id,title\n7,"two\nlines"\n3,b\n7,c\n')
    log = table_log(
        pa.table({"movie_id": [3]}), Source(joins=(Join(file=str(side), on="movie_id"),))
    )
    with pytest.raises(
        UserError, match=r"items\.csv, line 5: key 'movie_id', row 2: '?7'? is there twice"
    ):
        rows_of(log)


def test_a_side_table_is_repaired_and_counted_once(tmp_path: Path) -> None:
    """Its notes are told once, whatever the number of the log's parts."""
    side = write(
        tmp_path / "items.csv",
        "movie_id,size\n" + "".join(f"{i},{i}\n" for i in range(3000)) + "3000\n",
    )
    for i in range(3):
        pq.write_table(
            pa.table({"movie_id": range(500), "click": [0, 1] * 250}), tmp_path / f"{i}.parquet"
        )
    split = Split(
        by="file",
        valid_files=(str(tmp_path / "1.parquet"),),
        test_files=(str(tmp_path / "2.parquet"),),
    )
    source = Source(bad_rows="repair", joins=(Join(file=str(side), on="movie_id"),))
    made = data.prepare([tmp_path / "0.parquet"], tmp_path / "out", source=source, split=split)
    assert [note for note in made.notes if "items.csv" in note and "lines left out" in note] == [
        f"{side}: 1 lines left out (wrong number of cells), first at line 3002: '3000'"
    ]


def test_a_prepared_log_remembers_its_side_tables(tmp_path: Path) -> None:
    """They are joined by candidates, and again the next day, with the same columns and rows as if
    joined by hand.
    """
    random = np.random.default_rng(0)
    shown = [random.choice(40, 4, replace=False).tolist() for _ in range(300)]
    log = pa.table({"articles_inview": shown, "articles_clicked": [x[:1] for x in shown]})
    pq.write_table(log, tmp_path / "log.parquet")
    items = pa.table(
        {
            "article": range(40),
            "topic": [f"t{i % 6}" for i in range(40)],
            "age": random.normal(size=40),
        }
    )
    pq.write_table(items, tmp_path / "items.parquet")
    join = Join(file=str(tmp_path / "items.parquet"), on="articles_inview", key="article")
    made = data.prepare([tmp_path / "log.parquet"], tmp_path / "made", source=Source(joins=(join,)))
    assert {"topic", "age", "articles_inview"} <= {*made.schema.dense, *made.schema.sparse}
    rows = [
        {
            "articles_inview": x,
            "topic": f"t{x % 6}",
            "age": items["age"][x].as_py(),
            "clicked": int(k == 0),
            "request": i,
        }
        for i, each in enumerate(shown)
        for k, x in enumerate(each)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "hand.parquet")
    schema = infer_log(open_log([tmp_path / "log.parquet"], Source(joins=(join,))))
    hand = data.prepare(
        [tmp_path / "hand.parquet"], tmp_path / "hand", schema=schema, source=Source()
    )
    for part in hand.rows:
        parts = [
            pq.read_table(tmp_path / name / part / "part-00000.parquet")
            for name in ("made", "hand")
        ]
        assert parts[0].num_rows and parts[0].equals(parts[1])
    again = data.prepare([tmp_path / "log.parquet"], tmp_path / "again", schema=made.schema)
    assert again.rows == made.rows and again.schema.source.joins == made.schema.source.joins


@pytest.mark.parametrize(
    ("file", "index"),
    [
        ("items.csv", ""),
        ("items.csv", "Unnamed: 0"),
        ("items.csv", "Unnamed: 0.1"),
        ("items.parquet", "__index_level_0__"),
        ("items.parquet", "Unnamed: 0"),
    ],
)
@pytest.mark.parametrize("in_log", [False, True])
def test_an_index_without_a_name_is_not_joined(
    tmp_path: Path, file: str, index: str, in_log: bool
) -> None:
    items = pa.table({index: [0, 2, 5], **ITEMS})
    (pacsv.write_csv if file.endswith("csv") else pq.write_table)(items, tmp_path / file)
    log = pa.table(
        ({index: [3, 5, 6] * 20} if in_log else {})
        | {"movie_id": [3, 12, 7] * 20, "click": [0, 1, 1] * 20}
    )
    found = table_log(log, Source(joins=(Join(file=str(tmp_path / file), on="movie_id"),)))
    assert list(found.types) == [*log.column_names, "year", "title"]
    assert [row["title"] for row in rows_of(found)[:3]] == ["b", "c", "a"]
    told = (
        f"{tmp_path / file}: column {index!r} has no name, as an index that pandas wrote, and is"
        " not joined; "
    )
    made = data.prepare(found, tmp_path / "out")
    assert [note for note in made.notes if note.startswith(told)] == [
        f"{told}name it to have it joined"
    ]
    assert index not in {*made.schema.dense, *made.schema.sparse}


def test_an_index_can_be_the_key_and_be_joined_if_told(tmp_path: Path) -> None:
    items = {"__index_level_0__": [7, 3, 12], "title": ["a", "b", "c"], "Unnamed: 0": [1, 2, 3]}
    log = pa.table({"movie_id": [3, 12]})
    assert joined(tmp_path, log, items, key="__index_level_0__") == [
        {"movie_id": 3, "title": "b"},
        {"movie_id": 12, "title": "c"},
    ]
    rows = joined(tmp_path, log, items, key="__index_level_0__", columns={"Unnamed: 0": "place"})
    assert rows == [{"movie_id": 3, "place": 2}, {"movie_id": 12, "place": 3}]


def test_names_that_are_taken_get_the_files(tmp_path: Path) -> None:
    """Of the log, of an earlier side table, and of what candidates make; others keep theirs."""
    log = pa.table(
        {"user": [1, 2] * 30, "item": [5, 6] * 30, "age": [7, 8] * 30, "click": [0, 1] * 30}
    )
    pq.write_table(log, tmp_path / "log.parquet")
    (tmp_path / "items").mkdir()
    for name, columns in {
        "users.v2.csv": {"user": [1, 2], "age": [30, 40], "city": ["a", "b"]},
        "items/part-0.csv": {"id": [5, 6], "city": ["x", "y"], "item": [9, 9]},
    }.items():
        pacsv.write_csv(pa.table(columns), tmp_path / name)
    joins = (
        Join(file=str(tmp_path / "users.v2.csv"), on="user"),
        Join(file=str(tmp_path / "items" / "*.csv"), on="item", key="id"),
    )
    found = open_log([tmp_path / "log.parquet"], Source(joins=joins))
    taken = {"users_v2.age": 30, "city": "a", "items.city": "x", "items.item": 9}
    assert rows_of(found)[0] == {"user": 1, "item": 5, "age": 7, "click": 0} | taken
    notes = [note.partition(": ")[2] for note in found.notes()]
    assert notes == [
        "column 'age' is called 'users_v2.age', as another one has its name",
        "column 'city' is called 'items.city', as another one has its name",
        "column 'item' is called 'items.item', as another one has its name",
    ]


def test_candidates_names_are_taken_too(tmp_path: Path) -> None:
    shown = [[1, 2, 3][: 2 + i % 2] for i in range(60)]
    log = pa.table(
        {"articles_inview": shown, "articles_clicked": [x[:1] for x in shown], "user": [4, 5] * 30}
    )
    pq.write_table(
        pa.table({"user": [4, 5], "clicked": [8, 9], "request": [6, 7]}), tmp_path / "users.parquet"
    )
    join = Join(file=str(tmp_path / "users.parquet"), on="user")
    made = data.prepare(table_log(log, Source(joins=(join,))), tmp_path / "out")
    assert made.schema.labels == ("clicked",) and made.schema.role("group") == "request"
    assert {"users.clicked", "users.request"} <= {*made.schema.columns}


def test_one_table_may_be_joined_several_times(tmp_path: Path) -> None:
    """By its own name once more; beyond that each needs a prefix, as the error says."""
    users = str(tmp_path / "users.parquet")
    pq.write_table(pa.table({"id": [1, 2, 3], "age": [30, 40, 50]}), users)
    log = pa.table({"buyer": [1, 2], "seller": [2, 3], "agent": [3, 1]})
    joins = [Join(file=users, on=on, key="id") for on in log.column_names]
    rows = rows_of(table_log(log, Source(joins=(joins[0], joins[1]))))
    assert [(row["age"], row["users.age"]) for row in rows] == [(30, 40), (40, 50)]
    with pytest.raises(
        UserError,
        match=r"users\.parquet: column 'users\.age' is in the log too; rename one, or set a ",
    ):
        table_log(log, Source(joins=tuple(joins)))
    prefixed = [Join(file=users, on=on, key="id", prefix=f"{on}_") for on in log.column_names]
    rows = rows_of(table_log(log, Source(joins=tuple(prefixed))))
    assert rows[0] == {
        "buyer": 1,
        "seller": 2,
        "agent": 3,
        "buyer_age": 30,
        "seller_age": 40,
        "agent_age": 50,
    }


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"age": "users.age", "users.age": "users.age"},
            r"two columns would be called 'users\.age'; ",
        ),
        ({"age": "x", "users.age": "x"}, r"two columns would be called 'x'; "),
    ],
)
def test_two_columns_of_one_name_are_refused(tmp_path: Path, columns: dict, words: str) -> None:
    pq.write_table(
        pa.table({"id": [1], "age": [30], "users.age": [31]}), tmp_path / "users.parquet"
    )
    log = pa.table({"id": [1], "age": [3]})
    with pytest.raises(UserError, match=rf"users\.parquet: {words}"):
        join = Join(file=str(tmp_path / "users.parquet"), on="id", columns=columns)
        table_log(log, Source(joins=(join,)))


def test_a_join_of_before_adds_what_it_added(tmp_path: Path) -> None:
    """Runs of versions that named no columns: an index was a feature, and a name that is taken is
    refused.
    """
    pq.write_table(
        pa.table({"Unnamed: 0": [0, 4], "id": [1, 2], "age": [30, 40]}), tmp_path / "users.parquet"
    )
    source = Source(candidates="", joins=(Join(file=str(tmp_path / "users.parquet"), on="id"),))
    columns = {name: Column(kind="numeric") for name in ("Unnamed: 0", "age")} | {
        "click": Column(kind="label")
    }
    schema = Schema(columns=columns, source=source)
    again = shape_like(table_log(pa.table({"id": [2, 1]})), source, schema)
    assert rows_of(again) == [
        {"id": 2, "Unnamed: 0": 4, "age": 40},
        {"id": 1, "Unnamed: 0": 0, "age": 30},
    ]
    with pytest.raises(UserError, match=r"users\.parquet: column 'age' is in the log too"):
        shape_like(table_log(pa.table({"id": [2, 1], "age": [3, 4]})), source, schema)
