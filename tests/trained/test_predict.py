from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from sparrow import cli
from sparrow.core import UserError
from sparrow.trained.predict import predict


def test_no_row_to_score_is_left_out_without_a_word(log: Path, tmp_path: Path) -> None:
    csv.write_csv(pq.read_table(log, columns=["label", "user", "item"]), tmp_path / "log.csv")
    with open(tmp_path / "log.csv", "a", encoding="utf-8") as file:
        file.write("1,2\n")
    arguments = ["prepare", str(tmp_path / "log.csv"), "--out", str(tmp_path / "data"), "--bad-rows", "repair"]
    assert cli.main(arguments) == 0
    run = ["train", str(tmp_path / "data"), "--run_dir", str(tmp_path / "run"), "--loop.max_steps", "2"]
    assert cli.main(run) == 0
    with pytest.raises(UserError, match=r"log.csv, line 6002: 2 cells where 3 are expected"):
        predict(tmp_path / "run", [tmp_path / "log.csv"], tmp_path / "scores.parquet")
    assert not (tmp_path / "scores.parquet").exists()
