"""A log of two labels: nothing judges the first one alone without saying so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.analysis import picture
from sparrow.analysis.scaling import scale
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.metrics import evaluate
from sparrow.trained.labels import by_label, of_first, together
from sparrow.trained.scorer import restore
from sparrow.training import Trainer, preflight, runlog, train
from sparrow.training.preflight import resolved
from tests.runs import small_run

KINDS: Any = {"clicked": "label", "bought": "label", "request": "group", "guess": "baseline"}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared log of clicks and purchases, with requests and somebody's guess."""
    place, random = tmp_path_factory.mktemp("two"), np.random.default_rng(0)
    user, item = random.integers(0, 20, 2000), random.integers(0, 10, 2000)
    columns = {
        "clicked": (random.random(2000) < 0.2 + 0.03 * user).astype(int),
        "bought": (random.random(2000) < 0.05 + 0.05 * item).astype(int),
        "user": user, "item": item, "request": np.arange(2000) // 5, "guess": np.full(2000, 0.3),
    }  # fmt: skip
    pq.write_table(pa.table(columns), place / "log.parquet")
    kinds = {name: Column(kind=kind) for name, kind in KINDS.items()}
    kinds |= {name: Column(kind="categorical", table=name) for name in ("user", "item")}
    schema = Schema(columns=kinds, encodings={"user": Encoding(), "item": Encoding()}, split=Split(by="ratio"))
    return data.prepare([place / "log.parquet"], place / "prepared", schema=schema).out


def test_metrics_lie_flat_and_come_back() -> None:
    labels, found = ["a", "b", "b.c"], [{"ne": 0.1, "auc": 0.2}, {"ne": 0.3, "auc": 0.4}, {"ne": 0.5, "auc": 0.6}]
    flat = together(labels, found)
    assert flat == {"ne": 0.1, "auc": 0.2, "b.ne": 0.3, "b.auc": 0.4, "b.c.ne": 0.5, "b.c.auc": 0.6}
    back = by_label(labels, flat)
    assert [name for name, _ in back] == ["valid, a", "valid, b", "valid, b.c"]
    assert [{name: values[name] for name in ("ne", "auc")} for _, values in back] == found
    assert together(["a"], found[:1]) == found[0] and by_label(["a"], found[0]) == [("valid", found[0])]
    assert (of_first(["a"]), of_first(labels)) == ("", ", a")


def test_a_run_holds_every_labels_metrics(two: Path, tmp_path: Path) -> None:
    results = train(small_run(two, tmp_path, batch_size=100))
    found, log = restore(tmp_path, which="last"), data.open(two)
    clicked, bought = (evaluate(found.scores, log.loader(100, split="valid"), label=label) for label in (0, 1))
    judged = clicked | {f"bought.{name}": value for name, value in bought.items()}
    assert results["labels"] == ["clicked", "bought"]
    assert {name: value for name, value in results["valid"].items() if name != "step"} == pytest.approx(judged)
    assert "bought.gauc" in judged and clicked["ne"] != bought["ne"]
    assert [r["bought.ne"] for r in runlog.read(tmp_path) if r["event"] == "valid"] == [results["valid"]["bought.ne"]]
    assert train(small_run(two, tmp_path, batch_size=100), resume=True) == results


def test_the_valid_part_is_scored_once(two: Path, tmp_path: Path) -> None:
    trainer, scored = Trainer(small_run(two, tmp_path, batch_size=100)), []
    score = trainer.score
    trainer.score = lambda batch: scored.append(batch.batch_size) or score(batch)  # type: ignore[func-returns-value]
    trainer.fit()
    assert sum(scored) == data.open(two).rows("valid")


def test_a_second_label_that_diverged_is_not_overlooked(two: Path, tmp_path: Path) -> None:
    trainer = Trainer(small_run(two, tmp_path, batch_size=100))
    score = trainer.score
    trainer.score = lambda batch: score(batch) * torch.tensor([1.0, float("nan")])
    with pytest.raises(UserError, match="scores are not finite"):
        trainer.fit()


def test_evaluation_keeps_eight_bytes_a_row_and_label(two: Path, tmp_path: Path) -> None:
    log = data.open(two)
    one = {name: column for name, column in log.schema.columns.items() if name != "bought"}
    alone = dataclasses.replace(log, schema=dataclasses.replace(log.schema, columns=one))
    run = resolved(small_run(two, tmp_path, batch_size=100), log)
    of_one, of_two = (preflight.estimate(run, each).host["evaluation"] for each in (alone, log))
    assert (of_one, of_two) == (20 * log.rows("valid"), 28 * log.rows("valid"))


def test_what_is_measured_names_the_label(two: Path, tmp_path: Path) -> None:
    (point,) = scale([small_run(two, tmp_path, batch_size=100)])
    assert point.measured == "valid, clicked"


def test_the_commands_say_whose_numbers_they_are(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    titles, paint = [], picture.over_examples
    monkeypatch.setattr(picture, "over_examples", lambda *given: titles.append(given[-1]) or paint(*given))
    assert main(["train", str(two), "--run_dir", "run", "--model.name", "mmoe", "--data.batch_size", "100"]) == 0
    said, progress = capsys.readouterr()
    results = json.loads(Path("run/results.json").read_text())
    shown = {"clicked": f"{results['valid']['auc']:.4f}", "bought": f"{results['valid']['bought.auc']:.4f}"}
    for label, value in shown.items():
        (row,) = [line for line in said.splitlines() if f"valid, {label}" in line]
        assert value in row and f": valid, {label} auc {value}" in progress
    assert "progressive validation, clicked: each batch" in said and "best by ne, clicked: step" in said
    assert titles[:2] == ["normalised entropy, clicked", "AUC, clicked"]
    assert main(["evaluate", "run", "--json-out", "found.json"]) == 0
    found = json.loads(Path("found.json").read_text())
    model = f"mmoe, step {results['best_step']}: "
    assert list(found) == [f"{model}clicked", f"{model}bought", "guess: clicked"]
    rates = [one["base_rate"] for one in found.values()]
    assert rates[0] == rates[2] != rates[1]
