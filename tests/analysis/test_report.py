from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.inspection import permutation_importance
from sklearn.metrics import log_loss, roc_auc_score

from sparrow import data
from sparrow.analysis.compare import compare
from sparrow.analysis.importance import importance
from sparrow.analysis.report import _in_words, reliability, report
from sparrow.analysis.scores import Rows
from sparrow.analysis.slices import slices
from sparrow.analysis.usage import usage
from sparrow.cli import main
from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.metrics.intervals import Estimate
from sparrow.models import dlrm, logistic
from sparrow.trained.run import Data, Log, Loop, Run
from sparrow.trained.scorer import restore
from sparrow.training import train

SECTIONS = ("Verdict", "Learning", "Calibration", "By slice", "Feature importance", "Time of a step", "Tables")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("report") / "run"
    train(a_run(prepared, run_dir))
    return run_dir


def a_run(prepared: Path, run_dir: Path, **changes: Any) -> Run:
    run = Run(
        run_dir=str(run_dir),
        data=Data(path=str(prepared), batch_size=512),
        model=dlrm.Config(dim=4, bottom=(8,), top=(8,)),
        tables=TableChoices(rule=rowwise_adagrad.Config(lr=0.1)),
        log=Log(every=3, tensorboard=False),
        threads=1,
    )
    return dataclasses.replace(run, **changes)


