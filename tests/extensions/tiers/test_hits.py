"""What a run says of its tables: bytes as allocated, and hit rates as counted by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sparrow import data
from sparrow.analysis import elements
from sparrow.apps.generate import generate
from sparrow.cli import main
from sparrow.embeddings import TableChoices
from sparrow.embeddings.spec import Cache
from sparrow.extensions.tiers import host, ssd
from sparrow.kernels.formats import int8
from sparrow.trained.run import Checkpoints, Log, Loop
from sparrow.training import Trainer, preflight, runlog, train
from tests.analysis.pages import page
from tests.runs import on_disk, small_run

ALL, FEW = (TableChoices(format=int8.Config(), cache=Cache(fraction=f)) for f in (1.0, 0.2))


def counted(trainer: Trainer, steps: int) -> dict[str, tuple[int, int]]:
    """Table -> different rows of its batches, and rows that some batch had, of so many steps."""
    rows: dict[str, int] = {}
    seen: dict[str, set[int]] = {}
    (tables,) = trainer.job.tables
    for _, batch in zip(
        range(steps), trainer.job.dataset.loader(trainer.job.run.data.batch_size), strict=False
    ):
        each: dict[str, set[int]] = {}
        for feature in tables.features:
            for name, rows_N in tables.rows_of(batch.ids, feature.name).items():
                each.setdefault(name, set()).update(rows_N.tolist())
        for name, of_batch in each.items():
            rows[name] = rows.get(name, 0) + len(of_batch)
            seen.setdefault(name, set()).update(of_batch)
    return {name: (rows[name], len(seen[name])) for name in rows}


@pytest.mark.parametrize("nonfinite", ["skip", "off"])  # deferred and fused
def test_with_a_frame_for_each_row_only_first_uses_miss(
    prepared: Path, tmp_path: Path, nonfinite: Any
) -> None:
    loop = Loop(nonfinite=nonfinite, max_steps=12, evaluate_every=3)
    run = small_run(prepared, tmp_path, tables=ALL, loop=loop, log=Log(every=4, tensorboard=False))
    run = replace(run, data=replace(run.data, id_dropout={}))
    trainer = Trainer(run)
    results = trainer.fit()
    want = counted(trainer, 12)
    rates = results["tables"]["hit_rate"]
    assert rates.keys() == want.keys() and len(rates) > 3
    for name, (rows, different) in want.items():
        assert rates[name] == pytest.approx(1 - different / rows, rel=1e-12), name
    sofar = [(0, 0)] + [
        tuple(map(sum, zip(*counted(trainer, steps).values(), strict=True))) for steps in (4, 8, 12)
    ]
    lines = [line["hit_rate"] for line in runlog.read(tmp_path) if line["event"] == "train"]
    for line, (one, first), (other, then) in zip(lines, sofar, sofar[1:], strict=False):
        assert line == pytest.approx(1 - (then - first) / (other - one), rel=1e-12)
    assert len(lines) == 3


def test_evaluation_counts_nothing(prepared: Path, tmp_path: Path) -> None:
    often, never = (
        train(
            small_run(
                prepared,
                tmp_path / str(every),
                tables=FEW,
                loop=Loop(max_steps=8, evaluate_every=every),
            )
        )
        for every in (1, 8)
    )
    assert often["tables"] == never["tables"]
    assert 0 < min(never["tables"]["hit_rate"].values()) < 0.99


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param(FEW, id="cache"),
        pytest.param(TableChoices(), id="none", marks=pytest.mark.slow),
    ],
)
def test_bytes_are_those_of_the_tensors_and_of_the_preflight(
    prepared: Path, tmp_path: Path, tables: TableChoices, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(prepared, tmp_path / "run", tables=tables, loop=Loop(max_steps=4))
    found = Trainer(run)
    told = found.fit()["tables"]
    held = sum(
        t.nbytes
        for one in found.job.tables
        for t in one.buffers()
        if t is not one.exchange.parts[0].lr_T
    )
    resolved = preflight.resolved(run, data.open(prepared))
    assert told["bytes"] == held == preflight.estimate(resolved, data.open(prepared)).host["tables"]
    assert bool(told["hit_rate"]) == (tables is FEW)
    assert all(
        ("hit_rate" in line) == (tables is FEW)
        for line in runlog.read(tmp_path / "run")
        if "loss" in line
    )
    assert main(["train", str(tmp_path / "run" / "run.toml"), "--overwrite"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"tables: {held / 1e6:,.1f} MB" in printed
    rates = ", ".join(f"{name} {rate:.1%}" for name, rate in told["hit_rate"].items())
    assert (f"; rows of batches that were in caches: {rates}" in printed) == (tables is FEW)
    assert main(["report", str(tmp_path / "run"), "--rows", "0"]) == 0
    cells = page(tmp_path / "run" / "report.html").cells
    assert (elements.share(told["hit_rate"].get("user", math.nan)) in cells) == (tables is FEW)
    assert ("32 frames, lru" in cells) == (tables is FEW)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with more ids than frames."""
    place = tmp_path_factory.mktemp("wide")
    generate(
        place / "log.parquet", rows=2000, users=900, items=1500, categorical=1, numeric=1, seed=5
    )
    data.prepare([place / "log.parquet"], place / "prepared")
    return place / "prepared"


