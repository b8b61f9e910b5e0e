from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.apps.numerics import auto
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.core.config import from_dict
from sparrow.extensions.low_precision.precision import recipe_file
from sparrow.features.schema import Split
from sparrow.layers.precision import Precision
from sparrow.models import dcnv2
from sparrow.trained.run import Loop, Run
from sparrow.training import train
from sparrow.training.loop import Trainer
from sparrow.training.rundir import RunDir
from tests.runs import run_of, small_run
from tests.training.test_loop import same, tensors

FLAGS = [
    "--threads",
    "1",
    "--model.name",
    "dcnv2",
    "--model.dim",
    "4",
    "--model.deep",
    "[8]",
    "--log.tensorboard",
    "false",
    "--data.batch_size",
    "256",
]
MODEL = dcnv2.Config(dim=4, deep=(8,))


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps, and a bf16 that is always faster."""
    monkeypatch.setattr(auto, "STEPS", 5)
    monkeypatch.setattr(auto, "ROWS", 300)
    monkeypatch.setattr(auto, "BUDGET", 1.0)
    times = lambda of, which, there: {name: 2.0 if name == "fp32" else 1.0 for name in there}  # noqa: E731
    monkeypatch.setattr("sparrow.apps.numerics.dispatch.milliseconds", times)
    monkeypatch.setattr("sparrow.layers.precisions.bf16.missing", lambda device: "")


@pytest.mark.usefixtures("decided")
def test_auto_decides_once_and_a_resumed_run_has_its_recipe(
    prepared: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def alone(run: Run, **how: Any) -> dict[str, Any]:
        """Begin the long run. No other one could have come before it since the short one began."""
        with (
            pytest.raises(UserError, match="another training is running here"),
            RunDir(tmp_path / "run").locked(),
        ):
            pass
        return train(run, **how)

    place = [
        "train",
        str(prepared),
        *FLAGS,
        "--run_dir",
        str(tmp_path / "run"),
        "--precision",
        "auto",
    ]
    with monkeypatch.context() as patched:
        patched.setattr("sparrow.training.train", alone)
        assert main([*place, "--loop.max_steps", "4"]) == 0
    with RunDir(tmp_path / "run").locked():  # and then it is free
        pass
    told = capsys.readouterr().err
    assert "precision: auto has bf16" in told and "on rows that have not chosen" in told
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # the short run left nothing
    first = Run.load(tmp_path / "run" / "run.toml").precision
    assert first.name == "bf16"
    assert first.sites
    kept = tmp_path / "run" / "auto.toml"
    assert recipe_file(kept)["name"] == "bf16"
    given = [*place[:-1], str(kept), "--loop.max_steps", "4"]
    given[given.index(str(tmp_path / "run"))] = str(tmp_path / "given")
    assert main(given) == 0  # a run that is given the recipe is the same
    assert same(tensors(tmp_path / "run"), tensors(tmp_path / "given"))
    monkeypatch.setattr(auto, "_decide", lambda *what: pytest.fail("decided again"))
    assert main([*place, "--resume", "--loop.max_steps", "8"]) == 0
    assert Run.load(tmp_path / "run" / "run.toml").precision == first
    assert kept.exists()
    place[-1] = "mxfp8"  # a run in another precision, that takes its place
    assert main([*place, "--overwrite", "--loop.max_steps", "1"]) == 0
    assert not kept.exists()


@pytest.mark.usefixtures("decided")
def test_auto_may_end_in_fp32(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is faster. The run has the bits of one of fp32, and the one that resumes it
    decides nothing.
    """
    times = lambda of, which, there: {name: 1.0 if name == "fp32" else 2.0 for name in there}  # noqa: E731
    monkeypatch.setattr("sparrow.apps.numerics.dispatch.milliseconds", times)
    said: list[str] = []
    plain = small_run(prepared, tmp_path / "plain", model=MODEL, loop=Loop(max_steps=4))
    asked = replace(plain, run_dir=str(tmp_path / "run"), precision=Precision("auto"))
    run = auto.choose_precision(
        asked,
        resume=False,
        overwrite=False,
        listener=lambda event, values: said.append(str(values)),
    )
    assert run.precision == Precision() and "precision: auto has fp32 (" in said[-1]
    assert from_dict(Precision, recipe_file(tmp_path / "run" / "auto.toml")) == Precision()
    for one in (run, plain):
        train(one)
    assert same(tensors(tmp_path / "run"), tensors(tmp_path / "plain"))
    monkeypatch.setattr(auto, "_decide", lambda *what: pytest.fail("decided again"))
    assert auto.choose_precision(asked, resume=True, overwrite=False) == run
    assert train(run, resume=True)["precision"]["name"] == "fp32"


