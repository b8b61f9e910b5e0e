from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow.apps import scaling
from sparrow.apps.backtest import Plan, Window, backtest, mean_and_spread
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.features.schema import Schema
from tests.data.preparation.logs import part

ROWS = 3000
QUICK = {"model.name": "logistic", "log.tensorboard": False, "threads": 1, "loop.epochs": 1}


def written(folder: Path, *, told: bool = False) -> Path:
    """A log out of the order of time. Its labels are coin flips, or an item tells them."""
    random = np.random.default_rng(0)
    item, label = random.integers(0, 20, ROWS), random.integers(0, 2, ROWS)
    label = np.where(random.random(ROWS) < 0.8, item % 2, label) if told else label
    columns = {
        "label": label,
        "item": [f"i{i}" for i in item],
        "ts": 1_700_000_000 + random.permutation(ROWS),
    }
    pq.write_table(pa.table(columns), folder / "log.parquet")
    return folder / "log.parquet"


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(windows=3, share=0.4, valid=0.05), Plan(windows=7, share=0.35)]
)
@pytest.mark.parametrize("rows", [1000, 999, 13])
def test_windows_follow_one_another_and_end_with_the_log(plan: Plan, rows: int) -> None:
    """Their ends are the same numbers of rows, whatever the windows; what is before one is trained
    on.
    """
    ends = []
    for window in range(plan.windows):
        split = plan.split(window)
        later = 1 - (split.until or 1)
        ends.append((round(rows * (1 - (split.test + later))), round(rows * (1 - later))))
        assert split.valid == plan.valid
    assert ends[-1][1] == rows
    assert [end for _, end in ends[:-1]] == [first for first, _ in ends[1:]]
    assert ends[0][0] == pytest.approx(rows * (1 - plan.share), abs=1)


def test_each_window_is_tested_by_what_came_before_and_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, plan = written(tmp_path, told=True), Plan(windows=3, share=0.6)
    found = backtest([log], tmp_path / "out", plan, run=QUICK)
    assert [window.rows["test"] for window in found] == pytest.approx([600] * 3, abs=1)
    assert [window.rows["valid"] for window in found] == [300] * 3
    assert [window.rows["train"] for window in found] == pytest.approx([900, 1500, 2100], abs=3)
    tested: list[int] = []
    for number in (1, 2, 3):
        times = {
            p: part(tmp_path / "out" / f"window-{number}" / "data", p)["ts"].to_pylist()
            for p in ("train", "test")
        }
        assert max(times["train"]) < min(times["test"])
        tested += times["test"]
    assert sorted(tested) == sorted(set(tested))
    assert max(tested) == 1_700_000_000 + ROWS - 1
    assert all(window.values["auc"] > 0.8 and 0 < window.errors["auc"] < 0.05 for window in found)

    begun: list[str] = []
    train = scaling.train

    def counted(run, **settings):
        begun.append(run.run_dir)
        return train(run, **settings)

    monkeypatch.setattr(scaling, "train", counted)
    assert backtest([log], tmp_path / "out", plan, run=QUICK) == found
    shutil.rmtree(tmp_path / "out" / "window-2")
    (tmp_path / "out" / "window-3" / "results.json").unlink()  # as if it was killed while it tested
    assert backtest([log], tmp_path / "out", plan, run=QUICK) == found
    assert begun == [str(tmp_path / "out" / "window-2" / "run")]


def test_a_coin_flip_is_told_by_nothing(tmp_path: Path) -> None:
    found = backtest([written(tmp_path)], tmp_path / "out", Plan(windows=2), run=QUICK)
    for window in found:
        assert abs(window.values["auc"] - 0.5) < 4 * window.errors["auc"]


def test_fitted_numbers_of_a_schema_are_fitted_anew(tmp_path: Path) -> None:
    log = written(tmp_path, told=True)
    assert main(["prepare", str(log), "--out", str(tmp_path / "data")]) == 0
    text = (tmp_path / "data" / "schema.toml").read_text()
    text = text.replace(
        "[columns]\n",
        '[columns]\nclicks = { kind = "numeric", source = "item", counts = "positives" }\n',
    )
    (tmp_path / "mine.toml").write_text(text)
    schema = Schema.load(tmp_path / "mine.toml")
    schema.columns["clicks"].__dict__.update(mean=1e6, std=1.0)  # as of all the log
    backtest([log], tmp_path / "out", Plan(windows=1), schema=schema, run=QUICK)
    fitted = Schema.load(tmp_path / "out" / "window-1" / "data" / "schema.toml").columns["clicks"]
    assert fitted.mean is not None and fitted.mean < 10
    assert fitted.until is not None and fitted.until < 1_700_000_000 + ROWS / 2


def test_the_mean_and_the_spread_of_windows() -> None:
    windows = [Window(rows={}, values={"auc": x}, errors={"auc": 0.1}) for x in (0.5, 0.7)]
    mean, spread = mean_and_spread(windows)
    assert mean == {"auc": pytest.approx(0.6)}
    assert spread == {"auc": pytest.approx(math.sqrt(0.02))}
    assert math.isnan(mean_and_spread(windows[:1])[1]["auc"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(
        'run_dir = "elsewhere"\n[data]\npath = "no log"\n[model]\nname = "logistic"\n'
    )
    flags = ["--run", str(tmp_path / "run.toml"), "--threads=1", "--loop.epochs", "1"]
    log, out = str(written(tmp_path)), str(tmp_path / "out")
    command = ["backtest", log, "--out", out, "--windows", "2", "--share", "0.3", *flags]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "window 1, trained on 1,800 rows" in printed
    assert "standard deviation of the windows" in printed
    assert (tmp_path / "out" / "backtest.png").stat().st_size > 3000
    assert main([*command[:5], "3", *command[6:]]) == 2
    assert (
        "holds a backtest in which windows was 2 and is 3 now; give another --out"
        in capsys.readouterr().err
    )
    assert main([*command, "--model.dim=8"]) == 2
    assert "in which run.model.dim was None and is '8' now" in capsys.readouterr().err


def test_what_cannot_be_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"share 0.9 and valid 0.2 leave nothing to train on; lower them"
    ):
        Plan(share=0.9, valid=0.2)
    with pytest.raises(UserError, match="windows: 0"):
        Plan(windows=0)
    log = written(tmp_path)
    pq.write_table(pq.read_table(log).drop_columns(["ts"]), tmp_path / "timeless.parquet")
    with pytest.raises(UserError, match=r"split\.by: 'time' needs a column of kind time"):
        backtest([tmp_path / "timeless.parquet"], tmp_path / "out", run=QUICK)
    with pytest.raises(
        UserError, match=r"exists and is no folder of a backtest; give another --out"
    ):
        backtest([log], tmp_path, run=QUICK)
    with pytest.raises(UserError, match="absent"):
        backtest([tmp_path / "absent.parquet"], tmp_path / "none", run=QUICK)
    assert not (tmp_path / "none").exists()
