"""What an earlier Sparrow made is read: a prepared log, runs that were killed half-way, a run with
a calibrator, a model folder.

`earlier_runs.tar.xz` was made on 2026-11-28 by commit d99a737b of 2026-11-26, on its reference
path, of 1,200 rows (`generate all.csv --rows 1200 --users 60 --items 40 --numeric 2 --categorical 2
--seed 5`, `prepare all.csv --out log`). `raw.csv` has the first 30 rows. `dcnv2`, `dynamic` (a DLRM
with dynamic ids, int8 rows, Adam) and `blend` were killed between two checkpoints. `calibrated` has
ended, and `served` is its export. `expected.json` says what `evaluate` and `predict` gave, of the
first three after the last step of the same runs without a kill.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from sparrow.cli import main
from sparrow.serving.scorer import load

STORED = Path(__file__).with_name("earlier_runs.tar.xz")
CLOSE = 1e-4  # sums of another processor or path differ by some last bits


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which these lie."""
    folder = tmp_path_factory.mktemp("stored")
    with tarfile.open(STORED) as archive:
        archive.extractall(folder, filter="data")
    return folder


def expected(stored: Path, name: str) -> dict[str, Any]:
    """What the earlier Sparrow gave for a run."""
    return json.loads((stored / "expected.json").read_text())[name]


@pytest.mark.parametrize("name", ["dcnv2", "dynamic", "blend", "calibrated"])
def test_a_run_ends_as_it_did(
    name: str, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stored)
    earlier = expected(stored, name)
    if name != "calibrated":
        main(["train", f"{name}/run.toml", "--resume"])
    table, scores = tmp_path / "test.json", tmp_path / "scores.parquet"
    main(["evaluate", name, "--checkpoint", "last", "--json-out", str(table)])
    metrics = next(iter(json.loads(table.read_text()).values()))
    assert {k: metrics.get(k) for k in earlier["test"]} == pytest.approx(earlier["test"], rel=CLOSE)
    main(["predict", name, "raw.csv", "--checkpoint", "last", "--out", str(scores)])
    now = pq.read_table(scores).column("score").to_pylist()
    assert now == pytest.approx(earlier["scores"], rel=CLOSE)


def test_a_model_folder_scores_as_it_did(stored: Path) -> None:
    cells = pyarrow.csv.ConvertOptions(strings_can_be_null=True)
    rows = pyarrow.csv.read_csv(stored / "raw.csv", convert_options=cells).to_pylist()
    scores = load(stored / "served").score(rows).ravel().tolist()
    assert scores == pytest.approx(expected(stored, "calibrated")["scores"], rel=CLOSE)
