"""Small logs of all shapes: what is inferred, beside what a person would say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks._peers.meaning_logs import NAMES, made
from benchmarks._peers.meaning_logs.judge import judged
from sparrow.data import prepare


def test_logs_are_read_as_a_person_would(tmp_path: Path) -> None:
    verdicts = [verdict for name in NAMES for verdict in judged(name, tmp_path)]
    wrong = [verdict for verdict in verdicts if not verdict.right]
    assert len(NAMES) >= 25
    assert len(wrong) <= 0.05 * len(verdicts), wrong
    assert not [verdict for verdict in wrong if not verdict.note]


@pytest.mark.parametrize(
    "names", [[*NAMES][::4], pytest.param([*NAMES], marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_what_is_inferred_prepares(names: Sequence[str], tmp_path: Path) -> None:
    for name in names:
        log = made(name)
        done = prepare([log.write(tmp_path, name)], tmp_path / name)
        assert sum(done.rows.values()) == len(next(iter(log.columns.values())))


def test_logs_are_the_same_every_time() -> None:
    assert made("census") == made("census")
    assert made("census").columns["c0"] != made("census_named").columns["age"]


def test_blanks_around_cells_are_no_part_of_a_value(tmp_path: Path) -> None:
    padded = made("census_named")
    prepared = []
    for log in (padded, replace(padded, padded=False)):
        folder = tmp_path / str(log.padded)
        folder.mkdir()
        prepare([log.write(folder, "census")], folder / "out")
        prepared.append(pq.read_table(folder / "out" / "train"))
    assert prepared[0].equals(prepared[1])
    assert "workclass" in prepared[0].column_names
