"""All ranks launch the same collectives in the same order: NCCL can deadlock where they do not.
Checked on Gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparrow.distributed.mesh import LANES
from tests.data.grouped import prepared_sessions
from tests.equivalence import cases
from tests.equivalence.pool import Pool

pytestmark = pytest.mark.multi


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared_sessions(tmp_path_factory.mktemp("sessions"))


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "uneven shares": (2, {"data.batch_size": 7, "sharding.plan": "table_wise"}),
    "a rank without rows": (3, {"data.batch_size": 2, "sharding.plan": "row_wise"}),
    "sums within hosts": (4, {"data.batch_size": 30, "sharding.plan": "table_row_wise"}),
    "accumulated, in bf16": (
        2,
        {
            "data.batch_size": 9,
            "sharding.plan": "row_wise",
            "loop.accumulate": 2,
            "sharding.backward.dtype": "bf16",
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_launches_have_one_order(
    ranks: Callable[[int], Pool], sessions: str, tmp_path: Path, name: str
) -> None:
    """And groups of their own change no metric."""
    size, changes = CASES[name]
    changes = {"model.dim": 4, "data.dedup": "on", "loop.max_steps": 4, **changes}
    found = [
        ranks(size).run(cases.launched, sessions, str(tmp_path / str(lanes)), changes, lanes)
        for lanes in (False, True)
    ]
    for order, valid in found[0] + found[1]:
        assert order == found[0][0][0]
        assert valid == found[0][0][1]
    used = {lane for lane, _, _ in order}
    assert used == {"", "dense", *LANES}


def test_a_step_launches_as_written(
    ranks: Callable[[int], Pool], sessions: str, tmp_path: Path
) -> None:
    """In the order that docs/gpu.md gives."""
    changes = {"model.dim": 4, "data.dedup": "off", "data.batch_size": 20, "loop.max_steps": 4}
    changes |= {"sharding.plan": "row_wise", "log.every": 100}
    order, _ = ranks(2).run(cases.launched, sessions, str(tmp_path / "run"), changes, True)[0]
    purposes = [what for _, _, what in order]
    ends = [at for at, what in enumerate(purposes) if what == "what a step found"]
    assert purposes[ends[0] + 1 : ends[1] + 1] == [
        "sizes of ids",  # of the next step
        "vectors",
        "ids",  # of the next step
        "weights",  # of these ids
        "dense gradients",
        "gradients",
        "what a step found",
    ]
