"""A log of sessions and requests whose features repeat, its schema with groups, and its rows read
back.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from sparrow import data
from sparrow.core import Batch
from sparrow.data.batches import parts
from sparrow.data.batches.dataset import Dataset
from sparrow.features.schema import RUN, Cluster, Column, Encoding, Schema, Split

HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000 // HOUR_MS * HOUR_MS
SCHEMA = Schema(
    columns={
        "label": Column(kind="label"),
        "ts": Column(kind="time"),
        "session": Column(kind="session"),
        "request": Column(kind="group"),
        "row": Column(kind="numeric", transform="none"),
        "age": Column(kind="numeric", transform="none"),
        "item": Column(kind="categorical", table="item"),
        "user": Column(kind="categorical", table="user"),
        "history": Column(kind="list", table="item", weights="stars", pooling="mean"),
        "tags": Column(kind="list", table="tag", pooling="sum"),
    },
    encodings={name: Encoding(kind="hash", rows=50) for name in ("item", "user", "tag")},
    split=Split(by="time", valid=0.2, test=0.0),
    cluster=Cluster(by="session"),
    groups={"user": ("user", "history", "age"), "tags": ("tags",)},
)


def made(sessions: int = 60, hours: int = 3, seed: int = 0, ids: int = 30) -> pa.Table:
    """Requests of up to four candidates; a session shares its user, age and a history that
    sometimes grows.
    """
    random = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for session in range(sessions):
        begin = START_MS + int(random.integers(0, hours * HOUR_MS))
        history = [int(i) for i in random.integers(0, ids, random.integers(0, 4))]
        user, age = f"u{random.integers(ids * 2 // 3)}", float(random.integers(3))
        for request in range(random.integers(1, 5)):
            history = [*history, int(random.integers(ids))] if random.random() < 0.3 else history
            for _ in range(random.integers(1, 5)):
                rows.append(
                    {
                        "label": int(random.integers(2)),
                        "ts": begin + 1000 * request,
                        "session": f"s{session}",
                        "request": 100 * session + request,
                        "age": age,
                        "item": int(random.integers(ids)),
                        "user": user,
                        "history": history,
                        "stars": [0.5 + i for i in range(len(history))],
                        "tags": [int(i) for i in random.integers(0, ids, random.integers(0, 3))],
                    }
                )
    rows.sort(key=lambda row: row["ts"])
    return pa.Table.from_pylist([{**row, "row": float(i)} for i, row in enumerate(rows)])


def prepared_sessions(place: Path) -> str:
    """The log of 40 sessions in two hours, prepared within a folder; the row's number is an
    ordinary feature.
    """
    pq.write_table(made(40, 2), place / "log.parquet")
    schema = replace(SCHEMA, columns={**SCHEMA.columns, "row": Column(kind="numeric")})
    return str(data.prepare([place / "log.parquet"], place / "prepared", schema=schema).out)


def everything(dataset: Dataset, split: str = "train") -> list[dict[str, Any]]:
    """All rows of a part, as a reader of Parquet finds them: columns of groups repeated."""
    folder = dataset.path / split
    table = pq.read_table(folder / parts.ROWS)
    for group, names in dataset.schema.groups.items():
        runs = pq.read_table(folder / parts.group_file(group))
        at = np.repeat(np.arange(runs.num_rows), runs[RUN].to_numpy())
        for name in parts.columns_of(dataset.schema, group):
            table = table.append_column(name, runs[name].take(pa.array(at)))
        assert names
    return table.to_pylist()


def same(one: Batch, other: Batch) -> None:
    """expanded(dedup(batch)) = batch, to the bit."""
    a, b = one.ids.expanded(), other.ids.expanded()
    assert a.keys == b.keys and torch.equal(a.values_N, b.values_N)
    assert torch.equal(a.lengths, b.lengths) and torch.equal(a.weights_N, b.weights_N)  # type: ignore[arg-type]
    for x, y in (
        (one.dense_BC, other.dense_BC),
        (one.labels_BT, other.labels_BT),
        (one.session_B, other.session_B),
    ):
        assert torch.equal(x, y)  # type: ignore[arg-type]
