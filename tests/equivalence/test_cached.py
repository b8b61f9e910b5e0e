"""Tables with a cache on many ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow.core import Chunk, KeyedJagged, UserError
from sparrow.distributed import World
from sparrow.embeddings import (
    ON_CPU,
    UNALLOCATED,
    Direct,
    EmbeddingTables,
    Feature,
    Placement,
    TableSpec,
)
from sparrow.embeddings.spec import Cache
from sparrow.extensions.tiers.stores.cached import CachedStore
from sparrow.kernels.formats import fp16, int8
from sparrow.kernels.rules import sgd
from sparrow.sharding import Codecs, Layout, column_wise, data_parallel, row_wise, shard, table_wise
from sparrow.training import Trainer
from tests.equivalence import cases
from tests.equivalence.pool import Pool
from tests.runs import run_of

pytestmark = pytest.mark.multi
ROWS, DIM, STEPS, SAMPLES = 600, 6, 8, 30
PLANS: dict[str, Callable[[int], Layout]] = {
    "table_wise": lambda size: table_wise(size - 1),
    "row_wise": lambda size: row_wise(size),
    "column_wise": lambda size: column_wise((0, 1)),
    "data_parallel": lambda size: data_parallel(),
}


def tables_of(
    format: str, fraction: float = 0.12, placement: Placement = ON_CPU
) -> EmbeddingTables:
    spec = TableSpec(
        name="t", dim=DIM, addressing=Direct(ROWS), rule=sgd.Config(lr=0.3), init_scale=1.0,
        format=int8.Config() if format == "int8" else fp16.Config(),
        cache=Cache(fraction=fraction, policy="lfu"),
    )  # fmt: skip
    return EmbeddingTables(
        [spec], [Feature(name="a", table="t")], seed=1, mode="deferred", placement=placement
    )


def ids_of(step: int, ranks: list[int]) -> KeyedJagged:
    parts = []
    for rank in ranks:
        g = torch.Generator().manual_seed(100 * step + rank)
        parts.append((torch.rand(2 * SAMPLES, generator=g) ** 4 * ROWS).long())
    return KeyedJagged(
        keys=("a",), values_N=torch.cat(parts), lengths=torch.full((len(ranks) * SAMPLES,), 2)
    )


def steps(tables: EmbeddingTables, ranks: list[int], first: int = 0) -> None:
    for step in range(first, first + STEPS):
        out: Any = tables(ids_of(step, ranks))["a"]
        (out * 2.0).sum().backward()  # whole gradients add up to the same in any order
        tables.update()


def sharded(world: World, format: str, layout: str) -> list[Chunk]:
    tables = tables_of(format, placement=UNALLOCATED)
    shard(tables, {"t": PLANS[layout](world.size)}, world, Codecs())
    steps(tables, [world.rank])
    return [
        Chunk(**{**vars(chunk), "fields": {n: t.clone() for n, t in chunk.fields.items()}})
        for chunk in tables.chunks()
    ]


def loaded(chunks: list[Chunk], format: str, fraction: float = 0.12) -> EmbeddingTables:
    tables = tables_of(format, fraction)
    for chunk in sorted(chunks, key=lambda chunk: chunk.is_cache):  # as a checkpoint gives them
        tables.load_chunk(chunk)
    return tables


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("format", "layout"), [("int8", "table_wise"), ("fp16", "table_wise"), ("fp16", "column_wise")]
)
def test_a_cache_over_all_rows_does_the_same_on_one_rank(
    ranks: Callable[[int], Pool], format: str, layout: str, size: int
) -> None:
    whole = tables_of(format)
    steps(whole, list(range(size)))
    got = loaded(
        [chunk for of_rank in ranks(size).run(sharded, format, layout) for chunk in of_rank], format
    )
    record, same = whole.record("t"), got.record("t")
    if layout == "table_wise":
        for name in record.fields:
            assert torch.equal(record.fields[name], same.fields[name]), name
        assert torch.equal(record.weight, same.weight)
        got.set_extra_state(whole.get_extra_state())
        steps(whole, [0], STEPS)
        steps(got, [0], STEPS)
        assert torch.equal(record.weight, same.weight)
    else:  # frames of parts are rounded where parts join, and counted
        assert same.rounded > 20
        torch.testing.assert_close(same.weight, record.weight, rtol=2**-9, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3])
def test_frames_of_many_ranks_go_to_the_owners_of_their_rows(
    ranks: Callable[[int], Pool], size: int
) -> None:
    chunks = [
        chunk for of_rank in ranks(size).run(sharded, "int8", "row_wise") for chunk in of_rank
    ]
    exact = torch.zeros(ROWS, DIM)
    for chunk in sorted(chunks, key=lambda chunk: chunk.is_cache):
        rows = chunk.fields["row"] if chunk.is_cache else slice(*chunk.rows)
        values = (
            chunk.fields["weight"] if chunk.is_cache else int8.Config().decode(chunk.fields, DIM)
        )
        exact[rows] = values
    held = sum(len(chunk.fields["row"]) for chunk in chunks if chunk.is_cache)
    for fraction in (0.5, 0.05):
        record = loaded(chunks, "int8", fraction).record("t")
        assert isinstance(record.store, CachedStore)
        kept = len(record.store.exact_rows()["row"])
        assert kept + record.rounded == held and (record.rounded > 10) == (fraction < 0.1)
        step_R = (exact.amax(1) - exact.amin(1)) / 255
        assert bool(((record.weight - exact).abs().amax(1) <= 1.01 * step_R).all())


def refused(world: World) -> str:
    tables = tables_of("int8")
    try:
        shard(tables, {"t": data_parallel()}, world, Codecs())
    except UserError as error:
        return str(error)
    return ""


def test_copies_of_a_cache_are_refused(ranks: Callable[[int], Pool]) -> None:
    for told in ranks(2).run(refused):
        assert (
            told
            == "plan: table 't' has a cache, and copies of caches would differ; put it on one rank"
            " or cut it"
        )


SETTINGS: dict[str, Any] = {
    "data.batch_size": 500,
    "model.dim": 8,
    "model.deep": [16],
    "tables.format.name": "int8",
    "data.id_dropout": {},
}


def test_hit_rates_and_bytes_are_sums_over_ranks(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    """With a frame for each row a row misses once, wherever it is; a resumed run goes on counting,
    on any ranks.
    """
    settings = {**SETTINGS, "tables.cache.fraction": 1.0}
    want = cases.fit(World(), str(prepared), str(tmp_path / "one"), settings, False)["results"][
        "tables"
    ]
    halves = {**settings, "sharding.plan": "row_wise"}
    for changes in ({"loop.max_steps": 5}, {}):
        trained = ranks(2).run(
            fit, str(prepared), str(tmp_path / "two"), {**halves, **changes}, not changes
        )
    for rank in trained:
        assert rank["told"]["hit_rate"] == want["hit_rate"] and len(want["hit_rate"]) > 3
        assert rank["told"]["bytes"] == sum(one["mine"] for one in trained) > want["bytes"]


def test_a_layout_with_fewer_frames_tells_which_rows_found_none(
    ranks: Callable[[int], Pool], prepared: Path, tmp_path: Path
) -> None:
    """Two ranks have a set of a table each, and one has one."""
    settings = {
        **SETTINGS,
        "tables.cache.fraction": 0.1,
        "checkpoint.every": 3,
        "sharding.plan": "row_wise",
    }
    ranks(2).run(
        fit, str(prepared), str(tmp_path / "run"), {**settings, "loop.max_steps": 5}, False
    )
    found = fit(World(), str(prepared), str(tmp_path / "run"), settings, True)
    lines = [text for text in found["said"] if "no frame" in text]
    told = ", ".join(f"{count} of table {name!r}" for name, count in found["rounded"].items())
    assert lines == [f"rows of caches that found no frame here are stored as other rows: {told}"]
    assert found["rounded"]["user"] > 5


def fit(
    world: World, prepared: str, run_dir: str, changes: dict[str, Any], resume: bool
) -> dict[str, Any]:
    """What a run tells, the bytes of this rank's tables, and rows without a frame by table."""
    said: list[str] = []
    trainer = Trainer(
        run_of(prepared, run_dir, **changes),
        resume=resume,
        listener=lambda event, values: said.append(values.get("text", "")),
    )
    results = trainer.fit()
    trainer.job.ranks.world.leave()
    records = [record for tables in trainer.job.tables for record in tables.all_records()]
    mine = sum(t.nbytes for record in records for t in record.buffers())
    rounded = {record.component.name: record.rounded for record in records if record.rounded}
    return {"told": results["tables"], "mine": mine, "rounded": rounded, "said": said}
