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
from torch.nn import functional as F

from sparrow import data
from sparrow.analysis import picture
from sparrow.apps.scaling import scale
from sparrow.cli import main
from sparrow.core import Batch, UserError
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.losses import bce
from sparrow.metrics import evaluate, ne
from sparrow.metrics.evaluation import bytes_of
from sparrow.trained.labels import first_label_suffix, join_labels, split_labels
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
    schema = Schema(
        columns=kinds, encodings={"user": Encoding(), "item": Encoding()}, split=Split(by="ratio")
    )
    return data.prepare([place / "log.parquet"], place / "prepared", schema=schema).out


@pytest.fixture(scope="module")
def lacking(two: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same log, of which purchases are known where there was a click, and of some other
    rows.
    """
    place, log = tmp_path_factory.mktemp("lacking"), pq.read_table(two.parent / "log.parquet")
    known = (log["clicked"].to_numpy() == 1) | (np.arange(2000) % 7 == 0)
    bought = pa.array(np.where(known, log["bought"].to_numpy(), np.nan))
    pq.write_table(log.set_column(1, "bought", bought), place / "log.parquet")
    schema = Schema.load(two / "schema.toml")
    made = data.prepare([place / "log.parquet"], place / "prepared", schema=schema)
    assert (
        f"bought: missing in {2000 - known.sum():,} of 2,000 rows, which have no loss and are in no"
        " metric" in str(made.notes)
    )
    return made.out


def test_metrics_lie_flat_and_come_back() -> None:
    labels, found = (
        ["a", "b", "b.c"],
        [{"ne": 0.1, "auc": 0.2}, {"ne": 0.3, "auc": 0.4}, {"ne": 0.5, "auc": 0.6}],
    )
    flat = join_labels(labels, found)
    assert flat == {"ne": 0.1, "auc": 0.2, "b.ne": 0.3, "b.auc": 0.4, "b.c.ne": 0.5, "b.c.auc": 0.6}
    back = split_labels(labels, flat)
    assert [name for name, _ in back] == ["valid, a", "valid, b", "valid, b.c"]
    assert [{name: values[name] for name in ("ne", "auc")} for _, values in back] == found
    assert join_labels(["a"], found[:1]) == found[0] and split_labels(["a"], found[0]) == [
        ("valid", found[0])
    ]
    assert (first_label_suffix(["a"]), first_label_suffix(labels)) == ("", ", a")


def test_a_run_holds_every_labels_metrics(two: Path, tmp_path: Path) -> None:
    results = train(small_run(two, tmp_path, batch_size=100))
    found, log = restore(tmp_path, which="last"), data.open(two)
    clicked, bought = (
        evaluate(found.scores, log.loader(100, split="valid"), label=label) for label in (0, 1)
    )
    judged = clicked | {f"bought.{name}": value for name, value in bought.items()}
    assert results["labels"] == ["clicked", "bought"]
    assert {
        name: value for name, value in results["valid"].items() if name != "step"
    } == pytest.approx(judged)
    assert "bought.gauc" in judged and clicked["ne"] != bought["ne"]
    assert [r["bought.ne"] for r in runlog.read(tmp_path) if r["event"] == "valid"] == [
        results["valid"]["bought.ne"]
    ]
    assert train(small_run(two, tmp_path, batch_size=100), resume=True) == results


def test_the_valid_part_is_scored_once(two: Path, tmp_path: Path) -> None:
    trainer, scored = Trainer(small_run(two, tmp_path, batch_size=100)), []
    score = trainer.evaluator.score
    trainer.evaluator.score = lambda batch: scored.append(batch.batch_size) or score(batch)  # type: ignore[func-returns-value]
    trainer.fit()
    assert sum(scored) == data.open(two).rows("valid")


def test_a_second_label_that_diverged_is_not_overlooked(two: Path, tmp_path: Path) -> None:
    trainer = Trainer(small_run(two, tmp_path, batch_size=100))
    score = trainer.evaluator.score
    trainer.evaluator.score = lambda batch: score(batch) * torch.tensor([1.0, float("nan")])
    with pytest.raises(UserError, match="scores are not finite"):
        trainer.fit()


def test_evaluation_keeps_eight_bytes_a_row_and_label(two: Path, tmp_path: Path) -> None:
    log = data.open(two)
    one = {name: column for name, column in log.schema.columns.items() if name != "bought"}
    alone = dataclasses.replace(log, schema=dataclasses.replace(log.schema, columns=one))
    run = resolved(small_run(two, tmp_path, batch_size=100), log)
    of_one, of_two = (preflight.estimate(run, each).host for each in (alone, log))
    has_groups = log.schema.role("group") is not None
    assert of_one["evaluation"] + of_one["metrics"] == bytes_of(log.rows("valid"), 1, has_groups)
    assert of_two["evaluation"] - of_one["evaluation"] == 8 * log.rows("valid")
    assert of_two["metrics"] == of_one["metrics"]


def test_what_is_measured_names_the_label(two: Path, tmp_path: Path) -> None:
    (point,) = scale([small_run(two, tmp_path, batch_size=100)])
    assert point.measured == "valid, clicked"


def test_the_commands_say_whose_numbers_they_are(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    titles, paint = [], picture.over_examples
    monkeypatch.setattr(
        picture, "over_examples", lambda *given: titles.append(given[-1]) or paint(*given)
    )
    assert (
        main(
            [
                "train",
                str(two),
                "--run_dir",
                "run",
                "--model.name",
                "mmoe",
                "--data.batch_size",
                "100",
            ]
        )
        == 0
    )
    said, progress = capsys.readouterr()
    results = json.loads(Path("run/results.json").read_text())
    shown = {
        "clicked": f"{results['valid']['auc']:.4f}",
        "bought": f"{results['valid']['bought.auc']:.4f}",
    }
    for label, value in shown.items():
        (row,) = [line for line in said.splitlines() if f"valid, {label}" in line]
        assert value in row and f": valid, {label} auc {value}" in progress
    assert (
        "progressive validation, clicked: each batch" in said
        and "best by ne, clicked: step" in said
    )
    assert titles[:2] == ["normalised entropy, clicked", "AUC, clicked"]
    assert main(["evaluate", "run", "--json-out", "found.json"]) == 0
    found = json.loads(Path("found.json").read_text())
    model = f"mmoe, step {results['best_step']}: "
    assert list(found) == [f"{model}clicked", f"{model}bought", "guess: clicked"]
    rates = [one["base_rate"] for one in found.values()]
    assert rates[0] == rates[2] != rates[1]


def rows_of(log: data.Dataset, split: str) -> Any:
    return next(iter(log.loader(4000, split=split)))


def test_rates_are_of_the_rows_that_have_the_label(two: Path, lacking: Path) -> None:
    log, whole = data.open(lacking), data.open(two)
    bought = rows_of(log, "train").labels_BT[:, 1]
    bought = bought[~bought.isnan()]
    assert log.manifest["base_rate"]["bought"] == pytest.approx(
        float(bought.double().mean()), rel=1e-12
    )
    ones, zeros = float(bought.sum()), float((1 - bought).sum())
    assert log.log_odds() == [
        whole.log_odds()[0],
        pytest.approx(np.log((ones + 0.5) / (zeros + 0.5)), rel=1e-12),
    ]
    valid = rows_of(log, "valid").labels_BT[:, 1]
    assert log.manifest["label_mean"]["valid"]["bought"] == pytest.approx(
        float(valid.nanmean()), rel=1e-6
    )
    lacks = {
        part: int(rows_of(log, part).labels_BT[:, 1].isnan().sum())
        for part in ("train", "valid", "test")
    }
    assert log.manifest["unlabelled"] == {"bought": lacks} and min(lacks.values()) > 0
    assert "unlabelled" not in whole.manifest  # a log without missing labels is prepared as ever


@pytest.mark.parametrize("weights", [{}, {"bought": 3.0, "clicked": 0.5}])
def test_a_row_that_lacks_a_label_is_not_trained_on_for_it(
    lacking: Path, tmp_path: Path, weights: dict[str, float]
) -> None:
    """As if each label had a log of its own, whose losses are added."""
    trained, other = (
        Trainer(
            small_run(lacking, tmp_path / name, batch_size=100, loss=bce.Config(weights=weights))
        )
        for name in ("run", "reference")
    )

    def reference(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits_BT, total = other.job.model(batch), torch.zeros(())
        for label, (s_B, y_B) in zip(
            log.schema.labels, zip(logits_BT.T, batch.labels_BT.T, strict=True), strict=True
        ):
            rows = [b for b in range(len(y_B)) if y_B[b] in (0, 1)]
            loss = F.binary_cross_entropy_with_logits(s_B[rows], y_B[rows], reduction="sum")
            total = total + weights.get(label, 1.0) * loss / (2 * len(y_B))
        return total, torch.sigmoid(logits_BT.detach())

    log = data.open(lacking)
    other.course.take_step.learn = reference
    results, want = trained.fit(), other.fit()
    assert results["valid"] == pytest.approx(want["valid"], rel=1e-5)
    for one, two_ in zip(trained.job.model.parameters(), other.job.model.parameters(), strict=True):
        torch.testing.assert_close(one, two_, rtol=1e-4, atol=1e-5)
    valid = rows_of(log, "valid")
    known = ~valid.labels_BT[:, 1].isnan()
    p_N = restore(tmp_path / "run", which="last").scores(valid)[known, 1]
    assert (
        results["valid"]["bought.examples"]
        == int(known.sum())
        < len(known)
        == results["valid"]["examples"]
    )
    assert results["valid"]["bought.ne"] == pytest.approx(
        ne(p_N, valid.labels_BT[known, 1]), rel=1e-6
    )
    # of the first label
    assert sum(fifth["examples"] for fifth in results["progressive"]) == log.rows("train")


def test_progressive_validation_leaves_out_rows_that_lack_the_first_label(
    lacking: Path, tmp_path: Path
) -> None:
    schema = Schema.load(lacking / "schema.toml")
    columns = {name: schema.columns[name] for name in ("bought", "clicked", *schema.columns)}
    turned = dataclasses.replace(schema, columns=columns)
    data.prepare([lacking.parent / "log.parquet"], tmp_path / "log", schema=turned)
    results = train(small_run(tmp_path / "log", tmp_path / "run", batch_size=100))
    log = data.open(tmp_path / "log")
    known = int((~rows_of(log, "train").labels_BT[:, 0].isnan()).sum())
    assert sum(fifth["examples"] for fifth in results["progressive"]) == known < log.rows("train")
    assert (
        train(small_run(tmp_path / "log", tmp_path / "run", batch_size=100), resume=True) == results
    )


def test_what_judges_a_run_leaves_out_rows_that_lack_the_label(
    lacking: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate("ab"):
        train(small_run(lacking, tmp_path / name, batch_size=100, seed=seed))
    assert main(["evaluate", "a", "--json-out", "found.json"]) == 0
    found = json.loads(Path("found.json").read_text())
    test = rows_of(data.open(lacking), "test").labels_BT
    lacks = int(test[:, 1].isnan().sum())
    assert [one["examples"] for one in found.values()] == [len(test), len(test) - lacks, len(test)]
    assert main(["compare", "a", "b", "--label", "bought"]) == 0
    assert main(["report", "a", "--label", "bought", "--by", "item"]) == 0
    assert ">nan" not in Path("a/report.html").read_text().lower()
    assert main(["export", "a", "served", "--log", str(lacking.parent / "log.parquet")]) == 0
    card = json.loads(Path("served/card.json").read_text())["metrics"]["test"]["labels"]
    bought = next(one for name, one in found.items() if "bought" in name)
    assert card["bought"]["auc"]["value"] == pytest.approx(bought["auc"], abs=1e-6)
    capsys.readouterr()


def test_a_label_that_no_training_row_has_is_refused(two: Path, tmp_path: Path) -> None:
    log = pq.read_table(two.parent / "log.parquet").set_column(
        1, "bought", pa.nulls(2000, pa.float64())
    )
    pq.write_table(log, tmp_path / "log.parquet")
    with pytest.raises(
        UserError, match=r"label 'bought': missing in all \d+ training rows; leave the column out"
    ):
        data.prepare(
            [tmp_path / "log.parquet"], tmp_path / "out", schema=Schema.load(two / "schema.toml")
        )