class Page(HTMLParser):
    """Headings and cells of a page; fails on tags that are not closed in order, and on whatever loads from outside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.cells: list[str] = []
        self.pictures = 0
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "object")
        for name, value in attrs:
            if name in ("src", "href"):
                assert value is not None and value.startswith(("data:image/svg+xml;base64,", "#")), value
        self.pictures += tag == "img"
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(text)
        if self.open and self.open[-1] == "td":
            self.cells.append(text)


def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


# -- the file ---------------------------------------------------------------------------------------------------


def test_one_file_with_every_section(trained: Path, tmp_path: Path) -> None:
    profile = {"steps": 20, **{k: [{"part": f"a {k}", "ms_per_step": 2.0, "share": 1.0}] for k in ("parts", "kinds")}}
    (trained / "profile.json").write_text(json.dumps(profile))
    done: Counter[str] = Counter()
    path = report(trained, rows=300, out=tmp_path / "r.html", progress=lambda what, n, total: done.update([what]))
    (trained / "profile.json").unlink()
    got = page(path)
    for section in SECTIONS:
        assert any(heading.startswith(section) for heading in got.headings), section
    assert {"Unknown ids", "Settings"} < set(got.headings)
    assert "ts" in got.headings  # sliced by time unless told
    assert {"valid: dlrm", "test: dlrm", "test: always the training rate", "test: true_p (baseline)"} < set(got.cells)
    assert {"a parts", "a kinds"} < set(got.cells)
    assert {"scored test", "scored valid", "importance", "counted train", "counted test", "slices"} <= set(done)
    assert got.pictures >= 6


def test_its_figures_are_evaluates(trained: Path, tmp_path: Path) -> None:
    assert main(["evaluate", str(trained), "--json-out", str(tmp_path / "e.json")]) == 0
    wanted = next(iter(json.loads((tmp_path / "e.json").read_text()).values()))
    cells = page(report(trained, rows=0, out=tmp_path / "r.html")).cells
    row = cells[cells.index("test: dlrm") :]
    for metric, cell in zip(("auc", "gauc", "logloss", "ne", "calibration"), row[2:7], strict=True):
        assert float(cell.split(" ± ")[0]) == pytest.approx(wanted[metric], abs=6e-5), metric


def test_the_command(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(trained), "--split", "valid", "--by", "user", "num_1", "--rows", "200"]) == 0
    assert "report.html" in capsys.readouterr().out
    got = page(trained / "report.html")
    assert [h for h in got.headings if h in ("user", "num_1", "ts")] == ["user", "num_1"]
    for bad, says in ((["--by", "usr"], "did you mean 'user'"), (["--rows", "-1"], "rows: -1")):
        assert main(["report", str(trained), *bad]) == 2
        assert says in capsys.readouterr().err
    (trained / "profile.json").write_text("{")
    assert main(["report", str(trained)]) == 2
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


def in_full(tmp_path: Path, columns: dict[str, Any], split: Split | None = None, **changes: Any) -> Page:
    """Prepare, train and report on a log of these columns."""
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    split = split or Split(by="ratio", valid=0.2, test=0.2)
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared", split=split)
    train(a_run(tmp_path / "prepared", tmp_path / "run", **changes))
    return page(report(tmp_path / "run", rows=100, by=list(columns)[1:]))


ODD: dict[str, Callable[[Path], Page]] = {
    "names that are html": lambda p: in_full(p, table()),
    "no valid part": lambda p: in_full(p, table(), Split(by="ratio", valid=0.0, test=0.3)),
    "no dense columns": lambda p: in_full(p, {k: v for k, v in table().items() if k != "x"}),
    "no id columns": lambda p: in_full(
        p, {k: v for k, v in table().items() if k in ("label", "x")}, model=logistic.Config()
    ),
    "nothing progressive, one step": lambda p: in_full(p, table(), loop=Loop(progressive=False, max_steps=1)),
    "one class in a slice": lambda p: in_full(p, table(item=np.where(table()["label"] == 1, 1, table()["item"]))),
    "nearly a constant": lambda p: in_full(p, table(x=np.where(np.arange(900) == 0, 2.0, 1.0))),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_runs(name: str, tmp_path: Path) -> None:
    got = ODD[name](tmp_path)
    assert got.headings[0] == "Report on run"
    if name == "names that are html":
        assert {"<i>k</i>", "item", "x"} < set(got.headings)
    if name == "no valid part":
        assert not any(cell.startswith("valid: ") for cell in got.cells)
    if name == "one class in a slice":
        assert "-" in got.cells


def test_any_of_several_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = table(buy=np.random.default_rng(1).integers(0, 2, 900))
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    kinds = {"label": "label", "buy": "label", "x": "numeric"}
    schema = Schema(
        columns={n: Column(kind=k) for n, k in kinds.items()}, encodings={}, split=Split(by="ratio", test=0.3)
    )  # type: ignore[arg-type]
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared", schema=schema)
    run_dir = tmp_path / "run"
    train(a_run(tmp_path / "prepared", run_dir, model=logistic.Config()))
    assert main(["evaluate", str(run_dir), "--json-out", str(tmp_path / "e.json")]) == 0
    wanted = {name.split(": ")[1]: result for name, result in json.loads((tmp_path / "e.json").read_text()).items()}
    for name in ("label", "buy"):
        path = report(run_dir, label=name, rows=50)
        cells = page(path).cells
        auc = float(cells[cells.index("test: logistic") + 2].split(" ± ")[0])
        assert auc == pytest.approx(wanted[name]["auc"], abs=6e-5)
        assert f"predicts {name} (and {'buy' if name == 'label' else 'label'}: --label)" in path.read_text()
        assert compare([run_dir], [run_dir], label=name).differences[0].a == pytest.approx(wanted[name]["auc"])
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
def test_the_verdict_in_words(ne: tuple[float, float], calibration: tuple[float, float], says: str) -> None:
    def estimate(value: float, error: float) -> Estimate:
        return Estimate(value, torch.tensor([1.0, -1.0], dtype=torch.float64) * error / 2)

    assert estimate(0.0, 0.01).error == pytest.approx(0.01)
    assert says in _in_words("test", {"ne": estimate(*ne), "calibration": estimate(*calibration)})


@pytest.mark.parametrize("spread", [0.0, 0.9])
def test_half_widths_do_not_hang_on_the_unit_of_the_weights(spread: float) -> None:
    """Of the curve, the verdict and a slice; with equal weights they are those of no weights. They were 0.43, 0.026 and
    0.0003 for weights of 0.01, 1 and 100.
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
    assert found[1] == pytest.approx(found[2], rel=1e-4) and found[3] == pytest.approx(found[2], rel=1e-4)
    assert (found[0] == pytest.approx(found[2], rel=1e-4)) == (spread == 0)
    assert sum(found[2]) > (1.05 if spread else 0.999) * sum(found[0])  # unequal weights tell less


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
        data.prepare([tmp_path / "log.parquet"], tmp_path / "none", split=Split(by="time", valid=0.2, test=0.0))
        train(a_run(tmp_path / "none", tmp_path / "other"))
        report(tmp_path / "other")


# -- importance -------------------------------------------------------------------------------------------------


