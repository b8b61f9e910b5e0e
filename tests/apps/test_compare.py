from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import ttest_ind

from sparrow import data
from sparrow.apps.compare import Difference, _difference, _verdict, compare, lines, to_html
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.features.schema import Schema
from sparrow.metrics import METRICS, evaluate, metric_of
from sparrow.metrics.intervals import Estimate
from sparrow.metrics.metric import topk_names
from sparrow.models import logistic
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.analysis.pages import Page
from tests.runs import small_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    """a0, a1, a2 and b0, b1, b2: DLRM and logistic regression with three seeds each."""
    here = tmp_path_factory.mktemp("compare")
    for seed in range(3):
        train(small_run(prepared, here / f"a{seed}", seed=seed))
        train(small_run(prepared, here / f"b{seed}", seed=seed, model=logistic.Config()))
    return here


def test_one_run_against_another(runs: Path) -> None:
    found = compare([runs / "a0"], [runs / "b0"])
    by_name = {d.metric: d for d in found.differences}
    assert list(by_name) == [*METRICS, *topk_names()]
    for d in found.differences:
        assert d.low < d.b - d.a == d.value < d.high
        assert math.isnan(d.spread_a)
    assert any("sessions" in note for note in found.notes)
    assert any(note.startswith("here: of these models") for note in found.notes)
    assert {d.verdict for d in found.differences} <= {
        *("A better here", "B better here", "differs here", "equal here"),
        *("unclear", "undefined"),
    }
    assert ("model.name", "dlrm", "logistic") in [
        tuple(s) for s in found.settings
    ] or found.settings
    other = {d.metric: d for d in compare([runs / "b0"], [runs / "a0"]).differences}
    for name, d in by_name.items():
        assert (other[name].value, other[name].low) == pytest.approx((-d.value, -d.high))


