from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.analysis.importance import Importance
from sparrow.analysis.scores import Rows
from sparrow.apps.compare import compare
from sparrow.apps.report import _columns, _in_words, reliability, report
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.features.schema import Column, Schema, Split
from sparrow.metrics.intervals import Estimate
from sparrow.metrics.metric import topk_names
from sparrow.models import logistic
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.analysis.pages import Page, page
from tests.runs import small_run

SECTIONS = (
    "Verdict",
    "Learning",
    "Calibration",
    "By slice",
    "Feature importance",
    "Time of a step",
    "Tables",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("report") / "run"
    train(small_run(prepared, run_dir))
    return run_dir


@pytest.fixture(scope="module")
def done(trained: Path) -> tuple[Path, Counter[str]]:
    """A report with every section, and how often it told of what."""
    profile = {
        "steps": 20,
        **{k: [{"part": f"a {k}", "ms_per_step": 2.0, "share": 1.0}] for k in ("parts", "kinds")},
    }
    (trained / "profile.json").write_text(json.dumps(profile))
    told: Counter[str] = Counter()
    path = report(
        trained,
        rows=300,
        out=trained.parent / "r.html",
        progress=lambda what, n, total: told.update([what]),
    )
    (trained / "profile.json").unlink()
    return path, told


def test_one_file_with_every_section(done: tuple[Path, Counter[str]]) -> None:
    path, told = done
    got = page(path)
    for section in SECTIONS:
        assert any(heading.startswith(section) for heading in got.headings), section
    assert {"Unknown ids", "Settings", "Within groups: where the positives are placed"} < set(
        got.headings
    )
    assert got.headings.count("ts") == 1  # sliced by time unless told
    assert {
        "valid: dlrm",
        "test: dlrm",
        "test: always the training rate",
        "test: true_p (baseline)",
    } < set(got.cells)
    assert {"a parts", "a kinds"} < set(got.cells)
    assert {
        "scored test",
        "scored valid",
        "importance",
        "counted train",
        "counted test",
        "slices",
    } <= set(told)
    assert got.pictures >= 6


def test_its_figures_are_evaluates(
    trained: Path, done: tuple[Path, Counter[str]], tmp_path: Path
) -> None:
    assert main(["evaluate", str(trained), "--json-out", str(tmp_path / "e.json")]) == 0
    wanted = next(iter(json.loads((tmp_path / "e.json").read_text()).values()))
    cells = page(done[0]).cells
    row = cells[cells.index("test: dlrm") :]
    for metric, cell in zip(("auc", "gauc", "logloss", "ne", "calibration"), row[2:7], strict=True):
        assert float(cell.split(" ± ")[0]) == pytest.approx(wanted[metric], abs=6e-5), metric
    assert float(row[7].split(" ± ")[0]) == pytest.approx(wanted["ece"], abs=6e-5)
    within = row[row.index("test: dlrm", 1) + 1 :]
    for metric, cell in zip(topk_names(), within, strict=False):
        assert float(cell.split(" ± ")[0]) == pytest.approx(wanted[metric], abs=6e-5), metric
    constant = within[within.index("test: always the training rate") + 1 :]
    # chance, whatever the log's order
    assert float(constant[0].split(" ± ")[0]) < wanted["recall@5"] < 1


def test_a_time_that_matters_is_sliced_once() -> None:
    schema = Schema(columns={"ts": Column(kind="time"), "x": Column(kind="numeric")}, encodings={})
    weighed = [
        Importance(column=name, ne=0.1, auc=0.1, ne_spread=0.0, auc_spread=0.0)
        for name in ("x", "ts")
    ]
    assert _columns(schema, weighed) == ["ts", "x"]


@pytest.mark.usefixtures("undrawn")
def test_the_command(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["report", str(trained), "--split", "valid", "--by", "user", "num_1", "--rows", "200"])
        == 0
    )
    assert "report.html" in capsys.readouterr().out
    got = page(trained / "report.html")
    assert [h for h in got.headings if h in ("user", "num_1", "ts")] == ["user", "num_1"]
    for bad, says in ((["--by", "usr"], "did you mean 'user'"), (["--rows", "-1"], "rows: -1")):
        assert main(["report", str(trained), *bad]) == 2
        assert says in capsys.readouterr().err
    (trained / "profile.json").write_text("{")
    assert main(["report", str(trained), "--rows", "0"]) == 2
    assert "damaged" in capsys.readouterr().err
    (trained / "profile.json").unlink()


