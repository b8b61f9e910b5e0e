from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from sparrow.trained.run import Loop
from sparrow.training import profiling, train
from tests.runs import small_run


def test_profile_says_where_a_steps_time_goes(prepared: Path, tmp_path: Path) -> None:
    train(small_run(prepared, tmp_path / "run", loop=Loop(epochs=2, max_steps=26)), profile=True)
    found = profiling.read(tmp_path / "run")
    assert found is not None
    parts = {row["part"]: row["ms_per_step"] for row in found["parts"]}
    assert {"load", "forward", "backward", "dense optimizer", "table update"} <= set(parts)
    assert sum(row["share"] for row in found["parts"]) == pytest.approx(1)
    assert parts["forward"] > 0
    assert "matrix products" in {row["part"] for row in found["kinds"]}
    trace = json.loads(gzip.decompress((tmp_path / "run" / "trace.json.gz").read_bytes()))
    assert any(event.get("name") == "sparrow part: backward" for event in trace["traceEvents"])
    assert found["steps"] == profiling.STEPS
