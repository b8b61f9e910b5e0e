from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sparrow
from sparrow import cli
from sparrow.core import UserError
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.trained.predict import predict
from sparrow.training.fit import Fitted

QUICK = {"threads": 1, "loop.epochs": 2}


@pytest.fixture(scope="module")
def table(log: Path) -> pa.Table:
    return pq.read_table(log).drop_columns(["true_p"])


@pytest.fixture(scope="module")
def reference(table: pa.Table) -> Fitted:
    return sparrow.fit(table, label="label", settings=QUICK)


def test_one_outcome_needs_no_list(table: pa.Table) -> None:
    fitted = sparrow.fit(table, label="label", outcomes="user", settings=QUICK)
    assert "user: an outcome, as --outcomes says" in fitted.notes


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_of_any_library_gives_the_same_model(
    table: pa.Table, reference: Fitted, library: str, tmp_path: Path
) -> None:
    pytest.importorskip(library)
    frame = {"pandas": table.to_pandas, "polars": lambda: polars(table)}[library]()
    fitted = sparrow.fit(frame, label="label", settings=QUICK, run_dir=tmp_path / "run")
    scores = fitted.predict(frame)
    assert scores.shape == (6000,)
    assert scores.dtype == np.float32
    assert 0.5 < fitted.evaluate(frame)["auc"] < 1
    np.testing.assert_array_equal(scores, reference.predict(table))
    assert fitted.results["valid"]["auc"] == reference.results["valid"]["auc"]


def polars(table: pa.Table) -> object:
    import polars as pl

    return pl.from_arrow(table)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_columns_of_every_kind_that_frames_have(library: str) -> None:
    pd = pytest.importorskip("pandas")
    rng, rows = np.random.default_rng(0), 400
    frame = pd.DataFrame(
        {
            "city": pd.Categorical(rng.choice(["a", "b"], rows)),
            "user": rng.integers(0, 30, rows),
            "price": np.where(rng.random(rows) < 0.1, np.nan, 1.0 * np.arange(rows)),
            "when": pd.date_range("2024-01-01", periods=rows, freq="min"),
            "tags": [list(rng.choice(["x", "y"], 2)) for _ in range(rows)],
            "seen": rng.random(rows) < 0.3,
            "clicked": np.arange(rows) % 2,
        }
    )
    if library == "polars":
        pl = pytest.importorskip("polars")
        frame = pl.from_pandas(frame).with_columns(pl.col("city").cast(pl.Categorical))
    fitted = sparrow.fit(frame, label="clicked", settings={"threads": 1})
    kinds = {name: column.kind for name, column in fitted.schema.columns.items()}
    assert kinds["city"] == kinds["user"] == "categorical"
    assert (kinds["when"], kinds["tags"], kinds["price"]) == ("time", "list", "numeric")
    assert np.isfinite(fitted.predict(frame)).all()


def test_rows_to_score_need_no_label_and_may_be_new(table: pa.Table) -> None:
    fitted = sparrow.fit(table, settings={"threads": 1, "loop.max_steps": 3})
    some = table.slice(0, 10).drop_columns(["label", "ts"])
    scores = fitted.predict(some)
    # a product of another shape is rounded in another order
    np.testing.assert_allclose(scores, fitted.predict(table)[:10], rtol=1e-5)
    users = (
        pa.array(["never seen"] * 10)
        if pa.types.is_string(some["user"].type)
        else pa.array([10**9 + 7] * 10)
    )
    fitted.predict(some.set_column(some.column_names.index("user"), "user", users))
    assert fitted.predict(some.slice(0, 0)).shape == (0,)
    with pytest.raises(UserError, match="no column 'user'"):
        fitted.predict(some.drop_columns(["user"]))


def test_the_run_is_one_that_commands_take(table: pa.Table, tmp_path: Path) -> None:
    fitted = sparrow.fit(
        table, run_dir=tmp_path / "run", settings={"model.name": "logistic", "loop.max_steps": 3}
    )
    assert cli.main(["evaluate", str(tmp_path / "run")]) == 0
    assert fitted.run_dir == tmp_path / "run"
    with pytest.raises(UserError, match="exists"):
        sparrow.fit(table, run_dir=tmp_path / "run")
    sparrow.fit(table, run_dir=tmp_path / "run", overwrite=True, settings={"loop.max_steps": 1})


def test_mistakes(table: pa.Table) -> None:
    with pytest.raises(UserError, match="frame: a builtins.int cannot be read"):
        sparrow.fit(3)
    with pytest.raises(UserError, match="no column 'clik'"):
        sparrow.fit(table, label="clik")
    with pytest.raises(UserError, match=r"model\.dmi: unknown key"):
        sparrow.fit(table, settings={"model.dmi": 3})


def test_two_labels_give_two_columns(table: pa.Table) -> None:
    clicks = table["label"].to_numpy()
    both = table.append_column(
        "late", pa.array(((np.arange(6000) % 7 == 0) & (clicks == 1)).astype(int))
    )
    columns = {"label": Column(kind="label"), "late": Column(kind="label")}
    columns["user"] = Column(kind="categorical", table="user")
    given = Schema(columns=columns, encodings={"user": Encoding()})
    fitted = sparrow.fit(both, schema=given, split=Split(by="ratio"), settings=QUICK)
    scores = fitted.predict(both)
    assert scores.shape == (6000, 2)
    assert scores[:, 1].mean() < scores[:, 0].mean()
    assert fitted.evaluate(both, label=1)["base_rate"] < fitted.evaluate(both)["base_rate"]


