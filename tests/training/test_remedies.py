"""What would make a run fit, where nothing smaller does. `test_preflight.py` has runs with too
little memory.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sparrow import data
from sparrow.trained.run import Data, Run
from sparrow.training import preflight, remedies
from sparrow.training.plan import Plan


@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        ("tables", "'item', takes 2.00 MB"),
        ("tables", "or keep it on an SSD with few frames in memory (--tiers.folder, "),
        (preflight.DENSE, "lower several"),
        ("evaluation", "prepare with a smaller"),
    ],
)
def test_the_last_remedy_is_for_what_is_largest(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, part: str, remedy: str
) -> None:
    monkeypatch.setattr(preflight, "fits", lambda *_: False)
    host = {"program": 9, "tables": 1, preflight.DENSE: 1, "evaluation": 1, part: 2}
    run = Run(run_dir="unused", data=Data(path=str(prepared), batch_size=512))
    plan = Plan(run=run, dataset=data.open(prepared))
    needs = preflight.Needs(host=host, device={}, largest=("item", 2_000_000), flop=0)
    assert remedy in remedies.first_remedy(plan, needs)
