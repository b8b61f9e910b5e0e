"""Counts of earlier rows: by their definition, whatever the order of the log, and without a leak of
labels.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow import data
from sparrow.core import UserError
from sparrow.data.preparation import earlier
from sparrow.data.preparation.cutter import Cutter
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.features.transforms import Transforms, typed
from sparrow.metrics import ranking
from sparrow.serving import load
from sparrow.serving.export import export
from sparrow.trained.predict import predict
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.data.preparation.logs import part
from tests.runs import run_of

PRIOR = 3.0
COUNTED = {
    kind: Column(
        kind="numeric",
        source="user",
        counts=kind,
        transform="none",
        prior=PRIOR if kind == "rate" else None,
    )
    for kind in ("seen", "positives", "rate")
}
OTHERS = {"label": Column(kind="label"), "row": Column(kind="numeric", transform="none")}
NONE = Split(valid=0, test=0)


def schema_of(split: Split = NONE, **columns: Column) -> Schema:
    return Schema(columns={**OTHERS, **COUNTED, **columns}, split=split)


def log_of(users: list[str | None], labels: list[int], **columns: object) -> pa.Table:
    row = np.arange(len(users)) * 1.0
    return pa.table({"user": pa.array(users, pa.string()), "label": labels, "row": row, **columns})


def by_definition(
    users: list, labels: list, order: list, i: int | None = None, user: object = None
) -> list[float]:
    """Seen, positives and rate of row i; without one, of a user after all rows."""
    before = [
        j for j in range(len(users)) if users[j] is not None and (i is None or order[j] < order[i])
    ]
    mine = [labels[j] for j in before if users[j] == (user if i is None else users[i])]
    mean = (sum(labels[j] for j in before) + 0.5) / (len(before) + 1)
    return [len(mine), sum(mine), (sum(mine) + PRIOR * mean) / (len(mine) + PRIOR)]


ROW = st.tuples(st.sampled_from([None, *"abcd"]), st.integers(0, 1), st.integers(0, 5))


@settings(max_examples=15)
@given(st.lists(ROW, min_size=2, max_size=40), st.integers(1, 9), st.integers(2, 1 << 20))
def test_a_training_row_has_the_counts_of_earlier_times(
    tmp_path_factory: pytest.TempPathFactory, log: list, cut: int, held: int
) -> None:
    """Rows of one time do not see each other. A later log goes on counting. What is served is what
    is after all.
    """
    folder = tmp_path_factory.mktemp("log")
    log = [*log, ("a", 1, 6), ("b", 0, 6)]
    users, labels, times = (list(column) for column in zip(*log, strict=True))
    early = [i for i in range(len(log)) if times[i] < cut]
    late = [i for i in range(len(log)) if times[i] >= cut]
    whole = log_of(users, labels, ts=times)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(earlier, "SORTED", held)
        pq.write_table(whole, folder / "log.parquet", row_group_size=7)
        made = data.prepare(
            [folder / "log.parquet"], folder / "out", schema=schema_of(ts=Column(kind="time"))
        )
    rows = {int(row["row"]): row for row in part(made.out, "train").to_pylist()}
    for i in range(len(log)):
        want = by_definition(users, labels, times, i) if users[i] is not None else [0, 0, 0]
        assert [rows[i][kind] for kind in COUNTED] == pytest.approx(want)
    transforms = Transforms.load(made.out)
    asked = log_of(["a", "d", "new"], [0, 0, 0])
    served = transforms.transform(asked, training=False).to_pylist()
    for user, row in zip(asked["user"].to_pylist(), served, strict=True):
        assert [row[kind] for kind in COUNTED] == pytest.approx(
            by_definition(users, labels, times, user=user)
        )
    both = len({labels[i] for i in early}) == len({labels[i] for i in late}) == 2
    if both and any(users[i] for i in early):  # else there is nothing to fit
        for name, at in (("early", early), ("late", late)):
            pq.write_table(whole.take(pa.array(at)), folder / f"{name}.parquet")
        first = data.prepare(
            [folder / "early.parquet"], folder / "a", schema=schema_of(ts=Column(kind="time"))
        )
        then = data.prepare(
            [folder / "late.parquet"], folder / "b", schema=Transforms.load(first.out), grow=True
        )
        grown = {int(row["row"]): row for row in part(then.out, "train").to_pylist()}
        assert all(grown[i][kind] == rows[i][kind] for i in late for kind in COUNTED)
        digests = {name: column.digest for name, column in made.schema.columns.items()}
        assert digests == {name: column.digest for name, column in then.schema.columns.items()}


def test_held_out_rows_have_the_counts_at_the_end_of_training(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    users, labels = random.choice(list("abcdef"), 300).tolist(), random.integers(0, 2, 300).tolist()
    pq.write_table(log_of(users, labels, ts=np.arange(300)), tmp_path / "log.parquet")
    split = Split(valid=0.2, test=0.2)
    made = data.prepare(
        [tmp_path / "log.parquet"],
        tmp_path / "out",
        schema=schema_of(split, ts=Column(kind="time")),
    )
    trained = made.rows["train"]
    for name in ("valid", "test"):
        for row in part(made.out, name).to_pylist():
            user = users[int(row["row"])]
            want = by_definition(users[:trained], labels[:trained], [], user=user)
            assert [row[kind] for kind in COUNTED] == pytest.approx(want)


def of_rows(out: Path, rows: np.ndarray) -> dict[int, list[float]]:
    table = part(out, "train").to_pylist()
    return {int(row["row"]): [row[kind] for kind in COUNTED] for row in table if row["row"] in rows}


@pytest.mark.parametrize("edges", [earlier.MOST_EDGES, 7])
def test_labels_of_later_rows_and_the_order_of_the_log_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edges: int
) -> None:
    """What labels of the row's own time are changes nothing either, but those of earlier times
    do.
    """
    monkeypatch.setattr(earlier, "MOST_EDGES", edges)
    random = np.random.default_rng(1)
    users, labels = random.choice(list("abcdefgh"), 500).tolist(), random.integers(0, 2, 500)
    table = log_of(users, labels.tolist(), ts=np.arange(500) // 3)
    other = labels.copy()
    other[300:] = 1 - other[300:]  # 300 // 3 = 100 is a time that begins there
    changed = table.set_column(1, "label", pa.array(other))
    shuffled = table.take(pa.array(random.permutation(500)))
    schema, found = schema_of(ts=Column(kind="time")), {}
    for name, log in {"as it is": table, "changed": changed, "shuffled": shuffled}.items():
        pq.write_table(log, tmp_path / f"{name}.parquet", row_group_size=90)
        made = data.prepare([tmp_path / f"{name}.parquet"], tmp_path / name, schema=schema)
        found[name] = of_rows(made.out, np.arange(500.0))
    assert found["shuffled"] == found["as it is"]
    assert all(found["changed"][i] == found["as it is"][i] for i in range(303))
    assert any(found["changed"][i] != found["as it is"][i] for i in range(303, 500))


def test_the_mean_of_a_long_log_is_that_before_an_edge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No user comes twice, so each rate is the mean of earlier rows. It lags by at most the rows
    between two edges.
    """
    labels = np.random.default_rng(5).integers(0, 2, 1000)
    monkeypatch.setattr(earlier, "MOST_EDGES", 100)
    pq.write_table(
        log_of([f"u{i}" for i in range(1000)], labels.tolist(), ts=np.arange(1000)),
        tmp_path / "log.parquet",
    )
    made = data.prepare(
        [tmp_path / "log.parquet"], tmp_path / "out", schema=schema_of(ts=Column(kind="time"))
    )
    before = np.append(0, np.cumsum(labels))
    found = [of[2] for _, of in sorted(of_rows(made.out, np.arange(1000.0)).items())]
    assert found == pytest.approx(
        [(before[i - i % 10] + 0.5) / (i - i % 10 + 1) for i in range(1000)]
    )