def table(rows: int = 900, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=rows)
    columns = {
        "label": (rng.random(rows) < 1 / (1 + np.exp(-2 * x))).astype(int),
        "x": x,
        "<i>k</i>": [("$a", "b<c", "d&e")[i] for i in rng.integers(0, 3, rows)],
        "item": rng.integers(0, 30, rows),
    }
    return columns | changes


def nearly_constant() -> Any:
    return np.where(np.arange(900) == 0, 2.0, 1.0)


def in_full(
    tmp_path: Path, columns: dict[str, Any], split: Split | None = None, **changes: Any
) -> Page:
    """Prepare, train and report on a log of these columns."""
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    split = split or Split(by="ratio", valid=0.2, test=0.2)
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared", split=split)
    train(small_run(tmp_path / "prepared", tmp_path / "run", **changes))
    return page(report(tmp_path / "run", rows=100, by=list(columns)[1:]))


ODD: dict[str, Callable[[Path], Page]] = {
    "names that are html": lambda p: in_full(p, table()),
    "no valid part": lambda p: in_full(p, table(), Split(by="ratio", valid=0.0, test=0.3)),
    "no dense columns": lambda p: in_full(p, {k: v for k, v in table().items() if k != "x"}),
    "no id columns": lambda p: in_full(
        p, {k: v for k, v in table().items() if k in ("label", "x")}, model=logistic.Config()
    ),
    "nothing progressive, one step": lambda p: in_full(
        p, table(), loop=Loop(progressive=False, max_steps=1)
    ),
    "one class in a slice": lambda p: in_full(
        p, table(item=np.where(table()["label"] == 1, 1, table()["item"]))
    ),
    "nearly a constant": lambda p: in_full(p, table(x=nearly_constant())),
    "nearly a constant, no valid part": lambda p: in_full(
        p, table(x=nearly_constant()), Split(by="ratio", valid=0.0, test=0.3)
    ),
    "no dense columns, nothing progressive, one step": lambda p: in_full(
        p,
        {k: v for k, v in table().items() if k != "x"},
        loop=Loop(progressive=False, max_steps=1),
    ),
}
# of those with two oddities each of both is here
QUICK = (
    "one class in a slice",
    "no id columns",
    "nearly a constant, no valid part",
    "no dense columns, nothing progressive, one step",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ODD]
)
def test_odd_runs(name: str, tmp_path: Path) -> None:
    got = ODD[name](tmp_path)
    assert got.headings[0] == "Report on run"
    if name in ("names that are html", "one class in a slice"):
        assert {"<i>k</i>", "item", "x"} < set(got.headings)
    if "no valid part" in name:
        assert not any(cell.startswith("valid: ") for cell in got.cells)
    if name == "one class in a slice":
        assert "-" in got.cells


