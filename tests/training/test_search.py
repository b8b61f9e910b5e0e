from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparrow import checkpoint, data
from sparrow.cli import main
from sparrow.core.errors import UserError
from sparrow.features.schema import Split
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import search as module
from sparrow.training import train
from sparrow.training.defaults import defaults
from sparrow.training.search import search, tries
from tests.extensions.blend.test_model import log

QUICK = {
    "model.name": "logistic",
    "loop.epochs": 1,
    "loop.patience": 1,
    "log.tensorboard": False,
    "log.every": 1,
}


@pytest.fixture(scope="module")
def prepared_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return log(tmp_path_factory.mktemp("search"), signal=1.5, rows=2000)


def test_what_a_person_gave_is_not_tried(prepared_small: Path) -> None:
    assert tries(prepared_small, {})[0] == {} and len(tries(prepared_small, {})) > 3
    for given in (
        {"model.dim": 4},
        {"tables.rule.lr": 0.1},
        {"model.name": "dcnv2"},
        {"model.cross_layers": 1},
    ):
        for change in tries(prepared_small, given):
            assert not change.keys() & given.keys() and "model.name" not in change
    assert any("model.name" in change for change in tries(prepared_small, {"device": "cuda"}))
    for given in ({}, {"model.name": "dcnv2"}):  # every one is a run
        for change in tries(prepared_small, given):
            Run.of(prepared_small, defaults(prepared_small, {**change, **given}))


def test_the_best_is_kept_and_is_what_train_makes(prepared_small: Path, tmp_path: Path) -> None:
    """To the bit, whatever was tried before it."""
    given = {**QUICK, "run_dir": str(tmp_path / "kept")}
    results = search(prepared_small, given, 600)
    told = results["tries"]
    assert [one["changed"] for one in told] == tries(prepared_small, given) and len(told) > 1
    best = min(told, key=lambda one: one["value"])
    assert [one for one in told if one["kept"]] == [best] and results["best"]["ne"] == best["value"]
    alone = train(
        Run.of(prepared_small, {**given, **best["changed"], "run_dir": str(tmp_path / "alone")})
    )
    assert alone["best"] == results["best"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "kept"]
    files = [
        sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("alone", "kept")
    ]
    assert files[0] == files[1]
    assert json.loads((tmp_path / "kept" / "results.json").read_text())["tries"] == told
    found = restore(tmp_path / "kept")
    assert found.run.run_dir == str(tmp_path / "kept") and found.step == results["best_step"]


def test_the_time_ends_it(
    prepared_small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try is whole, whatever the time. One that the end comes upon is left out."""
    given = {**QUICK, "run_dir": str(tmp_path / "first")}
    assert [one["kept"] for one in search(prepared_small, given, 1e-6)["tries"]] == [True]
    clock = iter(range(10**6))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    # 25 steps, each a second
    results = search(prepared_small, {**given, "run_dir": str(tmp_path / "second")}, 48)
    assert (
        len(results["tries"]) == 2
        and results["tries"][1]["value"] is None
        and results["tries"][0]["kept"]
    )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_signal_ends_it(prepared_small: Path, tmp_path: Path) -> None:
    def hear(event: str, values: dict[str, Any]) -> None:
        if event == "evaluation":
            os.kill(os.getpid(), signal.SIGTERM)

    given = {**QUICK, "run_dir": str(tmp_path / "run"), "loop.evaluate_every": 2}
    results = search(prepared_small, given, 600, listener=hear)
    assert results["stopped_by"] == "SIGTERM" and len(results["tries"]) == 1
    assert restore(tmp_path / "run").step == results["best_step"]


def test_a_try_that_fails_is_left_out(
    prepared_small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TRIES", ({}, {"dense.lr": 1e30, "loop.nonfinite": "stop"}))
    heard: list[str] = []
    results = search(
        prepared_small,
        {**QUICK, "model.name": "dlrm", "run_dir": str(tmp_path / "run")},
        600,
        listener=lambda event, values: heard.append(values.get("text", "")),
    )
    assert [one["value"] is None for one in results["tries"]] == [False, True]
    assert any(text.startswith("try 2: step") for text in heard)


def test_a_run_in_the_way_stays(prepared_small: Path, tmp_path: Path) -> None:
    given = {**QUICK, "run_dir": str(tmp_path / "run")}
    first = train(Run.of(prepared_small, given))
    with pytest.raises(UserError, match="holds a run up to step"):
        search(prepared_small, given, 1)
    assert restore(tmp_path / "run").step == first["best_step"]
    (tmp_path / "run" / "notes.txt").write_text("mine")
    search(prepared_small, given, 1, overwrite=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_log_without_valid_rows(prepared_small: Path, tmp_path: Path) -> None:
    data.prepare([prepared_small.parent / "log.parquet"], tmp_path / "all", split=Split(valid=0.0))
    with pytest.raises(UserError, match="^budget: .* has no valid rows to choose by"):
        search(tmp_path / "all", {"run_dir": str(tmp_path / "run")}, 1)


def test_the_command(
    prepared_small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for name, value in QUICK.items() for word in (f"--{name}", str(value))]
    command = ["train", str(prepared_small), "--run_dir", str(tmp_path / "run"), *flags]
    assert main([*command, "--budget", "60s"]) == 0
    told = capsys.readouterr().out
    assert (
        "what was tried, judged by the valid part" in told and "kept" in told and "nothing" in told
    )
    for budget, more, says in (
        ("soon", [], "--budget soon: not a time; give one such as 60s, 10m or 2h"),
        ("-1", [], "--budget -1: not a time"),
        ("60s", ["--resume"], "--budget: neither goes on with a run"),
    ):
        assert main([*command, f"--budget={budget}", *more]) == 2
        assert says in capsys.readouterr().err
    assert main(["train", "recipes/demo.toml", "--budget", "60s"]) == 2
    assert "is a run file" in capsys.readouterr().err


KILLED = """
import os, sys
from sparrow.training import search as module
def hear(event, values):
    if event == "end":
        tries.append(1)
    if len(tries) == int(sys.argv[3]) and event in ("evaluation", "end"):
        os.kill(os.getpid(), 9)
tries, given = [], {"run_dir": sys.argv[2], **eval(sys.argv[4])}
module.search(sys.argv[1], given, 600, listener=hear)
"""


@pytest.mark.multi
def test_files_on_an_ssd_of_a_search_that_was_killed_go(
    prepared_small: Path, tmp_path: Path
) -> None:
    """With the next search there; and those of one that an error ended go at once."""
    place, disk = tmp_path / "run", tmp_path / "disk"
    given = (
        QUICK
        | {"model.name": "dcnv2", "model.dim": 4, "model.deep": [8], "loop.max_steps": 6}
        | {
            "tables.tier.name": "ssd",
            "tiers.folder": str(disk),
            "data.batch_size": 16,
            "tables.tier.fraction": 0.5,
        }
    )
    arguments = [str(prepared_small), str(place), "1", repr(given)]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = set(disk.rglob("*.blocks"))
    assert left and not (place / "checkpoints").exists()
    search(prepared_small, given | {"run_dir": str(place)}, 1e-6)
    kept = set(disk.rglob("*.blocks"))
    assert (
        kept == {Path(path) for path in checkpoint.load(place / "checkpoints").block_files}
        and not kept & left
    )
    assert len(list(disk.iterdir())) == 1
    with pytest.raises(UserError):
        search(
            prepared_small,
            given
            | {
                "run_dir": str(tmp_path / "other"),
                "dense.lr": 1e30,
                "loop.nonfinite": "stop",
            },
            1,
        )
    assert set(disk.rglob("*.blocks")) == kept
