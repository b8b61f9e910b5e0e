"""Ids that training takes for unknown: which, how many, the same in every setting, and what they are good for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.data.schema import Column, Schema, Split, Table
from sparrow.features.hashing import mix
from sparrow.training import Run, dropout, train
from sparrow.training.dropout import Dropout, default_shares
from tests.data.test_dedup import SCHEMA as GROUPED
from tests.data.test_dedup import made

SCHEMA = Schema(
    columns={
        "item": Column(kind="categorical", table="item"),
        "history": Column(kind="list", table="item"),
        "user": Column(kind="categorical", table="user"),
        "hashed": Column(kind="categorical", table="hashed"),
    },
    tables={"item": Table(encoding="vocabulary"), "user": Table(encoding="range"), "hashed": Table(encoding="hash")},
)


def batch_of(rows: int, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    ids: dict[str, list[list[int]]] = {
        name: random.integers(0, 40, (rows, 1)).tolist() for name in ("item", "user", "hashed")
    }
    ids["history"] = [random.integers(0, 40, random.integers(0, 5)).tolist() for _ in range(rows)]
    return Batch(dense_BC=torch.zeros(rows, 0), ids=KeyedJagged.from_lists({name: ids[name] for name in SCHEMA.sparse}))


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
    assert dropped(batch, Dropout(SCHEMA, {"item": 0.3}, seed=4)(batch, 0, 7), "item") != found[7][0]  # and seed
    assert dropped(batch, Dropout(SCHEMA, {"item": 0.3}, seed=3)(batch, 0, 7), "item") == found[7][0]
    assert dropped(batch, Dropout(SCHEMA, {"item": 1.0}, seed=3)(batch, 0, 7), "item") == set(range(2, 40))


def test_a_part_of_a_batch_loses_what_the_whole_loses() -> None:
    drop, batch = Dropout(SCHEMA, {"item": 0.4, "history": 0.2}, seed=0), batch_of(50)
    part = drop(batch.part(10, 20), 2, 5).ids
    assert torch.equal(part.values_N, drop(batch, 2, 5).part(10, 20).ids.values_N)


def test_dedup_loses_what_its_expansion_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And draws for the ids that it stores, once for a row that repeats."""
    drawn: list[int] = []
    monkeypatch.setattr(dropout, "mix", lambda x: drawn.append(len(x)) or mix(x))
    schema = replace(GROUPED, tables={name: Table(min_count=1) for name in GROUPED.tables})
    pq.write_table(made(200, 6), tmp_path / "log.parquet")
    data.prepare([tmp_path / "log.parquet"], tmp_path / "out", schema=schema)
    dataset = data.open(tmp_path / "out")
    drop = Dropout(dataset.schema, {"item": 0.3, "history": 0.3, "user": 0.5, "tags": 0.2}, seed=0)
    pairs = zip(*(dataset.loader(64, dedup=way) for way in ("on", "off")), strict=True)  # type: ignore[arg-type]
    for number, (one, other) in enumerate(pairs):
        assert one.ids.inverse_B
        drawn.clear()
        drop(one, 0, number)
        assert sum(n for n in drawn if n > 1) == one.ids.values_N.numel() < other.ids.values_N.numel()
        after, expanded = drop(one, 0, number).ids.expanded(), drop(other, 0, number).ids
        assert torch.equal(after.values_N, expanded.values_N)
        assert not torch.equal(expanded.values_N, other.ids.values_N)


def new_ids(rows: int = 12_000) -> pa.Table:
    """Items live for a while: later parts have others. A click depends on the item, and on a number that all show."""
    random = np.random.default_rng(0)
    item = np.arange(rows) // 100 + random.integers(0, 20, rows)
    number = random.normal(size=rows)
    logit = 2 * random.normal(size=item.max() + 1)[item] + number - 1
    label = random.random(rows) < 1 / (1 + np.exp(-logit))
    return pa.table({"label": label.astype(np.int8), "ts": np.arange(rows), "item": item, "number": number})


def run_of(folder: Path, **changes: Any) -> Run:
    return Run.of(folder / "prepared", {"run_dir": str(folder / "run"), "threads": 1, **changes})


def prepared(folder: Path, by: str) -> Path:
    pq.write_table(new_ids(), folder / "log.parquet")
    columns = {
        "label": Column(kind="label"), "ts": Column(kind="time"), "number": Column(kind="numeric"),
        "item": Column(kind="categorical", table="item"),
    }  # fmt: skip
    schema = Schema(columns=columns, tables={"item": Table()}, split=Split(by=by))  # type: ignore[arg-type]
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
    train(run_of(tmp_path))
    assert Run.load(tmp_path / "run" / "run.toml").data.id_dropout == {"item": share}


def test_auto_drops_nothing_of_rows_drawn_at_random(tmp_path: Path) -> None:
    assert default_shares(data.open(prepared(tmp_path, "ratio"))) == {}


def test_what_cannot_be_dropped_is_said() -> None:
    with pytest.raises(UserError, match=r"data\.id_dropout\.hashed: no column whose table has a row for unknown ids"):
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
        "label": Column(kind="label"), "session": Column(kind="session"),
        "cookie": Column(kind="categorical", table="cookie"), "item": Column(kind="categorical", table="item"),
    }  # fmt: skip
    schema = Schema(columns=columns, tables={"cookie": Table(), "item": Table()}, split=Split(by="ratio"))
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared", schema=schema)
    assert default_shares(data.open(tmp_path / "prepared")) == {"cookie": 0.5}
