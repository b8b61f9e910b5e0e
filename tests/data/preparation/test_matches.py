"""Side tables whose keys match no row are refused by prepare, before anything is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from sparrow.core import UserError
from sparrow.data import prepare
from sparrow.data.logs.read import open_like
from sparrow.data.logs.tables import table_log
from sparrow.data.preparation.job import Prepared
from sparrow.features.schema import Join, Source, Split
from sparrow.features.transforms import Transforms

ROWS = 3000
LOG = {
    "user": [f"u{i % 50}" for i in range(ROWS)],
    "number": [1000 + i % 50 for i in range(ROWS)],
    "price": [i % 7 / 7 for i in range(ROWS)],
    "click": [i % 2 for i in range(ROWS)],
}
USERS = {
    "user": list(range(50)),
    "name": [f"u{i}" for i in range(50)],
    "age": [20 + i % 9 for i in range(50)],
}


def written(path: Path, columns: dict[str, Any]) -> Path:
    (pacsv.write_csv if path.suffix == ".csv" else pq.write_table)(pa.table(columns), path)
    return path


def joined(folder: Path, users: Path, on: str, key: str | None = None, **settings: Any) -> Prepared:
    source = Source(joins=(Join(file=str(users), on=on, key=key),))
    return prepare([folder / "log.parquet"], folder / "out", source=source, **settings)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_no_match_at_all_is_refused(tmp_path: Path, kind: str) -> None:
    """With the keys of both sides, and remedies that work."""
    log = written(tmp_path / f"log.{kind}", LOG)
    users = written(tmp_path / f"users.{kind}", USERS)
    written(tmp_path / "log.parquet", LOG)
    with pytest.raises(UserError) as caught:
        prepare([log], tmp_path / "out", source=Source(joins=(Join(file=str(users), on="user"),)))
    assert (
        str(caught.value)
        == f"{users}: no match for any of the 3,000 rows of {log}: 'user' (string) is 'u0', 'u1',"
        " 'u2' in the log, 'user' (int64) is 0, 1, 2 there; write both as text or both as"
        " numbers, or join by another column (--on user=ITS_COLUMN)"
    )
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        UserError,
        match=r"'number' \(int64\) is 1000, 1001, 1002 in .* is 0, 1, 2 there; write both al",
    ):
        joined(tmp_path, users, "number", "user")
    assert "age" in joined(tmp_path, users, "user", "name").schema.columns
    users = written(tmp_path / f"texts.{kind}", USERS | {"user": USERS["name"]})
    assert "age" in joined(tmp_path, users, "user", overwrite=True).schema.columns


def test_all_keys_missing(tmp_path: Path) -> None:
    written(tmp_path / "log.parquet", LOG | {"user": pa.nulls(ROWS, pa.string())})
    users = written(tmp_path / "users.parquet", USERS)
    with pytest.raises(
        UserError,
        match=r"'user' \(string\) is missing in the log, 'user' \(int64\) is 0, 1, 2 there",
    ):
        joined(tmp_path, users, "user")


@pytest.mark.parametrize("place", [0, ROWS - 1])
def test_one_match_is_enough(tmp_path: Path, place: int) -> None:
    """Wherever it is: how many rows have none is told."""
    written(
        tmp_path / "log.parquet",
        LOG | {"user": [str(i + 50) if i != place else "3" for i in range(ROWS)]},
    )
    made = joined(tmp_path, written(tmp_path / "users.parquet", USERS), "user")
    assert any("2,999 rows without a match for user" in note for note in made.notes)


def test_each_side_table_is_judged(tmp_path: Path) -> None:
    """Also one that is joined by a column of another one, and one without any column to add."""
    log = written(tmp_path / "log.parquet", LOG)
    users = written(
        tmp_path / "users.parquet",
        {"name": USERS["name"], "city": [f"c{i % 5}" for i in range(50)]},
    )
    cities = written(tmp_path / "cities.parquet", {"city": ["C0", "C1"], "size": [5, 6]})
    bare = written(tmp_path / "bare.parquet", {"user": ["x"]})
    joins = [Join(file=str(users), on="user", key="name"), Join(file=str(cities), on="city")]
    with pytest.raises(
        UserError,
        match=r"cities\.parquet: no match for .* 'c0', 'c1', 'c2' in .* 'C0', 'C1' there; wr",
    ):
        prepare([log], tmp_path / "out", source=Source(joins=tuple(joins)))
    prepare(
        [log], tmp_path / "out", source=Source(joins=(joins[0], Join(file=str(bare), on="user")))
    )


def test_parts_are_judged_together(tmp_path: Path) -> None:
    """A day of new users may be without a match; all days may not."""
    written(tmp_path / "log.parquet", LOG)
    later = written(tmp_path / "later.parquet", LOG | {"user": ["new"] * ROWS})
    split = Split(by="file", valid_files=(str(later),))
    users = written(tmp_path / "users.parquet", USERS)
    assert joined(tmp_path, users, "user", "name", split=split).rows["valid"] == ROWS
    with pytest.raises(UserError, match=r"no match for any of the 6,000 rows"):
        joined(tmp_path, users, "user", split=split, overwrite=True)


def test_the_next_day_is_judged_and_predictions_are_not(tmp_path: Path) -> None:
    written(tmp_path / "log.parquet", LOG)
    made = joined(tmp_path, written(tmp_path / "users.parquet", USERS), "user", "name")
    later = written(tmp_path / "later.parquet", LOG | {"user": ["new"] * ROWS})
    with pytest.raises(
        UserError, match=r"users\.parquet: no match for any of the 3,000 rows of .*later\.parquet"
    ):
        prepare([later], tmp_path / "again", schema=Transforms.load(made.out))
    log = open_like([later], made.schema.source, made.schema)
    assert sum(batch.num_rows for batch in log.batches({"age": log.types["age"]})) == ROWS


def test_what_the_log_has_counted_stays(tmp_path: Path) -> None:
    """Text that is no number far into the log is told by the pass that reads it, and not by this
    one.
    """
    texts = "user,x,click\n" + "".join(
        f"{'u' if i < 2500 else ''}{i % 50},{i},{i % 2}\n" for i in range(ROWS)
    )
    (tmp_path / "log.csv").write_text(texts + "u1,oops,1\n")
    users = written(tmp_path / "users.csv", USERS)
    source = Source(bad_rows="repair", joins=(Join(file=str(users), on="user"),))
    made = prepare([tmp_path / "log.csv"], tmp_path / "out", source=source)
    assert [note for note in made.notes if "taken for missing, first" in note] == [
        f"{tmp_path / 'log.csv'}: 1 cells of 'x' taken for missing, first at line 3002: 'oops'"
    ]
    assert any("2,501 rows without a match" in note for note in made.notes)


def test_a_table_in_memory(tmp_path: Path) -> None:
    users = written(tmp_path / "users.parquet", USERS)
    log = table_log(pa.table(LOG), Source(joins=(Join(file=str(users), on="user"),)))
    with pytest.raises(UserError, match=r"no match for any of the 3,000 rows of the table"):
        prepare(log, tmp_path / "out")
