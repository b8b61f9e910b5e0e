from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparrow.analysis.numerics import auto
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.layers import Precision
from sparrow.layers.precision import recipe_file
from sparrow.trained.run import Run
from sparrow.training import train
from tests.runs import small_run
from tests.training.test_loop import same, tensors

FLAGS = ["--threads", "1", "--model.name", "dcnv2", "--model.dim", "4", "--model.deep", "[8]", "--log.tensorboard",
         "false", "--data.batch_size", "256"]  # fmt: skip


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps, and a bf16 that is always faster."""
    monkeypatch.setattr(auto, "STEPS", 5)
    monkeypatch.setattr(auto, "ROWS", 300)
    monkeypatch.setattr(auto, "BUDGET", 1.0)
    times = lambda of, which, there: {name: 2.0 if name == "fp32" else 1.0 for name in there}  # noqa: E731
    monkeypatch.setattr("sparrow.analysis.numerics.dispatch.milliseconds", times)
    monkeypatch.setattr("sparrow.layers.candidates.bf16.missing", lambda device: "")


@pytest.mark.usefixtures("decided")
def test_auto_decides_once_and_a_resumed_run_has_its_recipe(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ["train", str(prepared), *FLAGS, "--run_dir", str(tmp_path / "run"), "--precision", "auto"]
    assert main([*place, "--loop.max_steps", "4"]) == 0
    assert "precision: auto has bf16" in capsys.readouterr().err
    first = Run.load(tmp_path / "run" / "run.toml").precision
    assert first.name == "bf16"
    assert first.sites
    kept = tmp_path / "run" / "auto.toml"
    assert recipe_file(kept)["name"] == "bf16"
    given = [*place[:-1], str(kept), "--loop.max_steps", "4"]
    given[given.index(str(tmp_path / "run"))] = str(tmp_path / "given")
    assert main(given) == 0  # a run that is given the recipe is the same
    assert same(tensors(tmp_path / "run"), tensors(tmp_path / "given"))
    monkeypatch.setattr(auto, "_decided", lambda run, listen: pytest.fail("decided again"))
    assert main([*place, "--resume", "--loop.max_steps", "8"]) == 0
    assert Run.load(tmp_path / "run" / "run.toml").precision == first


def test_what_auto_refuses(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(prepared, tmp_path / "run")
    assert auto.settled(run, resume=False, overwrite=False) is run
    asked = replace(run, precision=Precision("auto"))
    with pytest.raises(UserError, match="precision: 'auto' is decided by `sparrow train`"):
        train(asked)
    train(run)
    with pytest.raises(UserError, match="holds a run"):
        auto.settled(asked, resume=False, overwrite=False)
    with pytest.raises(UserError, match="began without 'auto'"):
        auto.settled(asked, resume=True, overwrite=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="decided in one process"):
        auto.settled(asked, resume=False, overwrite=True)
