"""What the ranks of a pool do; each function runs on every one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sparrow import checkpoint
from sparrow.core import Jagged, KeyedJagged
from sparrow.distributed import Codec, World
from sparrow.distributed.codecs import cast
from sparrow.embeddings import Direct, EmbeddingTables, Feature, Hashed, TableSpec, unallocated
from sparrow.kernels.rules import RowRule, sgd
from sparrow.sharding import Layout, ShardedTables
from sparrow.training import Run
from sparrow.training.loop import Trainer
from sparrow.training.ranks import Ranks
from sparrow.training.restore import load_weights

ROWS, DIMS = (50, 7, 33), (8, 12, 5)


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """A codec of variable size: how many numbers are not 0, where, and which."""

    elementwise = False

    def encode(self, block_ND: Tensor, step: int, forward: bool) -> Tensor:
        places = block_ND.flatten().nonzero()[:, 0]
        numbers = block_ND.flatten()[places]
        return torch.cat([places.view(torch.uint8), numbers.contiguous().view(torch.uint8)])

    def decode(self, data: Tensor, rows: int, dim: int) -> Tensor:
        count = len(data) // 12
        out = torch.zeros(rows * dim)
        out[data[: 8 * count].clone().view(torch.int64)] = data[8 * count :].clone().view(torch.float32)
        return out.view(rows, dim)

    def size(self, rows: int, dim: int) -> int | None:
        return None

    def error(self, block_ND: Tensor) -> Tensor:
        return torch.zeros_like(block_ND)


def tables(rule: RowRule, poolings: tuple[str, ...], mode: str, dims: tuple[int, ...] = DIMS) -> EmbeddingTables:
    """Three tables, four features: two share the first table."""
    specs = [
        TableSpec(name="a", dim=dims[0], addressing=Direct(ROWS[0]), rule=rule),
        TableSpec(name="b", dim=dims[1], addressing=Hashed(ROWS[1]), rule=rule),
        TableSpec(name="c", dim=dims[2], addressing=Direct(ROWS[2]), rule=rule, oov_row=0),
    ]
    of = zip(("f1", "f2", "f3", "f4"), ("a", "b", "a", "c"), poolings, strict=True)
    features = [Feature(name=name, table=table, pooling=pooling) for name, table, pooling in of]  # type: ignore[arg-type]
    return EmbeddingTables(specs, features, seed=3, mode=mode)  # type: ignore[arg-type]


def ids(seed: int, batch: int, most: int, weighted: bool) -> KeyedJagged:
    """Random bags of 0 to `most` ids (1 each for most = 1); some beyond the third table."""
    random = torch.Generator().manual_seed(seed)
    low = 1 if most == 1 else 0
    lengths = torch.randint(low, most + 1, (4 * batch,), generator=random)
    ends = [0, *lengths.view(4, batch).sum(1).cumsum(0).tolist()] if batch else [0] * 5
    limits = (ROWS[0], 1 << 40, ROWS[0], ROWS[2] + 5)
    values = [torch.randint(0, n, (ends[i + 1] - ends[i],), generator=random) for i, n in enumerate(limits)]
    weights_N = torch.rand(int(lengths.sum()), generator=random) if weighted else None
    return KeyedJagged(
        keys=("f1", "f2", "f3", "f4"), values_N=torch.cat(values), lengths=lengths, weights_N=weights_N
    )  # fmt: skip


def upstream(shape: torch.Size, seed: int) -> Tensor:
    """A gradient."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flat(found: dict[str, Tensor | Jagged]) -> dict[str, Tensor]:
    """Vectors, sequences' too."""
    return {name: v.values_N if isinstance(v, Jagged) else v for name, v in found.items()}


def train(
    world: World, plan: dict[str, Layout], rule: RowRule, poolings: tuple[str, ...], mode: str, batches: list[int],
    most: int, weighted: bool, steps: int, codecs: tuple[Codec, Codec] = (cast.Config(), cast.Config()),
    ahead: bool = False, dims: tuple[int, ...] = DIMS,
) -> dict[str, Any]:  # fmt: skip
    """Some steps of the tables alone: each step's vectors, then the rows that are here."""
    with unallocated():
        whole = tables(rule, poolings, mode, dims)
    sharded = ShardedTables(whole, plan, world, *codecs)
    found = []
    before = world.meter.bytes.copy()
    for step in range(steps):
        mine = ids(100 * step + world.rank, batches[world.rank], most, weighted)
        if ahead:
            sharded.prefetch(mine)
        out = flat(sharded(mine))
        found.append({name: v.detach().clone() for name, v in out.items()})
        loss = sum((v * upstream(v.shape, 7 * step + 31 * world.rank + i)).sum() for i, v in enumerate(out.values()))
        torch.as_tensor(loss).backward()
        sharded.update()
    chunks = plain(sharded.chunks())
    return {"vectors": found, "chunks": chunks, "bytes": world.meter.bytes - before, "oov": sharded.oov_counts()}