@pytest.mark.parametrize(("model", "lr"), [("logistic", 0.1), ("dcnv2", 0.01), ("dlrm", 0.01)])
def test_that_a_number_is_missing_can_be_the_whole_signal(model: str, lr: float) -> None:
    """NE of the best there is: 0.76."""
    rng, n = np.random.default_rng(3), 8_000
    gone = rng.random(n) < 0.3
    click = rng.random(n) < np.where(gone, 0.7, 0.15)
    # a missing number used to be the mean, in the middle of all
    x = pa.array(rng.normal(0, 1, n), mask=gone)
    columns = {
        "click": click.astype(int),
        "x": x,
        "whole": rng.normal(0, 1, n),
        "item": rng.integers(0, 5, n),
    }
    settings = {
        "model.name": model,
        "data.batch_size": 64,
        "threads": 1,
        "tables.rule.lr": 0.01,
        "dense.lr": lr,
    }
    found = sparrow.fit(pa.table(columns), label="click", settings=settings)
    assert found.schema.dense == ("x", "x:missing", "whole")
    rates = np.array([0.15, 0.7])[gone.astype(int)]
    best = -(rates * np.log(rates) + (1 - rates) * np.log(1 - rates)).mean()
    rate = click.mean()
    best /= -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert found.evaluate(pa.table(columns))["ne"] < best + 0.03
    odd = {
        "item": [0] * 5,
        "x": [0.0] * 5,
        "whole": [float(columns["whole"].max()), 1e3, 1e12, 0.0, None],
    }
    # 1e12 used to fail all rows, and 1,000 to score exactly 0
    scores = found.predict(pa.table(odd))
    assert scores[0] == scores[1] == scores[2] > 0.001
    assert abs(scores[4] - scores[3]) < 0.02


def test_a_row_that_spoils_its_score_is_named() -> None:
    """Where the schema asks for numbers as they are, and for weights."""
    rng, n = np.random.default_rng(3), 2_000
    tags = [[[int(i), int(j)], [float(w), 1.0]] for i, j, w in rng.integers(1, 9, (n, 3))]
    ids, weights = [ids for ids, _ in tags], [weights for _, weights in tags]
    log = {"click": rng.integers(0, 2, n), "plain": rng.normal(0, 1, n), "tags": ids, "by": weights}
    columns = {
        "click": Column(kind="label"),
        "plain": Column(kind="numeric", transform="none"),
        "tags": Column(kind="list", table="tags", weights="by"),
    }
    given = Schema(columns=columns, encodings={"tags": Encoding()})
    settings = {"threads": 1, "loop.max_steps": 5, "model.name": "dcnv2"}
    found = sparrow.fit(pa.table(log), schema=given, settings=settings)
    rows = {name: list(values[:9]) for name, values in log.items()}
    with pytest.raises(
        UserError, match=r"row 4: its score and 0 others are not finite; .* plain = 1e\+30: mend it"
    ):
        found.predict(pa.table(rows | {"plain": [0.0] * 4 + [1e30] + [0.0] * 4}))
    rows["by"][7] = [1e30, 1.0]
    with pytest.raises(
        UserError, match=r"row 7: .* the largest number there is the weights of tags = 1e\+30: mend"
    ):
        found.predict(pa.table(rows))


def test_frames_with_structs_and_lists_of_candidates() -> None:
    random = np.random.default_rng(0)
    shown = [random.choice(30, 3, replace=False).tolist() for _ in range(400)]
    people = [{"name": f"u{i % 9}", "age": 20.5 + i % 30} for i in range(400)]
    frame = pa.table({"user": people, "inview": shown, "clicks": [x[:1] for x in shown]})
    fitted = sparrow.fit(frame, settings={"threads": 1, "loop.max_steps": 3})
    scores = fitted.predict(frame.drop_columns(["clicks"]))
    assert scores.shape == (1200,)
    flat = {
        "user.name": [p["name"] for p in people for _ in range(3)],
        "inview": [x for each in shown for x in each],
    }
    flat |= {"user.age": [p["age"] for p in people for _ in range(3)]}
    np.testing.assert_array_equal(scores, fitted.predict(pa.table(flat)))
    assert fitted.evaluate(frame)["gauc"] >= 0


def test_ordered_categories_are_the_text_that_their_csv_has(tmp_path: Path) -> None:
    pd, pl = pytest.importorskip("pandas"), pytest.importorskip("polars")
    random, rows = np.random.default_rng(0), 300
    ages = pd.Series(random.integers(1, 90, rows))
    frame = pd.DataFrame(
        {"click": random.integers(0, 2, rows), "item": random.integers(0, 20, rows)}
    )
    frame["age"] = pd.cut(ages.where(ages > 5), [0, 18, 30.5, 60, 90])  # some are missing
    frame["size"] = pd.Categorical(
        random.choice(["S", "M", "L"], rows), ["S", "M", "L"], ordered=True
    )
    frame["month"] = pd.period_range("2020-01", periods=4, freq="M")[random.integers(0, 4, rows)]
    fitted = sparrow.fit(
        frame, settings={"threads": 1, "loop.max_steps": 3}, run_dir=tmp_path / "run"
    )
    assert {fitted.schema.columns[name].kind for name in ("age", "size")} == {"categorical"}
    scores = fitted.predict(frame)
    frame.to_csv(tmp_path / "log.csv", index=False)
    assert predict(tmp_path / "run", [tmp_path / "log.csv"], tmp_path / "scores.parquet") == rows
    np.testing.assert_array_equal(
        pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy(), scores
    )
    texts = pl.read_csv(tmp_path / "log.csv")
    enums = texts.with_columns(
        pl.col("size").cast(pl.Enum(["L", "M", "S"])), pl.col("age").cast(pl.Categorical)
    )
    for same in (texts, enums, enums.to_arrow()):
        np.testing.assert_array_equal(fitted.predict(same), scores)
