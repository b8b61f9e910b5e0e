from __future__ import annotations

import errno
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.data import prepare
from sparrow.features.schema import Split
from tests.data.preparation.logs import SCHEMA, log_of, written


def test_out_is_replaced_only_after_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, out = written(tmp_path, log_of(300)), tmp_path / "out"
    prepare([log], out, schema=SCHEMA)
    before = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    with pytest.raises(UserError, match="exists; choose another name, or overwrite it"):
        prepare([log], out, schema=SCHEMA)

    def full(*args: object, **named: object) -> None:
        raise error

    for error in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):
        with monkeypatch.context() as patch:
            patch.setattr(pq.ParquetWriter, "write_table", full)
            with pytest.raises(UserError if isinstance(error, OSError) else KeyboardInterrupt):
                prepare([log], out, schema=SCHEMA, overwrite=True)
    assert {p.name: p.stat().st_mtime_ns for p in out.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.parquet", "out"]
    prepare([log], out, schema=SCHEMA, overwrite=True, split=Split(valid=0.5, test=0))
    assert data.open(out).rows("test") == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.parquet", "out"]
    with pytest.raises(UserError, match="is not a prepared log"):
        prepare([log], tmp_path, schema=SCHEMA, overwrite=True)


def test_a_folder_that_was_made_and_not_locked_goes_away(tmp_path: Path) -> None:
    log, (old, young, full) = (
        written(tmp_path, log_of(300)),
        [tmp_path / f".out.{c * 8}" for c in "abc"],
    )
    for folder in (old, young, full):
        folder.mkdir()
    (full / "something").touch()
    for folder in (old, full):
        os.utime(folder, (0, 0))
    prepare([log], tmp_path / "out", schema=SCHEMA)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        young.name,
        full.name,
        "log.parquet",
        "out",
    ]