def test_users_are_the_units_where_told(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, users = (compare([runs / "a0"], [runs / "b0"], units=units) for units in (None, "user"))
    assert [d.value for d in rows.differences] == [d.value for d in users.differences]
    assert any(
        "sessions count as independent" in note and "--units COLUMN" in note for note in rows.notes
    )
    dataset = data.open(restore(runs / "a0").run.data.path)
    count = len(pc.unique(dataset.column("user", "test")))
    assert any(f"paired over the {count} values of user of test" in note for note in users.notes)
    assert main(["compare", str(runs / "a0"), str(runs / "b0"), "--units", "num_0"]) == 2
    assert "--units: 'num_0' is no such column" in capsys.readouterr().err


def test_a_run_does_not_differ_from_itself(runs: Path) -> None:
    found = compare([runs / "a0"], [runs / "a0"])
    for d in found.differences:
        assert (d.value, d.low, d.high, d.verdict) == (0, 0, 0, "equal here")
    assert f"on both sides: {runs / 'a0'}" in found.notes


def test_with_seeds_the_interval_covers_them_too(runs: Path) -> None:
    a, b = ([runs / f"{side}{seed}" for seed in range(3)] for side in "ab")
    found = compare(a, b)
    assert not any("here: " in note for note in found.notes)
    assert not any("here" in d.verdict for d in found.differences)
    two = compare(a, b[:2])
    assert any("3 and 2 runs" in note for note in two.notes) and any(
        "here: " in note for note in two.notes
    )
    assert any("3 and 3 runs" in note for note in found.notes)
    singles = [compare([one], [other]) for one, other in zip(a, b, strict=True)]
    for i, d in enumerate(found.differences):
        assert d.value == pytest.approx(
            np.mean([single.differences[i].value for single in singles])
        )
        assert d.spread_a == pytest.approx(
            np.std([single.differences[i].a for single in singles], ddof=1)
        )
    repeated = compare([a[0], a[0]], b[:2])
    assert any("not independent" in note for note in repeated.notes)


def test_seeds_alone_are_welchs_test() -> None:
    """Where rows are no source of error, the interval is the one that scipy gives."""
    rng, none_G = np.random.default_rng(0), torch.zeros(50, dtype=torch.float64)
    a, b = rng.normal(0.7, 0.01, 3), rng.normal(0.72, 0.003, 5)
    got = _difference("auc", [Estimate(x, none_G) for x in a], [Estimate(x, none_G) for x in b])
    wanted = ttest_ind(b, a, equal_var=False).confidence_interval(0.95)
    assert (got.low, got.high) == pytest.approx((wanted.low, wanted.high), rel=1e-3)


@pytest.mark.parametrize(
    ("metric", "low", "high", "verdict"),
    [
        ("auc", 0.1, 0.2, "B better"),
        ("auc", -0.2, -0.1, "A better"),
        ("ne", 0.1, 0.2, "A better"),
        ("logloss", -0.2, -0.1, "B better"),
        ("gauc", -0.1, 0.1, "unclear"),
        ("calibration", 0.1, 0.2, "differs"),
        ("auc", math.nan, math.nan, "undefined"),
        ("auc", 1e-8, 3e-7, "equal"),  # as one rank against three
        ("calibration", 1e-8, 3e-7, "equal"),
        ("ne", -0.9e-4, 0.9e-4, "equal"),
        ("ne", 0.2e-4, 1.2e-4, "unclear"),  # certain to differ, but perhaps by nothing that matters
        ("ne", 0.2e-4, 2.2e-4, "A better"),
        ("logloss", -0.4e-4, 0.4e-4, "equal"),  # of 0.5
        ("logloss", 0.6e-4, 0.8e-4, "A better"),
        ("ece", 0.001, 0.004, "equal"),
        ("ece", -0.2, -0.1, "B better"),
        ("recall@5", 0.1, 0.2, "B better"),
    ],
)
def test_verdicts(metric: str, low: float, high: float, verdict: str) -> None:
    declared = metric_of(metric)
    assert _verdict(declared, 0.5, 0.5 + (low + high) / 2, low, high) == verdict
    alone = verdict if verdict in ("unclear", "undefined") else f"{verdict} here"
    assert _verdict(declared, 0.5, 0.5 + (low + high) / 2, low, high, has_seeds=False) == alone


def test_the_page_and_the_command(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c.html"
    sides = [",".join(str(runs / f"{side}{seed}") for seed in range(2)) for side in "ab"]
    assert main(["compare", *sides, "--split", "valid", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for word in ("auc", "calibration", "95 % interval", "Welch"):
        assert word in said
    page = Page(out.read_text(encoding="utf-8"))
    assert {"Difference", "Scores of the first run of each", "Settings that differ"} < set(
        page.headings
    )
    assert page.pictures == 2
    found = compare([runs / "a0"], [runs / "b0"])
    cells = set(Page(to_html(found)).cells)
    for line in lines(found):
        assert set(line) <= cells
    for bad, says in (
        ([str(runs / "a0"), ","], "name no run"),
        ([str(runs / "a0"), str(runs / "c")], "not a run"),
    ):
        assert main(["compare", *bad]) == 2
        assert says in capsys.readouterr().err


def test_another_systems_scores(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A column of the log and a file with the same scores are the same side; the truth is better
    than a model.
    """
    dataset = data.open(restore(runs / "a0").run.data.path)
    truth = dataset.column("true_p", "test").to_numpy()
    pq.write_table(
        pa.table({"score": truth, "label": dataset.column("label", "test")}), tmp_path / "s.parquet"
    )
    by_column, by_file = (
        compare([runs / "a0"], [other]) for other in ("true_p", tmp_path / "s.parquet")
    )
    verdicts = {d.metric: d.verdict for d in by_column.differences}
    assert verdicts["ne"] == verdicts["auc"] == "B better here"
    assert [figures(d) for d in by_column.differences] == [figures(d) for d in by_file.differences]
    values = {d.metric: d for d in by_column.differences}
    for name, loader in dataset.baselines("test"):
        assert name == "true_p"
        wanted = evaluate(lambda batch: batch.dense_BC, loader)
        for metric in ("auc", "gauc", "ne", "ece", "recall@5", "mrr"):
            assert values[metric].b == pytest.approx(wanted[metric], rel=1e-6)
    # any side may be the other system
    same = compare(["true_p"], [tmp_path / "s.parquet", runs / "b0"])
    assert same.settings == () and same.differences[0].a == values["auc"].b
    out = tmp_path / "c.html"
    assert main(["compare", str(runs / "a0"), "true_p", "--out", str(out)]) == 0
    assert "true_p" in capsys.readouterr().out
    assert "Settings that differ" in Page(out.read_text(encoding="utf-8")).headings
    for names, says in (
        ([str(runs / "a0"), "tru_p"], "not a run directory, no file of scores, and no baseline"),
        (["true_p", "true_p"], "true_p: not a run directory"),
        ([str(tmp_path / "s.parquet"), "true_p"], "not a run directory"),
        ([str(runs / "a0"), "true_p", "--split", "valid", "--label", "gone"], "--label: 'gone'"),
        (
            [str(runs / "a0"), str(tmp_path / "s.parquet"), "--split", "valid"],
            "rows, and valid has",
        ),
    ):
        assert main(["compare", *names]) == 2
        assert says in capsys.readouterr().err


def test_what_rounding_changes_is_no_difference(runs: Path, tmp_path: Path) -> None:
    """Every score is higher by 1e-6 of it, so the interval of calibration is narrow and does not
    hold 0.
    """
    scores_N = compare([runs / "a0"], [runs / "a0"]).rows_a.scores_N
    for drift, verdict in ((1e-6, "equal here"), (1e-3, "differs here")):
        pq.write_table(
            pa.table({"score": scores_N.double().numpy() * (1 - drift)}), tmp_path / "s.parquet"
        )
        by_name = {
            d.metric: d for d in compare([runs / "a0"], [tmp_path / "s.parquet"]).differences
        }
        assert by_name["calibration"].high < 0
        assert by_name["calibration"].verdict == verdict
        assert by_name["auc"].verdict == "equal here"


def figures(one: Difference) -> Difference:
    """With figures that can be compared."""
    return dataclasses.replace(one, spread_a=0.0, spread_b=0.0)


def test_other_rows_are_refused(runs: Path, log: Path, tmp_path: Path) -> None:
    """Other labels, another number of rows, another label; the same rows prepared otherwise are
    not.
    """
    raw, schema = pq.read_table(log), Schema.load(runs / "a0" / "schema.toml")

    def trained(name: str, table: pa.Table, schema: Schema) -> Path:
        pq.write_table(table, tmp_path / f"{name}.parquet")
        data.prepare([tmp_path / f"{name}.parquet"], tmp_path / f"{name}.prepared", schema=schema)
        train(small_run(tmp_path / f"{name}.prepared", tmp_path / name))
        return tmp_path / name

    at = raw.column_names.index("label")
    flipped = raw.set_column(at, "label", pc.subtract(1, raw["label"]))
    with pytest.raises(UserError, match="the labels of its test rows are not those of"):
        compare([runs / "a0"], [trained("flipped", flipped, schema)])
    with pytest.raises(UserError, match="test rows"):
        compare([runs / "a0"], [trained("shorter", raw.slice(0, 4000), schema)])
    columns = {("click" if n == "label" else n): c for n, c in schema.columns.items()}
    renamed = raw.rename_columns(["click" if n == "label" else n for n in raw.column_names])
    with pytest.raises(UserError, match="predicts click"):
        compare(
            [runs / "a0"],
            [trained("renamed", renamed, dataclasses.replace(schema, columns=columns))],
        )
    with pytest.raises(UserError, match="the sessions"):
        group = schema.role("group")
        assert group is not None
        ignored = schema.columns | {
            group: dataclasses.replace(schema.columns[group], kind="ignore")
        }
        compare(
            [runs / "a0"], [trained("alone", raw, dataclasses.replace(schema, columns=ignored))]
        )
    plain = schema.columns | {
        "num_0": dataclasses.replace(schema.columns["num_0"], transform="none", mean=None, std=None)
    }
    found = compare(
        [runs / "a0"], [trained("plain", raw, dataclasses.replace(schema, columns=plain))]
    )
    assert any("prepared differently" in note for note in found.notes)


def test_without_sessions_and_with_one_class(tmp_path: Path) -> None:
    rows = 1000
    columns = {
        "label": np.arange(rows) % 2,
        "ts": np.arange(rows),
        "x": np.random.default_rng(0).normal(size=rows),
    }
    columns["label"][-100:] = 0
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared")
    for seed in (0, 1):
        train(
            small_run(
                tmp_path / "prepared", tmp_path / f"r{seed}", seed=seed, model=logistic.Config()
            )
        )
    found = compare([tmp_path / "r0"], [tmp_path / "r1"])
    verdicts = {d.metric: d.verdict for d in found.differences}
    assert verdicts["auc"] == verdicts["ne"] == "undefined"
    assert "gauc" not in verdicts
    assert any("rows" in note for note in found.notes)
    assert "undefined" in Page(to_html(found)).cells
    seeds = compare([tmp_path / "r0", tmp_path / "r1"], [tmp_path / "r1", tmp_path / "r0"])
    assert {d.verdict for d in seeds.differences if d.metric not in ("logloss", "ece")} <= {
        "undefined",
        "equal",
    }
