"""`--precision auto` on many ranks: they have one recipe, whatever each of them measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparrow.extensions.low_precision.precision import recipe_file
from tests.equivalence import cases
from tests.equivalence.pool import Pool

pytestmark = pytest.mark.multi
SETTINGS: dict[str, Any] = {
    "precision": "auto",
    "model.name": "dcnv2",
    "model.dim": 4,
    "model.deep": [8],
    "data.batch_size": 128,
    "sharding.plan": "row_wise",
}


@pytest.mark.parametrize("tier", [pytest.param("memory", marks=pytest.mark.slow), "ssd"])
def test_ranks_settle_on_one_recipe(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path, tier: str
) -> None:
    """That of rank 0's times, from what both have seen; then it is read and not chosen."""
    disk = tmp_path / "disk"
    more = {"tables.tier.name": "ssd", "tiers.folder": str(disk)} if tier == "ssd" else {}
    found = ranks(2).run(cases.settled, str(prepared), str(tmp_path / "run"), SETTINGS | more)
    for first, again, _, _ in found:
        assert first.name == "bf16" and first.sites
        assert again == first == found[0][0]
    assert recipe_file(tmp_path / "run" / "auto.toml")["name"] == "bf16"
    # rows of two snapshots, 16 of each rank
    assert [seen for _, _, seen, _ in found] == [2 * 32, None]
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "disk"}
    assert tier == "memory" or not list(disk.iterdir())
    compiled, apart = found[0][3]
    assert all(of[3] == found[0][3] for of in found)
    assert compiled == "compile: not on many ranks yet; leave it out"
    assert apart.startswith("precision: 'auto' reads a checkpoint on one host") or tier == "memory"
