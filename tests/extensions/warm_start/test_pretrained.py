from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.core import UserError
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.serving import load
from sparrow.serving.export import export
from sparrow.trained.build import tables_of
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import train
from sparrow.training.loop import Trainer
from tests.runs import run_of
from tests.training.test_loop import Kill, dies_at, same, tensors

DIM = 4


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Items are text, users integers, and hashes have rows in common."""
    place, rng = tmp_path_factory.mktemp("pretrained"), np.random.default_rng(0)
    columns = {
        "click": rng.integers(0, 2, 900),
        "item_id": [f"i{x}" for x in rng.integers(0, 30, 900)],
        "user": rng.integers(5, 25, 900),
        "hashed": rng.integers(0, 90, 900),
    }
    pq.write_table(pa.table(columns), place / "log.parquet")
    schema = Schema(
        columns={
            "click": Column(kind="label"),
            "item_id": Column(kind="categorical", table="item"),
            "user": Column(kind="categorical", table="user"),
            "hashed": Column(kind="categorical", table="hashed"),
        },
        encodings={
            "item": Encoding(),
            "user": Encoding(),
            "hashed": Encoding(kind="hash", rows=64),
        },
    )
    data.prepare([place / "log.parquet"], place / "prepared", schema=schema)
    return place / "prepared"


def write(path: Path, ids: list[Any], dim: int = DIM, key: str = "item_id", **more: Any) -> Path:
    vectors = [[float(i), *([0.25] * (dim - 1))] for i in range(len(ids))]
    pq.write_table(pa.table({key: ids, "vector": vectors, **more}), path)
    return path


def settings(prepared: Path, place: Path, **more: Any) -> Run:
    changes = {
        "model.name": "dcnv2",
        "model.dim": DIM,
        "data.batch_size": 100,
        "checkpoint.every": 2,
        **more,
    }
    return run_of(prepared, place, **changes)


def rows(model: Any, table: str) -> torch.Tensor:
    return next(
        record.weight
        for of in tables_of(model)
        for record in of.all_records()
        if record.component.name == table
    )


def begun(run: Run) -> tuple[Any, list[str]]:
    """The model before its first step, and what is said."""
    told: list[str] = []
    trainer = Trainer(
        run, listener=lambda event, values: told.append(values["text"]) if event == "note" else None
    )
    trainer._train = lambda: {}  # type: ignore[method-assign]
    trainer.fit()
    return trainer.job.model, told


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_ids_begin_with_their_vectors_and_others_at_random(
    prepared: Path, tmp_path: Path, name: str
) -> None:
    ids = [*(f"i{x}" for x in range(20)), "nobody", None]
    file = write(tmp_path / "items.parquet", ids)
    more: dict[str, Any] = {"tables.format.name": name}
    model, told = begun(
        settings(prepared, tmp_path / "run", **{"tables.init.item": str(file)}, **more)
    )
    plain, _ = begun(settings(prepared, tmp_path / "plain", **more))
    transforms = data.open(prepared).transforms
    row_N = transforms.rows_of("item", pa.array(ids))
    found, random = rows(model, "item"), rows(plain, "item")
    for place, row in enumerate(row_N[:20].tolist()):
        wanted = torch.tensor([place, 0.25, 0.25, 0.25])
        assert torch.allclose(found[row], wanted, atol=place / 100)
        assert name != "fp32" or torch.equal(found[row], wanted)
    others = sorted(set(range(len(found))) - set(row_N[:20].tolist()))
    assert torch.equal(found[others], random[others]) and {0, 1} <= set(others)
    assert torch.equal(rows(model, "user"), rows(plain, "user"))
    assert [text for text in told if text.startswith("tables.init")] == [
        f"tables.init.item: 20 of 30 ids begin with vectors of {file}, the others with random ones;"
        " 2 of its vectors are of ids that the log does not know"
    ]


def test_integers_of_a_range_by_number_or_text(prepared: Path, tmp_path: Path) -> None:
    for number, ids in enumerate(([7, 5, 10**12], ["7", "5", "6000"], [7.0, 5.0, None])):
        file = write(tmp_path / "users.parquet", ids, key="user", other=["a", "b", "c"])
        model, _ = begun(
            settings(prepared, tmp_path / f"run{number}", **{"tables.init.user": str(file)})
        )
        found = rows(model, "user")[
            data.open(prepared).transforms.rows_of("user", pa.array([7, 5]))
        ]
        assert torch.equal(found[:, 0], torch.tensor([0.0, 1.0]))


def test_resumed_is_uninterrupted_and_reads_no_file_again(prepared: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "items.parquet", [f"i{x}" for x in range(30)])
    runs = [
        settings(prepared, tmp_path / place, **{"tables.init.item": str(file)})
        for place in ("whole", "cut")
    ]
    whole = train(runs[0])
    with pytest.raises(Kill):
        train(runs[1], listener=dies_at(5))
    file.unlink()
    assert train(runs[1], resume=True) | {"run_dir": ""} == whole | {"run_dir": ""}
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "cut"))
    export(tmp_path / "whole", tmp_path / "model", [prepared.parent / "log.parquet"])
    assert "items.parquet" not in (tmp_path / "model" / "run.toml").read_text()
    load(tmp_path / "model")


def test_a_table_that_does_not_learn_stays(prepared: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "items.parquet", [f"i{x}" for x in range(30)])
    frozen = [{"names": ["item"], "rule": {"name": "sgd", "lr": 0.0}}]
    more = {"tables.init.item": str(file)}
    train(settings(prepared, tmp_path / "frozen", **more, **{"tables.overrides": frozen}))
    train(settings(prepared, tmp_path / "trained", **more))
    row_N = data.open(prepared).transforms.rows_of("item", pa.array([f"i{x}" for x in range(30)]))
    wanted = torch.tensor([[float(i), 0.25, 0.25, 0.25] for i in range(30)])
    assert torch.equal(rows(restore(tmp_path / "frozen").model, "item")[row_N], wanted)
    assert not torch.equal(rows(restore(tmp_path / "trained").model, "item")[row_N], wanted)


def test_an_earlier_run_comes_first(prepared: Path, tmp_path: Path) -> None:
    """What it knew stays as it learnt it; new ids begin with the file's vectors."""
    train(settings(prepared, tmp_path / "old"))
    log, rng = tmp_path / "log.parquet", np.random.default_rng(1)
    columns = {
        "click": rng.integers(0, 2, 600),
        "item_id": [f"i{x}" for x in rng.integers(20, 40, 600)],
        "user": rng.integers(5, 25, 600),
        "hashed": rng.integers(0, 90, 600),
    }
    pq.write_table(pa.table(columns), log)
    data.prepare([log], tmp_path / "next", schema=data.open(prepared).transforms, grow=True)
    file = write(tmp_path / "items.parquet", [f"i{x}" for x in range(40)])
    more = {"tables.init.item": str(file), "init_from": str(tmp_path / "old")}
    model, _ = begun(settings(tmp_path / "next", tmp_path / "new", **more))
    then, now = restore(tmp_path / "old"), data.open(tmp_path / "next").transforms
    both = pa.array([f"i{x}" for x in range(30)])
    found = rows(model, "item")
    assert torch.equal(
        found[now.rows_of("item", both)],
        rows(then.model, "item")[then.transforms.rows_of("item", both)],
    )
    new = found[now.rows_of("item", pa.array(["i35", "i36"]))]
    assert torch.equal(new[:, 0], torch.tensor([35.0, 36.0]))


