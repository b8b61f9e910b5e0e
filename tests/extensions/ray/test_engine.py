"""What is wrong before a cluster is asked for; `tests/equivalence/test_ray.py` has the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.features.schema import Column, Encoding, Schema

COLUMNS = {
    "label": Column(kind="label"),
    "ts": Column(kind="time"),
    "user": Column(kind="categorical", table="user"),
}
COUNTED = Column(kind="numeric", source="user", counts="seen")
HEAVY = ("daft", "ray", "sparrow.extensions.ray.cluster")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log, where neither Ray nor daft can be imported."""
    rows = {"label": [0, 1] * 50, "ts": list(range(100)), "user": [i % 7 for i in range(100)]}
    pq.write_table(pa.table(rows), tmp_path / "log.parquet")
    monkeypatch.delitem(sys.modules, HEAVY[-1], raising=False)
    for package in HEAVY[:2]:
        monkeypatch.setitem(sys.modules, package, None)
    return tmp_path / "log.parquet"


def test_ray_that_is_not_installed_is_named_with_its_extra(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = log.with_name("out")
    with pytest.raises(UserError, match=r"^ray: .*daft.*; pip install 'sparrow-rec\[ray\]'$"):
        data.prepare([log], out, ray="local")
    assert main(["prepare", str(log), "--out", str(out), "--ray", "local"]) == 2
    assert "pip install 'sparrow-rec[ray]'" in capsys.readouterr().err
    assert [path.name for path in log.parent.iterdir()] == ["log.parquet"]


def test_columns_that_one_machine_must_count_are_refused_before_ray_is_loaded(log: Path) -> None:
    schema = Schema(columns=COLUMNS | {"seen": COUNTED}, encodings={"user": Encoding()})
    with pytest.raises(
        UserError, match=r"^ray: columns\.seen counts rows .*; leave out ray, or the column$"
    ):
        data.prepare([log], log.with_name("out"), schema=schema, ray="local")
    assert HEAVY[-1] not in sys.modules


def test_without_the_flag_nothing_of_it_is_loaded(log: Path) -> None:
    data.prepare([log], log.with_name("out"), ray=None)
    assert HEAVY[-1] not in sys.modules
