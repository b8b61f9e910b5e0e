"""Which files an input names, how they are packed, and what is wrong with them."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow.core import UserError
from sparrow.data.logs.read import open_log
from tests.data.logs.reading import rows, write


def test_globs_folders_and_order(tmp_path: Path) -> None:
    for i in (2, 1, 3):
        write(tmp_path / f"{i}.csv", f"a,b\n{i},x\n")
    assert [r["a"] for r in rows(tmp_path / "3.csv", str(tmp_path / "[12].csv"))] == [3, 1, 2]
    assert [r["a"] for r in rows(tmp_path)] == [1, 2, 3]


def test_a_cut_off_gzip_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"12345,2\n" * 90_000)[:900])
    with pytest.raises(UserError, match=r"x\.csv\.gz.*(Truncated|whole)"):
        rows(tmp_path / "x.csv.gz")


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    file = write(tmp_path / "x.csv", "a,b\n1,2\n")
    log = open_log([file])
    reading = log.batches(log.types)
    next(reading)
    file.write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(UserError, match=r"x\.csv: changed while it was read; copy it first"):
        next(reading)
    with pytest.raises(UserError, match=r"x\.csv: changed while it was read"):
        next(log.batches(log.types))


def test_compressed_files_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(gzip.compress(b"a,b\n1,2\n"))
    (tmp_path / "y.csv.gz").write_bytes(b"a,b\n1,2\n")
    (tmp_path / "z.csv.bz2").write_bytes(bz2.compress(b"a,b\n1,2\n"))
    for file in tmp_path.iterdir():
        assert rows(file) == [{"a": 1, "b": 2}]


@pytest.mark.parametrize("codec", ["gzip", "zstd", "bz2"])
def test_a_cut_off_compressed_file_is_named(tmp_path: Path, codec: str) -> None:
    text = b"a,b\n" + b"".join(b"%d,2\n" % (i * 7919 % 65_537) for i in range(200_000))
    with pa.CompressedOutputStream(str(tmp_path / "whole"), codec) as stream:
        stream.write(text)
    packed = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut.csv").write_bytes(packed[: len(packed) * 3 // 4])
    with pytest.raises(UserError, match=r"cut\.csv.*(Truncated|check that it is whole)"):
        rows(tmp_path / "cut.csv")


def test_uris(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    for name in ("1.csv", "2.csv", "3.txt", "deeper/4.csv"):
        write(tmp_path / name, f"a,b\n{name[-5]},x\n")
    uri = tmp_path.as_uri()

    def found(*texts: str) -> list[int]:
        return [r["a"] for r in rows(*texts)]

    assert found(f"{uri}/2.csv", f"{uri}/1.csv") == [2, 1]
    assert found(f"{uri}/*.csv") == [1, 2]
    assert found(f"{uri}/[13].*") == [1, 3]
    assert found(f"{uri}/deep*/*.csv") == found(f"{uri}/deep*") == [4]
    assert found(f"{uri}/**/*.csv") == [1, 2, 4]
    assert found(uri) == [1, 2, 3]
    pq.write_table(pa.table({"a": [9]}), tmp_path / "x.parquet")
    assert found(f"{uri}/x.parquet") == [9]
    for text, words in [
        (f"{uri}/nowhere.csv", "no such file"),
        (f"{uri}/n*.csv", "no such file"),
        ("nonsense://bucket/x", "cannot be looked up: .*check the address"),
    ]:
        with pytest.raises(UserError, match=words):
            open_log([text])