@pytest.mark.parametrize(
    ("table", "make", "words"),
    [
        ("item", lambda p: write(p, ["i1", "i2"], dim=8), r"vectors of 8 numbers, and the table's have 4; change"),
        ("item", lambda p: write(p, ["i1", "i2", "i1"]), r"an id has two vectors; keep one of them"),
        ("item", lambda p: write(p, ["i1", "i2"], key="a", b=[1, 2]), r"no column of ids is known; name it 'item'"),
        ("item", lambda p: pq.write_table(pa.table({"item_id": ["i1"]}), p) or p, r"no column of lists of floats"),
        ("item", lambda p: write(p, ["i1"], more=[[0.5]]), r"columns of vectors \(lists of floats\): vector, more"),
        ("item", lambda p: pq.write_table(pa.table({"item_id": ["i1", "i2"], "v": [[1.0] * 4, [1.0] * 3]}), p) or p,
         r"column 'v', row 1: a vector of 3 numbers where others have 4; mend it or leave it blank"),
        ("item", lambda p: p, r"cannot be read \(.*\); give a Parquet file"),
        ("item", lambda p: p.write_text("a,b") and p, r"cannot be read"),
        ("hashed", lambda p: write(p, [1, 2], key="hashed"), r"several ids of this table may share a row; g"),
        ("itm", lambda p: write(p, ["i1"]), r"tables\.init: no table 'itm'; did you mean 'item'\?"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(
    prepared: Path, tmp_path: Path, table: str, make: Any, words: str
) -> None:
    file = make(tmp_path / "vectors.parquet")
    with pytest.raises(UserError, match=words) as caught:
        train(settings(prepared, tmp_path / "run", **{f"tables.init.{table}": str(file)}))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("tables.init")
