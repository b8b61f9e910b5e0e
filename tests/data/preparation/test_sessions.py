"""Rows of a session side by side, within memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.data.batches.dataset import Dataset
from sparrow.data.preparation import engine, sessions, time_order
from sparrow.features.hashing import hash_ids
from sparrow.features.quantile import Ordered
from sparrow.features.runs import mixed
from sparrow.features.schema import Cluster, Column, Split
from tests.data.grouped import HOUR_MS, SCHEMA, everything


def test_the_file_has_the_log_by_hour_session_and_time(grouped: Dataset, grouped_log: Path) -> None:
    want = []
    plain = pq.read_table(grouped_log).to_pylist()
    for part in ("train", "valid"):
        found = everything(grouped, part)
        here = {row["row"] for row in found}
        number = {row["session"]: 0 for row in plain}
        codes = dict(zip(number, mixed(hash_ids(pa.array(number))).tolist(), strict=True))
        rows = [row for row in plain if row["row"] in here]
        rows.sort(key=lambda row: (row["ts"] // HOUR_MS, codes[row["session"]], row["row"]))
        assert [row["row"] for row in found] == [row["row"] for row in rows]
        want += rows
    assert len(want) == len(plain)


def test_memory_holds_no_partition(
    grouped_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut by session, again and again, down to one session that is larger than memory."""
    data.prepare([grouped_log], tmp_path / "one", schema=SCHEMA)
    monkeypatch.setattr(sessions, "HELD_BYTES", 500)
    monkeypatch.setattr(sessions, "BITS", 1)
    data.prepare([grouped_log], tmp_path / "other", schema=SCHEMA)
    for part in ("train", "valid"):
        assert everything(data.open(tmp_path / "one"), part) == everything(
            data.open(tmp_path / "other"), part
        )
    digests = [
        json.loads((tmp_path / n / "manifest.json").read_text())["parts_sha256"]
        for n in ("one", "other")
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("kind", ["one session", "late rows"])
def test_memory_holds_little_of_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Rows that are put aside in small pieces must not keep all of the batches that they are pieces
    of.
    """
    monkeypatch.setattr(sessions, "HELD_BYTES", 1 << 18)
    monkeypatch.setattr(time_order, "RANGE_BYTES", 1 << 18)
    random, peak = np.random.default_rng(0), 0

    def batches() -> Iterator[tuple[int, pa.Table]]:
        nonlocal peak
        for i in range(60):
            session, ts = np.full(4000, 7), 4000 * i + np.arange(4000)
            some = random.random(4000) < 0.01
            if kind == "one session":
                session[some] = random.integers(0, 1 << 40, some.sum())
            else:
                ts[some] = random.integers(0, 240_000, some.sum())
            rows = {f"x{j}": random.random(4000) for j in range(20)}
            yield 0, pa.table({"session": session, "ts": ts, **rows})
            peak = max(peak, pa.total_allocated_bytes() - before)

    before = pa.total_allocated_bytes()
    if kind == "one session":
        found = sessions.clustered(batches(), "session", "ts", 0, tmp_path)
    else:
        times = Ordered(tmp_path / "times", np.int64)
        times.add(np.arange(240_000))
        found = time_order.in_time_order(batches(), times, "ts", tmp_path)
    count = 0
    for _, table in found:
        count += table.num_rows
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert count == 240_000
    assert peak < 15 << 20  # of 42 MB


def test_rows_without_a_session_are_alone(grouped_log: Path, tmp_path: Path) -> None:
    table = pq.read_table(grouped_log)
    sessions = [None if i % 3 == 0 else s for i, s in enumerate(table["session"].to_pylist())]
    table = table.set_column(table.column_names.index("session"), "session", pa.array(sessions))
    half = table.num_rows // 2  # sessions lie in both files
    pq.write_table(table.slice(0, half), tmp_path / "1.parquet")
    pq.write_table(table.slice(half), tmp_path / "2.parquet")
    data.prepare([tmp_path / "1.parquet", tmp_path / "2.parquet"], tmp_path / "out", schema=SCHEMA)
    rows = everything(data.open(tmp_path / "out")) + everything(
        data.open(tmp_path / "out"), "valid"
    )
    alone = [row for row in rows if row["session"] < 0]
    assert {row["row"] for row in alone} == {float(i) for i in range(table.num_rows) if i % 3 == 0}
    assert len({row["session"] for row in alone}) == len(alone)


@pytest.mark.parametrize("hours", [0.0, 1.0])
def test_parts_that_interleave_are_clustered_too(
    grouped_log: Path, tmp_path: Path, hours: float
) -> None:
    """A split by ratio gives the sessions of each batch to all parts, and a log without a time is
    one partition.
    """
    ratio = replace(
        SCHEMA,
        split=Split(by="ratio", valid=0.3, test=0.3),
        cluster=Cluster(by="session", hours=hours),
    )
    if not hours:
        ratio = replace(ratio, columns={**ratio.columns, "ts": Column(kind="ignore")})
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(engine, "BATCH_ROWS", 50)  # rows that are read at a time
        data.prepare([grouped_log], tmp_path / "out", schema=ratio)
    for part in ("train", "valid", "test"):
        rows = everything(data.open(tmp_path / "out"), part)
        stretches = [
            key
            for key, _ in itertools.groupby(
                (row["session"], row.get("ts", 0) // HOUR_MS) for row in rows
            )
        ]
        assert len(stretches) == len(set(stretches)) > 20


def test_hours_need_a_time_since_1970(grouped_log: Path, tmp_path: Path) -> None:
    odd = replace(SCHEMA, columns={**SCHEMA.columns, "ts": Column(kind="time", source="row")})
    table = pq.read_table(grouped_log)
    table = table.set_column(
        table.column_names.index("row"), "row", pa.array(np.arange(table.num_rows))
    )
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(
        UserError, match=r"cluster\.hours: column 'ts' ends with \d+, which is no time since 1970"
    ):
        data.prepare([tmp_path / "log.parquet"], tmp_path / "out", schema=odd)
    data.prepare(
        [tmp_path / "log.parquet"],
        tmp_path / "out",
        schema=replace(odd, cluster=Cluster(by="session", hours=0)),
    )
