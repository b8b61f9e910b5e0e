from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.embeddings import Component
from sparrow.embeddings.spec import Tier
from sparrow.trained.run import Checkpoints
from sparrow.training import train
from sparrow.training.disk import check_disks
from tests.runs import small_run


def test_disks_must_have_room(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For rows that may learn, and for as many checkpoints as are kept; of tables in memory nothing is asked."""
    run = replace(small_run(prepared, tmp_path / "run"), ssd=str(tmp_path / "disk"))
    dataset = data.open(prepared)
    free = {"/": 10**12}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free["/"]))
    large = Component(name="t", rows=10**9, dim=16, tier=Tier(name="ssd"))
    check_disks(replace(run, checkpoint=Checkpoints(keep=1)), [large], dataset)
    free["/"] = 2 * 10**10
    told = r"run: checkpoints need up to \d\d\.\d GB, and 20.0 GB are free; lower checkpoint.keep, or name another"
    with pytest.raises(UserError, match=told):
        check_disks(run, [large], dataset)
    check_disks(run, [replace(large, tier=Tier())], dataset)
    free["/"] = 10**6
    with pytest.raises(
        UserError,
        match="disk: rows of tables on an SSD, and their checkpoints, need up to .* name another folder with --ssd",
    ):
        check_disks(run, [replace(large, rows=10**5)], dataset)


def test_checkpoints_with_all_rows_share_no_blocks(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all rows of each are in the run directory."""
    run = replace(small_run(prepared, tmp_path / "run"), ssd=str(tmp_path / "disk"))
    component = Component(name="t", rows=10**9, dim=16, tier=Tier(name="ssd"))
    run, free = replace(run, checkpoint=Checkpoints(keep=1, whole=True)), 3 * component.rows * component.bytes_row
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    check_disks(run, [component], data.open(prepared))
    free -= 1
    with pytest.raises(UserError, match="run: checkpoints need up to"):
        check_disks(run, [component], data.open(prepared))


def test_checkpoints_with_all_rows_in_the_background_are_refused(prepared: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ssd": str(tmp_path / "disk"), "checkpoint": Checkpoints(background=True, whole=True)}
    run = small_run(prepared, tmp_path / "run", **settings)
    tables = replace(run.tables, tier=Tier(name="ssd"))
    with pytest.raises(UserError, match="checkpoint.background: checkpoints with all rows of tables on an SSD are not"):
        train(replace(run, tables=tables))
