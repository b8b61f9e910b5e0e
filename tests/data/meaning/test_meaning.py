"""Small logs of all shapes: what is inferred, beside what a person would say."""

from __future__ import annotations

from pathlib import Path

from benchmarks._peers.meaning_logs import NAMES, made
from benchmarks._peers.meaning_logs.judge import judged


def test_logs_are_read_as_a_person_would(tmp_path: Path) -> None:
    verdicts = [verdict for name in NAMES for verdict in judged(name, tmp_path)]
    wrong = [verdict for verdict in verdicts if not verdict.right]
    assert len(NAMES) >= 25
    assert len(wrong) <= 0.05 * len(verdicts), wrong
    assert not [verdict for verdict in wrong if not verdict.note]


def test_logs_are_the_same_every_time() -> None:
    assert made("census") == made("census")
    assert made("census").columns["c0"] != made("census_named").columns["age"]
