"""A run's calibrators: fitted to valid, honest on test, and applied by all that scores."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import sparrow
from sparrow import checkpoint, data
from sparrow.apps.bits.quantize import quantize
from sparrow.apps.compare import compare
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.extensions.calibration import logistic
from sparrow.extensions.calibration.calibrate import calibrate
from sparrow.extensions.calibration.fit import fit_calibrators
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.metrics import auc, ne
from sparrow.serving import load
from sparrow.serving.export import export
from sparrow.trained import calibrators
from sparrow.trained.predict import predict
from sparrow.trained.scorer import Restored, restore
from sparrow.training import train
from tests.runs import run_of

KINDS = ("logistic", "isotonic")
MODEL: dict[str, Any] = {
    "model.name": "logistic",
    "dense.lr": 0.02,
    "data.batch_size": 100,
    "checkpoint.every": 10,
}


def rows(count: int, seed: int, kept: float = 1.0) -> pa.Table:
    """Clicks and purchases that hang on x and user. kept: the share of the rows without a click
    that are logged.
    """
    random = np.random.default_rng(seed)
    x, user = random.normal(size=count), random.integers(0, 20, count)
    clicked = random.random(count) < 1 / (1 + np.exp(2 - x - 0.05 * user))
    bought = random.random(count) < 1 / (1 + np.exp(1 + x))
    logged = clicked | (random.random(count) < kept)
    columns = {"clicked": clicked.astype(int), "bought": bought.astype(int), "x": x, "user": user}
    return pa.table(
        {name: of[logged] for name, of in {**columns, "w": np.where(clicked, 4.0, 1.0)}.items()}
    )


Made = Callable[..., Path]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Prepared logs of which the training part alone lacks most rows without a click, and nothing
    says so.
    """

    def made(
        labels: tuple[str, ...] = ("clicked",), weighted: bool = False, **parts: pa.Table
    ) -> Path:
        place = tmp_path_factory.mktemp("sampled")
        tables = {
            "train": rows(8000, 0, 0.25),
            "valid": rows(3000, 1),
            "test": rows(3000, 2),
            **parts,
        }
        for name, table in tables.items():
            pq.write_table(table, place / f"{name}.parquet")
        kinds: dict[str, Any] = dict.fromkeys(("clicked", "bought", "w"), "ignore")
        kinds |= {
            **dict.fromkeys(labels, "label"),
            **({"w": "weight"} if weighted else {}),
            "x": "numeric",
        }
        columns = {name: Column(kind=kind) for name, kind in kinds.items()}
        columns["user"] = Column(kind="categorical", table="user")
        files = {f"{part}_files": (str(place / f"{part}.parquet"),) for part in ("valid", "test")}
        schema = Schema(columns=columns, encodings={"user": Encoding()})
        split = Split(by="file", valid=0, test=0, **files)
        return data.prepare(
            [place / "train.parquet"], place / "prepared", schema=schema, split=split
        ).out

    return made


@pytest.fixture(scope="module")
def prepared_sampled(sampled: Made) -> Path:
    return sampled()


@pytest.fixture(scope="module")
def two(sampled: Made) -> Path:
    return sampled(("clicked", "bought"))


