"""A row that stands for n impressions = its n rows: metrics, training and preparation. And what is
refused of it.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

import sparrow
from sparrow import data, metrics, serving
from sparrow.analysis.parts import Alone
from sparrow.apps.compare import compare
from sparrow.apps.report import report
from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.data.preparation.job import Prepared
from sparrow.distributed import World
from sparrow.extensions.calibration.calibrate import calibrate
from sparrow.extensions.calibration.fit import WorseError
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.features.transforms import Transforms
from sparrow.metrics import Streaming, evaluate
from sparrow.metrics.intervals import auc_error, estimates
from sparrow.serving.export import export
from sparrow.trained.predict import predict
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import train
from sparrow.training.defaults import defaults
from tests.equivalence import cases
from tests.equivalence.pool import Pool
from tests.runs import run_of
from tests.training.test_loop import Kill, dies_at, same, tensors

ROWS = 1200
# of `metrics`, or in another form
NO_METRICS = {"evaluate", "evaluate_labels", "folded", "labelled", "merged"}
PLACES = ("recall@5", "ndcg@5", "hit_rate@5", "recall@10", "ndcg@10", "hit_rate@10", "mrr")


def showings(shown_N: Any, clicks_N: Any) -> tuple[Any, Any]:
    """The row that each showing is of, and whether it was clicked, of numpy's or torch's
    numbers.
    """
    shown_N, clicks_N = np.asarray(shown_N), np.asarray(clicks_N)
    row_E = np.repeat(np.arange(len(shown_N)), shown_N)
    nth_E = np.arange(len(row_E)) - (np.cumsum(shown_N) - shown_N)[row_E]
    return row_E, nth_E < clicks_N[row_E]


# -- metrics ---------------------------------------------------------------------------------------


def counted(seed: int, size: int = 500) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rows with counts, and their showings: scores (some are equal), labels, weights and groups."""
    random = np.random.default_rng(seed)
    shown_N = random.integers(0, 9, size)
    scores_N = np.where(
        random.random(size) < 0.3, random.integers(1, 9, size) / 9, random.random(size)
    )
    clicks_N = random.binomial(shown_N, scores_N**1.3)
    weights_N, groups_N = random.random(size) + 0.1, random.integers(0, 40, size)
    row_E, is_click_E = showings(shown_N, clicks_N)
    rows = {
        "scores": scores_N,
        "labels": clicks_N / np.maximum(shown_N, 1),
        "weights": weights_N * shown_N,
        "groups": groups_N,
    }
    of_each = {
        "scores": scores_N[row_E],
        "labels": is_click_E.astype(np.float64),
        "weights": weights_N[row_E],
        "groups": groups_N[row_E],
        "rows": row_E,
    }
    return (
        {name: torch.from_numpy(x.copy()) for name, x in side.items()} for side in (rows, of_each)
    )  # type: ignore[return-value]


def called(metric: Callable[..., Any], rows: dict[str, Tensor]) -> Any:
    """What a metric says of rows."""
    names = [name.removesuffix("_B") for name in inspect.signature(metric).parameters]
    given = {"logits" if "logits" in names else "scores": rows["scores"], "labels": rows["labels"]}
    given |= {"weights": rows["weights"]} | (
        {"groups": rows["groups"]} if "groups" in names else {}
    )
    return metric(**{f"{name}_B": x for name, x in given.items()})


def close(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(close, one, other))
    one, other = (torch.as_tensor(side, dtype=torch.float64) for side in (one, other))
    return torch.allclose(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)


FAMILY = [
    name
    for name in metrics.__all__
    if name not in NO_METRICS
    and callable(getattr(metrics, name))
    and "labels_B" in inspect.signature(getattr(metrics, name)).parameters
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAMILY)
def test_a_metric_of_counts_is_that_of_the_showings(name: str, seed: int) -> None:
    rows, of_each = counted(seed)
    if name == "topk":  # a row of nine showings has no one place
        with pytest.raises(
            UserError,
            match=r"^labels: 0\.\d+ in row \d+; a candidate at one place is .* use gauc, or",
        ):
            called(metrics.topk, rows)
        return
    one, other = (called(getattr(metrics, name), side) for side in (rows, of_each))
    assert close(one, other)
    assert not close(
        one, called(getattr(metrics, name), {**rows, "labels": (rows["labels"] > 0).double()})
    )