ON_SSD = {"ssd": ssd.Config(fraction=0.05), "host": host.Config(fraction=0.05)}
ON_SSD |= {
    name: replace(ON_SSD["host"], beneath=ssd.Config(fraction=fraction))
    for name, fraction in (("over an SSD", 0.08), ("over frames for all", 1.0))
}


@pytest.mark.parametrize("name", ON_SSD)
def test_what_an_ssd_did_is_told(
    wide: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of one beneath the memory of the host. From there nothing is read or written while all
    rows have frames.
    """
    changes: dict[str, Any] = {"loop": Loop(max_steps=40), "checkpoint": Checkpoints()}
    run = small_run(wide, tmp_path / "run", batch_size=16, **changes)
    run = on_disk(run, tmp_path / "disk")
    run = replace(run, data=replace(run.data, id_dropout={}))
    want = {table: rows for table, (rows, _) in counted(Trainer(run), 40).items()}
    replace(run, tables=replace(run.tables, tier=ON_SSD[name])).save(tmp_path / "run.toml")
    assert main(["train", str(tmp_path / "run.toml"), "--overwrite"]) == 0
    found = json.loads((tmp_path / "run" / "results.json").read_text())["tables"].get("ssd", {})
    assert {table: of["used"] for table, of in found.items()} == (want if name != "host" else {})
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if " on an SSD; " in line] == [
        f"{table}: on an SSD; {of['hits'] / of['used']:.1%} of rows of batches were in frames; "
        f"{of['bytes_read'] / 1e6:,.1f} MB read, {of['bytes_written'] / 1e6:,.1f} MB written"
        for table, of in found.items()
    ]
    if found:
        item = found["item"]
        assert 0 < item["hits"] < item["used"] and item["left"] > 0
        assert (
            (item["bytes_read"] > 0)
            == (item["bytes_written"] > 0)
            == (name != "over frames for all")
        )


def notes() -> tuple[list[str], Callable[[str, dict[str, Any]], None]]:
    """What a run says, and the listener that writes it down."""
    said: list[str] = []

    def hear(event: str, values: dict[str, Any]) -> None:
        said.extend([values["text"]] if event == "note" else [])

    return said, hear


def test_rows_that_find_no_frame_are_told_once(prepared: Path, tmp_path: Path) -> None:
    train(small_run(prepared, tmp_path / "first", tables=ALL, loop=Loop(max_steps=12)))
    said, hear = notes()
    run = small_run(
        prepared,
        tmp_path / "warm",
        tables=FEW,
        init_from=str(tmp_path / "first"),
        loop=Loop(max_steps=1),
    )
    trainer = Trainer(run, listener=hear)
    trainer.fit()
    records = [
        record for one in trainer.job.tables for record in one.all_records() if record.rounded
    ]
    named = ", ".join(f"{record.rounded} of table {record.component.name!r}" for record in records)
    assert [text for text in said if "no frame" in text] == [
        f"rows of caches that found no frame here are stored as other rows: {named}"
    ]
    assert {"user", "cat_1"} <= {record.component.name for record in records}
    said.clear()
    # the same layout: each has its frame
    train(replace(run, loop=Loop(max_steps=2)), resume=True, listener=hear)
    assert said and not any("no frame" in text for text in said)


def test_frames_too_few_for_the_batches_in_flight_are_told_once(
    prepared: Path, tmp_path: Path
) -> None:
    said, hear = notes()
    few = TableChoices(format=int8.Config(), cache=Cache(fraction=0.01, protect=3))
    run = small_run(prepared, tmp_path / "few", tables=few, loop=Loop(max_steps=9))
    trainer = Trainer(replace(run, data=replace(run.data, id_dropout={})), listener=hear)
    trainer.fit()
    told = [text for text in said if "frames" in text]
    # a line of the log is of three steps
    rows = [0] + [counted(trainer, steps)["cat_2"][0] for steps in (1, 2, 3)]
    most = max(later - before for before, later in pairwise(rows))
    assert (
        told[-1]
        == f"table 'cat_2': its cache has 32 frames, and 3 batches may use {3 * most} rows, so that"
        " many find none; raise tables.cache.fraction, or lower tables.cache.protect or"
        " data.batch_size"
    )
    assert not any("\n" in text for text in told) and len(told) == len(set(told)) < len(
        counted(trainer, 1)
    )
    said.clear()
    train(small_run(prepared, tmp_path / "all", tables=ALL, loop=Loop(max_steps=9)), listener=hear)
    assert not any("frames" in text for text in said)
