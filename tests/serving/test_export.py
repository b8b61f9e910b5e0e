from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.embeddings import RowRecords
from sparrow.embeddings.spec import Component
from sparrow.features.schema import missing_of
from sparrow.kernels.formats import bf16, fp16, fp32, int8, split_bf16
from sparrow.kernels.rules import sgd
from sparrow.metrics import evaluate
from sparrow.serving import Scorer, load
from sparrow.serving.export import _check_finite, _rows, export
from sparrow.serving.golden_rows import ROWS
from sparrow.serving.scorer import CHECK, IDS
from sparrow.trained.run import Loop
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.runs import small_run


@pytest.fixture(scope="module")
def run_dir(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("export") / "run"
    train(small_run(prepared, place, loop=Loop(max_steps=4)))
    return place


@pytest.fixture(scope="module")
def model(run_dir: Path, log: Path) -> Path:
    export(run_dir, run_dir.parent / "model", [log])
    return run_dir.parent / "model"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_same_run_makes_the_same_folder(
    run_dir: Path, model: Path, log: Path, tmp_path: Path
) -> None:
    """Wherever it is, and whenever: no path and no time is in it."""
    shutil.copytree(run_dir, tmp_path / "elsewhere")
    export(tmp_path / "elsewhere", tmp_path / "again", [log])
    assert contents(tmp_path / "again") == contents(model)
    for name, held in contents(model).items():
        assert str(run_dir).encode() not in held and str(log).encode() not in held, name


def test_rows_that_are_kept_are_telling(model: Path) -> None:
    """A missing value of every column, an unknown id, an empty list and a long one are among
    them.
    """
    kept, schema = pq.read_table(model / CHECK), load(model).schema
    assert kept.num_rows == ROWS
    for name in (*schema.dense, *schema.sparse):
        source = schema.columns[name].source or name
        if source not in kept.column_names:  # it tells of another column
            assert any(missing_of(other) == name for other in schema.dense)
            continue
        assert kept[source].null_count, name
        if name in schema.sparse:
            ids = kept[IDS + name].to_pylist()
            if schema.encodings[str(schema.columns[name].table)].is_numbered:
                assert any(1 in of for of in ids), name
            if schema.columns[name].kind == "list":
                lengths = [len(of) for of in ids]
                assert min(lengths) == 0 and max(lengths) > 10


def test_made_rows_are_no_persons(run_dir: Path, model: Path, log: Path, tmp_path: Path) -> None:
    export(run_dir, tmp_path / "made", [log], check="made")
    load(tmp_path / "made")
    names = list(load(model).encoder.sources)
    plain = pq.read_table(log).select(names).to_pylist()
    kept = pq.read_table(tmp_path / "made" / CHECK).select(names).to_pylist()
    assert len(kept) == ROWS and not any(row in plain for row in kept)
    known = [row["user"] for row in plain]
    assert sum(row["user"] in known for row in kept) > ROWS / 2  # each column is drawn from the log


def test_the_card_says_what_the_model_is(run_dir: Path, model: Path, prepared: Path) -> None:
    card, found, dataset = (
        json.loads((model / "card.json").read_text()),
        restore(run_dir),
        data.open(prepared),
    )
    for split in ("valid", "test"):
        expected = evaluate(found.scores, dataset.loader(500, split=split))
        told = card["metrics"][split]["labels"]["label"]
        for name in ("auc", "gauc", "ne", "calibration"):
            assert (
                told[name]["value"] == pytest.approx(expected[name], rel=1e-6)
                and told[name]["error"] > 0
            )
    training = card["training"]
    assert training["rows"] == sum(training["scores"]["label"]) == dataset.rows()
    for name, (unknown, ids) in dataset.manifest["unknown_ids"]["train"].items():
        if found.schema.columns[name].kind == "list":
            assert training["features"][name]["unknown"] == pytest.approx(unknown / ids)
    raw = (
        pq.read_table(prepared / "train" / "part-00000.parquet")
        if (prepared / "train").is_dir()
        else None
    )
    assert raw is not None
    shares = {name: training["features"][name]["missing"] for name in found.schema.dense}
    assert 0 < shares["num_0"] == pytest.approx(np.mean(raw["num_0:missing"].to_numpy()))


def test_the_command(
    run_dir: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert main(["export", str(run_dir), str(out), "--log", str(log)]) == 0
    said = capsys.readouterr().out
    assert (
        "tables" in said
        and f"{sum(map(len, contents(out).values())) - (out / 'manifest.json').stat().st_size:,}"
        in said
    )
    assert main(["export", str(run_dir), str(out), "--log", str(log)]) == 2
    assert "model: exists; choose another name" in capsys.readouterr().err
    assert (
        main(
            ["export", str(run_dir), str(tmp_path / "other"), "--log", str(tmp_path / "no.parquet")]
        )
        == 2
    )
    assert main(["export", str(tmp_path), str(tmp_path / "other"), "--log", str(log)]) == 2
    assert not (tmp_path / "other").exists()


def test_a_folder_appears_after_its_own_check(
    run_dir: Path, model: Path, log: Path, tmp_path: Path
) -> None:
    """Nothing is left of one that fails, the error names the folder that was asked for, and the
    name is free.
    """

    def check(scorer: Scorer) -> None:
        if scorer.folder.path != model:
            raise UserError(f"{scorer.folder.path / CHECK}: another score")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "check", check)
        for name, base in (("model", []), ("delta", [model])):
            with pytest.raises(UserError, match=rf"^{tmp_path / name / CHECK}: another score$"):
                export(run_dir, tmp_path / name, [log], base=base)
    assert not list(tmp_path.iterdir())
    folder = export(run_dir, tmp_path / "model", [log])
    assert folder.path == tmp_path / "model" and all(Path(path).exists() for path in folder.checked)
    assert folder == load(tmp_path / "model").folder


def test_logs_that_cannot_be_used_are_told(run_dir: Path, log: Path, tmp_path: Path) -> None:
    table = pq.read_table(log)
    pq.write_table(table.slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(UserError, match="empty"):
        export(run_dir, tmp_path / "out", [tmp_path / "empty.parquet"])
    pq.write_table(table.drop_columns(["item"]), tmp_path / "without.parquet")
    with pytest.raises(UserError, match="item"):
        export(run_dir, tmp_path / "out", [tmp_path / "without.parquet"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "format", [fp32.Config(), bf16.Config(), fp16.Config(), int8.Config(), split_bf16.Config()]
)
def test_a_row_that_is_not_finite_is_told(run_dir: Path, format: Any) -> None:
    """And not one of large numbers, whose sum is infinite."""
    component = Component(
        name="t", rows=500, dim=8, format=format, rule=sgd.Config(), init_scale=0.1
    )
    record, found = RowRecords(component, 0), restore(run_dir)
    large = 6e4 if isinstance(format, fp16.Config) else 1e38
    record.begin_with(torch.arange(500), torch.full((500, 8), large))
    rows = _rows(record)
    _check_finite(found, record, rows, slice(0, 500))
    for bad in (torch.nan, torch.inf, -torch.inf):
        values_D = torch.full((1, 8), large)
        values_D[0, 5] = bad
        record.begin_with(torch.tensor([321]), values_D)
        rows = _rows(record)
        _check_finite(found, record, rows, slice(0, 321))
        for at in (slice(300, 400), torch.tensor([2, 321, 400])):
            with pytest.raises(UserError, match="row 321 of table 't' is not finite"):
                _check_finite(found, record, rows, at)


@pytest.mark.parametrize("is_text", [True, False])
def test_parts_of_a_time(tmp_path: Path, is_text: bool) -> None:
    """As `prepare` infers them of three weeks. A row without the time has neither, and is scored
    all the same.
    """
    seconds = np.arange(2000) * 900 + 1_700_000_000
    texts = [datetime.fromtimestamp(s, UTC).strftime("%Y-%m-%d %H:%M:%S") for s in seconds.tolist()]
    random = np.random.default_rng(0)
    made = pa.table(
        {
            "ts": texts if is_text else seconds,
            "item": [f"i{i}" for i in random.integers(0, 20, 2000)],
            "click": (
                (random.random(2000) < np.where(seconds // 3600 % 24 < 12, 0.7, 0.2)).astype(int)
            ),
        }
    )
    pq.write_table(made, tmp_path / "log.parquet")
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared")
    run = small_run(tmp_path / "prepared", tmp_path / "run", loop=Loop(max_steps=5))
    train(run)
    assert {"ts_hour", "ts_weekday"} <= set(restore(tmp_path / "run").schema.sparse)
    export(tmp_path / "run", tmp_path / "model", [tmp_path / "log.parquet"])
    rows = made.slice(0, 3).drop_columns(["click"])
    gone = rows.set_column(0, "ts", pa.array([rows["ts"][0].as_py(), None, rows["ts"][2].as_py()]))
    scores = restore(tmp_path / "run").score_rows(gone)[:, 0]
    served = load(tmp_path / "model").score(gone.to_pylist())
    np.testing.assert_allclose(np.asarray(served).reshape(-1), scores, atol=1e-6)
    assert scores[1] != restore(tmp_path / "run").score_rows(rows)[1, 0]