def test_the_family_is_there() -> None:
    assert {"auc", "gauc", "ne", "calibration", "logloss", "ece", "topk"} <= set(FAMILY)


@pytest.mark.parametrize("seed", range(3))
def test_streams_of_counts_are_those_of_the_showings(seed: int) -> None:
    told = []
    for side in counted(seed):
        stream = Streaming()
        stream.update(side["scores"], side["labels"], side["weights"])
        result = stream.result()
        result.pop("examples")  # rows
        told.append([list(result.values()), *stream.reliability(), stream.ece(), auc_error(stream)])
    assert close(*told)


@pytest.mark.parametrize("grouped", [False, True])
def test_intervals_take_the_showings_of_a_row_for_one_unit(grouped: bool) -> None:
    """They may depend on each other. So values and errors are those of showings in sessions of one
    row each.
    """
    rows, of_each = counted(5)
    of_rows = estimates(
        rows["scores"], rows["labels"], rows["weights"], rows["groups"] if grouped else None
    )
    units = of_each["groups"] if grouped else of_each["rows"]
    of_showings = estimates(of_each["scores"], of_each["labels"], of_each["weights"], units)
    for name, one in of_rows.items():
        other = of_showings[name].influence_G
        assert one.value == pytest.approx(of_showings[name].value, rel=1e-12), name
        assert close(one.influence_G[one.influence_G != 0], other[other != 0]), name
    assert set(of_showings) - set(of_rows) == ({*PLACES} if grouped else {"gauc", *PLACES})


def test_evaluation_of_counts_is_that_of_the_showings() -> None:
    told = []
    for side in counted(7):
        batch = Batch(
            dense_BC=side["scores"][:, None],
            ids=KeyedJagged.from_lists({}),
            labels_BT=side["labels"][:, None],
            weights_B=side["weights"],
            session_B=side["groups"],
        )
        parts = [batch.part(low, low + 300) for low in range(0, batch.batch_size, 300)]
        told.append(evaluate(lambda batch: batch.dense_BC, parts))
    one, other = told
    assert set(other) - set(one) == {*PLACES, "ranked_groups", "groups_without_positive"}
    for name in set(one) - {"examples"}:
        assert one[name] == pytest.approx(other[name], rel=1e-12), name


# -- preparation and training ----------------------------------------------------------------------


def log(seed: int, flat: bool = False, rows: int = ROWS) -> pa.Table:
    """Rows with counts. flat: all have the same probability of a click."""
    random = np.random.default_rng(seed)
    items, places = np.random.default_rng(1).normal(size=60), np.array([-0.7, 0.0, 0.7])
    item_N, place_N, x_N = (
        random.integers(0, 60, rows),
        random.integers(0, 3, rows),
        random.normal(size=rows),
    )
    p_N = 1 / (1 + np.exp(1.8 - (0 if flat else 1) * (items[item_N] + places[place_N] + 0.5 * x_N)))
    shown_N = random.geometric(1 / 7, rows) - 1
    clicks_N = random.binomial(shown_N, p_N)
    return pa.table(
        {
            "ts": 1_700_000_000 + np.sort(random.integers(0, 86400 * 9, rows)),
            "item_id": [f"i{i}" for i in item_N],
            "place": [f"p{i}" for i in place_N],
            "x": x_N,
            "impressions": shown_N,
            "clicks": clicks_N,
            "orders": random.binomial(clicks_N, 0.3),
            "teacher": p_N,
        }
    )


def expanded(table: pa.Table) -> pa.Table:
    """A row for each showing, with `clicks` of 0 or 1 and without impressions."""
    row_E, is_click_E = showings(table["impressions"].to_numpy(), table["clicks"].to_numpy())
    place = table.column_names.index("clicks")
    rows = table.take(pa.array(row_E)).set_column(
        place, "clicks", pa.array(is_click_E.astype(np.int64))
    )
    return rows.drop_columns(["impressions"])


SCHEMA = Schema(
    columns={
        "ts": Column(kind="time"), "item_id": Column(kind="categorical", table="item_id"),
        "place": Column(kind="categorical", table="place"), "x": Column(kind="numeric"),
        "impressions": Column(kind="impressions"), "clicks": Column(kind="label"),
        "item_rate": Column(kind="numeric", source="item_id", counts="rate"),
        "item_seen": Column(kind="numeric", source="item_id", counts="seen"),
    },
    # else a first row hides its id
    encodings={name: Encoding(min_count=1) for name in ("item_id", "place")},
)  # fmt: skip


