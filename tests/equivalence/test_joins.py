"""Logs whose side tables have columns of the log's names: joined = written by hand, at every
door.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.data.batches.parts import PARTS
from sparrow.features.schema import Join, Source
from sparrow.features.transforms import Transforms
from sparrow.serving import load
from sparrow.serving.export import export
from sparrow.trained.predict import predict
from sparrow.training import train
from tests.runs import run_of

ROWS, USERS = 600, 40


def raw(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "user": rng.integers(0, USERS + 5, ROWS),  # some are not in the side table
        "price": rng.random(ROWS),
        "click": rng.integers(0, 2, ROWS),
    }


def users() -> pa.Table:
    """With an index that pandas wrote, and with names that the log has: of its label, too."""
    rng = np.random.default_rng(9)
    columns = {
        "__index_level_0__": range(3, USERS + 3),
        "user": range(USERS),
        "price": rng.random(USERS),
    }
    return pa.table(
        columns | {"click": rng.integers(0, 99, USERS), "city": [f"c{i % 7}" for i in range(USERS)]}
    )


def by_hand(log: dict[str, Any]) -> pa.Table:
    """The log with the columns that the model's features are called."""
    side = users()
    names = {"users.price": "price", "users.click": "click", "city": "city"}
    place = pa.array(log["user"], mask=log["user"] >= USERS)
    return pa.table(log | {name: side[column].take(place) for name, column in names.items()})


def written(path: Path, columns: dict[str, Any] | pa.Table) -> Path:
    (pacsv.write_csv if path.suffix == ".csv" else pq.write_table)(pa.table(columns), path)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the side table, and with a model of a log that was joined with it."""
    folder = tmp_path_factory.mktemp("joins")
    written(folder / "users.parquet", users())
    log = written(folder / "log.parquet", raw())
    join = Join(file=str(folder / "users.parquet"), on="user")
    data.prepare([log], folder / "prepared", source=Source(joins=(join,)))
    changes = {"model.name": "dlrm", "model.dim": 4, "data.batch_size": 100, "loop.epochs": 1}
    train(run_of(folder / "prepared", folder / "run", **changes))
    return folder


def scores(place: Path, log: Path) -> np.ndarray:
    predict(place / "run", [log], log.parent / "scores.parquet", overwrite=True)
    return pq.read_table(log.parent / "scores.parquet")["score"].to_numpy()


def test_prepared(place: Path, tmp_path: Path) -> None:
    """Also the next day, and rows as a service logs them, which have all features."""
    schema = Transforms.load(place / "prepared").schema
    assert {*schema.inputs} == {"user", "price", "users.price", "users.click", "city"} | {
        f"users.{name}:missing" for name in ("price", "click")
    }
    for name, log in (("joined", raw(1)), ("by_hand", by_hand(raw(1)))):
        made = written(tmp_path / f"{name}.parquet", log)
        data.prepare([made], tmp_path / name, schema=Transforms.load(place / "run"))
    for part in PARTS:
        tables = [
            pq.read_table(tmp_path / name / part / "part-00000.parquet")
            for name in ("joined", "by_hand")
        ]
        assert tables[0].num_rows and tables[0].equals(tables[1])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_predicted(place: Path, tmp_path: Path, kind: str) -> None:
    """A log without the label has the side table's column of that name all the same."""
    log = raw(2)
    bare = {name: column for name, column in log.items() if name != "click"}
    wanted = scores(place, written(tmp_path / f"hand.{kind}", by_hand(log)))
    assert np.ptp(wanted) > 0
    for columns in (log, bare):
        assert np.array_equal(scores(place, written(tmp_path / f"log.{kind}", columns)), wanted)


def test_served(place: Path, tmp_path: Path) -> None:
    log = written(tmp_path / "log.parquet", raw(2))
    export(place / "run", tmp_path / "model", [log])  # keeps rows of the log with their scores
    scorer = load(tmp_path / "model")
    assert {*scorer.encoder.sources} == {"user", "price", "users.price", "users.click", "city"}
    columns = by_hand(raw(2)).select(scorer.encoder.sources).to_pydict()
    assert np.abs(scorer.score(columns)[:, 0] - scores(place, log)).max() < 1e-6


def test_a_column_that_came_of_the_side_table_is_not_taken_from_the_log(
    place: Path, tmp_path: Path
) -> None:
    log = written(tmp_path / "log.parquet", raw(2) | {"city": ["c1"] * ROWS})
    with pytest.raises(
        UserError, match=r"users\.parquet: column 'city' is in the log too; rename one"
    ):
        scores(place, log)
    log = written(tmp_path / "log.parquet", raw(2) | {"town": ["c1"] * ROWS})
    assert np.array_equal(
        scores(place, log), scores(place, written(tmp_path / "old.parquet", raw(2)))
    )