def test_rows_without_a_label_get_counts_and_add_none_but_to_those_of_all_rows(
    tmp_path: Path,
) -> None:
    schema = replace(schema_of(ts=Column(kind="time")), split=replace(NONE, by="ratio"))
    users, labels = ["a", "a", "b", "a"], [1.0, np.nan, 0.0, 1.0]
    columns = {
        "user": users,
        "label": pa.array([1.0, 0.0, 0.0, 1.0]),
        "row": [0.0] * 4,
        "ts": range(4),
    }
    batch = typed(schema, pa.table(columns), training=True)
    batch = batch.set_column(
        batch.schema.get_field_index("label"), "label", pa.array(labels, pa.float32())
    )
    counter = earlier.Earlier(Transforms(schema=schema), Cutter(schema=schema), tmp_path, 4)
    counts = counter.count([batch]).counts
    found = counter.numbered(batch, 0).to_pydict()
    assert found["seen"] == [0, 1, 0, 2]
    assert found["positives"] == [0, 1, 0, 1]
    assert found["rate"] == pytest.approx([0.5, (1 + 3 * 0.75) / 4, 0.75, (1 + 3 * 1.5 / 3) / 4])
    assert counts["seen"].totals_2.tolist() == [4, 0]
    assert counts["rate"].totals_2.tolist() == [3, 2]


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    return ranking.auc(torch.from_numpy(scores), torch.from_numpy(labels))


