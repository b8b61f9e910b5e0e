"""A model folder in fewer bits: what it holds, how it scores, and what it was chosen by."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from sparrow import data
from sparrow.analysis.judge import Judge, judges
from sparrow.apps.bits import quantize as module
from sparrow.apps.bits.quantize import REPORT, Quantized, quantize
from sparrow.apps.fewer.parts import rises
from sparrow.apps.generate import generate
from sparrow.cli import main
from sparrow.cli.quantize import _show_parts
from sparrow.core import UserError
from sparrow.data.batches.dataset import Dataset
from sparrow.features.schema import Split
from sparrow.serving import Scorer, load, products
from sparrow.serving.export import export
from sparrow.serving.scorer import CHECK, table_file
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.runs import run_of, small_run
from tests.serving.test_export import contents


@pytest.fixture(scope="module")
def narrow(exported: Path, prepared: Path) -> Quantized:
    """All in the narrowest formats."""
    return quantize(exported, exported.parent / "narrow", prepared, budget=float("inf"))


@pytest.fixture(scope="module")
def rows(log: Path, served: Scorer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        pq.read_table(log).slice(5900).select(list(served.encoder.sources)).to_pylist()
    )
    return found


def test_bytes_are_those_of_the_formats(served: Scorer, narrow: Quantized) -> None:
    """D/2 + 4 bytes a row, a byte a weight with a scale a channel; and no weight is there twice."""
    folder = narrow.scorer.folder.path
    for part in narrow.parts:
        if part["kind"] == "table":
            rows, dim = part["shape"]
            assert part["format"] == "int4"
            with safe_open(folder / table_file(part["name"]), "pt") as file:
                names = list(file.keys())
                assert [file.get_tensor(name).nbytes for name in names] == [
                    rows * (-(-dim // 2) + 4)
                ]
            each = {"int4": -(-dim // 2) + 4, "int8": dim + 8, "fp16": 2 * dim, "fp32": 4 * dim}
            assert part["bytes"] == {name: rows * size for name, size in each.items()}
    sites = [part for part in narrow.parts if part["kind"] == "product"]
    assert len(sites) == 5
    with safe_open(folder / products.FILE, "pt") as file:
        for part in sites:
            out, inputs = part["shape"]
            assert file.get_tensor(f"{part['name']}/int8/codes").shape == (out, inputs)
            assert part["bytes"]["int8"] == out * inputs + 4 * out + 8
    with safe_open(folder / "dense.safetensors", "pt") as file:
        assert not {part["name"] for part in sites} & set(file.keys())
    assert narrow.scorer.folder.bytes < served.folder.bytes


def test_others_may_read_all_of_it(narrow: Quantized) -> None:
    """A service need not run as who made the model."""
    folder = narrow.scorer.folder.path
    mode = (folder / "manifest.json").stat().st_mode
    assert {
        name
        for name in narrow.scorer.folder.manifest["files"]
        if (folder / name).stat().st_mode != mode
    } == set()


def test_a_row_has_the_same_score_alone_and_beside_others(
    narrow: Quantized, rows: list[dict[str, Any]]
) -> None:
    """Log-odds to the bit: products are whole numbers. A sigmoid has another last bit where a
    vector of them ends.
    """
    scorer = narrow.scorer

    def equal(a: Any, b: Any) -> bool:
        return bool(np.abs(a - b).max() <= 2**-24)

    with torch.inference_mode():
        logits, some = (scorer.model(scorer.encoder.batch(of)) for of in (rows, rows[50:]))
        assert torch.equal(logits[50:], some)
        for row in (0, 7, 99):
            assert torch.equal(
                scorer.model(scorer.encoder.batch(rows[row : row + 1]))[0], logits[row]
            )

    whole = scorer.score(rows)
    assert np.isfinite(whole).all()
    for row in (0, 7, 99):
        assert equal(scorer.score(rows[row : row + 1])[0], whole[row])
    assert equal(scorer.score(rows[50:]), whole[50:])
    stacked = scorer.rank_all([({}, rows[:30]), ({}, rows[30:])])
    assert equal(np.concatenate(stacked), whole)
    user = {name: rows[0][name] for name in ("user", "history")}
    candidates = [{name: of for name, of in row.items() if name not in user} for row in rows]
    assert equal(scorer.rank(user, candidates), scorer.score([row | user for row in rows]))


def test_scores_are_near_and_the_folder_proves_itself(
    served: Scorer, narrow: Quantized, rows: list[dict[str, Any]]
) -> None:
    apart = np.abs(narrow.scorer.score(rows) - served.score(rows))
    assert 0 < apart.max() < 0.1
    again = load(narrow.scorer.folder.path)
    assert np.array_equal(again.score(rows), narrow.scorer.score(rows))


@pytest.mark.slow  # so does the command
def test_the_same_model_and_log_make_the_same_folder(
    exported: Path, prepared: Path, narrow: Quantized, tmp_path: Path
) -> None:
    quantize(exported, tmp_path / "again", prepared, budget=float("inf"))
    assert contents(tmp_path / "again") == contents(narrow.scorer.folder.path)


def test_a_report_does_not_depend_on_the_order_of_sets(narrow: Quantized) -> None:
    """The order of a set of texts is another one in each process."""
    report = json.loads((narrow.scorer.folder.path / REPORT).read_text())
    for part in report["parts"]:
        assert list(part["error"]) == list(part["damage"]) == list(part["bytes"])[:-1]


@pytest.mark.parametrize("shift", [5e-4, "one row"], ids=str)
def test_scores_that_are_a_little_off_in_all_rows_are_refused(
    shift: Any, narrow: Quantized, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An input may get the next code on another machine, in some rows; a wrong range shows in all
    of them.
    """
    place = tmp_path / "model"
    shutil.copytree(narrow.scorer.folder.path, place)
    kept = pq.read_table(place / CHECK)
    scores = np.array(kept[":score:label"].to_pylist(), np.float32)
    scores[slice(7, 8) if shift == "one row" else slice(None)] += (
        1e-2 if shift == "one row" else shift
    )
    pq.write_table(
        kept.set_column(kept.column_names.index(":score:label"), ":score:label", pa.array(scores)),
        place / CHECK,
    )
    monkeypatch.setattr("sparrow.serving.folder._unlike", lambda path, size, digest, is_known: "")
    if shift == "one row":
        load(place)
        return
    with pytest.raises(
        UserError, match=f"{CHECK}: row .*: the score of 'label' is .* export the model here"
    ):
        load(place)


