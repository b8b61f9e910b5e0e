from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.analysis.usage import count_usage
from sparrow.embeddings import TableChoices
from sparrow.embeddings.sizes import memory_bytes
from sparrow.embeddings.spec import Cache
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.kernels.formats import int4, int8
from sparrow.kernels.rules import adam
from sparrow.trained.build import tables_of
from sparrow.trained.run import Loop
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.runs import run_of, small_run

HALF = Cache(fraction=0.5)


def test_hits_and_unknown_ids_are_counted(tmp_path: Path) -> None:
    rows = 400
    train_ids, test_ids = np.arange(rows // 2) % 20, np.arange(rows // 2) % 40  # 20..39 are new
    item = pa.array(
        [None if i % 10 == 0 else int(x) for i, x in enumerate([*train_ids, *test_ids])]
    )
    lists = [[1, 2]] * (rows // 2) + [[1, 5], []] * (rows // 4)  # 3 would have the row of 1 or 2
    columns = {
        "label": np.arange(rows) % 3 == 0,
        "ts": np.arange(rows),
        "item": item,
        "h": lists,
        "other": item,
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    kinds: dict[str, Any] = {"label": Column(kind="label"), "ts": Column(kind="time")}
    kinds |= {n: Column(kind="categorical", table=n) for n in ("item", "other")}
    schema = Schema(
        columns=kinds | {"h": Column(kind="list", table="h")},
        encodings={
            "item": Encoding(kind="range"),
            "other": Encoding(kind="hash", rows=4096),
            "h": Encoding(kind="hash"),
        },
        split=Split(by="time", valid=0, test=0.5),
    )
    data.prepare([tmp_path / "log.parquet"], tmp_path / "prepared", schema=schema)
    train(small_run(tmp_path / "prepared", tmp_path / "run"))
    found, dataset = restore(tmp_path / "run"), data.open(tmp_path / "prepared")
    tables, used = count_usage(found, dataset, ("test",), lambda what, done, total: None)
    by_name = {t.name: t for t in tables}
    trained = item.to_pylist()[: rows // 2]
    first = [x is not None and x not in trained[:i] for i, x in enumerate(trained)]  # not known yet
    wanted = Counter(-1 if new else x for x, new in zip(trained, first, strict=True))
    hits = by_name["item"].hits_R
    assert hits.sum() == rows // 2
    assert sorted(hits[hits > 0].tolist()) == sorted(wanted.values())
    assert by_name["item"].columns == ("item",)
    assert by_name["item"].share_never == pytest.approx(float((hits == 0).float().mean()))
    assert by_name["item"].share_of_top(1.0) == 1
    assert by_name["item"].bytes_weight == hits.numel() * 4 * 4
    # one accumulator a row, and the touched byte
    assert by_name["item"].bytes_state == hits.numel() * (4 + 1)
    half, missing = rows // 2, rows // 20
    new = sum(x is not None and x >= 20 for x in item.to_pylist()[half:])
    for name, unknown in (("item", new), ("other", 0)):
        got = used[name]["test"]
        assert (got.rows, got.ids, got.unknown, got.missing) == (half, half, unknown, missing)
    # a range sends them to its row 1, which did learn
    assert used["other"]["test"].untrained == new
    assert used["item"]["test"].untrained == 0
    assert (used["h"]["test"].missing, used["h"]["test"].ids) == (half // 2, half)
    assert used["h"]["test"].untrained == half // 2


@pytest.mark.parametrize(
    "choices",
    [
        TableChoices(format=int8.Config(), state="bf16"),
        TableChoices(format=int4.Config(), rule=adam.Config(lr=0.01)),
    ],
)
def test_bytes_are_those_of_the_tensors(
    prepared: Path, tmp_path: Path, choices: TableChoices
) -> None:
    train(small_run(prepared, tmp_path, tables=choices, loop=Loop(max_steps=2)))
    found = restore(tmp_path)
    records = {
        record.name: record for tables in tables_of(found.model) for record in tables.all_records()
    }
    uses, _ = count_usage(found, data.open(prepared), (), lambda what, done, total: None)
    assert {t.name for t in uses} == set(records)
    for t in uses:
        sizes = {name: tensor.nbytes for name, tensor in records[t.name].fields.items()}
        assert (t.bytes_weight, t.bytes_state) == (sizes.pop("weight"), sum(sizes.values()))


TIERS: dict[str, dict[str, Any]] = {
    "ssd": {"tables.tier.name": "ssd", "tables.tier.fraction": 0.2},
    "mapped": {"tables.tier.name": "mapped"},
    "host": {"tables.tier.name": "host", "tables.tier.fraction": 0.2},
    "both": {
        "tables.tier": {
            "name": "host",
            "fraction": 0.1,
            "beneath": {"name": "ssd", "fraction": 0.3},
        }
    },
    "cached": {
        "tables.tier.name": "mapped",
        "tables.format.name": "int8",
        "tables.cache.fraction": 0.1,
    },
}


@pytest.mark.parametrize("tier", TIERS)
def test_bytes_count_each_place_of_a_row(prepared: Path, tmp_path: Path, tier: str) -> None:
    """Records once where they lie, and what is in memory beside them. `test_ssd.py` says what the
    latter is.
    """
    places = {"tiers.folder": str(tmp_path / "disk")} if tier != "host" else {}
    settings = {
        "data.batch_size": 16,
        "model.dim": 8,
        "model.deep": [8],
        "data.id_dropout": {},
        "loop.max_steps": 2,
    }
    trained = train(run_of(prepared, tmp_path / "run", **settings, **places, **TIERS[tier]))[
        "tables"
    ]
    total, disk = 0, 0
    for t in count_usage(
        restore(tmp_path / "run"), data.open(prepared), (), lambda what, done, total: None
    )[0]:
        part, rows = t.component, t.component.rows
        values = 8 + 4 + 4 if tier == "cached" else 4 * 8  # int8 has a scale and an offset
        record = values + 4 + 1  # an accumulator, and the touched byte
        memory = memory_bytes(part, rows, 8) + part.tier.beneath_bytes(part, rows, 8)
        assert t.bytes_weight == rows * values and t.bytes_state > 0
        assert t.bytes_weight + t.bytes_state == memory + rows * record * (tier != "host")
        total, disk = (
            total + t.bytes_weight + t.bytes_state,
            disk + rows * record * (tier != "host"),
        )
    assert (trained["bytes"], trained.get("bytes_disk", 0)) == (total, disk) and total > 0


def test_rows_that_never_learnt(prepared: Path, tmp_path: Path) -> None:
    """A row that learnt in a frame of a cache is none of them, although what is beneath was not
    updated.
    """
    shares = {}
    for name, choices in (
        ("plain", TableChoices()),
        ("cached", TableChoices(format=int8.Config(), cache=HALF)),
    ):
        train(small_run(prepared, tmp_path / name, tables=choices, loop=Loop(max_steps=2)))
        uses, _ = count_usage(
            restore(tmp_path / name), data.open(prepared), (), lambda what, done, total: None
        )
        shares[name] = {t.name: t.share_unlearnt for t in uses}
    assert shares["plain"] == shares["cached"] and 0 < shares["plain"]["user"] < 1
