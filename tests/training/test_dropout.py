"""Ids that training takes for unknown: which, how many, the same in every setting, and what they
are good for.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.features.encodings import UNKNOWN
from sparrow.features.hashing import mix
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.trained.run import Run
from sparrow.training import Trainer, dropout, train
from sparrow.training.dropout import Dropout, default_shares
from tests.data.grouped import SCHEMA as GROUPED
from tests.data.grouped import made
from tests.runs import run_of

SCHEMA = Schema(
    columns={
        "item": Column(kind="categorical", table="item"),
        "history": Column(kind="list", table="item"),
        "user": Column(kind="categorical", table="user"),
        "hashed": Column(kind="categorical", table="hashed"),
    },
    encodings={
        "item": Encoding(kind="vocabulary"),
        "user": Encoding(kind="range"),
        "hashed": Encoding(kind="hash"),
    },
)


def batch_of(rows: int, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    ids: dict[str, list[list[int]]] = {
        name: random.integers(0, 40, (rows, 1)).tolist() for name in ("item", "user", "hashed")
    }
    ids["history"] = [random.integers(0, 40, random.integers(0, 5)).tolist() for _ in range(rows)]
    return Batch(
        dense_BC=torch.zeros(rows, 0),
        ids=KeyedJagged.from_lists({name: ids[name] for name in SCHEMA.sparse}),
    )


def dropped(before: Batch, after: Batch, name: str) -> set[int]:
    """The ids of a column that became unknown, everywhere; all others stay."""
    old_N, new_N = before.ids[name].values_N, after.ids[name].values_N
    changed = set(old_N[old_N != new_N].tolist())
    assert not changed & {0, 1}
    assert new_N.tolist() == [1 if i in changed else i for i in old_N.tolist()]
    return changed


def test_an_id_is_dropped_from_the_whole_batch_or_not_at_all() -> None:
    drop = Dropout(SCHEMA, {"item": 0.3, "history": 0.3, "user": 0.1}, seed=3)
    batch, found = batch_of(1000), []
    for number in range(300):
        after = drop(batch, 0, number)
        items = dropped(batch, after, "item")
        assert items == dropped(batch, after, "history")  # 1,000 rows have all 40 ids in both
        assert not dropped(batch, after, "hashed")
        found.append((items, dropped(batch, after, "user")))
    for i, share in ((0, 0.3), (1, 0.1)):
        rate = np.mean([len(ids[i]) / 38 for ids in found])
        assert abs(rate - share) < 5 * (share * (1 - share) / 38 / 300) ** 0.5
    assert len({frozenset(items) for items, _ in found}) == 300  # another draw for each batch,
    assert dropped(batch, drop(batch, 1, 7), "item") != found[7][0]  # for each epoch,
    # and seed
    assert (
        dropped(batch, Dropout(SCHEMA, {"item": 0.3}, seed=4)(batch, 0, 7), "item") != found[7][0]
    )
    assert (
        dropped(batch, Dropout(SCHEMA, {"item": 0.3}, seed=3)(batch, 0, 7), "item") == found[7][0]
    )
    assert dropped(batch, Dropout(SCHEMA, {"item": 1.0}, seed=3)(batch, 0, 7), "item") == set(
        range(2, 40)
    )


def test_a_part_of_a_batch_loses_what_the_whole_loses() -> None:
    drop, batch = Dropout(SCHEMA, {"item": 0.4, "history": 0.2}, seed=0), batch_of(50)
    part = drop(batch.part(10, 20), 2, 5).ids
    assert torch.equal(part.values_N, drop(batch, 2, 5).part(10, 20).ids.values_N)


def test_dedup_loses_what_its_expansion_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And draws for the ids that it stores, once for a row that repeats."""
    drawn: list[int] = []
    monkeypatch.setattr(dropout, "mix", lambda x: drawn.append(len(x)) or mix(x))
    schema = replace(GROUPED, encodings={name: Encoding(min_count=1) for name in GROUPED.encodings})
    pq.write_table(made(200, 6), tmp_path / "log.parquet")
    data.prepare([tmp_path / "log.parquet"], tmp_path / "out", schema=schema)
    dataset = data.open(tmp_path / "out")
    drop = Dropout(dataset.schema, {"item": 0.3, "history": 0.3, "user": 0.5, "tags": 0.2}, seed=0)
    pairs = zip(*(dataset.loader(64, dedup=way) for way in ("on", "off")), strict=True)  # type: ignore[arg-type]
    for number, (one, other) in enumerate(pairs):
        assert one.ids.inverse_B
        drawn.clear()
        drop(one, 0, number)
        assert (
            sum(n for n in drawn if n > 1) == one.ids.values_N.numel() < other.ids.values_N.numel()
        )
        after, expanded = drop(one, 0, number).ids.expanded(), drop(other, 0, number).ids
        assert torch.equal(after.values_N, expanded.values_N)
        assert not torch.equal(expanded.values_N, other.ids.values_N)


def new_ids(rows: int = 12_000) -> pa.Table:
    """Items live for a while: later parts have others. A click depends on the item, and on a number
    that all show.
    """
    random = np.random.default_rng(0)
    item = np.arange(rows) // 100 + random.integers(0, 20, rows)
    number = random.normal(size=rows)
    logit = 2 * random.normal(size=item.max() + 1)[item] + number - 1
    label = random.random(rows) < 1 / (1 + np.exp(-logit))
    return pa.table(
        {"label": label.astype(np.int8), "ts": np.arange(rows), "item": item, "number": number}
    )


