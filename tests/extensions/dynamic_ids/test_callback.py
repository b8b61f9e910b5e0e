"""Runs whose ids come and go: against a table of all ids and a count by hand, resumed, and on the
next day's log.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.apps.report import report
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.core.config import read_toml
from sparrow.embeddings import TableChoices
from sparrow.embeddings.choices import Override
from sparrow.extensions.dynamic_ids import addressing as dynamic
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.kernels import missing, row_index
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.trained.run import Data, Loop
from sparrow.trained.scorer import restore
from sparrow.training import Trainer, preflight, runlog, train
from tests.analysis.pages import page
from tests.extensions.tiers.test_hits import notes
from tests.runs import small_run
from tests.training.test_loop import same, tensors

RULE = rowwise_adagrad.Config(lr=0.1)


def choices(**given: Any) -> TableChoices:
    return TableChoices(
        rule=RULE, addressing=dynamic.Config(**{"rows": 120, "bucket": 30, **given})
    )


def test_with_a_row_for_every_id_it_is_the_vocabulary(prepared: Path, tmp_path: Path) -> None:
    """The same first values, so the same bits: scores, dense weights, and each id's vector."""
    large = TableChoices(rule=RULE, init_scale=0.1, addressing=dynamic.Config(rows=5000))
    runs: dict[str, Trainer] = {}
    results = {}
    for name, tables in {
        "dynamic": large,
        "vocabulary": TableChoices(rule=RULE, init_scale=0.1),
    }.items():
        run = small_run(
            prepared, tmp_path / name, tables=tables, loop=Loop(max_steps=20, evaluate_every=7)
        )
        runs[name] = Trainer(replace(run, data=replace(run.data, id_dropout={})))
        results[name] = runs[name].fit()
    one, other = runs["dynamic"].job, runs["vocabulary"].job
    assert results["dynamic"]["progressive"] == results["vocabulary"]["progressive"]
    for name, weight in other.model.state_dict().items():
        if not name.endswith("_extra_state"):
            assert torch.equal(one.model.state_dict()[name], weight), name
    batch = one.dataset.first(2000)
    for feature in batch.ids.keys:
        ((table, mine_N),) = one.tables[0].rows_of(batch.ids, feature).items()
        ((_, its_N),) = other.tables[0].rows_of(batch.ids, feature).items()
        assert torch.equal(
            one.tables[0].record(table).weight[mine_N], other.tables[0].record(table).weight[its_N]
        )


