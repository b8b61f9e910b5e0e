"""A run's folder: one training at a time, of one run and one log."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.features.schema import Split
from sparrow.models import dlrm
from sparrow.trained.run import Loop
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.runs import small_run


def test_another_log_is_not_taken_for_the_same(prepared: Path, tmp_path: Path) -> None:
    train(small_run(prepared, tmp_path / "run"))
    transforms, raw = data.open(prepared).transforms, prepared.parent / "log.parquet"
    schema = transforms.schema
    data.prepare([raw], tmp_path / "seed", schema=transforms, split=Split(by="ratio", seed=9))
    with pytest.raises(UserError, match="not the one that this run began with"):
        train(small_run(tmp_path / "seed", tmp_path / "run"), resume=True)
    name = schema.dense[0]
    columns = schema.columns | {name: dataclasses.replace(schema.columns[name], mean=100.0)}
    other = dataclasses.replace(transforms, schema=dataclasses.replace(schema, columns=columns))
    data.prepare([raw], tmp_path / "mean", schema=other)
    with pytest.raises(UserError, match=rf"another schema: columns\.{name}\.mean is 100\.0 there"):
        train(small_run(tmp_path / "mean", tmp_path / "run"), resume=True)


def test_one_training_per_directory(prepared: Path, tmp_path: Path) -> None:
    def second(event: str, values: dict[str, Any]) -> None:
        if event == "begin":
            with pytest.raises(UserError, match="another training is running here"):
                train(small_run(prepared, tmp_path / "run"), overwrite=True)

    assert train(small_run(prepared, tmp_path / "run"), listener=second)["step"] == 19


def test_overwriting_forgets_the_old_best(prepared: Path, tmp_path: Path) -> None:
    first = train(small_run(prepared, tmp_path / "run"))
    assert first["best_step"] == 19
    train(small_run(prepared, tmp_path / "run", loop=Loop(max_steps=8)), overwrite=True)
    assert restore(tmp_path / "run").step == 8
    with pytest.raises(UserError, match="give one of them"):
        train(small_run(prepared, tmp_path / "run"), overwrite=True, resume=True)


def test_two_runs_do_not_mix(prepared: Path, tmp_path: Path) -> None:
    run = small_run(prepared, tmp_path / "run")
    train(run)
    with pytest.raises(UserError, match="add --resume, --overwrite"):
        train(run)
    other = dataclasses.replace(run, model=dlrm.Config(dim=8, bottom=(8,), top=(8,)))
    with pytest.raises(UserError, match=r"another model: model\.dim is 4 there and 8 here"):
        train(other, resume=True)
    assert restore(tmp_path / "run").run.model.dim == 4  # refused before anything was changed
    train(other, overwrite=True)
    assert restore(tmp_path / "run").run.model.dim == 8


def test_resuming_says_what_changed(prepared: Path, tmp_path: Path) -> None:
    train(small_run(prepared, tmp_path / "run"))
    notes: list[str] = []
    longer = small_run(prepared, tmp_path / "run", loop=Loop(epochs=2))
    result = train(longer, resume=True, listener=lambda e, v: notes.append(v["text"]) if e == "note" else None)
    assert notes == ["resumed with loop.epochs = 2, it was 1", "continuing from step 19 of 38"]
    assert result["examples"] == 2 * data.open(prepared).rows("train")