def replaced_ids(rows: int = 8_000) -> pa.Table:
    """All items of the last fifth are new. A click depends on the item, whose number tells most of
    what it does.
    """
    random = np.random.default_rng(0)
    item = random.integers(0, 100, rows) + 100 * (np.arange(rows) >= 0.8 * rows)
    number = random.normal(size=200)
    logit = 2 * number + random.normal(size=200) - 1
    label = random.random(rows) < 1 / (1 + np.exp(-logit[item]))
    return pa.table(
        {
            "label": label.astype(np.int8),
            "ts": np.arange(rows),
            "item": item,
            "number": number[item],
        }
    )


def prepared(folder: Path, by: str, log: pa.Table | None = None) -> Path:
    pq.write_table(log or new_ids(), folder / "log.parquet")
    columns = {
        "label": Column(kind="label"), "ts": Column(kind="time"), "number": Column(kind="numeric"),
        "item": Column(kind="categorical", table="item"),
    }  # fmt: skip
    schema = Schema(columns=columns, encodings={"item": Encoding()}, split=Split(by=by))  # type: ignore[arg-type]
    data.prepare([folder / "log.parquet"], folder / "prepared", schema=schema)
    return folder / "prepared"


def test_auto_drops_what_valid_will_not_know(tmp_path: Path) -> None:
    """And the run keeps what was chosen."""
    dataset = data.open(prepared(tmp_path, "time"))
    bad, ids = dataset.manifest["unknown_ids"]["valid"]["item"]
    bad_train, ids_train = dataset.manifest["unknown_ids"]["train"]["item"]
    assert bad / ids > 0.3 > 0.05 > bad_train / ids_train
    share = default_shares(dataset)["item"]
    wanted = 1 - (1 - bad / ids) / (1 - bad_train / ids_train)
    assert share == pytest.approx(min(wanted, 0.5), abs=1e-3)
    train(run_of(dataset.path, tmp_path / "run"))
    assert Run.load(tmp_path / "run" / "run.toml").data.id_dropout == {"item": share}


def test_auto_drops_nothing_of_rows_drawn_at_random(tmp_path: Path) -> None:
    assert default_shares(data.open(prepared(tmp_path, "ratio"))) == {}


def test_half_of_the_known_ids_stay(tmp_path: Path) -> None:
    """However many are new in valid: here all."""
    assert default_shares(data.open(prepared(tmp_path, "time", replaced_ids()))) == {"item": 0.5}


def test_a_step_gets_what_is_left(tmp_path: Path) -> None:
    """The batches of a step agree on which ids that is."""
    log = prepared(tmp_path, "time", replaced_ids())
    feed = Trainer(
        run_of(log, tmp_path / "run", **{"data.id_dropout": {"item": 0.3}, "loop.accumulate": 10})
    ).job.feed
    whole = Trainer(
        run_of(log, tmp_path / "run", **{"data.id_dropout": {}, "loop.accumulate": 10})
    ).job.feed
    found = []
    while micro := feed.take():
        before, after = (
            torch.cat([s.batch.ids["item"].values_N for s in of]) for of in (whole.take(), micro)
        )
        kept = set(after.tolist()) - {UNKNOWN}
        assert torch.equal(
            after, torch.where(torch.isin(before, torch.tensor(sorted(kept))), before, UNKNOWN)
        )
        found.append(1 - len(kept) / len(set(before.tolist()) - {UNKNOWN}))
    assert len(found) == 10
    # of 100 items in each of 10 steps
    assert abs(np.mean(found) - 0.3) < 5 * (0.3 * 0.7 / 100 / 10) ** 0.5


def test_unknown_ids_are_predicted_better(tmp_path: Path) -> None:
    """Else the item's row has learned a part of what its number tells, and the row of unknown ids
    has not.

    NE was 0.719 to 0.720 with and 0.756 to 0.764 without (three seeds): every row of valid has an
    unknown id.
    """
    log = prepared(tmp_path, "time", replaced_ids())
    for seed in (0, 1):
        with_drop, without = (
            train(run_of(log, tmp_path / "run", seed=seed, **changes), overwrite=True)["valid"][
                "ne"
            ]
            for changes in ({}, {"data.id_dropout": {}})
        )
        assert with_drop < without - 0.02


def test_what_cannot_be_dropped_is_said() -> None:
    with pytest.raises(
        UserError,
        match=r"data\.id_dropout\.hashed: no column whose table has a row for unknown ids",
    ):
        Dropout(SCHEMA, {"hashed": 0.1}, seed=0)
    with pytest.raises(UserError, match=r"id_dropout\.usr: .*did you mean 'user'"):
        Dropout(SCHEMA, {"usr": 0.1}, seed=0)
    with pytest.raises(UserError, match=r"id_dropout\.user: 1\.5 is out of range"):
        Run.of("x", {"data.id_dropout": {"user": 1.5}})


def test_groups_drawn_at_random_bring_their_own_ids(tmp_path: Path) -> None:
    """Valid does not know a cookie that one session has, and does know the items that all have."""
    random, rows = np.random.default_rng(0), 6_000
    session = np.arange(rows) % 1_000
    log = {
        "label": random.integers(0, 2, rows),
        "session": session,
        "cookie": session,
        "item": random.integers(0, 20, rows),
    }
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    columns = {
        "label": Column(kind="label"),
        "session": Column(kind="session"),
        "cookie": Column(kind="categorical", table="cookie"),
        "item": Column(kind="categorical", table="item"),
    }
    schema = Schema(
        columns=columns,
        encodings={"cookie": Encoding(), "item": Encoding()},
        split=Split(by="ratio"),
    )
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared", schema=schema)
    assert default_shares(data.open(tmp_path / "prepared")) == {"cookie": 0.5}