def coin_flips(rows: int, timed: bool) -> pa.Table:
    """Labels that nothing tells. Users have four rows each, so that a row's own label is much of
    their rate.
    """
    random = np.random.default_rng(2)
    users = [f"u{i}" for i in random.integers(0, rows // 4, rows)]
    return log_of(
        users,
        random.integers(0, 2, rows).tolist(),
        **({"ts": np.arange(rows) // 2} if timed else {}),
    )


@pytest.mark.parametrize("timed", [True, False])
def test_the_rate_does_not_tell_a_row_its_own_label(tmp_path: Path, timed: bool) -> None:
    table = coin_flips(20_000, timed)
    pq.write_table(table, tmp_path / "log.parquet")
    columns = {"ts": Column(kind="time")} if timed else {}
    made = data.prepare(
        [tmp_path / "log.parquet"], tmp_path / "out", schema=schema_of(Split(), **columns)
    )
    rows = part(made.out, "train")
    labels, error = rows["label"].to_numpy(), 0.577 / np.sqrt(rows.num_rows)
    for kind in COUNTED:
        assert abs(auc(rows[kind].to_numpy(), labels) - 0.5) < 4 * error, kind
    at = rows["row"].to_numpy().astype(int)
    leaks = Transforms.load(made.out).transform(table, training=False)["rate"].to_numpy()[at]
    assert auc(leaks, labels) > 0.6  # of all rows, its own among them
    results = train(run_of(made.out, tmp_path / "run", **{"model.name": "logistic"}))
    assert abs(results["valid"]["auc"] - 0.5) < 4 * 0.577 / np.sqrt(made.rows["valid"])
    assert results["valid"]["ne"] < 1.01


def test_without_a_time_rows_of_a_group_do_not_see_each_other(tmp_path: Path) -> None:
    table = log_of(["a"] * 60, [0, 1] * 30, g=np.repeat(np.arange(6), 10))
    pq.write_table(table, tmp_path / "log.parquet")
    made = data.prepare(
        [tmp_path / "log.parquet"], tmp_path / "out", schema=schema_of(g=Column(kind="group"))
    )
    seen = np.array([found[0] for _, found in sorted(of_rows(made.out, np.arange(60.0)).items())])
    assert sorted(seen) == sorted(np.repeat(np.arange(6) * 10, 10))
    assert all(len(set(rows)) == 1 for rows in seen.reshape(6, 10))
    alone = data.prepare([tmp_path / "log.parquet"], tmp_path / "alone", schema=schema_of())
    assert sorted(found[0] for found in of_rows(alone.out, np.arange(60.0)).values()) == list(
        range(60)
    )


def test_a_model_is_served_what_it_was_evaluated_on(tmp_path: Path) -> None:
    """Through training, predict, and a folder whose requests are Python values; a missing id has a
    column that says so.

    Among them is a count of an id that is a feature, too, and whose ids stay a range, as without
    the count.
    """
    random = np.random.default_rng(3)
    item, taste = random.integers(0, 40, 2000), random.normal(0, 2, 40)
    label = (random.random(2000) < 1 / (1 + np.exp(-taste[item]))).astype(int)
    lines = [
        f"{y},{'' if i == 7 else i},{t}" for y, i, t in zip(label, item, range(2000), strict=True)
    ]
    (tmp_path / "log.csv").write_text("\n".join(["label,item,ts", *lines]))
    columns = {"label": Column(kind="label"), "item": Column(kind="categorical", table="item")}
    columns |= {
        "ts": Column(kind="time"),
        "rate": Column(kind="numeric", source="item", counts="rate"),
    }
    columns |= {"seen": Column(kind="numeric", source="item", counts="seen")}
    schema = Schema(columns=columns, encodings={"item": Encoding()})
    made = data.prepare([tmp_path / "log.csv"], tmp_path / "data", schema=schema)
    assert made.schema.encodings["item"].kind == "range"
    # both are missing where the item is
    assert made.schema.dense == ("rate", "rate:missing", "seen")
    assert made.schema.mark_of("seen") == made.schema.mark_of("rate") == "rate:missing"
    assert (made.schema.columns["seen"].transform, made.schema.columns["rate"].prior) == (
        "log",
        20.0,
    )
    results = train(
        run_of(made.out, tmp_path / "run", **{"model.name": "logistic", "loop.epochs": 3})
    )
    assert results["valid"]["auc"] > 0.7
    held_out = part(made.out, "test")["ts"].to_numpy()
    rows = ["label,item,ts", *(lines[t] for t in held_out)]
    (tmp_path / "test.csv").write_text("\n".join(rows))
    predict(tmp_path / "run", [tmp_path / "test.csv"], tmp_path / "scores.parquet")
    scores = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    (batch,) = data.open(made.out).loader(10_000, split="test")
    assert np.array_equal(restore(tmp_path / "run").scores(batch)[:, 0].numpy(), scores)
    export(tmp_path / "run", tmp_path / "folder", [tmp_path / "log.csv"])
    cells = [None if line.split(",")[1] == "" else int(line.split(",")[1]) for line in rows[1:]]
    card = json.loads((tmp_path / "folder" / "card.json").read_text())
    missing = [card["training"]["features"][name]["missing"] for name in ("item", "rate", "seen")]
    assert missing[0] > 0 and missing == [missing[0]] * 3
    asked = [{"item": cell} for cell in cells]
    assert np.allclose(load(tmp_path / "folder").score(asked)[:, 0], scores, atol=1e-6)


def test_what_cannot_be_is_said_in_a_line(tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    table = log_of(
        random.choice(list("ab"), 100).tolist(),
        random.integers(0, 2, 100).tolist(),
        ts=np.arange(100),
    )
    pq.write_table(table, tmp_path / "log.parquet")
    log, timed = [tmp_path / "log.parquet"], schema_of(ts=Column(kind="time"))
    with pytest.raises(
        UserError, match=r"columns\.rate\.label: no label 'buy'; the labels are \('label',\)"
    ):
        column = Column(kind="numeric", source="user", counts="rate", label="buy")
        data.prepare(log, tmp_path / "out", schema=schema_of(rate=column))
    with pytest.raises(
        UserError, match=r"ray: columns\.seen counts rows .*; leave out ray, or the column"
    ):
        data.prepare(log, tmp_path / "out", schema=timed, ray="local")
    with pytest.raises(UserError, match="counts: for columns of kind numeric"):
        Column(kind="group", counts="seen")
    with pytest.raises(UserError, match="label, prior: for columns with counts"):
        Column(kind="numeric", prior=3.0)
    with pytest.raises(UserError, match="prior: 0"):
        Column(kind="numeric", counts="rate", prior=0.0)
    made = data.prepare(log, tmp_path / "out", schema=timed)
    with pytest.raises(
        UserError,
        match=r"columns\.seen\.until: row 0 is not later than 99, .*; grow with later rows",
    ):
        data.prepare(log, tmp_path / "two", schema=Transforms.load(made.out), grow=True)
    again = data.prepare(log, tmp_path / "like", schema=Transforms.load(made.out))
    assert sum("labels of its own rows may be in its numbers" in note for note in again.notes) == 3
    file = next((made.out / "vocabulary").glob("counts-000-*"))
    next((made.out / "vocabulary").glob("counts-001-*")).replace(file)
    with pytest.raises(
        UserError, match="counts-000-seen.parquet: not the counts that schema.toml was fitted with"
    ):
        Transforms.load(made.out)