def plain(schema: Schema) -> Schema:
    """The schema of the showings."""
    return replace(
        schema, columns={name: c for name, c in schema.columns.items() if c.kind != "impressions"}
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Prepared, Prepared]:
    """A log with counts and its showings, prepared; the same rows are in the same part."""
    place = tmp_path_factory.mktemp("both")
    parts = [log(seed) for seed in (2, 3, 4)]
    for i, part in enumerate(parts):  # each later than the one before
        part = part.set_column(0, "ts", pa.array(part["ts"].to_numpy() + i * 86400 * 10))
        pq.write_table(part, place / f"counts-{i}.parquet")
        pq.write_table(expanded(part), place / f"showings-{i}.parquet")

    def prepared(kind: str, schema: Schema | Transforms) -> Prepared:
        valid, test = ((str(place / f"{kind}-{i}.parquet"),) for i in (1, 2))
        split = Split(by="file", valid_files=valid, test_files=test)
        return data.prepare([place / f"{kind}-0.parquet"], place / kind, schema=schema, split=split)

    counts = prepared("counts", SCHEMA)
    found = Transforms.load(counts.out)
    columns = {n: c for n, c in plain(found.schema).columns.items() if not c.counts}  # counted anew
    columns |= {n: SCHEMA.columns[n] for n in SCHEMA.counted}
    columns |= {
        n: replace(columns[n], mean=c.mean, std=c.std)
        for n, c in found.schema.columns.items()
        if c.counts
    }
    given = replace(found, schema=replace(found.schema, columns=columns), counts={})
    order = [n for n in found.schema.columns if n in columns]
    given = replace(given, schema=replace(given.schema, columns={n: columns[n] for n in order}))
    return counts, prepared("showings", given)


def test_preparation_counts_showings(both: tuple[Prepared, Prepared]) -> None:
    """The share of clicks, log-odds, and counts of ids in earlier rows."""
    counts, rows = (data.open(one.out) for one in both)
    assert counts.log_odds() == pytest.approx(rows.log_odds(), rel=1e-6)
    for part in ("train", "valid", "test"):
        means = [one.label_means[part]["clicks"] for one in both]
        assert means[0] == pytest.approx(means[1], rel=1e-6)
        shown_N = counts.column("impressions", part).to_numpy().astype(np.int64)
        assert len(shown_N) == counts.rows(part) == (shown_N > 0).sum()
        for name in ("item_rate", "item_seen", "x"):
            wide_E = np.repeat(counts.column(name, part).to_numpy(), shown_N)
            np.testing.assert_allclose(
                wide_E, rows.column(name, part).to_numpy(), rtol=1e-5, atol=1e-6
            )
    zeros = sum(int((log(seed)["impressions"].to_numpy() == 0).sum()) for seed in (2, 3, 4))
    assert any(
        f"impressions: 0 in {zeros:,} rows, which stand for nothing" in note
        for note in both[0].notes
    )
    assert both[0].left_out == zeros > 0