def planted(rows: int = 3000) -> tuple[Batch, Schema]:
    """Dense a, b and c, id k, list h; the second and the last of them carry the label, see `score`."""
    rng = torch.Generator().manual_seed(0)
    dense_BC = torch.randn(rows, 3, generator=rng)
    k_B = torch.randint(0, 5, (rows,), generator=rng)
    lengths_B = torch.randint(0, 4, (rows,), generator=rng)
    h_N = torch.randint(0, 2, (int(lengths_B.sum()),), generator=rng)
    ids = KeyedJagged(
        keys=("k", "h"), values_N=torch.cat([k_B, h_N]), lengths=torch.cat([torch.ones_like(k_B), lengths_B])
    )
    batch = Batch(dense_BC=dense_BC, ids=ids)
    labels_B = (torch.rand(rows, generator=rng) < score(batch)).float()
    names = {name: Column(kind="numeric") for name in "abc"}
    names |= {"k": Column(kind="categorical", table="k"), "h": Column(kind="list", table="h")}
    schema = Schema(columns=names, encodings={"k": Encoding(), "h": Encoding()})
    return dataclasses.replace(batch, labels_BT=labels_B[:, None]), schema


def score(batch: Batch) -> torch.Tensor:
    h = batch.ids["h"]
    row_N = torch.arange(batch.batch_size).repeat_interleave(h.lengths_B)
    ones_B = torch.zeros(batch.batch_size).index_add_(0, row_N, 2.0 * h.values_N - 1)
    return torch.sigmoid(2 * batch.dense_BC[:, 1] + 0.5 * batch.dense_BC[:, 0] + 0.7 * ones_B)


def test_what_carries_the_signal_comes_first_and_what_is_not_used_is_nothing() -> None:
    batch, schema = planted()
    before = batch.dense_BC.clone()
    found = importance(score, batch, schema, batch_size=256, repeats=4)
    assert [one.column for one in found[:3]] == ["b", "h", "a"]
    by_name = {one.column: one for one in found}
    for unused in ("c", "k"):
        assert by_name[unused].ne == by_name[unused].auc == by_name[unused].ne_spread == 0
    assert by_name["b"].auc > 0.1 and by_name["b"].ne > 0.2 and 0 < by_name["b"].ne_spread < 0.1
    assert torch.equal(batch.dense_BC, before)
    again = importance(score, batch, schema, batch_size=999, repeats=4)
    assert {one.column: one.auc for one in again} == pytest.approx({one.column: one.auc for one in found})


def test_importance_is_sklearns() -> None:
    batch, schema = planted()

    class Model:
        classes_ = np.array([0, 1])

        def fit(self, x: Any, y: Any) -> None: ...

        def predict_proba(self, x: Any) -> Any:
            dense_BC = torch.tensor(x[:, :3], dtype=torch.float32)
            p = score(dataclasses.replace(batch, dense_BC=dense_BC)).numpy()
            return np.stack([1 - p, p], 1)

    assert batch.labels_BT is not None
    y = batch.labels_BT[:, 0].numpy()
    entropy = log_loss(y, np.full(len(y), y.mean()))
    scorers = {
        "auc": lambda model, x, y: roc_auc_score(y, model.predict_proba(x)[:, 1]),
        "ne": lambda model, x, y: -log_loss(y, model.predict_proba(x)[:, 1].astype(float)) / entropy,
    }
    theirs = permutation_importance(Model(), batch.dense_BC.numpy(), y, scoring=scorers, n_repeats=20, random_state=0)
    ours = {one.column: one for one in importance(score, batch, schema, batch_size=500, repeats=20, seed=1)}
    for c, name in enumerate("abc"):
        for metric in ("auc", "ne"):
            mean, spread = theirs[metric].importances_mean[c], theirs[metric].importances_std[c]
            assert getattr(ours[name], metric) == pytest.approx(mean, abs=4 * spread / math.sqrt(20) + 1e-6), name
            assert getattr(ours[name], f"{metric}_spread") == pytest.approx(spread, rel=0.6, abs=1e-6)


