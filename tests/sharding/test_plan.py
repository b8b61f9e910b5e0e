from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparrow.core import UserError
from sparrow.distributed.codecs import cast
from sparrow.embeddings import Direct, EmbeddingTables, Feature, TableSpec
from sparrow.kernels.rules import Regularization, sgd
from sparrow.sharding import Layout, ShardedTables, column_wise, plan
from sparrow.sharding.plan import NAMED

WORLD: Any = SimpleNamespace(size=4, hosts=2, local_size=2, rank=0)
SPECS = [
    TableSpec(name=n, dim=16, addressing=Direct(r))
    for n, r in [("s", 100), ("m", 40_000), ("l", 10_000_000), ("k", 50_000)]
]


@pytest.mark.parametrize("name", NAMED)
def test_every_number_is_on_one_rank(name: str) -> None:
    for spec in SPECS:
        layout = plan(name, SPECS, WORLD)[spec.name]
        shards = layout.shards(spec.name, spec.addressing.rows, spec.dim)
        size = sum((s.rows[1] - s.rows[0]) * (s.columns[1] - s.columns[0]) for s in shards)
        assert size == (0 if layout.is_replicated else spec.addressing.rows * spec.dim)
        assert {s.rank for s in shards} <= set(range(4))


def test_auto_goes_by_size() -> None:
    found = plan("auto", SPECS, WORLD)
    assert found["s"].is_replicated
    assert found["l"].rows == 4
    assert {len(found["m"].ranks), len(found["k"].ranks)} == {1}
    assert found["m"].ranks != found["k"].ranks


def test_a_file_says_what_it_wants(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('default = "row_wise"\n[tables.l]\nranks = [2, 3]\nrows = 2\nthrough_host = true\n')
    found = plan(str(file), SPECS, WORLD)
    assert found["l"] == Layout(ranks=(2, 3), rows=2, through_host=True)
    assert found["m"].rows == 4
    file.write_text("[tables.x]\nranks = [0]\n")
    with pytest.raises(UserError, match=r"plan\.toml: no table 'x'"):
        plan(str(file), SPECS, WORLD)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"ranks": (0, 1), "rows": 3}, r"columns = 1 x rows = 3 are 3 blocks, on ranks \[0, 1\]"),
        ({"ranks": (1, 2), "rows": 2, "through_host": True}, "not all those of a host"),
    ],
)
def test_impossible_layouts(layout: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Layout(**layout)


def test_a_host_is_all_its_ranks() -> None:
    whole = EmbeddingTables(SPECS[:1], [Feature(name="f", table="s")])
    fp32, world = cast.Config(), SimpleNamespace(size=4, hosts=1, local_size=4, rank=0)
    with pytest.raises(
        UserError, match="table 's': through_host needs rows = 4, one block for each rank of a host; it has rows = 2"
    ):
        ShardedTables(whole, {"s": Layout(ranks=(2, 3), rows=2, through_host=True)}, world, fp32, fp32)  # type: ignore[arg-type]


def test_norms_of_whole_rows_need_whole_rows() -> None:
    rule = sgd.Config(regularization=Regularization(max_norm=1.0))
    whole = EmbeddingTables(
        [TableSpec(name="s", dim=16, addressing=Direct(9), rule=rule)], [Feature(name="f", table="s")]
    )
    with pytest.raises(UserError, match="table 's' is cut by columns, and its rule bounds norms"):
        ShardedTables(whole, {"s": column_wise((0, 1))}, WORLD, cast.Config(), cast.Config())


def test_an_unknown_plan() -> None:
    with pytest.raises(UserError, match="did you mean 'row_wise'"):
        plan("rowwise", SPECS, WORLD)