def test_a_step_on_counts_is_one_on_their_showings(
    both: tuple[Prepared, Prepared], tmp_path: Path
) -> None:
    """Weights to fp32's rounding: of a row's showings gradients are added up in another order."""
    settings = {
        "data.batch_size": 1 << 20,
        "data.shuffle": False,
        "loop.epochs": 1,
        "model.name": "dlrm",
        "model.dim": 4,
        "dense.name": "sgd",
        "dense.lr": 0.5,
        "tables.rule.name": "sgd",
        "tables.rule.lr": 0.5,
    }
    found = []
    for i, one in enumerate(both):
        results = train(run_of(one.out, tmp_path / f"{i}", **settings))
        assert results["step"] == 1
        found.append(tensors(tmp_path / f"{i}"))
    weights = [name for name in found[0] if name.startswith("dense.") or name.endswith(".weight")]
    assert {name.split(".")[0] for name in weights} == {"dense", "item_id", "place"}
    for name in weights:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def default(
    both: tuple[Prepared, Prepared], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The runs of the default model on both logs."""
    place = tmp_path_factory.mktemp("default")
    for one, name in zip(both, ("counts", "showings"), strict=True):
        settings = {
            "run_dir": str(place / name),
            "threads": 1,
            "log.tensorboard": False,
            "loop.epochs": 2,
        }
        train(Run.of(one.out, defaults(one.out, settings)))
    return place / "counts", place / "showings"


def judged(run_dir: Path, out: Path) -> dict[str, float]:
    return evaluate(restore(run_dir).scores, data.open(out).loader(4096, split="test"))


def test_the_default_model_learns_counts_as_well(
    both: tuple[Prepared, Prepared], default: tuple[Path, Path]
) -> None:
    of_counts, of_showings = (judged(run_dir, both[1].out) for run_dir in default)
    assert of_counts["ne"] == pytest.approx(of_showings["ne"], abs=0.02)
    assert of_counts["ne"] < 0.93
    assert 0.9 < of_counts["calibration"] < 1.1
    again = judged(default[0], both[0].out)  # the rows with counts tell the same of a model
    for name in set(again) - {"examples"}:
        assert again[name] == pytest.approx(of_counts[name], rel=1e-5), name


def test_each_part_learns_rates(
    both: tuple[Prepared, Prepared], default: tuple[Path, Path]
) -> None:
    """LightGBM's objective "binary" takes each label above 0 for 1."""
    pytest.importorskip("lightgbm")
    dataset = data.open(both[1].out)
    alone = Alone(restore(default[0]), dataset).scores("test")
    assert len(alone) == 3
    labels_N = torch.from_numpy(dataset.column("clicks", "test").to_numpy())
    for name in ("logistic regression", "boosted trees"):  # members have hardly begun
        scores_N = alone[name]
        assert metrics.ne(scores_N, labels_N) < 0.95, name
        assert 0.9 < metrics.calibration(scores_N, labels_N) < 1.1, name


def test_resumed_is_uninterrupted(both: tuple[Prepared, Prepared], tmp_path: Path) -> None:
    settings = {"data.batch_size": 200, "model.dim": 4, "checkpoint.every": 3}
    runs = [run_of(both[0].out, tmp_path / place, **settings) for place in ("whole", "cut")]
    train(runs[0])
    with pytest.raises(Kill):
        train(runs[1], listener=dies_at(5))
    train(runs[1], resume=True)
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "cut"))


@pytest.mark.multi
def test_sharded_is_single(
    both: tuple[Prepared, Prepared], ranks: Callable[[int], Pool], tmp_path: Path
) -> None:
    settings = {"data.batch_size": 500, "model.name": "dlrm", "model.dim": 8}
    threads = torch.get_num_threads()
    alone = cases.fit(World(), str(both[0].out), str(tmp_path / "alone"), settings, False)
    torch.set_num_threads(threads)
    for side in ranks(2).run(cases.fit, str(both[0].out), str(tmp_path / "two"), settings, False):
        for name, value in side["dense"].items():
            torch.testing.assert_close(value, alone["dense"][name], rtol=1e-4, atol=1e-5)
        for name, value in alone["results"]["valid"].items():
            assert side["results"]["valid"][name] == pytest.approx(value, rel=1e-5), name


def test_a_coin_has_an_auc_of_a_half(tmp_path: Path) -> None:
    """Impressions tell nothing of a click, so a model that saw them would show it here."""
    fitted = sparrow.fit(
        log(8, flat=True).drop_columns(["orders", "teacher"]),
        label="clicks",
        impressions="impressions",
    )
    assert "impressions" not in {*fitted.schema.dense, *fitted.schema.sparse}
    found = fitted.evaluate(log(9, flat=True))
    assert found["auc"] == pytest.approx(0.5, abs=0.02)
    assert found["ne"] == pytest.approx(1.0, abs=0.02)
    assert found["calibration"] == pytest.approx(1.0, abs=0.1)


def test_a_teacher_is_learnt(tmp_path: Path) -> None:
    rows = log(10, rows=2 * ROWS).drop_columns(["orders", "clicks", "impressions"])
    fitted = sparrow.fit(rows, label="teacher")
    assert fitted.schema.columns["teacher"].probability
    fresh = log(11)
    teacher_N = fresh["teacher"].to_numpy()
    scores_N = fitted.predict(fresh)
    assert np.abs(scores_N - teacher_N).mean() < 0.3 * np.abs(teacher_N - teacher_N.mean()).mean()
    found = fitted.evaluate(fresh)
    assert found["base_rate"] == pytest.approx(teacher_N.mean(), rel=1e-5)
    entropy = -(teacher_N * np.log(teacher_N) + (1 - teacher_N) * np.log1p(-teacher_N)).mean()
    assert entropy <= found["logloss"] < entropy * 1.02


