"""A metric that is declared in one place is in all that names, shows, draws or obeys metrics."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparrow import data
from sparrow.apps.report import report
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.distributed import World
from sparrow.metrics import METRICS, Metric, Streaming
from sparrow.metrics.intervals import JudgedRows
from sparrow.metrics.streaming import BINS
from sparrow.trained.run import Loop, Run
from sparrow.trained.scorer import restore
from sparrow.training.runlog import read

TRAIN = (
    "--model.name",
    "logistic",
    "--data.batch_size",
    "128",
    "--data.shuffle",
    "false",
    "--loop.epochs",
    "2",
    "--loop.evaluate_every",
    "2",
    "--dense.lr",
    "0.2",
    "--log.every",
    "2",
    "--threads",
    "1",
)


def accuracy(stream: Streaming) -> float:
    """The share of rows whose outcome is the likelier one. A score of 0.5 is the edge between two
    bins of a stream.
    """
    non_clicks_R, clicks_R = stream.masses
    right = non_clicks_R[: BINS // 2].sum() + clicks_R[BINS // 2 :].sum()
    return float(right / stream.masses.sum())


def accuracy_influence(rows: JudgedRows) -> tuple[float, Tensor] | None:
    return (
        rows.mean(((rows.scores_B >= 0.5) == (rows.labels_B > 0.5)).double()) if rows.mass else None
    )


def squared_error(
    world: World, stream: Streaming, scores_N: Tensor, labels_N: Tensor, weights_N: Tensor
) -> float:
    """The Brier score."""
    weights_N = weights_N.double()
    sums = torch.stack(
        [weights_N @ (scores_N.double() - labels_N.double()).square(), weights_N.sum()]
    )
    loss, mass = world.all_sum("brier", sums).tolist()
    return loss / mass if mass else math.nan


def squared_error_influence(rows: JudgedRows) -> tuple[float, Tensor] | None:
    return rows.mean((rows.scores_B - rows.labels_B).square()) if rows.mass else None


ACCURACY = Metric(
    name="accuracy",
    title="accuracy at 0.5",
    short="accuracy",
    meaning="Accuracy is the share of likelier outcomes.",
    better="higher",
    stream=accuracy,
    influence=accuracy_influence,
    is_logged=True,
    is_monitored=True,
    is_headline=True,
)
BRIER = Metric(
    name="brier",
    title="Brier score",
    better="lower",
    exact=squared_error,
    influence=squared_error_influence,
    is_monitored=True,
    least_share=0.05,
)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that streams, of which more is better; and one of all rows, of which less is better."""
    for metric in (ACCURACY, BRIER):
        monkeypatch.setitem(METRICS, metric.name, metric)


def heads(out: str) -> list[str]:
    """The heads of the tables that a command printed."""
    return [
        " ".join(re.sub("[┃│]", " ", line).split())
        for line in out.splitlines()
        if line.startswith("┃")
    ]


def trained(prepared: Path, folder: Path, monitor: str) -> tuple[dict, list[dict]]:
    run_dir = folder / monitor
    assert (
        main(["train", str(prepared), "--run_dir", str(run_dir), "--loop.monitor", monitor, *TRAIN])
        == 0
    )
    return json.loads((run_dir / "results.json").read_text()), read(run_dir)


@pytest.mark.parametrize(("monitor", "best"), [("accuracy", max), ("brier", min)])
def test_a_run_is_judged_by_a_new_metric_and_its_log_has_it(
    prepared: Path, tmp_path: Path, monitor: str, best, capsys: pytest.CaptureFixture[str]
) -> None:
    results, log = trained(prepared, tmp_path, monitor)
    values = {record["step"]: record[monitor] for record in log if record["event"] == "valid"}
    assert len(set(values.values())) > 2
    assert values[results["best_step"]] == best(values.values())
    assert results["best"][monitor] == best(values.values())
    lines = [record for record in log if record["event"] == "train"]
    assert all(0 < record["accuracy"] < 1 for record in lines)
    assert all("brier" not in record for record in lines)  # it needs all rows
    assert all(0 < fifth["accuracy"] < 1 for fifth in results["progressive"])
    out = capsys.readouterr().out
    assert f"best by {monitor}: step {results['best_step']}" in out
    assert "examples auc logloss ne calibration accuracy" in heads(out)  # progressive
    assert "examples auc gauc logloss ne calibration ece accuracy brier" in heads(out)  # held out