Trained = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(prepared_sampled: Path, two: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Runs with their results, by calibrators and number of labels. Who changes one makes a copy of
    it.
    """
    found: dict[tuple[str, int], tuple[Path, dict[str, Any]]] = {}

    def of(kind: str, labels: int = 1) -> tuple[Path, dict[str, Any]]:
        if (kind, labels) not in found:
            place, log = (
                tmp_path_factory.mktemp("trained"),
                two if labels == 2 else prepared_sampled,
            )
            found[kind, labels] = (
                place,
                train(run_of(log, place, **MODEL, **{"calibration.method": kind})),
            )
        return found[kind, labels]

    return of


def scores_of(found: Restored, prepared: Path, split: str = "test") -> tuple[torch.Tensor, ...]:
    """Scores and labels [N, T] and weights [N] of a part."""
    (batch,) = data.open(prepared).loader(10_000, split=split)
    assert batch.labels_BT is not None
    return (
        found.scores(batch),
        batch.labels_BT,
        batch.weights_B if batch.weights_B is not None else torch.ones(1),
    )


def held(run_dir: Path) -> dict[str, bytes]:
    """All files of a run's calibrators and checkpoints."""
    folders = [run_dir / calibrators.FOLDER, run_dir / "checkpoints"]
    return {
        str(p.relative_to(run_dir)): p.read_bytes()
        for at in folders
        for p in at.rglob("*")
        if p.is_file()
    }


def test_a_run_that_is_to_have_none_any_more_loses_them(
    trained: Trained, prepared_sampled: Path, tmp_path: Path
) -> None:
    """But not those that a command has fitted since, of which the run's settings know nothing."""
    shutil.copytree(trained("isotonic")[0], tmp_path, dirs_exist_ok=True)
    assert restore(tmp_path).calibrators
    results = train(
        run_of(prepared_sampled, tmp_path, **MODEL, **{"calibration.method": "none"}), resume=True
    )
    assert "calibrated" not in results and restore(tmp_path).calibrators == ()
    calibrate(tmp_path, "logistic")
    train(run_of(prepared_sampled, tmp_path, **MODEL), resume=True)
    assert calibrators.kind_of(restore(tmp_path).calibrators) == "logistic"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_cut_and_a_command_fit_the_same_bits(
    trained: Trained, prepared_sampled: Path, tmp_path: Path, kind: Any
) -> None:
    settings = {**MODEL, "calibration.method": kind}
    cut, plain = tmp_path / "cut", tmp_path / "plain"
    whole, results = trained(kind)
    stopped = train(
        run_of(prepared_sampled, cut, **settings, **{"log.every": 3}),
        listener=lambda event, values: (
            os.kill(os.getpid(), signal.SIGTERM) if event == "progress" else None
        ),
    )
    assert stopped["stopped_by"] == "SIGTERM" and "calibrated" not in stopped
    with pytest.raises(
        UserError, match=rf"has no calibrator, and its run asks for one \(of the kind {kind}\)"
    ):
        restore(cut)
    train(run_of(prepared_sampled, cut, **settings), resume=True)
    before, results_before = trained("none")
    assert "calibrated" not in results_before
    shutil.copytree(before, plain)
    assert not (plain / calibrators.FOLDER).exists()
    weights = held(plain)
    shutil.copytree(plain, tmp_path / "later")
    again = train(run_of(prepared_sampled, tmp_path / "later", **settings), resume=True)
    assert again["calibrated"] == results["calibrated"] and again["step"] == results["step"]
    assert calibrate(plain, kind) == results["calibrated"]
    calibrated = [
        {n: of for n, of in held(at).items() if n.endswith(".toml")} for at in (whole, cut, plain)
    ]
    assert len(calibrated[0]) == 1 and calibrated[0] == calibrated[1] == calibrated[2]
    assert {
        n for n, of in held(whole).items() if n.endswith(".safetensors") and weights[n] != of
    } == set()
    for run_dir in (whole, plain):
        assert (
            json.loads((run_dir / "results.json").read_text())["calibrated"]
            == results["calibrated"]
        )


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_held_out_rows_become_right_and_keep_their_order(
    trained: Trained, two: Path, kind: Any
) -> None:
    run_dir, results = trained(kind, 2)
    before, labels, _ = scores_of(restore(run_dir, calibrated=False), two)
    after = scores_of(restore(run_dir), two)[0]
    assert [*results["calibrated"]["test"]] == ["clicked", "bought"]
    for t, of in enumerate(results["calibrated"]["test"].values()):
        assert of["before"]["ne"] == pytest.approx(ne(before[:, t], labels[:, t]))
        assert of["after"]["ne"] == pytest.approx(ne(after[:, t], labels[:, t]))
        order = before[:, t].argsort()
        assert bool((after[order, t].diff() >= 0).all())
        tied = auc(after[:, t], labels[:, t]) - auc(before[:, t], labels[:, t])
        assert abs(tied) < (1e-6 if kind == "logistic" else 2e-3)
    clicked = results["calibrated"]["test"]["clicked"]  # four times too many clicks were seen
    assert clicked["before"]["calibration"] > 1.5 > 1.15 > clicked["after"]["calibration"] > 0.87
    assert clicked["after"]["ece"] < clicked["before"]["ece"] / 3
    assert clicked["after"]["ne"] < clicked["before"]["ne"]
    first, second = restore(run_dir).calibrators
    assert first != second


@pytest.mark.parametrize("kind", KINDS)
def test_rows_count_by_their_weights(sampled: Made, tmp_path: Path, kind: Any) -> None:
    prepared = sampled(weighted=True)
    train(run_of(prepared, tmp_path, **MODEL, **{"calibration.method": kind}))
    scores_BT, labels_BT, weights_B = scores_of(restore(tmp_path), prepared, "valid")
    off = [
        float(w @ scores_BT[:, 0]) / float(w @ labels_BT[:, 0])
        for w in (weights_B, torch.ones_like(weights_B))
    ]
    assert off[0] == pytest.approx(1, abs=0.02)
    assert off[1] > 1.5  # a control: weights matter here


def test_the_log_of_a_coin_gets_its_rate(sampled: Made, tmp_path: Path) -> None:
    """Nothing is learnt from labels of the valid part but their rate."""
    random, tables = np.random.default_rng(5), {}
    for seed, name in enumerate(("train", "valid", "test")):
        table = rows(3000, seed)
        coin = pa.array((random.random(3000) < 0.3).astype(np.int64))
        tables[name] = table.set_column(0, "clicked", coin)
    found = train(
        run_of(sampled(**tables), tmp_path, **MODEL, **{"calibration.method": "isotonic"})
    )["calibrated"]["test"]["clicked"]
    assert found["after"]["auc"] == pytest.approx(0.5, abs=0.03)
    assert found["after"]["ne"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_scores_passes_through_them(
    trained: Trained, two: Path, tmp_path: Path, kind: Any
) -> None:
    run_dir, log = trained(kind, 2)[0], two.parent / "test.parquet"
    found, raw = restore(run_dir), pq.read_table(log)
    expected = found.score_rows(raw)
    plain = restore(run_dir, calibrated=False).score_rows(raw)
    assert np.abs(expected - plain).max(0).min() > 0.01
    predict(run_dir, [log], tmp_path / "scores.parquet")
    predicted = pq.read_table(tmp_path / "scores.parquet")
    assert np.array_equal(np.stack([predicted["score"], predicted["score_bought"]], 1), expected)
    assert main(["evaluate", str(run_dir), "--json_out", str(tmp_path / "told.json")]) == 0
    told = json.loads((tmp_path / "told.json").read_text())
    for t, label in enumerate(("clicked", "bought")):
        labels_B = torch.tensor(raw[label].to_numpy()).float()
        of = next(values for name, values in told.items() if name.endswith(f", {kind}: {label}"))
        assert of["ne"] == pytest.approx(
            ne(torch.from_numpy(expected[:, t].copy()), labels_B), abs=1e-6
        )
    export(run_dir, tmp_path / "model", [log])
    export(run_dir, tmp_path / "dropped", [log], calibrate="none")
    for folder, scores in (("model", expected), ("dropped", plain)):
        scorer = load(tmp_path / folder)
        sent = raw.select(list(scorer.encoder.sources)).to_pylist()
        assert np.abs(scorer.score(sent) - scores).max() <= 1e-6
    assert load(tmp_path / "model").calibrators == found.calibrators
    notes = [
        json.loads((tmp_path / f / "card.json").read_text())["metrics"]
        for f in ("model", "dropped")
    ]
    assert notes[0]["valid"]["note"] == f"its {kind} calibrator was fitted to these rows"
    assert not any("note" in of for of in (notes[0]["test"], *notes[1].values()))


def test_a_folder_in_few_bits_and_a_delta_inherit_them(
    trained: Trained, prepared_sampled: Path, tmp_path: Path
) -> None:
    run_dir, log = trained("isotonic")[0], prepared_sampled.parent / "test.parquet"
    export(run_dir, tmp_path / "base", [log], calibrate="logistic")
    export(run_dir, tmp_path / "model", [log])
    mine = restore(run_dir).calibrators
    few = quantize(
        tmp_path / "model", tmp_path / "few", prepared_sampled, budget=float("inf"), rows=500
    )
    assert few.scorer.calibrators == mine
    export(run_dir, tmp_path / "delta", [log], base=[tmp_path / "base"])
    # the run's before the base's
    assert load(tmp_path / "base", [tmp_path / "delta"]).calibrators == mine
    assert calibrators.kind_of(load(tmp_path / "base").calibrators) == "logistic"


def test_a_frame_in_python(tmp_path: Path) -> None:
    table = rows(4000, 3).drop_columns(["bought", "w"])
    given: dict[str, Any] = {
        "label": "clicked",
        "settings": {"threads": 1, "calibration.method": "isotonic", "loop.epochs": 2},
    }
    fitted = sparrow.fit(table, run_dir=tmp_path / "run", **given)
    assert np.array_equal(fitted.predict(table), restore(tmp_path / "run").score_rows(table)[:, 0])
    assert not np.array_equal(
        fitted.predict(table), restore(tmp_path / "run", calibrated=False).score_rows(table)[:, 0]
    )
    assert fitted.results["calibrated"]["kind"] == "isotonic"


def test_metrics_of_rows_that_were_fitted_say_so(
    prepared_sampled: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    begin = ["train", str(prepared_sampled), "--threads", "1", "--loop.epochs", "1"]
    assert main([*begin, "--run_dir", runs[0], "--calibration.method", "isotonic"]) == 0
    said = capfd.readouterr().out
    assert (
        "isotonic calibrator of step" in said
        and "clicked, before" in said
        and "clicked, after" in said
    )
    assert main([*begin, "--run_dir", runs[1]]) == 0
    for split, seen in (("valid", True), ("test", False)):
        capfd.readouterr()
        assert main(["evaluate", runs[0], "--split", split]) == 0
        said = capfd.readouterr().out
        assert ", isotonic" in said and ("fitted to these rows" in said) == seen
        notes = compare([runs[0]], [runs[1]], split=split).notes
        assert ("A: scores pass through isotonic" + " fitted to these rows" * seen) in notes
        assert not any(note.startswith("B:") for note in notes)
    assert main(["report", runs[0], "--rows", "100"]) == 0
    page = (tmp_path / "a" / "report.html").read_text()
    assert (
        "valid: blend, isotonic fitted to these rows" in page and "test: blend, isotonic<" in page
    )
    capfd.readouterr()
    assert main(["calibrate", runs[1], "logistic"]) == 0
    said = capfd.readouterr().out
    assert "logistic calibrator of step" in said and "now pass through logistic calibrators" in said
    shutil.copytree(prepared_sampled, tmp_path / "other")
    manifest = json.loads((tmp_path / "other" / "manifest.json").read_text())
    # another fingerprint: other rows
    (tmp_path / "other" / "manifest.json").write_text(json.dumps(manifest, indent=3))
    assert main(["evaluate", runs[0], "--split", "valid", "--data", str(tmp_path / "other")]) == 0
    assert "fitted to these rows" not in capfd.readouterr().out


def test_each_checkpoint_has_its_own(
    trained: Trained, prepared_sampled: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained("none")[0], tmp_path, dirs_exist_ok=True)
    early, best = (
        checkpoint.steps(tmp_path / "checkpoints")[0],
        checkpoint.latest(tmp_path / "checkpoints", best=True),
    )
    plain = scores_of(restore(tmp_path), prepared_sampled)[0]
    calibrate(tmp_path, "isotonic")
    with pytest.raises(
        UserError,
        match=rf"step {early} has no calibrator, and steps \[{best}\] have one; .*--resume, or",
    ):
        restore(tmp_path, which=str(early))
    calibrate(tmp_path, "isotonic", which=str(early))
    assert restore(tmp_path, which=str(early)).calibrators != restore(tmp_path).calibrators
    assert calibrate(tmp_path, "none") == {"kind": "none", "step": best, "test": {}}
    assert torch.equal(scores_of(restore(tmp_path), prepared_sampled)[0], plain)
    assert restore(tmp_path, which=str(early)).calibrators
    train(run_of(prepared_sampled, tmp_path, **MODEL), overwrite=True)
    assert not (tmp_path / calibrators.FOLDER).exists()


def test_a_file_that_was_changed_is_refused(
    trained: Trained, prepared_sampled: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained("logistic")[0], tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / calibrators.FOLDER).iterdir()
    text = path.read_text()
    assert "slope" in text
    again = r"fit it again: sparrow calibrate \S+ logistic --checkpoint \d+$"
    for edited, why in (
        (text.replace("slope = ", "slope = 1"), "changed since it was written"),
        (
            text.replace("slope = ", "slope = 2020-01-01 #"),
            "changed since it was written|not valid TOML",
        ),
        (text[: len(text) // 2], "changed since it was written|not valid TOML"),
        ("", "changed since it was written"),
        ("labels = 3", "changed since it was written"),
        ("\x00", "not valid TOML"),
    ):
        path.write_text(edited)
        with pytest.raises(UserError, match=f"({why}).*; {again}") as error:
            restore(tmp_path)
        assert "\n" not in str(error.value)
    path.write_text("# a note of a person\n" + text)
    assert restore(tmp_path).calibrators
    other = tmp_path / "other"
    train(run_of(prepared_sampled, other, **{**MODEL, "seed": 1, "calibration.method": "logistic"}))
    shutil.copy(other / calibrators.FOLDER / path.name, path)
    with pytest.raises(UserError, match=f"fitted to another checkpoint of step .*; {again}"):
        restore(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="has no calibrator, and its run asks for one"):
        restore(tmp_path)


def test_a_run_keeps_its_scores_where_calibrators_make_them_worse(
    prepared_sampled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As those do that turn all scores into one."""
    monkeypatch.setattr(
        "sparrow.extensions.calibration.logistic.fit_config",
        lambda *given: logistic.Config(slope=0.0),
    )
    command = [
        "train",
        str(prepared_sampled),
        "--run_dir",
        str(tmp_path),
        "--calibration.method",
        "logistic",
        "--threads",
        "1",
    ]
    assert main([*command, "--model.name", "logistic", "--dense.lr", "0.02"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "label 'clicked': logistic makes scores worse (log loss 0." in told
    found = json.loads((tmp_path / "results.json").read_text())["calibrated"]
    assert found["kind"] == "none" and "makes scores worse" in found["refused"]
    assert restore(tmp_path).calibrators == ()
    with pytest.raises(UserError, match="makes scores worse"):
        calibrate(tmp_path, "logistic")


@pytest.mark.parametrize("part", ["few", "empty", "zeros", "ones"])
def test_a_valid_part_that_cannot_be_fitted_to_is_refused_at_once(
    sampled: Made, tmp_path: Path, part: str
) -> None:
    valid = rows(300, 1)
    clicked = np.full(300, part == "ones").astype(np.int64)
    clicked[:9] |= part == "few"
    prepared = sampled(
        valid=(
            valid.slice(0, 0)
            if part == "empty"
            else valid.set_column(0, "clicked", pa.array(clicked))
        )
    )
    why = {
        "empty": "has no valid part to fit to",
        "few": (
            "label 'clicked' is 0.03 on average in 300 rows of the valid part .* and 10 of each"
            " kind are the least"
        ),
    }.get(part, f"label 'clicked' is {clicked[0]} in all rows of the valid")
    with pytest.raises(
        UserError,
        match=(
            f"calibration: .*{why}.*; prepare with a larger valid part .*none leaves them as"
            " they are"
        ),
    ):
        train(run_of(prepared, tmp_path / "run", **MODEL, **{"calibration.method": "isotonic"}))
    assert not (tmp_path / "run").exists()
    train(run_of(prepared, tmp_path / "run", **MODEL))
    with pytest.raises(UserError, match=why):
        calibrate(tmp_path / "run", "isotonic")


def test_a_score_that_is_not_finite_is_refused(prepared_sampled: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match="row 2 of the valid part is nan; the model diverged: use an earlier --checkpoint",
    ):
        fit_calibrators(
            "logistic",
            torch.tensor([[0.1], [0.2], [float("nan")]]),
            torch.eye(3)[:, :1],
            None,
            ["a"],
        )
    with pytest.raises(
        UserError, match="calibration.method: 'cubic' is not one of 'none', 'logistic', 'isotonic'"
    ):
        run_of(prepared_sampled, tmp_path, **{"calibration.method": "cubic"})


def test_without_a_test_part_nothing_is_judged(sampled: Made, tmp_path: Path) -> None:
    prepared = sampled(test=rows(300, 1).slice(0, 0))
    found = train(run_of(prepared, tmp_path, **MODEL, **{"calibration.method": "isotonic"}))[
        "calibrated"
    ]
    assert found["test"] == {} and dataclasses.asdict(restore(tmp_path).calibrators[0])  # type: ignore[call-overload]
