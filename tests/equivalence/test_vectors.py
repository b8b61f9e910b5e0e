"""Logs with vector columns: text = Parquet, dedup = expanded, resumed = uninterrupted, served =
predicted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.analysis.importance import measure_importance
from sparrow.apps.convert import convert
from sparrow.core import UserError
from sparrow.data.batches.parts import PARTS
from sparrow.data.meaning.inference import infer
from sparrow.features.schema import Cluster, Column, Encoding, Join, Schema, Source
from sparrow.metrics import auc
from sparrow.serving import load
from sparrow.serving.export import export
from sparrow.trained.predict import predict
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.equivalence.test_every_model import FAMILY
from tests.runs import run_of
from tests.training.test_loop import Kill, dies_at, tensors
from tests.training.test_loop import same as same_tensors

ROWS, SIZE = 1500, 6


def raw(rows: int = ROWS, seed: int = 0) -> dict[str, Any]:
    """Clicks that hang on one direction of a vector, which some rows lack."""
    rng = np.random.default_rng(seed)
    x_NS = rng.normal(0, 1, (rows, SIZE)).astype(np.float32) * np.float32(
        [1, 10, 0.1, 1, 1, 1]
    ) + np.float32(3)
    z_N = (x_NS - 3) @ np.array([2, 0, 10, -1, 0, 0])
    vectors = [None if i % 11 == 3 else x.tolist() for i, x in enumerate(x_NS)]
    return {
        "click": (rng.random(rows) < 1 / (1 + np.exp(-z_N))).astype(np.int64),
        "user": rng.integers(0, 40, rows),
        "n": rng.normal(0, 1, rows),
        "emb": vectors,
        "after": rng.normal(0, 1, rows),
    }


def write(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(
        pa.table(columns | {"emb": pa.array(columns["emb"], pa.list_(pa.float32()))}), path
    )
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("vectors")
    write(place / "log.parquet", raw())
    data.prepare([place / "log.parquet"], place / "prepared")
    return place / "prepared"


def write_text(path: Path, columns: dict[str, Any]) -> Path:
    """The same rows as CSV, with vectors as Python prints lists."""
    cells = {
        name: ["" if x is None else f'"{x}"' for x in of] if name == "emb" else of
        for name, of in columns.items()
    }
    rows = zip(*(of if isinstance(of, list) else of.tolist() for of in cells.values()), strict=True)
    path.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]))
    return path


def part(prepared: Path, name: str = "train") -> pa.Table:
    return pq.read_table(prepared / name / "part-00000.parquet")


def test_fitted_values_are_those_of_training(prepared: Path) -> None:
    dataset = data.open(prepared)
    column = dataset.schema.columns["emb"]
    assert (column.kind, column.size, column.transform) == ("vector", SIZE, "standard")
    assert dataset.schema.dense == ("n", "emb", "emb:missing", "after")
    assert dataset.schema.numbers == (
        "n",
        *(f"emb:{i}" for i in range(SIZE)),
        "emb:missing",
        "after",
    )
    (batch,) = dataset.loader(10_000)
    x_BS = batch.dense_BC[:, dataset.schema.places["emb"]]
    missing_B = batch.dense_BC[:, dataset.schema.places["emb:missing"].start]
    assert 0 < missing_B.sum() < len(missing_B) and not x_BS[missing_B == 1].any()
    there_BS = x_BS[missing_B == 0]
    # tails are tamed
    assert there_BS.mean(0).abs().max() < 0.1 and (there_BS.std(0) - 1).abs().max() < 0.15
    kept = np.array([x for x in raw()["emb"] if x is not None])
    assert np.allclose(column.means, kept.mean(0), atol=0.2) and np.allclose(
        column.stds, kept.std(0), rtol=0.1
    )
    again = data.prepare(
        [prepared.parent / "log.parquet"], prepared.parent / "again", schema=dataset.schema
    )
    assert again.schema == dataset.schema and part(prepared.parent / "again").equals(part(prepared))


def test_text_is_parquet(prepared: Path, tmp_path: Path) -> None:
    made = data.prepare([write_text(tmp_path / "log.csv", raw())], tmp_path / "prepared")
    assert any("emb: a vector of 6 numbers: text, cut at ','" in note for note in made.notes)
    assert part(tmp_path / "prepared").equals(part(prepared))


@pytest.mark.parametrize(
    ("row", "vector", "words"),
    [
        (
            700,
            [1.0, 2.0],
            (
                r"line 702: column 'emb', row 700: a vector of 2 numbers where others have 6; mend"
                r" it or"
            ),
        ),
        (
            3,
            [1.0, "x", 1.0, 1.0, 1.0, 1.0],
            r"line 5: column 'emb', row 3: number 1 of the vector is \"'x'\", which is no",
        ),
        (
            9,
            [1.0] * 5 + [float("nan")],
            r"line 11: column 'emb', row 9: number 5 of the vector is nan, which is not f",
        ),
    ],
)
def test_a_vector_that_does_not_fit_is_one_line(
    tmp_path: Path, row: int, vector: list[Any], words: str
) -> None:
    columns = raw()
    columns["emb"][row] = vector
    schema = Schema(
        columns={"click": Column(kind="label"), "emb": Column(kind="vector", separator="json")}
    )
    with pytest.raises(UserError, match=rf"log\.csv, {words}") as caught:
        data.prepare([write_text(tmp_path / "log.csv", columns)], tmp_path / "out", schema=schema)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_vector_without_transform_stays_as_it_is(prepared: Path, tmp_path: Path) -> None:
    columns = {"click": Column(kind="label"), "emb": Column(kind="vector", transform="none")}
    made = data.prepare(
        [prepared.parent / "log.parquet"], tmp_path / "out", schema=Schema(columns=columns)
    )
    assert made.schema.columns["emb"].means is None and "emb:missing" not in made.schema.columns
    cells = [cell for name in PARTS for cell in part(tmp_path / "out", name)["emb"].to_pylist()]
    wanted = [np.array(x or [0] * SIZE, "<f4").tobytes() for x in raw()["emb"]]
    assert sorted(cells) == sorted(wanted)


def test_vectors_of_a_side_table(tmp_path: Path) -> None:
    """Rows whose key is not there have none."""
    columns = raw(600)
    kept = [row for row, x in enumerate(columns["emb"]) if x is not None][:30]
    vectors = pa.FixedSizeListArray.from_arrays(
        pa.array(np.ravel([columns["emb"][row] for row in kept])), SIZE
    )
    pq.write_table(pa.table({"user": list(range(30)), "emb": vectors}), tmp_path / "users.parquet")
    pq.write_table(
        pa.table({name: columns[name] for name in ("click", "user")}), tmp_path / "log.parquet"
    )
    source = Source(joins=(Join(file=str(tmp_path / "users.parquet"), on="user"),))
    schema = data.prepare([tmp_path / "log.parquet"], tmp_path / "out", source=source).schema
    assert schema.columns["emb"].size == SIZE and "emb:missing" in schema.columns
    table = part(tmp_path / "out")
    x_NS = np.frombuffer(b"".join(table["emb"].to_pylist()), "<f4").reshape(-1, SIZE)
    assert (x_NS.any(1) == (table["emb:missing"].to_numpy() == 0)).all()
    assert len(np.unique(x_NS, axis=0)) == 31


def test_fixed_size_lists_are_exported_and_told_where_arrow_fails(tmp_path: Path) -> None:
    columns = {name: of for name, of in raw(300).items() if name in ("click", "emb")}
    whole = [x or [0.0] * SIZE for x in columns["emb"]]
    for name, vectors in (("whole", whole), ("gaps", columns["emb"])):
        table = pa.table(
            {"click": columns["click"], "emb": pa.array(vectors, pa.list_(pa.float32(), SIZE))}
        )
        pq.write_table(table, tmp_path / f"{name}.parquet")
    data.prepare([tmp_path / "whole.parquet"], tmp_path / "prepared")
    train(
        run_of(
            tmp_path / "prepared",
            tmp_path / "run",
            **{"model.name": "logistic", "loop.max_steps": 2},
        )
    )
    # keeps a row without a vector
    export(tmp_path / "run", tmp_path / "model", [tmp_path / "whole.parquet"])
    load(tmp_path / "model")
    with pytest.raises(
        UserError, match=r"gaps\.parquet: a fixed-size list is missing in a row, which Arrow can"
    ):
        data.prepare([tmp_path / "gaps.parquet"], tmp_path / "out")


def test_dedup_is_expanded(tmp_path: Path) -> None:
    """Vectors of a feature group are stored once for each run of equal rows."""
    columns = {name: [x for x in of for _ in range(3)] for name, of in raw(200).items()}
    write(tmp_path / "log.parquet", columns | {"session": np.repeat(np.arange(200), 3)})
    schema = infer([tmp_path / "log.parquet"])
    kinds = {"session": Column(kind="session"), "user": Column(kind="categorical", table="user")}
    plain = replace(schema, columns=schema.columns | kinds, encodings={"user": Encoding()})
    plain = replace(plain, cluster=Cluster(by="session", hours=0))
    for name, of in (
        ("plain", plain),
        ("grouped", replace(plain, groups={"content": ("emb", "user")})),
    ):
        data.prepare([tmp_path / "log.parquet"], tmp_path / name, schema=of)
    grouped = data.open(tmp_path / "grouped")
    assert (
        grouped.schema.groups["content"] == ("emb", "user", "emb:missing")
        and grouped.factor("content") > 2.5
    )
    loaders = [grouped.loader(100, dedup="on"), grouped.loader(100, dedup="off")]
    for alone, *others in zip(data.open(tmp_path / "plain").loader(100), *loaders, strict=True):
        for batch in others:
            assert torch.equal(batch.dense_BC, alone.dense_BC) and torch.equal(
                batch.labels_BT, alone.labels_BT
            )
            assert torch.equal(batch.ids.expanded().values_N, alone.ids.values_N)


MEMBERS = [name for name in FAMILY.names() if name != "din"]


def settings(name: str) -> dict[str, Any]:
    """Of a short run of a model."""
    changes: dict[str, Any] = {
        "model.name": name,
        "checkpoint.every": 3,
        "data.batch_size": 100,
        "loop.epochs": 2,
    }
    changes |= {} if name == "logistic" else {"model.dim": 4}
    return changes | ({"model.trees": 0} if name == "blend" else {})


@pytest.mark.parametrize(
    # a checkpoint has nothing of vectors; tests/equivalence/test_every_model.py resumes each model
    "name",
    [
        pytest.param(name, marks=() if name in ("dcnv2", "blend") else pytest.mark.slow)
        for name in MEMBERS
    ],
)
def test_resumed_is_uninterrupted(prepared: Path, tmp_path: Path, name: str) -> None:
    whole = train(run_of(prepared, tmp_path / "whole", **settings(name)))
    with pytest.raises(Kill):
        train(run_of(prepared, tmp_path / "cut", **settings(name)), listener=dies_at(4))
    cut = train(run_of(prepared, tmp_path / "cut", **settings(name)), resume=True)
    assert cut | {"run_dir": ""} == whole | {"run_dir": ""}
    assert same_tensors(tensors(tmp_path / "whole"), tensors(tmp_path / "cut"))


@pytest.mark.parametrize("name", MEMBERS)
def test_every_model_reads_vectors_and_serves(prepared: Path, tmp_path: Path, name: str) -> None:
    train(run_of(prepared, tmp_path / "run", **settings(name)))
    log = write(tmp_path / "new.parquet", raw(300, seed=5))
    predict(tmp_path / "run", [log], tmp_path / "scores.parquet", keep=["click"])
    scores_N = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    export(tmp_path / "run", tmp_path / "model", [log])
    scorer = load(tmp_path / "model")
    rows = pq.read_table(log).to_pylist()
    sources = {name: [row[name] for row in rows] for name in scorer.encoder.sources}
    assert np.abs(scorer.score(sources)[:, 0] - scores_N).max() < 1e-5
    once = scorer.rank(
        {"emb": rows[0]["emb"], "n": 0.5}, {n: sources[n] for n in sources if n not in ("emb", "n")}
    )
    alike = scorer.score(sources | {"emb": [rows[0]["emb"]] * 300, "n": [0.5] * 300})
    assert np.abs(once - alike).max() < 1e-5


def test_a_vector_tells_what_it_tells(prepared: Path, tmp_path: Path) -> None:
    """With it a model ranks; with the vectors of other rows it does not."""
    changes: dict[str, Any] = {"model.name": "dcnv2", "data.batch_size": 100, "loop.epochs": 5}
    train(run_of(prepared, tmp_path / "run", **changes))
    log = write(tmp_path / "new.parquet", raw(1000, seed=7))
    columns = raw(1000, seed=7)
    other = write(
        tmp_path / "other.parquet", columns | {"emb": columns["emb"][1:] + columns["emb"][:1]}
    )

    def judged(path: Path) -> float:
        predict(
            tmp_path / "run", [path], tmp_path / "scores.parquet", keep=["click"], overwrite=True
        )
        found = pq.read_table(tmp_path / "scores.parquet")
        return float(
            auc(torch.tensor(found["score"].to_numpy()), torch.tensor(found["click"].to_numpy()))
        )

    assert judged(log) > 0.8 > 0.6 > judged(other)


def test_requests_with_vectors_that_do_not_fit(prepared: Path, tmp_path: Path) -> None:
    train(run_of(prepared, tmp_path / "run", **{"model.name": "logistic", "loop.max_steps": 2}))
    export(tmp_path / "run", tmp_path / "model", [prepared.parent / "log.parquet"])
    scorer = load(tmp_path / "model")
    assert scorer.encoder.kinds["emb"] == "vector" and scorer.encoder.sizes == {"emb": SIZE}
    row = {"user": 1, "n": 0.0, "after": 0.0}
    good = scorer.score([row | {"emb": [1, 2.5, 3, 4, 5, 6]}])
    assert np.array_equal(good, scorer.score([row | {"emb": np.float32([1, 2.5, 3, 4, 5, 6])}]))
    missing = [scorer.score([row | {"emb": of}]) for of in (None, [])]
    assert np.array_equal(*missing) and not np.array_equal(missing[0], good)
    for wrong, words in (
        (
            [1.0] * 5,
            r"row 1: a vector of 5 numbers where others have 6; give a list of 6 numbers, or null",
        ),
        (
            [1.0] * 5 + [None],
            r"row 1: number 5 of the vector is missing; give a list of 6 numbers, or null",
        ),
        (
            [1.0] * 5 + [float("nan")],
            r"row 1: number 5 of the vector is nan, which is not finite; give a list",
        ),
        ([[1.0] * 6], r"row 1"),
        (3.5, r"row 1: double where|where a vector is needed"),
    ):
        with pytest.raises(UserError, match=words):
            scorer.score([row | {"emb": [0.0] * 6}, row | {"emb": wrong}])


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_converted_programs_take_vectors(prepared: Path, tmp_path: Path, to: Any) -> None:
    train(
        run_of(
            prepared,
            tmp_path / "run",
            **{"model.name": "dcnv2", "loop.max_steps": 2, "model.dim": 4},
        )
    )
    export(tmp_path / "run", tmp_path / "model", [prepared.parent / "log.parquet"])
    convert(tmp_path / "model", tmp_path / "made", to)
    assert json.loads((tmp_path / "made" / "inputs.json").read_text())["inputs"]["emb"][
        "shape"
    ] == ["rows", SIZE]


def test_importance_moves_a_vector_as_a_whole(prepared: Path, tmp_path: Path) -> None:
    train(
        run_of(
            prepared,
            tmp_path / "run",
            **{"model.name": "dcnv2", "data.batch_size": 100, "loop.epochs": 3},
        )
    )
    found = restore(tmp_path / "run")
    (batch,) = data.open(prepared).loader(10_000, split="test")
    each = measure_importance(found.scores, batch, found.schema, batch_size=200)
    assert each[0].column == "emb" and {one.column for one in each} == {"emb", "n", "user", "after"}