def test_evaluate_compare_and_report_show_a_new_metric(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(prepared, tmp_path, "ne")
    run_dir, out = tmp_path / "ne", tmp_path / "numbers.json"
    capsys.readouterr()
    assert main(["evaluate", str(run_dir), "--json-out", str(out)]) == 0
    name, numbers = next(iter(json.loads(out.read_text()).items()))
    found = restore(run_dir)
    batches = list(data.open(prepared).loader(512, split="test"))
    scores_N = torch.cat([found.scores(batch)[:, 0] for batch in batches]).double()
    labels_N = torch.cat([batch.labels_BT[:, 0] for batch in batches]).double()
    right = float(((scores_N >= 0.5) == (labels_N > 0.5)).double().mean())
    squared = float((scores_N - labels_N).square().mean())
    assert name.startswith("logistic")
    assert numbers["accuracy"] == pytest.approx(right, abs=1e-12)
    assert numbers["brier"] == pytest.approx(squared, rel=1e-9)
    assert f"{right:.4f}" in capsys.readouterr().out

    results, _ = trained(prepared, tmp_path, "brier")
    assert results["best"]
    capsys.readouterr()
    assert main(["compare", str(run_dir), str(tmp_path / "brier")]) == 0
    told = capsys.readouterr().out
    assert re.search(rf"accuracy\s+│?\s*{right:.4f}", told)
    assert re.search(rf"brier\s+│?\s*{squared:.4f}", told)
    assert "of logloss 0.01%, of ECE 1%, of Brier score 5% of A's" in told

    html = report(run_dir, rows=200).read_text(encoding="utf-8")
    columns = ("rows", "auc", "gauc", "logloss", "ne", "calibration", "ece", "accuracy", "brier")
    assert "".join(f"<th>{name}</th>" for name in columns) in html
    assert f"<b>{right:.4f}</b><span>accuracy at 0.5, test</span>" in html  # a card
    assert "noise alone makes it more than 0. Accuracy is the share of likelier outcomes." in html
    assert 'alt="AUC, NE, calibration, accuracy by' in html
    assert 'alt="logloss, NE, AUC, accuracy over examples"' in html


def test_help_names_a_new_metric(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    assert (
        "accuracy     accuracy at 0.5; higher is better. Accuracy is the share"
        in capsys.readouterr().out
    )
    with pytest.raises(SystemExit):
        main(["train", str(prepared), "--help"])
    assert (
        "--loop.monitor is one of auc, gauc, logloss, ne, accuracy, brier\n"
        in capsys.readouterr().out
    )
    with pytest.raises(UserError, match="^monitor: 'mae' is not one of .*'accuracy', 'brier'$"):
        Loop(monitor="mae")
    with pytest.raises(UserError, match="^loop.monitor: 'calibration' is not one of 'auc'"):
        Run.of(prepared, {"loop.monitor": "calibration"})


def test_a_backtest_shows_and_draws_a_new_metric(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--windows",
        "2",
        "--model.name",
        "logistic",
        "--threads",
        "1",
        "--loop.monitor",
        "brier",
    )
    assert main(["backtest", str(log), "--out", str(tmp_path / "out"), *flags]) == 0
    out = capsys.readouterr().out
    windows = [json.loads((tmp_path / f"out/window-{i}/results.json").read_text()) for i in (1, 2)]
    for window in windows:
        assert f"{window['values']['brier']:.4f}" in out
        assert 0 < window["errors"]["accuracy"] < 0.1
    assert "examples auc gauc logloss ne calibration ece accuracy brier" in heads(out)
    assert "backtest.png: AUC and NE and accuracy of the windows" in out
