"""Sessions side by side, groups of features once for every run of equal rows: the same rows as
without.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.core import Batch
from sparrow.data.batches.dataset import Dataset
from sparrow.features.schema import Column
from tests.data.grouped import SCHEMA, everything, made, same


def rows_of(batch: Batch) -> list[tuple[Any, ...]]:
    """A batch's samples as plain values, expanded."""
    ids = batch.ids.expanded()
    lists = [
        [
            (v.tolist(), w.tolist())
            for v, w in zip(ids[k].values_N.split(n), ids[k].weights_N.split(n), strict=True)
        ]  # type: ignore[union-attr]
        for k in ids.keys
        for n in [ids[k].lengths_B.tolist()]
    ]
    return list(
        zip(
            batch.dense_BC.tolist(),
            *lists,
            batch.labels_BT.tolist(),
            batch.session_B.tolist(),
            strict=True,
        )
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 50, 10_000])
def test_expanded_is_the_batch_without(grouped: Dataset, shuffle: bool, batch_size: int) -> None:
    one, other = (
        grouped.loader(batch_size, shuffle=shuffle, seed=3, dedup=d) for d in ("on", "off")
    )  # type: ignore[arg-type]
    for _ in range(2):
        stored = 0
        for deduped, plain in zip(one, other, strict=True):
            same(deduped, plain)
            assert plain.ids.inverse_B == {} and set(deduped.ids.inverse_B) == {
                ("user", "history"),
                ("tags",),
            }
            stored += sum(deduped.ids.stored(key) for key in ("user", "tags"))
            for inverse_B in deduped.ids.inverse_B.values():
                seen = list(dict.fromkeys(inverse_B.tolist()))
                assert seen == list(range(len(seen)))  # in the order in which they first occur
        assert batch_size == 1 or stored < 2 * grouped.rows()


def test_unique_rows_are_unique(grouped_log: Path, tmp_path: Path) -> None:
    """Also those that stand apart: a batch within one window has each content once."""
    data.prepare([grouped_log], tmp_path / "out", schema=SCHEMA)
    (batch,) = data.open(tmp_path / "out").loader(10_000, dedup="on")
    ids = batch.ids["tags"]
    each = [tuple(v.tolist()) for v in ids.values_N.split(ids.offsets_B1.diff().tolist())]
    assert (
        len(set(each)) == len(each) < data.open(tmp_path / "out").manifest["runs"]["train"]["tags"]
    )


@pytest.mark.parametrize("shuffle", [False, True])
def test_no_request_is_split_and_no_row_is_lost(grouped: Dataset, shuffle: bool) -> None:
    loader = grouped.loader(10, shuffle=shuffle, seed=1)
    for _ in range(2):
        seen: list[float] = []
        requests: set[int] = set()
        batches = list(loader)
        assert len(batches) == len(loader) == -(-grouped.rows() // 10)
        for batch in batches:
            assert batch.session_B is not None and batch.batch_size < 20
            here = set(batch.session_B.tolist())
            assert not here & requests
            requests |= here
            seen += batch.dense_BC[:, 0].tolist()
        everyone = [row["row"] for row in everything(grouped)]
        assert sorted(seen) == sorted(everyone) and (seen != everyone) == shuffle


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("dedup", ["on", "off"])
def test_readers_divide_batches_between_requests(
    grouped: Dataset, shuffle: bool, ranks: int, dedup: Literal["on", "off"]
) -> None:
    for batch_size in (12, 70):
        given: dict[str, Any] = {"shuffle": shuffle, "seed": 1, "dedup": dedup}
        readers = [
            grouped.loader(batch_size, rank=rank, ranks=ranks, **given) for rank in range(ranks)
        ]
        for whole, *mine in zip(grouped.loader(batch_size, **given), *readers, strict=True):
            rows = [row for one in mine for row in one.dense_BC[:, 0].tolist()]
            assert sorted(rows) == sorted(whole.dense_BC[:, 0].tolist())
            requests = [set(one.session_B.tolist()) for one in mine if one.session_B is not None]
            assert sum(len(of_one) for of_one in requests) == len(set.union(*requests))
            if not shuffle:
                assert rows == whole.dense_BC[:, 0].tolist()
                parts = [one.ids.expanded() for one in mine]
                for key in whole.ids.keys:
                    values = torch.cat([part[key].values_N for part in parts])
                    assert torch.equal(values, whole.ids.expanded()[key].values_N)


def test_a_request_of_more_rows_than_a_batch_is_cut(grouped_log: Path, tmp_path: Path) -> None:
    table = made(3).drop(["request"])
    table = table.append_column("request", pa.array(np.zeros(table.num_rows, np.int64)))
    pq.write_table(table, tmp_path / "one.parquet")
    one = replace(
        SCHEMA, columns={**SCHEMA.columns, "session": Column(kind="session", source="request")}
    )
    data.prepare([tmp_path / "one.parquet"], tmp_path / "out", schema=one)
    dataset = data.open(tmp_path / "out")
    batches = list(dataset.loader(4))
    assert [batch.batch_size for batch in batches][:-1] == [4] * (len(batches) - 1) and len(
        batches
    ) > 3
    seen = [x for batch in batches for x in batch.dense_BC[:, 0].tolist()]
    assert seen == [row["row"] for row in everything(dataset)]


def test_taken_up_at_any_batch(grouped: Dataset) -> None:
    whole = list(grouped.loader(9, shuffle=True, seed=5, dedup="on"))
    for at in range(len(whole)):
        again = grouped.loader(9, shuffle=True, seed=5, dedup="on")
        again.load_state_dict({"epoch": 0, "batch": at, "batch_size": 9})
        rest = list(again)
        assert len(rest) == len(whole) - at
        same(rest[0], whole[at])
        same(rest[-1], whole[-1])