def grouped(rank: int, batch: int, most: int) -> KeyedJagged:
    """As `ids`, but f2 and f3 are a dedup group, whose rows are half as many."""
    whole, unique = ids(rank, batch, most, False), ids(rank + 50, (batch + 1) // 2, most, False)
    parts = [(unique if key in ("f2", "f3") else whole)[key] for key in whole.keys]
    random = torch.Generator().manual_seed(rank)
    inverse_B = torch.randint(0, max((batch + 1) // 2, 1), (batch,), generator=random)
    return KeyedJagged(
        keys=whole.keys, values_N=torch.cat([p.values_N for p in parts]),
        lengths=torch.cat([p.lengths_B for p in parts]),
        inverse_B={("f2", "f3"): inverse_B, ("f4",): torch.arange(batch)},
        rows=tuple(len(p.lengths_B) for p in parts),
    )  # fmt: skip


def expanded(found: dict[str, Tensor | Jagged]) -> dict[str, Tensor]:
    """Vectors, with each sample's of a sequence."""
    out = {}
    for name, v in found.items():
        if isinstance(v, Jagged) and v.inverse_B is not None:
            lengths = v.offsets_B1.diff()
            pieces = [v.values_N.split(lengths.tolist())[i] for i in v.inverse_B.tolist()]
            out[name] = torch.cat([v.values_N[:0], *pieces])
        else:
            out[name] = v.values_N if isinstance(v, Jagged) else v
    return out


def dedup(
    world: World, plan: dict[str, Layout], poolings: tuple[str, ...], batches: list[int], most: int
) -> dict[str, Any]:
    """Two steps on unique rows, with gradients that add up exactly."""
    whole: Any = tables(sgd.Config(lr=0.5), poolings, "fused")
    sharded = ShardedTables(whole, plan, world, cast.Config(), cast.Config())
    found = []
    before = world.meter.bytes.copy()
    for _ in range(2):
        mine = grouped(world.rank, batches[world.rank], most)
        out = expanded(sharded(mine))
        found.append({name: v.detach().clone() for name, v in out.items()})
        loss = sum((v * upstream(v.shape, 31 * world.rank + i).round()).sum() for i, v in enumerate(out.values()))
        torch.as_tensor(loss).backward()
        sharded.update()
    return {"vectors": found, "chunks": plain(sharded.chunks()), "bytes": world.meter.bytes - before}


def norm(world: World, plan: dict[str, Layout], rule: RowRule, spoilt: bool, shares: int = 1) -> float:
    """The norm of all gradients, as a step's guard and clipping see it; of so many ranks' shares in one process."""
    tables_here: Any = tables(rule, ("sum",) * 4, "deferred")
    if world.size > 1:
        tables_here = ShardedTables(tables_here, plan, world, cast.Config(), cast.Config())
    for rank in range(shares) if world.size == 1 else [world.rank]:
        out = flat(tables_here(ids(rank, 6, 4, False)))
        loss = sum((v * upstream(v.shape, 31 * rank + i)).sum() for i, v in enumerate(out.values()))
        if spoilt and rank == 1:
            loss = loss + out["f2"].sum() * float("inf")
        torch.as_tensor(loss).backward()
    ranks: Any = SimpleNamespace(world=world)
    found = Ranks.norm(ranks, [], [tables_here])
    tables_here.discard()
    return found


def fit(world: World, prepared: str, run_dir: str, changes: dict[str, Any], again: bool) -> dict[str, Any]:
    """A training job; with `again` one rank is told to stop in the middle, all do, and another job goes on."""
    run = Run.of(prepared, {"run_dir": run_dir, "threads": 1, "log.tensorboard": False, **changes})
    if again:
        first = Trainer(run)
        take, middle = first.take_step, first.total_steps // 2

        def told(micro: Any, flags: tuple[bool, bool], ahead: Any) -> Any:
            return take(micro, (world.rank == 1 and first.step == middle, flags[1]), ahead)

        first.take_step = told  # type: ignore[assignment]
        assert first.fit()["step"] == middle + 1 < first.total_steps
        trainer = Trainer(run, resume=True)
    else:
        trainer = Trainer(run)
    results = trainer.fit()
    dense = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return {"results": results, "dense": dense}


def save(world: World, plan: dict[str, Layout], rule: RowRule, directory: str) -> list[Any]:
    """Train a little and save; the chunks that are here."""
    with unallocated():
        whole = tables(rule, ("sum", "mean", "sum", "none"), "fused")
    sharded = ShardedTables(whole, plan, world, cast.Config(), cast.Config())
    out = flat(sharded(ids(world.rank, 6, 4, False)))
    torch.as_tensor(sum(v.square().sum() for v in out.values())).backward()
    sharded.update()
    chunks = list(sharded.chunks())
    checkpoint.save(
        Path(directory), 1, identity={}, state={}, parts={"dense": {}}, chunks=chunks, rank=world.rank,
        ranks=world.size, all_written=lambda: world.barrier("checkpoint"),
    )  # fmt: skip
    world.barrier("checkpoint")
    return plain(chunks)


def load(world: World, plan: dict[str, Layout], rule: RowRule, directory: str) -> list[Any]:
    """What is here of a checkpoint, by another plan."""
    with unallocated():
        whole = tables(rule, ("sum", "mean", "sum", "none"), "fused")
    sharded = ShardedTables(whole, plan, world, cast.Config(), cast.Config())
    model = torch.nn.ModuleList([sharded])
    model.load_state_dict({})
    load_weights(model, checkpoint.load(Path(directory)))
    return plain(sharded.chunks())


def plain(chunks: Any) -> list[Any]:
    """Chunks as plain values."""
    return [(c.table, c.rows, c.columns, {n: t.clone() for n, t in c.fields.items()}) for c in chunks]