@pytest.mark.usefixtures("undrawn")
def test_any_of_several_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = table(buy=np.random.default_rng(1).integers(0, 2, 900))
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    kinds = {"label": "label", "buy": "label", "x": "numeric"}
    schema = Schema(
        columns={n: Column(kind=k) for n, k in kinds.items()},
        encodings={},
        split=Split(by="ratio", test=0.3),
    )  # type: ignore[arg-type]
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared", schema=schema)
    run_dir = tmp_path / "run"
    train(small_run(tmp_path / "prepared", run_dir, model=logistic.Config()))
    assert main(["evaluate", str(run_dir), "--json-out", str(tmp_path / "e.json")]) == 0
    wanted = {
        name.split(": ")[1]: result
        for name, result in json.loads((tmp_path / "e.json").read_text()).items()
    }
    for name in ("label", "buy"):
        path = report(run_dir, label=name, rows=50)
        cells = page(path).cells
        auc = float(cells[cells.index("test: logistic") + 2].split(" ± ")[0])
        assert auc == pytest.approx(wanted[name]["auc"], abs=6e-5)
        assert (
            f"predicts {name} (and {'buy' if name == 'label' else 'label'}: --label)"
            in path.read_text()
        )
        assert compare([run_dir], [run_dir], label=name).differences[0].a == pytest.approx(
            wanted[name]["auc"]
        )
    assert wanted["buy"]["auc"] != pytest.approx(wanted["label"]["auc"], abs=0.01)
    for command in (["report", str(run_dir)], ["compare", str(run_dir), str(run_dir)]):
        assert main([*command, "--label", "bux"]) == 2
        assert "did you mean 'buy'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ne", "calibration", "says"),
    [
        ((0.8, 0.01), (1.0, 0.01), "takes away 20.0 % of the loss"),
        ((0.99, 0.01), (1.0, 0.01), "cannot be told from"),
        ((1.3, 0.01), (1.0, 0.01), "30.0 % worse than"),
        ((0.8, 0.01), (1.1, 0.01), "10.0 % more positives"),
        ((0.8, 0.01), (0.9, 0.01), "10.0 % fewer positives"),
        ((0.8, 0.01), (0.99, 0.01), "within the noise"),
        ((math.nan, math.nan), (math.nan, math.nan), "all of one class"),
    ],
)
def test_the_verdict_in_words(
    ne: tuple[float, float], calibration: tuple[float, float], says: str
) -> None:
    def estimate(value: float, error: float) -> Estimate:
        return Estimate(value, torch.tensor([1.0, -1.0], dtype=torch.float64) * error / 2)

    assert estimate(0.0, 0.01).error == pytest.approx(0.01)
    assert says in _in_words("test", {"ne": estimate(*ne), "calibration": estimate(*calibration)})


@pytest.mark.parametrize("spread", [0.0, 0.9])
def test_half_widths_do_not_hang_on_the_unit_of_the_weights(spread: float) -> None:
    """Of the curve, the verdict and a slice; with equal weights they are those of no weights. They
    were 0.43, 0.026 and 0.0003 for weights of 0.01, 1 and 100.
    """
    random = torch.Generator().manual_seed(0)
    scores_N, free_N = (torch.rand(5000, generator=random) for _ in range(2))
    labels_N = (torch.rand(5000, generator=random) < scores_N).float()
    found = []
    for unit in (None, 0.01, 1, 100):
        weights_N = None if unit is None else unit * (1 + spread * (2 * free_N - 1))
        rows = Rows(scores_N=scores_N, labels_N=labels_N, weights_N=weights_N, sessions_N=None)
        widths = [*reliability(rows)[2], *(e.error for e in rows.estimates().values())]
        found.append([*widths, *(e.error for e in rows.estimates(scores_N < 0.3).values())])
    assert found[1] == pytest.approx(found[2], rel=1e-4) and found[3] == pytest.approx(
        found[2], rel=1e-4
    )
    assert (found[0] == pytest.approx(found[2], rel=1e-4)) == (spread == 0)
    assert sum(found[2]) > (1.05 if spread else 0.999) * sum(found[0])  # unequal weights tell less


@pytest.mark.usefixtures("undrawn")
def test_the_training_rate_counts_weights(tmp_path: Path) -> None:
    """Always saying it is then as good on rows held out as the rate of these."""
    columns = table(4000)
    got = in_full(tmp_path, {**columns, "sample_weight": 1.0 + 9 * columns["label"]})
    at = got.cells.index("valid: always the training rate")
    calibration = got.cells[at + 1 + len(("rows", "auc", "logloss", "ne"))]
    assert float(calibration.split(" ± ")[0]) == pytest.approx(1, abs=0.05)


def test_a_part_of_one_class(tmp_path: Path) -> None:
    rows = 1200
    columns = table(rows, ts=np.arange(rows))
    columns["label"][-300:] = 0
    got = in_full(tmp_path, columns, Split(by="time", valid=0.2, test=0.2))
    assert "By slice, test" in got.headings
    with pytest.raises(UserError, match="test part is empty"):
        data.prepare(
            [tmp_path / "log.parquet"],
            tmp_path / "none",
            split=Split(by="time", valid=0.2, test=0.0),
        )
        train(small_run(tmp_path / "none", tmp_path / "other"))
        report(tmp_path / "other")
