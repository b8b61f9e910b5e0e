from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.data.logs.read import open_log
from sparrow.features.schema import Column, Encoding, Schema, Source, Split
from sparrow.serving import load
from sparrow.serving.export import export
from sparrow.training import train
from tests.runs import run_of

ROWS = 200
# row of the log -> a cell that is no vector of three numbers
BAD = {7: "0.5", 8: "0.5 x 1", 150: "0.5 nan 1", 9: ""}
SCHEMA = Schema(
    columns={
        "click": Column(kind="label"),
        "ad": Column(kind="categorical", table="ad"),
        "v": Column(kind="vector", missing=("none",)),
    },
    encodings={"ad": Encoding()},
    split=Split(by="ratio", valid=0.1, test=0.1),
)


def log(folder: Path, form: str) -> Path:
    texts = [BAD.get(i, f"{i / 10} -1 {i % 3}") for i in range(ROWS)]
    texts[0], texts[20] = "1 2 3 4", "none"  # the first vector does not tell the size
    table = pa.table(
        {
            "click": [i % 2 for i in range(ROWS)],
            "ad": [f"a{i % 5}" for i in range(ROWS)],
            "v": texts,
        }
    )
    if form == "csv":
        pyarrow.csv.write_csv(table, folder / "log.csv")
        return folder / "log.csv"
    if form == "lists":
        lists = [
            None if t == "none" else [float(x) if x != "x" else None for x in t.split()]
            for t in texts
        ]
        table = table.set_column(2, "v", pa.array(lists, pa.list_(pa.float32())))
    pq.write_table(table, folder / "log.parquet")
    return folder / "log.parquet"


@pytest.mark.parametrize("form", ["csv", "parquet", "lists"])
def test_vectors_that_are_none_are_missing_and_counted(tmp_path: Path, form: str) -> None:
    path = log(tmp_path, form)
    with pytest.raises(
        UserError,
        match=rf"{'line 2' if form == 'csv' else 'row 0'}.*of 4 numbers where others have 3",
    ):
        data.prepare([path], tmp_path / "none", schema=SCHEMA)
    made = data.prepare(
        open_log([path], Source(bad_rows="repair")), tmp_path / "out", schema=SCHEMA
    )
    place = "line 2: '1 2 3 4'" if form == "csv" else "row 0: "
    told = [note for note in made.notes if "no vector" in note]
    assert len(told) == 1 and place in told[0]
    assert (
        f"{path}: 4 rows whose 'v' is no vector of 3 numbers, taken for missing, first at"
        in told[0]
    )
    found = data.open(tmp_path / "out")
    missing = [found.column("v:missing", part).to_numpy() for part in ("train", "valid", "test")]
    assert sum(part.sum() for part in missing) == 6 and sum(map(len, missing)) == ROWS


def test_a_model_folder_keeps_rows_of_such_a_log(tmp_path: Path) -> None:
    path = log(tmp_path, "csv")
    made = data.prepare(
        open_log([path], Source(bad_rows="repair")), tmp_path / "out", schema=SCHEMA
    )
    train(run_of(made.out, tmp_path / "run", **{"model.name": "logistic"}))
    export(tmp_path / "run", tmp_path / "model", [path])
    assert load(tmp_path / "model").score([{"ad": "a1", "v": [1.0, 2.0, 3.0]}]).shape == (1, 1)