@pytest.mark.slow
@pytest.mark.usefixtures("decided")
def test_of_tables_on_an_ssd_the_short_run_leaves_no_block(tmp_path: Path) -> None:
    """And the run that follows has the bits of one that was given the recipe."""
    generate(
        tmp_path / "log.parquet", rows=3000, users=900, items=1500, categorical=2, numeric=2, seed=5
    )
    data.prepare([tmp_path / "log.parquet"], tmp_path / "data")
    disk, settings = tmp_path / "disk", {"model.name": "dcnv2", "model.dim": 8, "model.deep": [8]}
    settings |= {
        "data.batch_size": 64,
        "loop.max_steps": 12,
        "tables.tier.name": "ssd",
        "tables.tier.fraction": 0.1,
    }
    found = []
    for name in ("auto", "given"):
        how = "auto" if name == "auto" else str(tmp_path / "auto" / "auto.toml")
        run = run_of(
            tmp_path / "data",
            tmp_path / name,
            **settings,
            **{"tiers.folder": str(disk)},
            precision=how,
        )
        run = auto.choose_precision(run, resume=False, overwrite=False)
        assert run.precision.name == "bf16"
        assert not list(disk.glob("*")) or name == "given"
        found.append(train(run))
        assert found[-1]["tables"]["ssd"]
    assert {path.name.rpartition("-")[0] for path in disk.iterdir()} == {"auto", "given"}
    assert found[0]["valid"] == found[1]["valid"]


@pytest.mark.usefixtures("decided")
def test_a_compiled_run_is_decided_for_uncompiled(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.Module.compile", lambda self: pytest.fail("compiled"))
    run = small_run(
        prepared, tmp_path / "run", model=MODEL, precision=Precision("auto"), compile=True
    )
    found = auto.choose_precision(run, resume=False, overwrite=False)
    assert found.compile
    assert found.precision.name == "bf16"


@pytest.mark.slow
@pytest.mark.usefixtures("decided")
@pytest.mark.filterwarnings("ignore")  # torch's own, of torch
def test_a_compiled_run_has_the_recipe(prepared: Path, tmp_path: Path) -> None:
    run = small_run(
        prepared, tmp_path / "run", model=MODEL, precision=Precision("auto"), loop=Loop(max_steps=6)
    )
    plain = train(auto.choose_precision(run, resume=False, overwrite=False))
    run = replace(run, run_dir=str(tmp_path / "compiled"), compile=True)
    compiled = train(auto.choose_precision(run, resume=False, overwrite=False))
    assert compiled["valid"]["logloss"] == pytest.approx(plain["valid"]["logloss"], rel=1e-3)
    assert compiled["precision"]["native"] == ["bf16"]


@pytest.mark.usefixtures("decided")
def test_a_signal_ends_it_before_the_run_begins(prepared: Path, tmp_path: Path) -> None:
    def listener(event: str, values: dict[str, Any]) -> None:
        if event == "begin":
            os.kill(os.getpid(), signal.SIGTERM)

    run = small_run(prepared, tmp_path / "run", model=MODEL, precision=Precision("auto"))
    with pytest.raises(UserError, match="SIGTERM came before 'auto' had chosen"):
        auto.choose_precision(run, resume=False, overwrite=False, listener=listener)
    assert [path.name for path in tmp_path.rglob("*")] == ["run", ".lock"]


def test_what_auto_refuses(
    prepared: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a step of training."""
    run = small_run(prepared, tmp_path / "run")
    assert auto.choose_precision(run, resume=False, overwrite=False) is run
    asked = replace(run, precision=Precision("auto"))
    with pytest.raises(UserError, match="precision: 'auto' is decided by `sparrow train`"):
        train(asked)
    train(run)
    monkeypatch.setattr(Trainer, "fit", lambda self: pytest.fail("trained"))
    with pytest.raises(UserError, match="holds a run"):
        auto.choose_precision(asked, resume=False, overwrite=False)
    with pytest.raises(UserError, match="began without 'auto'"):
        auto.choose_precision(asked, resume=True, overwrite=False)
    dropping = dcnv2.Config(dim=4, deep=(8,), dropout=0.1)
    other = replace(asked, run_dir=str(tmp_path / "other"))
    whole = data.prepare([log], tmp_path / "whole", split=Split(by="time", valid=0, test=0)).out
    patient = replace(other, data=replace(run.data, path=str(whole)), loop=Loop(patience=1))
    for changed, says in (
        (replace(other, run_dir=str(prepared)), "is a prepared log"),
        (patient, "loop.patience: nothing to be patient with"),
        (replace(other, model=dropping, compile=True), "compile: not with dropout yet"),
    ):
        with pytest.raises(UserError, match=says):
            auto.choose_precision(changed, resume=False, overwrite=False)