def test_features_of_one_raw_column_move_together() -> None:
    """Each tells all that the other does: alone, either could be shuffled at no cost."""
    batch, schema = planted()
    twice = {**schema.columns, "c": Column(kind="numeric", source="b")}
    batch = dataclasses.replace(batch, dense_BC=batch.dense_BC[:, [0, 1, 1]])

    def either(batch: Batch) -> torch.Tensor:
        b, c = batch.dense_BC[:, 1], batch.dense_BC[:, 2]
        return torch.sigmoid(2 * torch.where(b == c, b, batch.dense_BC[:, 0]))

    found = importance(either, batch, dataclasses.replace(schema, columns=twice), batch_size=500)
    assert found[0].column == "b" and found[0].auc > 0.1
    assert "c" not in {one.column for one in found}


# -- slices, tables ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, dict[str, Any]]:
    rng, rows, path = np.random.default_rng(0), 2000, tmp_path_factory.mktemp("sliced")
    columns = {
        "label": rng.integers(0, 2, rows),
        "x": rng.normal(50, 7, rows),
        "big": np.round(np.exp(rng.normal(3, 2, rows))),
        "few": rng.integers(1, 4, rows).astype(float),
        "item": rng.zipf(1.5, rows).clip(max=60),
        "h": [list(range(i % 5)) for i in range(rows)],
        "ts": 1_700_000_000 + np.arange(rows) * 60,
    }
    pq.write_table(pa.table(columns), path / "log.parquet")
    schema = Schema(
        columns={
            "label": Column(kind="label"),
            "x": Column(kind="numeric"),
            "big": Column(kind="numeric", transform="log"),
            "few": Column(kind="numeric", transform="none"),
            "item": Column(kind="categorical", table="item"),
            "h": Column(kind="list", table="h"),
            "ts": Column(kind="time"),
            "gone": Column(kind="ignore"),
        },
        encodings={"item": Encoding(kind="range"), "h": Encoding(kind="hash")},
        split=Split(by="time", valid=0, test=0.5),
    )
    data.prepare([path / "log.parquet"], path / "prepared", schema=schema)
    test = {
        name: np.array(values[rows // 2 :], dtype=object if name == "h" else None) for name, values in columns.items()
    }
    return data.open(path / "prepared"), test


def test_slices_bear_the_values_of_the_raw_log(sliced: tuple[Dataset, dict[str, Any]]) -> None:
    dataset, raw = sliced
    names, at_N = slices(dataset, "test", "item")
    log = pq.read_table(dataset.path.parent / "log.parquet")
    train = log.slice(0, len(log) // 2)
    trained = Counter(train["item"].to_pylist())
    named = [str(item) if trained[item] >= 2 else "unknown" for item in raw["item"]]
    counts = Counter(named)
    assert len(names) == 8
    assert names[-1] == f"{len(counts) - 7} others"
    assert sorted((counts[name] for name in names[:-1]), reverse=True) == sorted(counts.values(), reverse=True)[:7]
    for i, name in enumerate(names[:-1]):
        assert {named[n] for n in np.flatnonzero(at_N == i)} == {name}
        assert (at_N == i).sum() == counts[name]
    for name in ("x", "big"):
        names, at_N = slices(dataset, "test", name)
        sizes = np.bincount(at_N)
        assert names[0].startswith("≤ ")
        bounds = pc.min_max(train[name]).as_py()
        raw_N = raw[name].clip(bounds["min"], bounds["max"])  # as `prepare` clips
        tops = [raw_N[at_N == i].max() for i in range(len(names))]
        assert [float(n[2:]) for n in names] == pytest.approx(tops, rel=1e-3)
        assert len(names) == 8
        assert (raw_N[at_N == 0].max() < raw_N[at_N == 1].min()) and sizes.min() > 60
    names, at_N = slices(dataset, "test", "few")
    assert names == ["1", "2", "3"]
    assert (at_N + 1 == raw["few"]).all()
    names, at_N = slices(dataset, "test", "h")
    assert names == ["0 ids", "1 ids", "2 ids", "3 ids", "4 ids"]
    assert at_N.tolist() == [len(h) for h in raw["h"]]
    names, _ = slices(dataset, "test", "ts")
    assert names[-1] == "≤ 2023-11-16 07:32"
    with pytest.raises(UserError, match="ignored"):
        slices(dataset, "test", "gone")


def test_ids_without_a_value_have_names(tmp_path: Path) -> None:
    """As a vocabulary and as quantile buckets number them."""
    schema = Schema(
        columns={
            "v": Column(kind="categorical", table="v"),
            "q": Column(kind="categorical", table="q", quantiles=3, boundaries=(1.5, 4.0)),
        },
        encodings={"v": Encoding(kind="vocabulary", rows=5), "q": Encoding(kind="range", low=1, high=3, rows=5)},
    )
    (tmp_path / "test").mkdir()
    table = pa.table({"v": [2, 2, 2, 0, 0, 4, 1], "q": [4, 2, 2, 0, 3, 2, 2]})
    pq.write_table(table, tmp_path / "test" / "part-00000.parquet")
    dataset = Dataset(tmp_path, schema, {})
    names, at_N = slices(dataset, "test", "v")
    assert names == ["no. 1 by frequency", "missing", "unknown", "no. 3 by frequency"]
    assert at_N.tolist() == [0, 0, 0, 1, 1, 3, 2]
    rare = pa.table({"v": [2] * 12 + list(range(3, 20)), "q": [1] * 29})
    pq.write_table(rare, tmp_path / "test" / "part-00000.parquet")
    assert slices(dataset, "test", "v")[0] == ["no. 1 by frequency", "17 others"]  # no slice of a single row
    pq.write_table(rare.slice(12), tmp_path / "test" / "part-00000.parquet")
    assert slices(dataset, "test", "v")[0] == ["17 ids, each in < 10 rows"]
    pq.write_table(table, tmp_path / "test" / "part-00000.parquet")
    names, at_N = slices(dataset, "test", "q")
    assert names == ["missing", "≤ 1.5", "≤ 4", "> 4"]
    assert at_N.tolist() == [3, 1, 1, 0, 2, 1, 1]


def test_hits_and_unknown_ids_are_counted(tmp_path: Path) -> None:
    rows = 400
    train_ids, test_ids = np.arange(rows // 2) % 20, np.arange(rows // 2) % 40  # 20..39 are new
    item = pa.array([None if i % 10 == 0 else int(x) for i, x in enumerate([*train_ids, *test_ids])])
    lists = [[1, 2]] * (rows // 2) + [[1, 5], []] * (rows // 4)  # 3 would have the row of 1 or 2
    columns = {"label": np.arange(rows) % 3 == 0, "ts": np.arange(rows), "item": item, "h": lists, "other": item}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    kinds: dict[str, Any] = {"label": Column(kind="label"), "ts": Column(kind="time")}
    kinds |= {n: Column(kind="categorical", table=n) for n in ("item", "other")}
    schema = Schema(
        columns=kinds | {"h": Column(kind="list", table="h")},
        encodings={
            "item": Encoding(kind="range"),
            "other": Encoding(kind="hash", rows=4096),
            "h": Encoding(kind="hash"),
        },
        split=Split(by="time", valid=0, test=0.5),
    )
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared", schema=schema)
    train(a_run(tmp_path / "prepared", tmp_path / "run"))
    found, dataset = restore(tmp_path / "run"), data.open(tmp_path / "prepared")
    tables, used = usage(found, dataset, ("test",), lambda what, done, total: None)
    by_name = {t.name: t for t in tables}
    trained = item.to_pylist()[: rows // 2]
    first = [x is not None and x not in trained[:i] for i, x in enumerate(trained)]  # not known yet
    wanted = Counter(-1 if new else x for x, new in zip(trained, first, strict=True))
    hits = by_name["item"].hits_R
    assert hits.sum() == rows // 2
    assert sorted(hits[hits > 0].tolist()) == sorted(wanted.values())
    assert by_name["item"].columns == ("item",)
    assert by_name["item"].share_never == pytest.approx(float((hits == 0).float().mean()))
    assert by_name["item"].share_of_top(1.0) == 1
    assert by_name["item"].bytes_weight == hits.numel() * 4 * 4
    assert by_name["item"].bytes_state == hits.numel() * (4 + 1)  # one accumulator a row, and the touched byte
    half, missing = rows // 2, rows // 20
    new = sum(x is not None and x >= 20 for x in item.to_pylist()[half:])
    for name, unknown in (("item", new), ("other", 0)):
        got = used[name]["test"]
        assert (got.rows, got.ids, got.unknown, got.missing) == (half, half, unknown, missing)
    assert used["other"]["test"].untrained == new  # a range sends them to its row 1, which did learn
    assert used["item"]["test"].untrained == 0
    assert (used["h"]["test"].missing, used["h"]["test"].ids) == (half // 2, half)
    assert used["h"]["test"].untrained == half // 2