def by_hand(
    batches: list[list[int]], capacity: int, sizes: list[int]
) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Least recently used in one bucket: id -> when it was used and its row; looked up, live,
    admitted, evicted.
    """
    held: dict[int, tuple[int, int]] = {}
    counts, now = [0, 0, 0, 0], 0
    for ids, size in zip(batches, sizes, strict=True):
        now += size
        new = set(ids) - held.keys() - {0}
        held |= {i: (now, row) for i, (_, row) in held.items() if i in ids}
        for i in sorted(new, key=lambda i: int(row_index.keys_of(torch.tensor([i])))):
            free = sorted(set(range(2, capacity + 2)) - {row for _, row in held.values()})
            if not free:
                _, row, old = min((when, row, j) for j, (when, row) in held.items())
                if held[old][0] == now:
                    continue  # all rows are in use
                del held[old]
                counts[3] += 1
                free = [row]
            held[i] = now, free[0]
            counts[2] += 1
        counts[0] += len(ids)
        counts[1] += sum(i == 0 or i in held for i in ids)
    return held, counts


def test_who_has_a_row_as_counted_by_hand(prepared: Path, tmp_path: Path) -> None:
    loop = Loop(max_steps=12, evaluate_every=4)
    run = small_run(
        prepared, tmp_path, tables=choices(rows=25, bucket=1000), loop=loop, batch_size=64
    )
    trainer = Trainer(replace(run, data=replace(run.data, id_dropout={})))
    results = trainer.fit()
    (tables,) = trainer.job.tables
    found = results["tables"]["ids"]
    batches = [batch for _, batch in zip(range(12), trainer.job.dataset.loader(64), strict=False)]
    assert any(ids["evicted"] for ids in found.values()) and any(
        ids["crowded"] for ids in found.values()
    )
    for name in found:
        of_table = [f.name for f in tables.features if f.table == name]
        ids = [[i for f in of_table for i in batch.ids[f].values_N.tolist()] for batch in batches]
        held, counts = by_hand(ids, 25, [batch.batch_size for batch in batches])
        index = tables.record(name).index
        mine = {
            i: (when, row)
            for row, (i, when) in enumerate(
                zip(index.ids_R.tolist(), index.times_R.tolist(), strict=True)
            )
        }
        assert {i: at for i, at in mine.items() if i > 0} == held, name
        assert [found[name][of] for of in ("looked_up", "live", "admitted", "evicted")] == counts, (
            name
        )
        assert (found[name]["capacity"], found[name]["rows"]) == (25, len(held))
        age = sum(
            sum(batch.batch_size for batch in batches) - when for when, _ in held.values()
        ) / len(held)
        assert found[name]["age"] == pytest.approx(age)
    lines = [line for line in runlog.read(tmp_path) if line["event"] == "train"]
    assert sum(line["admitted"] for line in lines) == sum(ids["admitted"] for ids in found.values())
    assert 0 < lines[-1]["live_rate"] < 1


@pytest.mark.parametrize(
    "policy",
    [{"evict": "lfu", "half_life": 700.0, "after": 2}, {"ttl": 600, "probability": 0.5}],
    ids=str,
)
def test_resumed_is_uninterrupted(prepared: Path, tmp_path: Path, policy: dict[str, Any]) -> None:
    changes = {"tables": choices(**policy), "loop": Loop(accumulate=2, nonfinite="skip")}
    whole = train(small_run(prepared, tmp_path / "whole", **changes))

    def listener(event: str, values: dict[str, Any]) -> None:
        if event == "progress" and values["step"] == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    assert (
        train(small_run(prepared, tmp_path / "cut", **changes), listener=listener)["stopped_by"]
        == "SIGTERM"
    )
    again = train(small_run(prepared, tmp_path / "cut", **changes), resume=True)
    assert {**again, "run_dir": ""} == {**whole, "run_dir": ""}
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "cut"))


def test_evaluation_and_prediction_only_read(prepared: Path, tmp_path: Path) -> None:
    often, never = (
        train(
            small_run(
                prepared,
                tmp_path / str(every),
                tables=choices(),
                loop=Loop(max_steps=8, evaluate_every=every),
            )
        )
        for every in (1, 8)
    )
    assert often["tables"] == never["tables"]
    found = restore(tmp_path / "8")
    before = {name: t.clone() for name, t in found.model.state_dict().items()}
    batch = data.open(prepared).first(500)
    one = found.scores(batch)
    assert torch.equal(one, found.scores(batch))
    assert all(torch.equal(before[name], t) for name, t in found.model.state_dict().items())


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param(choices(), id="lru", marks=pytest.mark.slow),
        pytest.param(choices(after=3, ttl=900), id="ttl"),
    ],
)
def test_bytes_are_those_of_the_preflight_and_all_is_shown(
    prepared: Path, tmp_path: Path, tables: TableChoices, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(prepared, tmp_path / "run", tables=tables)
    told = train(run)["tables"]
    resolved = preflight.resolved(run, data.open(prepared))
    if not missing():
        assert told["bytes"] == preflight.estimate(resolved, data.open(prepared)).host["tables"]
    assert main(["train", str(tmp_path / "run" / "run.toml"), "--overwrite"]) == 0
    printed, ids = " ".join(capsys.readouterr().out.split()), told["ids"]["user"]
    assert f"user: {ids['rows']:,} of 120 rows in use; {ids['admitted']:,} ids got one" in printed
    report(tmp_path / "run", rows=0)
    cells = page(tmp_path / "run" / "report.html").cells
    assert f"{ids['admitted']:,}" in cells and f"{ids['rows']:,} of 120" in cells
    written = read_toml(tmp_path / "run" / "run.toml")["tables"]
    assert written["addressing"]["rows"] == 120


def test_ids_without_room_are_told_once(prepared: Path, tmp_path: Path) -> None:
    said, hear = notes()
    only = TableChoices(
        rule=RULE,
        overrides=(Override(names=("user",), addressing={"name": "dynamic", "rows": 20}),),
    )
    train(small_run(prepared, tmp_path / "run", tables=only, loop=Loop(max_steps=9)), listener=hear)
    told = [text for text in said if "found no row" in text]
    assert (
        len(told) == 1
        and told[0].startswith("table 'user': ")
        and "raise tables.addressing.rows" in told[0]
    )


# -- the log's time --------------------------------------------------------------------------------


def log_of(place: Path, days: int, rows: int = 3000, first: int = 0) -> Path:
    """Clicks on items that are new each day. A click comes every minute."""
    random = np.random.default_rng(first)
    day = np.arange(rows) * days // rows + first
    table = {
        "ts": np.arange(rows) * 60 + first * 86_400,
        "site": random.integers(0, 5, rows),
        "item": (day * 40 + random.integers(0, 40, rows)) * 1_000_003,
        "click": random.integers(0, 2, rows),
    }
    pq.write_table(pa.table(table), place / f"log{first}.parquet")
    return place / f"log{first}.parquet"


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("timed")
    kinds = {
        "ts": Column(kind="time"),
        "site": Column(kind="categorical", table="site"),
        "item": Column(kind="categorical", table="item"),
        "click": Column(kind="label"),
    }
    schema = Schema(
        columns=kinds, encodings={"site": Encoding(), "item": Encoding(kind="hash", rows=1000)}
    )
    for first in (0, 10):
        data.prepare([log_of(place, 10, first=first)], place / f"p{first}", schema=schema)
    return place


def test_rows_leave_by_the_logs_time(timed: Path, tmp_path: Path) -> None:
    tables = choices(rows=400, ttl=6 * 3600, clock="time")
    run = small_run(timed / "p0", tmp_path / "run", tables=tables, batch_size=50)
    trainer = Trainer(replace(run, data=replace(run.data, id_dropout={})))
    ids = trainer.fit()["tables"]["ids"]["item"]
    index = trainer.job.tables[0].record("item").index
    passed = trainer.job.tables[0].exchange.parts[0].passed
    times = pq.read_table(timed / "log0.parquet")["ts"].to_pylist()
    assert passed.time == times[trainer.job.dataset.rows("train") - 1]
    held = index.ids_R > 0
    assert ids["rows"] == int(held.sum()) and ids["age"] < 86_400 * 10
    batch = trainer.job.dataset.first(50)  # of the first day
    trainer.job.model.eval()
    ((_, rows_N),) = trainer.job.tables[0].rows_of(batch.ids, "item").items()
    assert bool((index.ids_R[rows_N] < 0).all()), "what was clicked days ago still has rows"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data": {"shuffle": True}}, "data.shuffle"),
        ({"loop": Loop(epochs=2)}, "loop.epochs"),
        ({}, "no column of kind time"),
    ],
)
def test_time_that_would_go_back_is_refused(
    timed: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    source = timed / "p0"
    if not changes:
        table = pq.read_table(timed / "log0.parquet").drop(["ts"])
        pq.write_table(table, tmp_path / "log.parquet")
        data.prepare([tmp_path / "log.parquet"], tmp_path / "p", label="click")
        source = tmp_path / "p"
    settings = dict(changes)
    if "data" in settings:
        settings["data"] = Data(path=str(source), batch_size=256, shuffle=True)
    run = small_run(source, tmp_path / "run", tables=choices(clock="time"), **settings)
    with pytest.raises(UserError, match=f"time has to go on, but .*{reason}"):
        Trainer(run)


# -- the next day ----------------------------------------------------------------------------------


def test_the_next_day_goes_on_with_yesterdays_rows(timed: Path, tmp_path: Path) -> None:
    tables = choices(rows=300, clock="time")
    first = Trainer(small_run(timed / "p0", tmp_path / "first", tables=tables))
    first.fit()
    before = {name: t.clone() for name, t in first.job.tables[0].record("item").fields.items()}
    run = small_run(
        timed / "p10",
        tmp_path / "next",
        tables=tables,
        init_from=str(tmp_path / "first"),
        loop=Loop(max_steps=3),
    )
    after = Trainer(run)
    after.fit()
    index = after.job.tables[0].record("item").index
    passed = after.job.tables[0].exchange.parts[0].passed
    assert (
        passed.time > 10 * 86_400
        and passed.examples > first.job.tables[0].exchange.parts[0].passed.examples
    )
    kept = before["id"] == index.ids_R
    assert 0 < int(kept[before["id"] > 0].sum()) < 300
    old = kept & (before["time"] == index.times_R) & (before["id"] > 0)
    assert int(old.sum()) > 0
    assert torch.equal(
        after.job.tables[0].record("item").fields["weight"][old], before["weight"][old]
    )


def test_a_vocabulary_is_not_taken_for_ids_that_come_and_go(timed: Path, tmp_path: Path) -> None:
    both = {"plain": TableChoices(rule=RULE), "dynamic": choices(rows=300)}
    for name, tables in both.items():
        train(small_run(timed / "p0", tmp_path / name, tables=tables, loop=Loop(max_steps=3)))
    for name, tables in (("plain", both["dynamic"]), ("dynamic", both["plain"])):
        run = small_run(
            timed / "p0", tmp_path / "next", tables=tables, init_from=str(tmp_path / name)
        )
        with pytest.raises(UserError, match="'site' is addressed otherwise than in the run before"):
            Trainer(run).fit()


@pytest.mark.parametrize("changed", [{"rows": 301}, {"bucket": 60}])
def test_another_number_of_rows_is_refused(
    timed: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    train(
        small_run(
            timed / "p0", tmp_path / "first", tables=choices(rows=300), loop=Loop(max_steps=3)
        )
    )
    other = choices(**{"rows": 300, **changed})
    run = small_run(
        timed / "p10", tmp_path / "next", tables=other, init_from=str(tmp_path / "first")
    )
    with pytest.raises(UserError, match="'site' would have other rows .* keep its 300 rows"):
        Trainer(run).fit()


def test_another_policy_takes_yesterdays_rows(timed: Path, tmp_path: Path) -> None:
    train(small_run(timed / "p0", tmp_path / "first", tables=choices(rows=300)))
    other = choices(rows=300, evict="lfu", half_life=9000.0, after=2)
    said, hear = notes()
    run = small_run(
        timed / "p10",
        tmp_path / "next",
        tables=other,
        init_from=str(tmp_path / "first"),
        loop=Loop(max_steps=2),
    )
    Trainer(run, listener=hear).fit()
    assert any("618 of 618 table rows come from there" in text for text in said), said