def test_what_looks_at_a_run_takes_counts(
    both: tuple[Prepared, Prepared], default: tuple[Path, Path]
) -> None:
    found = compare([default[0]], [default[0]])
    assert {one.metric for one in found.differences} == {
        "auc",
        "logloss",
        "ne",
        "calibration",
        "ece",
    }
    try:
        assert calibrate(default[0], "logistic")["test"]["clicks"]["after"]["ne"] < 0.95
        # there are few rows
        with pytest.raises(WorseError, match="label 'clicks': isotonic makes scores worse"):
            calibrate(default[0], "isotonic")
    finally:
        calibrate(default[0], "none")
    page = report(default[0]).read_text()
    table = page.lower().split("<table", 1)[1].split("</table")[0]
    assert not re.search(r"\bnan\b", table)


def test_scores_need_neither_label_nor_impressions(
    default: tuple[Path, Path], tmp_path: Path
) -> None:
    for name, dropped in (
        ("all", []),
        ("clicks", ["impressions"]),
        ("none", ["impressions", "clicks"]),
    ):
        pq.write_table(log(12).drop_columns(dropped), tmp_path / f"{name}.parquet")
        predict(default[0], [tmp_path / f"{name}.parquet"], tmp_path / f"{name}-scores.parquet")
    whole, *others = (
        pq.read_table(tmp_path / f"{name}-scores.parquet") for name in ("all", "clicks", "none")
    )
    assert whole.num_rows == ROWS
    pq.write_table(log(12), tmp_path / "log.parquet")
    export(default[0], tmp_path / "folder", [tmp_path / "log.parquet"])
    requests = log(12).select(["ts", "item_id", "place", "x"]).slice(0, 20).to_pylist()
    served_N = np.asarray(serving.load(tmp_path / "folder").score(requests)).reshape(-1)
    np.testing.assert_allclose(served_N, whole["score"].to_numpy()[:20], rtol=1e-5)
    assert all(other["score"].equals(whole["score"]) for other in others)


# -- what is refused, and what several labels and weights mean -------------------------------------

GOOD = {
    "x": [0.5, 1.5, 2.5, 3.5],
    "clicks": [1, 0, 2, 0],
    "impressions": [3, 2, 2, 1],
    "orders": [0, 0, 1, 0],
    "teacher": [0.25, 0.5, 1.0, 0.0],
    "w": [1.0, 2.0, 0.5, 1.0],
}


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        (
            "clicks",
            4,
            (
                "label 'clicks', row 3: 4 of 1 impressions; a showing counts once at most; mend"
                " the row"
            ),
        ),
        (
            "clicks",
            -1,
            "label 'clicks', row 3: -1; beside impressions a label is a whole number, 0 or more",
        ),
        (
            "clicks",
            0.5,
            (
                "label 'clicks', row 3: 0.5; beside impressions .* set probability = true if it is"
                " a rate"
            ),
        ),
        (
            "clicks",
            None,
            "label 'clicks', row 3: missing; leave rows without a label out of the log",
        ),
        (
            "impressions",
            -1,
            "impressions 'impressions', row 3: -1; impressions are whole numbers, 0 or more",
        ),
        (
            "impressions",
            1.5,
            "impressions 'impressions', row 3: 1.5; .* weights that are not have kind 'weight'",
        ),
        ("impressions", None, "impressions 'impressions', row 3: nan; .* never missing"),
        ("impressions", 0, ""),
    ],
)
def test_counts_that_cannot_be_name_file_line_and_value(
    tmp_path: Path, column: str, value: float | None, says: str
) -> None:
    columns = {name: Column(kind=kind) for name, kind in (("x", "numeric"), ("clicks", "label"))}  # type: ignore[arg-type]
    schema = Schema(columns={**columns, "impressions": Column(kind="impressions")})
    rows = {name: [*GOOD[name]] for name in columns} | {"impressions": GOOD["impressions"]}
    pyarrow.csv.write_csv(
        pa.table({**rows, column: [*rows[column][:-1], value]}), tmp_path / "log.csv"
    )
    split = Split(by="ratio", valid=0, test=0)
    if not says:
        made = data.prepare([tmp_path / "log.csv"], tmp_path / "out", schema=schema, split=split)
        assert (made.rows["train"], made.left_out) == (3, 1)
        return
    with pytest.raises(UserError, match=rf"log\.csv, line 5: {says}"):
        data.prepare([tmp_path / "log.csv"], tmp_path / "out", schema=schema, split=split)


