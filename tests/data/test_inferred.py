from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow.core import UserError
from sparrow.data import infer
from sparrow.data.schema import Column, Schema


def inferred(folder: Path, columns: dict, label: str | None = None) -> Schema:
    pq.write_table(pa.table(columns), folder / "log.parquet")
    return infer([folder / "log.parquet"], label)


def test_kinds(tmp_path: Path) -> None:
    n, rng = 1200, np.random.default_rng(0)
    schema = inferred(
        tmp_path,
        {
            "label": np.arange(n) % 2,
            "session_id": np.arange(n) // 4,
            "request_id": np.arange(n) // 2,
            "ts": np.arange(n),
            "updated": [datetime.datetime(2020, 1, 1)] * n,
            "user": rng.integers(0, 300, n),
            "deviceType": rng.integers(0, 300, n),
            "few": rng.integers(0, 9, n),
            "height": rng.normal(0, 1, n),
            "price": rng.lognormal(3, 2, n),
            "city": ["rome", "oslo", "bern"] * (n // 3),
            "event_id": [f"e{i}" for i in range(n)],
            "constant": [3] * n,
            "void": pa.nulls(n, pa.float64()),
            "embedding": [[0.5]] * n,
            "tags": [["a", "b"]] * n,
            "record": [{"a": 1}] * n,
        },
    )
    kinds = {name: column.kind for name, column in schema.columns.items()}
    assert kinds == {
        "label": "label",
        "session_id": "ignore",
        "request_id": "group",
        "ts": "time",
        "updated": "ignore",
        "user": "categorical",
        "deviceType": "categorical",
        "few": "categorical",
        "height": "numeric",
        "price": "numeric",
        "city": "categorical",
        "event_id": "ignore",
        "constant": "ignore",
        "void": "ignore",
        "embedding": "ignore",
        "tags": "list",
        "record": "ignore",
    }
    assert (schema.columns["height"].transform, schema.columns["price"].transform) == ("standard", "log")
    assert schema.columns["session_id"].note == "group is request_id"
    assert all(column.note for column in schema.columns.values() if column.kind == "ignore")
    assert set(schema.tables) == {"user", "deviceType", "few", "city", "tags"}


def test_a_list_shares_the_table_whose_ids_it_repeats(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    items = rng.integers(1000, 1400, 2000)
    columns = {
        "label": np.arange(2000) % 2,
        "user": rng.integers(0, 500, 2000),
        "item": items,
        "user_history": [items[i : i + 3].tolist() for i in range(2000)],
        "words": [[f"w{i % 50}"] for i in range(2000)],
        "slots": [[i % 50] for i in range(2000)],  # small integers overlap the users' by accident
    }
    schema = inferred(tmp_path, columns)
    assert {name: schema.columns[name].table for name in schema.sparse} == {
        "user": "user",
        "item": "item",
        "user_history": "item",
        "words": "words",
        "slots": "slots",
    }


@pytest.mark.parametrize(
    ("values", "positive"),
    [
        ([0, 1, 1], None),
        ([True, False, True], None),
        (["no", "no", "yes"], "yes"),
        ([-1, 1, 1], "1"),
        ([1.0, 0.0, 1.0], None),
    ],
)
def test_what_counts_as_one(tmp_path: Path, values: list, positive: str | None) -> None:
    schema = inferred(tmp_path, {"y": values, "x": [1.5, 2.5, 0.5]})
    assert schema.columns["y"].kind == "label"
    assert schema.columns["y"].positive == positive


def test_labels_that_cannot_be_found(tmp_path: Path) -> None:
    columns = {"won": [0, 1, 0], "x": [1.5, 2.5, 0.5], "state": ["a", "b", "b"]}
    with pytest.raises(UserError, match=r"--label NAME name one of the columns of two values: won, state"):
        inferred(tmp_path, columns)
    assert inferred(tmp_path, columns, "won").columns["won"] == Column(kind="label")
    with pytest.raises(UserError, match=r"no column 'wn'; did you mean 'won'\?"):
        inferred(tmp_path, columns, "wn")
    with pytest.raises(UserError, match=r"label: column 'x' has 3 values where a label has two"):
        inferred(tmp_path, columns, "x")


@pytest.mark.parametrize("ids", [("12345678901234567890", "12345678901234567891"), ("1.0", "2.5"), ("1.0", "")])
def test_ids_that_are_no_integers_are_refused(tmp_path: Path, ids: tuple[str, str]) -> None:
    (tmp_path / "x.csv").write_text(f"label,user_id\n0,{ids[0]}\n1,{ids[1]}\n")
    with pytest.raises(UserError, match=r"column 'user_id': .* is not an id.*below 2\^63 or as strings"):
        infer([tmp_path / "x.csv"])


def test_what_is_inferred_can_be_written_and_read(tmp_path: Path) -> None:
    schema = inferred(tmp_path, {"click": ["a", "b", "b"], "x y:z": [1.5, 2.5, 0.5], "id": [1, 2, 1]})
    schema.save(tmp_path / "schema.toml")
    assert Schema.load(tmp_path / "schema.toml") == schema


def test_real_logs(real_data: Path) -> None:
    criteo = infer([real_data / "criteo" / "train_8000.tsv"])
    assert (criteo.source.format, len(criteo.dense), len(criteo.sparse)) == ("criteo", 13, 26)
    census = real_data / "census_kdd" / "census-income.test.gz"
    with pytest.raises(UserError, match="c12, c40, c41"):
        infer([census])
    assert infer([census], label="c41").columns["c41"].positive == " 50000+."
    with pytest.raises(UserError, match=r"rating:float.*5 values"):
        infer([real_data / "ml_100k" / "ml-100k.inter"], label="rating:float")


def test_movielens_style_headers(tmp_path: Path) -> None:
    lines = [f"{i % 7}\t{i % 5}\t{i % 2}\t{881250949 + i}" for i in range(300)]
    (tmp_path / "x.inter").write_text("\n".join(["user_id:token\titem_id:token\tlabel:float\ttimestamp:float", *lines]))
    kinds = {name: column.kind for name, column in infer([tmp_path / "x.inter"]).columns.items()}
    assert list(kinds.values()) == ["categorical", "categorical", "label", "time"]
