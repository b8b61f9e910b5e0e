from __future__ import annotations

import itertools

import pytest

from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.repeats import repeats
from tests.data.grouped import everything


def test_suggested_groups_change_together(grouped: Dataset) -> None:
    found = repeats(grouped)
    rows = everything(grouped)
    for name in ("user", "tags", "item"):
        behind = [(a, b) for a, b in itertools.pairwise(rows) if a["session"] == b["session"]]
        equal = sum(a[name] == b[name] for a, b in behind)
        assert found.equal[name] == pytest.approx(
            equal / len(behind), abs=0.1
        )  # a session may go on in another row group
    assert found.rows == len(rows)
    for group, names in found.groups.items():
        assert found.rows >= 1.5 * found.group_runs[group]
        same = sum(all(a[n] == b[n] for n in names) for a, b in behind)
        assert found.group_runs[group] == pytest.approx(len(rows) - same, rel=0.1)
    ((group, names),) = ((g, n) for g, n in found.groups.items() if "user" in n)
    assert "age" in names and "item" not in names and found.rows / found.group_runs[group] > 1.5
