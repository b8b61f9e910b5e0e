from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sparrow.cli import main
from sparrow.core import UserError
from sparrow.core.config import read_toml, to_dict, write_toml
from sparrow.extensions.low_precision.recipe import Recipe
from sparrow.layers.precision import Precision
from sparrow.models import dlrm
from sparrow.optimizers import adam
from sparrow.trained.run import Run, Schedule
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.runs import small_run


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (Schedule(decay="constant"), [1, 1, 1, 1, 1]),
        (Schedule(), [1, 1, 1, 1, 0.6667]),
        (Schedule(warmup_steps=2, decay="constant"), [0.5, 1, 1, 1, 1]),
        (Schedule(warmup_steps=1, decay="linear", hold=0.0, final=0.2), [1, 1, 0.8, 0.6, 0.4]),
        (Schedule(decay="cosine", hold=0.0), [1, 0.9045, 0.6545, 0.3455, 0.0955]),
    ],
)
def test_schedules(schedule: Schedule, wanted: list[float]) -> None:
    assert [schedule.factor(s, 5) for s in range(5)] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"loop": {"accumulate": 2, "update_mode": "fused"}}, "use 'deferred' or 'auto'"),
        ({"loop": {"epochs": 0}}, "epochs: 0 is out of range"),
        ({"device": "gpu"}, "'gpu' is not one to train on"),
        ({"data": {"path": "x", "batch_size": -1}}, "batch_size: -1"),
        ({"model": {"name": "dlmr"}}, "model.name: there is no 'dlmr'; did you mean 'dlrm'"),
        ({"modle": {}}, "modle: unknown key; did you mean 'model'"),
    ],
)
def test_impossible_runs(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    good = {"run_dir": "r", "data": {"path": "x"}, "model": {"name": "dlrm"}}
    (tmp_path / "run.toml").write_text(write_toml(good | change))
    with pytest.raises(UserError, match=f"run.toml: .*{says}"):
        Run.load(tmp_path / "run.toml")


def test_configs_read_back_to_the_last_bit(tmp_path: Path) -> None:
    pick = random.Random(0)
    for _ in range(20):
        run = small_run(
            Path("p"),
            Path("r"),
            seed=pick.randrange(99),
            dense=adam.Config(lr=pick.random() * 1e-3),
        )
        run.save(tmp_path / "run.toml")
        assert Run.load(tmp_path / "run.toml") == run


def test_a_run_of_defaults(prepared: Path, tmp_path: Path) -> None:
    run = Run.of(
        prepared, {"run_dir": str(tmp_path / "run"), "log.tensorboard": False, "loop.max_steps": 2}
    )
    train(run)
    chosen = Run.load(tmp_path / "run" / "run.toml")
    assert chosen.data.batch_size == 64
    assert Run.of(prepared).run_dir == f"runs/{prepared.name}"


def test_a_bare_word_names_a_member(tmp_path: Path) -> None:
    """Of every family, on the command line and in a file."""
    run = Run.of(
        "log",
        {
            "model": "dlrm",
            "model.dim": 8,
            "precision": "mxfp8",
            "tables.rule": "adam",
            "dense": "sgd",
        },
    )
    same = {
        "model.name": "dlrm",
        "model.dim": 8,
        "precision.name": "mxfp8",
        "tables.rule.name": "adam",
    }
    assert run == Run.of("log", {**same, "dense.name": "sgd"})
    file = tmp_path / "run.toml"
    file.write_text('run_dir = "r"\nmodel = "dlrm"\nprecision = "bf16"\n[data]\npath = "log"\n')
    assert Run.load(file).precision == Precision("bf16")
    assert Run.load(file, {"precision": "mx4", "model.name": "fm"}).precision == Precision("mx4")
    split = Run.load(file, {"precision.weights": "split", "model.dim": 3})
    assert split.precision == Precision("bf16", weights="split") and split.model == dlrm.Config(
        dim=3
    )
    split.save(tmp_path / "saved.toml")
    assert Run.load(tmp_path / "saved.toml") == split
    with pytest.raises(UserError, match=r"model.name: there is no 'dlmr'; did you mean 'dlrm'"):
        Run.of("log", {"model": "dlmr"})


def test_a_recipe_file_is_named_from_the_run_file_or_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine.toml").write_text('weights = "bf16"\n[sites]\n"deep.*" = "mx6"\n')
    file = tmp_path / "runs" / "run.toml"
    file.write_text('run_dir = "r"\nprecision = "mine.toml"\n[data]\npath = "log"\n')
    want = Precision("fp32", {"deep.*": Recipe.of("mx6")}, "bf16")
    assert Run.load(file).precision == want
    Run.load(file).save(tmp_path / "saved.toml")
    assert Run.load(tmp_path / "saved.toml").precision == want
    monkeypatch.chdir(tmp_path)
    assert Run.of("log", {"precision": "runs/mine.toml"}).precision == want
    # the same name too stands for all sites: else a run would seem to go on in it
    for name in ("bf16", "fp32"):
        assert Run.load(tmp_path / "saved.toml", {"precision": name}).precision == Precision(name)


BEFORE = """
run_dir = "r"
calibrate = "isotonic"
ssd = "/fast"

[data]
path = "log"

[loop]
epochs = 2
ahead = 3

[checkpoint]
keep = 1
whole = true
"""
NOW = {
    "calibration": {"method": "isotonic"},
    "tiers": {"folder": "/fast", "full_checkpoints": True, "prefetch": 3},
}


def test_settings_keep_their_earlier_names(tmp_path: Path) -> None:
    """In a run file, as flags and in a dictionary. What is written has those of today."""
    file = tmp_path / "run.toml"
    file.write_text(BEFORE)
    run = Run.load(file)
    assert {name: to_dict(settings) for name, settings in run.extensions.items()} == NOW
    assert run.loop.epochs == 2 and run.checkpoint.keep == 1
    run.save(tmp_path / "saved.toml")
    saved = read_toml(tmp_path / "saved.toml")
    assert {name: saved[name] for name in NOW} == NOW
    assert not {"calibrate", "ssd"} & saved.keys()
    assert "ahead" not in saved["loop"] and "whole" not in saved["checkpoint"]
    assert Run.load(tmp_path / "saved.toml") == run
    given = {"calibrate": "isotonic", "ssd": "/fast", "loop.ahead": 3, "checkpoint.whole": True}
    others = {"run_dir": "r", "loop.epochs": 2, "checkpoint.keep": 1}
    assert Run.of("log", {**given, **others}) == run
    # a flag, of today or before, is for what the file has, of today or before
    assert Run.load(file, {"calibration.method": "none", "tiers.folder": "/other"}).extensions == (
        Run.load(tmp_path / "saved.toml", {"calibrate": "none", "ssd": "/other"}).extensions
    )


@pytest.mark.parametrize(
    ("before", "today"),
    [
        ("calibrate", "calibration.method"),
        ("ssd", "tiers.folder"),
        ("checkpoint.whole", "tiers.full_checkpoints"),
        ("loop.ahead", "tiers.prefetch"),
    ],
)
def test_both_names_of_a_setting_are_an_error(tmp_path: Path, before: str, today: str) -> None:
    both = f"{before}, {today}: two names of one setting; give {today} alone"
    with pytest.raises(UserError, match=f"^{both}$"):
        Run.of("log", {before: "none", today: "none"})
    file = tmp_path / "run.toml"
    file.write_text(f'{before} = "none"\n{today} = "none"\nrun_dir = "r"\ndata.path = "log"')
    with pytest.raises(UserError, match=f"run.toml: {both}$"):
        Run.load(file)


def test_a_run_of_earlier_names_goes_on(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file is what Sparrow 0.2.0 wrote."""
    flags = ["--threads", "1", "--run_dir", str(tmp_path / "run"), "--model.name", "logistic"]
    begin = ["train", str(prepared), *flags, "--log.tensorboard", "false"]
    assert main([*begin, "--loop.max_steps", "2", "--calibrate", "logistic"]) == 0
    file = tmp_path / "run" / "run.toml"
    assert read_toml(file)["calibration"] == {"method": "logistic"}
    written = read_toml(file)
    del written["calibration"]
    written["loop"]["ahead"] = 2
    written["checkpoint"]["whole"] = False
    file.write_text(write_toml({**written, "calibrate": "logistic"}))
    assert restore(tmp_path / "run").calibrators
    assert main([*begin, "--resume", "--loop.max_steps", "3"]) == 0
    assert "resumed with loop.max_steps = 3, it was 2" in capsys.readouterr().err
    assert read_toml(file)["calibration"] == {"method": "logistic"}
    assert main([*begin, "--resume", "--calibrate", "none", "--calibration.method", "none"]) == 2
    assert "calibrate, calibration.method: two names" in capsys.readouterr().err
