"""A model folder in fewer bits: what it holds, how it scores, and what it was chosen by."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from sparrow import data
from sparrow.analysis.bits import quantize as module
from sparrow.analysis.bits.quantize import REPORT, Quantized, quantize
from sparrow.analysis.bits.search import rises
from sparrow.analysis.judge import judges
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.data.batches.dataset import Dataset
from sparrow.serving import Scorer, load, products
from sparrow.serving.scorer import CHECK, table_file
from tests.serving.test_export import contents


@pytest.fixture(scope="module")
def narrow(exported: Path, prepared: Path) -> Quantized:
    """All in the narrowest formats."""
    return quantize(exported, exported.parent / "narrow", prepared, budget=float("inf"))


@pytest.fixture(scope="module")
def rows(log: Path, served: Scorer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(log).slice(5900).select(list(served.encoder.sources)).to_pylist()
    return found


def test_bytes_are_those_of_the_formats(served: Scorer, narrow: Quantized) -> None:
    """D/2 + 4 bytes a row, a byte a weight with a scale a channel; and no weight is there twice."""
    folder = narrow.scorer.folder.path
    for part in narrow.parts:
        if part["kind"] == "table":
            (rows, dim) = part["shape"]
            assert part["format"] == "int4"
            with safe_open(folder / table_file(part["name"]), "pt") as file:
                assert [file.get_tensor(name).nbytes for name in file.keys()] == [rows * (-(-dim // 2) + 4)]  # noqa: SIM118
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
    assert {name for name in narrow.scorer.folder.manifest["files"] if (folder / name).stat().st_mode != mode} == set()


def test_a_row_has_the_same_score_alone_and_beside_others(narrow: Quantized, rows: list[dict[str, Any]]) -> None:
    """Log-odds to the bit: products are whole numbers. A sigmoid has another last bit where a vector of them ends."""
    scorer = narrow.scorer

    def equal(a: Any, b: Any) -> bool:
        return bool(np.abs(a - b).max() <= 2**-24)

    with torch.inference_mode():
        logits, some = (scorer.model(scorer.encoder.batch(of)) for of in (rows, rows[50:]))
        assert torch.equal(logits[50:], some)
        for row in (0, 7, 99):
            assert torch.equal(scorer.model(scorer.encoder.batch(rows[row : row + 1]))[0], logits[row])

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
    """An input may get the next code on another machine, in some rows; a wrong range shows in all of them."""
    place = tmp_path / "model"
    shutil.copytree(narrow.scorer.folder.path, place)
    kept = pq.read_table(place / CHECK)
    scores = np.array(kept[":score:label"].to_pylist(), np.float32)
    scores[slice(7, 8) if shift == "one row" else slice(None)] += 1e-2 if shift == "one row" else shift
    pq.write_table(
        kept.set_column(kept.column_names.index(":score:label"), ":score:label", pa.array(scores)), place / CHECK
    )
    monkeypatch.setattr("sparrow.serving.folder._unlike", lambda path, size, digest, checksums: "")
    if shift == "one row":
        load(place)
        return
    with pytest.raises(UserError, match=f"{CHECK}: row .*: the score of 'label' is .* export the model here"):
        load(place)


def test_a_budget_is_kept_to_on_the_rows_that_choose(exported: Path, prepared: Path, tmp_path: Path) -> None:
    done = quantize(exported, tmp_path / "out", prepared, budget=1e-3)
    best = done.found.best
    assert best.rise.upper <= 1e-3
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert report["rise"]["upper"] == best.rise.upper
    assert [part["name"] for part in report["parts"]] == [part["name"] for part in done.parts]
    dataset = data.open(prepared)
    (judge,) = judges(dataset, 50_000, parts=1)
    before, after = (judge.ne_of(of.scores) for of in (load(exported), done.scorer))
    assert rises(before, after).upper == pytest.approx(best.rise.upper, abs=1e-9)  # what was chosen is what is served


def test_other_rows_check_what_was_chosen(exported: Path, narrow: Quantized, prepared: Path, tmp_path: Path) -> None:
    """Where the valid part has as many more."""
    done = quantize(exported, tmp_path / "out", prepared, budget=float("inf"), rows=300)
    assert done.checked is not None and narrow.checked is None
    assert done.checked.value != done.found.best.rise.value
    assert json.loads((tmp_path / "out" / REPORT).read_text())["checked"]["upper"] == done.checked.upper
    chooses, checks = judges(data.open(prepared), 300)
    assert not torch.equal(chooses.batch.dense_BC, checks.batch.dense_BC)
    before, after = (checks.ne_of(scorer.scores) for scorer in (load(exported), done.scorer))
    assert rises(before, after).value == pytest.approx(done.checked.value, abs=1e-9)


def test_nothing_to_spend_leaves_the_model_as_it_is(
    exported: Path, served: Scorer, prepared: Path, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    done = quantize(exported, tmp_path / "out", prepared, budget=0.0)
    assert done.found.best.rise.upper <= 0
    if not done.found.best.choice:
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
    done = quantize(exported, tmp_path / "rows", prepared, budget=float("inf"), tables="int8", products="fp32")
    assert {(part["kind"], part["format"]) for part in done.parts} <= {("table", "int8"), ("table", "fp16")}
    assert not (tmp_path / "rows" / products.FILE).exists()
    assert not done.scorer.is_rounded


def test_each_row_may_have_its_own_range(exported: Path, served: Scorer, prepared: Path, tmp_path: Path) -> None:
    """Then a number far from those of training is no more wrong than others."""
    quantize(exported, tmp_path / "out", prepared, budget=float("inf"), inputs="of-each-row", rows=600)
    with safe_open(tmp_path / "out" / products.FILE, "pt") as file:
        assert not [name for name in file.keys() if name.endswith("/inputs")]  # noqa: SIM118
    row = dict.fromkeys(served.encoder.sources) | {"num_0": 40.0, "user": 3}
    assert abs(load(tmp_path / "out").score([row]) - served.score([row])).max() < 0.05


def test_mistakes_are_one_line(
    exported: Path, narrow: Quantized, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    exported: Path, narrow: Quantized, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(exported), str(tmp_path / "out"), "--data", str(prepared), "--ne-budget", "inf"]) == 0
    told = capsys.readouterr().out
    assert "cross.weights.0" in told and "times fewer" in told and "NE 0." in told
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert main(["quantize", str(exported), "--compare", str(narrow.scorer.folder.path)]) == 0
    assert "they part" in capsys.readouterr().out
