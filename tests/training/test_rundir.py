"""A run's folder: one training at a time, of one run and one log."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparrow import data
from sparrow.analysis import picture
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.embeddings import TableChoices
from sparrow.extensions.blend import baseline
from sparrow.extensions.calibration import callback as calibrated
from sparrow.features.schema import Split
from sparrow.kernels.rules import sgd
from sparrow.models import dlrm
from sparrow.optimizers import sgd as dense_sgd
from sparrow.trained.run import Loop
from sparrow.trained.scorer import restore
from sparrow.training import train
from sparrow.training.rundir import RunDir
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


@pytest.mark.parametrize(
    "more", [["--calibration.method", "logistic"], ["--budget", "1s"]], ids=["calibrated", "search"]
)
def test_a_directory_is_taken_until_the_last_file_is_written(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """That is the picture. Calibrators, and a regression that is fitted beside the run, come before
    it.
    """
    found: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            with (
                pytest.raises(UserError, match="another training is running here"),
                RunDir(tmp_path / "run").locked(),
            ):
                pass
            found.append(name)
            return real(*args, **how)

        return call

    for name, module in (
        ("calibrate", calibrated),
        ("evaluate_baseline", baseline),
        ("draw", picture),
    ):
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    flags = [
        "--run_dir",
        str(tmp_path / "run"),
        "--loop.max_steps",
        "3",
        "--log.tensorboard",
        "false",
    ]
    assert main(["train", str(prepared), "--model.name", "dlrm", *flags, *more]) == 0
    assert found == [
        *(["calibrate"] if "--calibration.method" in more else []),
        "evaluate_baseline",
        "draw",
    ]
    with RunDir(tmp_path / "run").locked():  # and then it is free
        pass


def test_a_run_that_is_over_says_what_would_make_it_go_on(prepared: Path, tmp_path: Path) -> None:
    """More steps, epochs or patience, whichever ended it. With these it goes on."""
    still: dict[str, Any] = {
        "tables": TableChoices(rule=sgd.Config(lr=0.0)),
        "dense": dense_sgd.Config(lr=0.0),
    }
    notes: list[str] = []

    def go(loop: Loop, resume: bool) -> dict[str, Any]:
        notes.clear()
        run = small_run(prepared, tmp_path / "run", loop=loop, **still)
        return train(
            run,
            resume=resume,
            listener=lambda e, v: notes.append(v["text"]) if e == "note" else None,
        )

    short, patient = Loop(max_steps=4), Loop(epochs=3, patience=2, evaluate_every=2)
    go(short, resume=False)
    for loop, more, at, total in (
        (short, "max_steps", 4, 4),
        (Loop(), "epochs", 19, 19),
        (patient, "patience", 20, 57),
    ):
        before = go(loop, resume=True)
        if loop is not short:
            assert any(note.startswith("continuing from step ") for note in notes)
        assert go(loop, resume=True)["examples"] == before["examples"]
        told = (
            f"the run is over at step {at} of {total}, so that nothing is trained; it goes on with"
            " a larger"
        )
        assert notes == [f"{told} --loop.{more}"]


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
    result = train(
        longer, resume=True, listener=lambda e, v: notes.append(v["text"]) if e == "note" else None
    )
    assert notes == ["resumed with loop.epochs = 2, it was 1", "continuing from step 19 of 38"]
    assert result["examples"] == 2 * data.open(prepared).rows("train")