def test_a_budget_is_kept_to_on_the_rows_that_choose(
    exported: Path, prepared: Path, tmp_path: Path
) -> None:
    done = quantize(exported, tmp_path / "out", prepared, budget=1e-3)
    best = done.result.best
    assert best.rise.upper <= 1e-3
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert report["rise"]["upper"] == best.rise.upper
    assert [part["name"] for part in report["parts"]] == [part["name"] for part in done.parts]
    dataset = data.open(prepared)
    chooses, _ = judges(dataset, 50_000)
    before, after = (chooses.ne_of(of.scores) for of in (load(exported), done.scorer))
    # what was chosen is what is served
    assert rises(before, after).upper == pytest.approx(best.rise.upper, abs=1e-9)


@pytest.mark.parametrize("rows", [100, 50_000])
def test_other_rows_check_what_was_chosen(
    rows: int, exported: Path, narrow: Quantized, prepared: Path, tmp_path: Path
) -> None:
    """Also where the valid part has fewer than twice the rows that may choose: then each half does
    one of the two.
    """
    done = (
        quantize(exported, tmp_path / "out", prepared, budget=float("inf"), rows=rows)
        if rows == 100
        else narrow
    )
    assert done.result.checked.value != done.result.best.rise.value
    assert (
        json.loads((done.scorer.folder.path / REPORT).read_text())["checked"]["upper"]
        == done.result.checked.upper
    )
    chooses, checks = judges(data.open(prepared), rows)
    assert chooses.batch.batch_size == min(rows, data.open(prepared).rows("valid") // 2)
    numbers = [judge.batch.dense_BC.numpy() for judge in (chooses, checks)]
    assert len(np.unique(np.concatenate(numbers), axis=0)) == sum(len(of) for of in numbers)
    before, after = (checks.ne_of(scorer.scores) for scorer in (load(exported), done.scorer))
    assert rises(before, after).value == pytest.approx(done.result.checked.value, abs=1e-9)


def test_folders_in_other_formats_are_refused_with_what_helps(
    narrow: Quantized, prepared: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run in few bits does not get other products by another export; one that is trained in fp32
    has them.
    """
    settings, few = {"model.dim": 4, "loop.max_steps": 3}, tmp_path / "few"
    train(run_of(prepared, tmp_path / "run", precision="mxfp8", **settings))
    export(tmp_path / "run", few, [log])
    for folder, says in (
        (
            narrow.scorer.folder.path,
            "in fewer bits already; quantise the folder that it was made of",
        ),
        (
            few,
            (
                "its products are computed in mxfp8, as when it was trained; train and export a run"
                " with --precision"
            ),
        ),
    ):
        assert main(["quantize", str(folder), str(tmp_path / "out"), "--data", str(prepared)]) == 2
        error = capsys.readouterr().err
        assert f"{folder}: {says}" in error and len(error.splitlines()) == 1
    train(run_of(prepared, tmp_path / "run", precision="fp32", **settings), overwrite=True)
    export(tmp_path / "run", tmp_path / "plain", [log])
    assert (
        main(["quantize", str(tmp_path / "plain"), str(tmp_path / "out"), "--data", str(prepared)])
        == 0
    )


@pytest.mark.slow
def test_the_rise_that_is_told_is_that_of_unseen_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several small models, with thousands of test rows each. On the rows that chose it is too
    low.
    """
    monkeypatch.setattr(module, "card", lambda *of: {})
    distances: dict[str, list[float]] = {"told": [], "of those that chose": []}
    for seed in range(10):
        log = tmp_path / f"{seed}.parquet"
        prepared, run, model = (
            tmp_path / f"{name}-{seed}" for name in ("prepared", "run", "model")
        )
        generate(
            log, rows=10_000, users=60, items=40, categorical=3, numeric=3, drift=0.0, seed=seed
        )
        data.prepare([log], prepared, split=Split(by="time", valid=0.12, test=0.6))
        train(small_run(prepared, run, loop=Loop(max_steps=12)))
        export(run, model, [log])
        done = quantize(model, tmp_path / f"few-{seed}", prepared, budget=2e-4)
        dataset = data.open(prepared)
        unseen = Judge(next(iter(dataset.loader(dataset.rows("test"), split="test"))), prepared)
        rise = rises(*(unseen.ne_of(scorer.scores) for scorer in (load(model), done.scorer)))
        if not done.result.best.choice:
            continue  # the model as it is
        for name, other in (
            ("told", done.result.checked),
            ("of those that chose", done.result.best.rise),
        ):
            distances[name].append((other.value - rise.value) / math.hypot(other.error, rise.error))
    # normal, if the values agree
    z = {name: sum(each) / math.sqrt(len(each)) for name, each in distances.items()}
    assert len(distances["told"]) >= 6
    assert abs(z["told"]) < 3
    assert z["of those that chose"] < -3


@pytest.mark.parametrize("is_beyond", [True, False])
def test_the_command_tells_the_rise_of_rows_that_chose_nothing(
    is_beyond: bool, narrow: Quantized, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says it where these do not show that it is within the budget."""
    budget = narrow.result.checked.upper + (-1e-6 if is_beyond else 1e-6)
    _show_parts(replace(narrow, budget=budget), Path("out"))
    told = capsys.readouterr().out
    first, second = re.findall(r"^(?:NE rises by|on those that chose).*", told, re.MULTILINE)
    checked, chose = (
        f"by {100 * rise.value:+.4f} %" for rise in (narrow.result.checked, narrow.result.best.rise)
    )
    assert checked in first and first.endswith("of the valid part that chose nothing")
    assert chose in second
    assert ("give a smaller --ne-budget" in told) == is_beyond


def test_nothing_to_spend_leaves_the_model_as_it_is(
    exported: Path, served: Scorer, prepared: Path, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    done = quantize(exported, tmp_path / "out", prepared, budget=0.0)
    assert done.result.best.rise.upper <= 0
    if not done.result.best.choice:
        assert np.array_equal(done.scorer.score(rows), served.score(rows))


def test_the_test_part_chooses_nothing(
    exported: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the card, which tells how good the model is, reads it."""
    read: list[str] = []
    before = Dataset.loader

    def loader(self: Dataset, size: int, split: str = "train", **others: Any) -> Iterator[Any]:
        read.append(split)
        return before(self, size, split, **others)  # type: ignore[return-value]

    monkeypatch.setattr(Dataset, "loader", loader)
    monkeypatch.setattr(module, "card", lambda *of: {})
    quantize(exported, tmp_path / "out", prepared, budget=1e-3)
    assert set(read) == {"train", "valid"}


def test_formats_that_may_not_be_narrower(exported: Path, prepared: Path, tmp_path: Path) -> None:
    done = quantize(
        exported, tmp_path / "rows", prepared, budget=float("inf"), tables="int8", products="fp32"
    )
    assert {(part["kind"], part["format"]) for part in done.parts} <= {
        ("table", "int8"),
        ("table", "fp16"),
    }
    assert not (tmp_path / "rows" / products.FILE).exists()
    assert not done.scorer.is_rounded


def test_each_row_may_have_its_own_range(
    exported: Path, served: Scorer, prepared: Path, tmp_path: Path
) -> None:
    """Then a number far from those of training is no more wrong than others."""
    quantize(
        exported, tmp_path / "out", prepared, budget=float("inf"), inputs="of-each-row", rows=600
    )
    with safe_open(tmp_path / "out" / products.FILE, "pt") as file:
        assert not [name for name in file.keys() if name.endswith("/inputs")]  # noqa: SIM118
    row = dict.fromkeys(served.encoder.sources) | {"num_0": 40.0, "user": 3}
    assert abs(load(tmp_path / "out").score([row]) - served.score([row])).max() < 0.05


def test_mistakes_are_one_line(
    exported: Path,
    narrow: Quantized,
    prepared: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    few, out = narrow.scorer.folder.path, tmp_path / "out"
    for arguments, remedy in (
        ([exported, out], "--data is missing"),
        ([exported, "--data", prepared], "OUT is missing"),
        ([few, out, "--data", prepared], "the folder that it was made of"),
        ([exported, few, "--data", prepared], "choose another name"),
        ([exported, out, "--data", prepared, "--ne-budget", "few"], "such as 0.02%"),
        ([exported, out, "--data", prepared, "--ne-budget", "-1%"], "such as 0.02%"),
        ([exported, out, "--data", tmp_path], "sparrow prepare"),
        ([tmp_path, out, "--data", prepared], "sparrow export"),
    ):
        assert main(["quantize", *map(str, arguments)]) == 2, arguments
        told = capsys.readouterr().err
        assert remedy in told and told.count("\n") == 1, told
        assert not out.exists()


def test_the_command_shows_and_draws(
    exported: Path,
    narrow: Quantized,
    prepared: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                "quantize",
                str(exported),
                str(tmp_path / "out"),
                "--data",
                str(prepared),
                "--ne-budget",
                "inf",
            ]
        )
        == 0
    )
    told = capsys.readouterr().out
    assert "cross.weights.0" in told and "times fewer" in told and "NE rises by" in told
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert contents(tmp_path / "out") == contents(narrow.scorer.folder.path)
    assert main(["quantize", str(exported), "--compare", str(narrow.scorer.folder.path)]) == 0
    assert "they part" in capsys.readouterr().out
