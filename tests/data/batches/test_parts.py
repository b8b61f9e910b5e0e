"""Groups of features are stored once for every run of equal rows, and looked up once where that
pays.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.data.batches import parts
from sparrow.data.batches.dataset import Dataset
from sparrow.features.schema import RUN, Cluster, Schema, Split
from tests.data.grouped import SCHEMA, everything, made, same


def test_a_group_is_stored_once_for_a_run(grouped: Dataset) -> None:
    rows = everything(grouped)
    for group in grouped.schema.groups:
        names = parts.columns_of(grouped.schema, group)
        runs, at, saved = 0, 0, 0
        file = pq.ParquetFile(grouped.path / "train" / parts.group_file(group))
        whole = pq.ParquetFile(grouped.path / "train" / parts.ROWS)
        assert file.num_row_groups == whole.num_row_groups > 2
        for i in range(whole.num_row_groups):
            here = rows[at : at + whole.metadata.row_group(i).num_rows]
            at += len(here)
            want = sum(
                j == 0 or any(here[j][n] != here[j - 1][n] for n in names) for j in range(len(here))
            )
            assert file.metadata.row_group(i).num_rows == want
            runs += want
            stored = file.read_row_group(i)
            at_N = np.repeat(np.arange(stored.num_rows), stored[RUN].to_numpy())
            # bytes of a stored row: numbers, and where a list ends
            each_N = np.zeros(stored.num_rows, np.int64)
            for name, column in zip(stored.column_names, stored.columns, strict=True):
                is_list = pa.types.is_large_list(column.type)
                width = (column.type.value_type if is_list else column.type).bit_width // 8
                each_N += (
                    8 + width * pc.list_value_length(column).to_numpy()
                    if is_list
                    else width * (name != RUN)
                )
            saved += each_N[at_N].sum() - each_N.sum() - 4 * stored.num_rows
        assert grouped.manifest["runs"]["train"][group] == runs < len(rows)
        assert grouped.manifest["saved_bytes"]["train"][group] == saved
        assert grouped.factor(group) == len(rows) / runs


def test_a_run_of_more_rows_than_a_row_group_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session, one request, whose user never changes."""
    monkeypatch.setattr(parts, "GROUP_ROWS", 64)
    (row,) = made(1).slice(0, 1).to_pylist()
    pq.write_table(
        pa.Table.from_pylist([{**row, "row": float(i), "label": i % 2} for i in range(300)]),
        tmp_path / "log",
    )
    data.prepare(
        [tmp_path / "log"],
        tmp_path / "out",
        schema=replace(SCHEMA, split=Split(by="time", valid=0, test=0)),
    )
    dataset = data.open(tmp_path / "out")
    assert dataset.manifest["runs"]["train"] == {"user": 5, "tags": 5}
    assert [row["row"] for row in everything(dataset)] == list(range(300))
    for on, off in zip(
        dataset.loader(300, dedup="on"), dataset.loader(300, dedup="off"), strict=True
    ):
        same(on, off)


def test_what_groups_are_worth_is_said(grouped_log: Path, tmp_path: Path) -> None:
    made = data.prepare([grouped_log], tmp_path / "out", schema=SCHEMA)
    said = "\n".join(made.notes)
    assert (
        f"group user: {data.open(tmp_path / 'out').factor('user'):.2f} rows a run, " in said
        and "looked up once" in said
    )


@pytest.mark.parametrize(
    ("rows", "lists", "ids"),
    [(1000, "", ""), (1090, "", ""), (1100, "1 2", "2"), (4000, "1 2", "2")],
)
def test_auto_looks_up_once_from_eleven_rows_for_ten_runs_on(
    tmp_path: Path, rows: int, lists: str, ids: str
) -> None:
    """lists, ids: how many readers do so for a group with a list, and for one of ids alone."""
    user_N = np.arange(rows) % 1000  # side by side, as they are one session
    log = pa.table(
        {
            "label": np.arange(rows) % 2,
            "user": user_N,
            "tags": [[i] for i in user_N.tolist()],
            "session": user_N,
            "item": np.arange(rows),
        }
    )
    schema = Schema(
        columns={name: SCHEMA.columns[name] for name in log.column_names},
        encodings=SCHEMA.encodings,
        split=Split(by="ratio", valid=0, test=0),
        cluster=Cluster(by="session"),
        groups={"lists": ("tags",), "ids": ("user",)},
    )
    pq.write_table(log, tmp_path / "log.parquet")
    made = data.prepare([tmp_path / "log.parquet"], tmp_path / "out", schema=schema)
    dataset = data.open(tmp_path / "out")
    assert dataset.factor("lists") == dataset.factor("ids") == rows / 1000
    for ranks in (1, 2):
        (batch,) = dataset.loader(10_000, ranks=ranks)
        want = {("tags",): str(ranks) in lists, ("user",): str(ranks) in ids}
        assert set(batch.ids.inverse_B) == {group for group, once in want.items() if once}
    said = ["looked up once" in note for note in made.notes if note.startswith("group ")]
    assert said == ["1" in lists, "1" in ids]