@pytest.mark.parametrize(("value", "shown"), [(1.5, "1.5"), (-0.1, "-0.1")])
def test_a_probability_outside_is_named(tmp_path: Path, value: float, shown: str) -> None:
    schema = Schema(
        columns={"x": Column(kind="numeric"), "teacher": Column(kind="label", probability=True)}
    )
    rows = {"x": GOOD["x"], "teacher": [*GOOD["teacher"][:-1], value]}
    pyarrow.csv.write_csv(pa.table(rows), tmp_path / "log.csv")
    says = (
        rf"log\.csv, line 5: label 'teacher', row 3: {shown}; probabilities lie in 0\.\.1; mend it,"
        r" or set threshold"
    )
    with pytest.raises(UserError, match=says):
        data.prepare([tmp_path / "log.csv"], tmp_path / "out", schema=schema)


def test_labels_that_count_a_probability_and_a_weight_share_the_impressions(tmp_path: Path) -> None:
    """A row's weight is the product, and one on the mean of the 8 impressions; a missing count has
    no loss.
    """
    roles = {
        "x": "numeric",
        "clicks": "label",
        "orders": "label",
        "teacher": "label",
        "impressions": "impressions",
        "w": "weight",
    }
    columns = {name: Column(kind=kind) for name, kind in roles.items()}  # type: ignore[arg-type]
    columns["teacher"] = Column(kind="label", probability=True)
    rows = {**GOOD, "orders": [None, 0, 1, 0]}
    pq.write_table(pa.table(rows), tmp_path / "log.parquet")
    split = Split(by="ratio", valid=0, test=0)
    made = data.prepare(
        [tmp_path / "log.parquet"], tmp_path / "out", schema=Schema(columns=columns), split=split
    )
    batch = data.open(made.out).first(10)
    assert batch.labels_BT is not None
    assert batch.weights_B is not None
    torch.testing.assert_close(batch.labels_BT[:, 0], torch.tensor([1 / 3, 0, 1, 0]))
    assert str(batch.labels_BT[:, 1].tolist()) == "[nan, 0.0, 0.5, 0.0]"
    assert batch.labels_BT[:, 2].tolist() == GOOD["teacher"]
    torch.testing.assert_close(batch.weights_B, torch.tensor([3.0, 4.0, 1.0, 1.0]) * 8 / 9)
    means = made.label_means["train"]  # by impressions, as of their rows
    assert means == pytest.approx(
        {"clicks": 3 / 8, "orders": 1 / 5, "teacher": (0.75 + 1 + 2) / 8}, rel=1e-6
    )
    rates = json.loads((made.out / "manifest.json").read_text())["base_rate"]
    assert rates == pytest.approx(
        {"clicks": 2 / 9, "orders": 0.5 / 6, "teacher": (0.75 + 2 + 1) / 9}, rel=1e-6
    )


def test_readers_share_the_weight_of_a_batch(both: tuple[Prepared, Prepared]) -> None:
    dataset = data.open(both[0].out)
    whole = [share.mass for share in dataset.loader(300).shares()]
    assert sum(whole) == dataset.column("impressions", "train").to_numpy().sum() > dataset.rows()
    for rank in range(3):
        assert [share.mass for share in dataset.loader(300, rank=rank, ranks=3).shares()] == whole


def test_scores_of_a_file_stand_beside_counts(default: tuple[Path, Path], tmp_path: Path) -> None:
    """The file may have the raw log's counts, which must agree."""
    dataset = data.open(restore(default[0]).run.data.path)
    shown_N = dataset.column("impressions", "test").to_numpy()
    clicks_N = np.rint(dataset.column("clicks", "test").to_numpy() * shown_N)
    table = pa.table(
        {"score": np.full(len(shown_N), 0.2), "clicks": clicks_N, "impressions": shown_N}
    )
    pq.write_table(table, tmp_path / "scores.parquet")
    found = {
        one.metric: one for one in compare([default[0]], [tmp_path / "scores.parquet"]).differences
    }
    assert found["auc"].b == 0.5
    pq.write_table(
        table.set_column(1, "clicks", pa.array(clicks_N[::-1].copy())), tmp_path / "scores.parquet"
    )
    with pytest.raises(UserError, match=r"row \d+: clicks is not that of row \d+ of test"):
        compare([default[0]], [tmp_path / "scores.parquet"])
