"""What the ranks of a pool do; each function runs on every one."""

from __future__ import annotations

import gc
import itertools
import math
import os
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sparrow import checkpoint
from sparrow.apps.numerics import auto
from sparrow.cli import train as command
from sparrow.core import Batch, Jagged, KeyedJagged, UserError
from sparrow.distributed import Codec, Pending, World, begin_world
from sparrow.distributed.codecs import Unit, cast
from sparrow.distributed.mesh import MeshWorld
from sparrow.embeddings import (
    ON_CPU,
    UNALLOCATED,
    Direct,
    EmbeddingTables,
    Feature,
    Hashed,
    Placement,
    TableSpec,
)
from sparrow.extensions.low_precision.probe import Probe
from sparrow.extensions.low_precision.watch import Operands
from sparrow.extensions.warm_start import pretrained
from sparrow.kernels.rules import RowRule
from sparrow.layers.precision import Precision
from sparrow.metrics import Streaming, evaluate_labels, folded
from sparrow.models import Offset
from sparrow.sharding import Codecs, Layout, copies, shard
from sparrow.sharding.exchange import InFlight
from sparrow.trained.build import load_weights
from sparrow.trained.dense import optimizer_state
from sparrow.training import many_ranks
from sparrow.training.loop import Trainer
from sparrow.training.many_ranks import ManyRanks
from sparrow.training.progress import Progress
from sparrow.training.ranks import Ranks
from sparrow.training.rundir import RunDir
from tests.runs import run_of

ROWS, DIMS = (50, 7, 33), (8, 12, 5)
EXACT = cast.Config()


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """A codec of variable size: how many numbers are not 0, where, and which."""

    unit: ClassVar[Unit] = "table"

    def encode(self, block_ND: Tensor, step: int, forward: bool) -> Tensor:
        places = block_ND.flatten().nonzero()[:, 0]
        numbers = block_ND.flatten()[places]
        return torch.cat([places.view(torch.uint8), numbers.contiguous().view(torch.uint8)])

    def decode(self, data: Tensor, rows: int, dim: int) -> Tensor:
        count = len(data) // 12
        out = torch.zeros(rows * dim)
        out[data[: 8 * count].clone().view(torch.int64)] = (
            data[8 * count :].clone().view(torch.float32)
        )
        return out.view(rows, dim)

    def size(self, rows: int, dim: int) -> int | None:
        return None

    def error(self, block_ND: Tensor) -> Tensor:
        return torch.zeros_like(block_ND)


def tables(
    rule: RowRule, poolings: tuple[str, ...], mode: str, dims: tuple[int, ...] = DIMS,
    placement: Placement = ON_CPU,
) -> EmbeddingTables:  # fmt: skip
    """Three tables, four features: two share the first table."""
    specs = [
        TableSpec(name="a", dim=dims[0], addressing=Direct(ROWS[0]), rule=rule),
        TableSpec(name="b", dim=dims[1], addressing=Hashed(ROWS[1]), rule=rule),
        TableSpec(name="c", dim=dims[2], addressing=Direct(ROWS[2]), rule=rule, oov_row=0),
    ]
    of = zip(("f1", "f2", "f3", "f4"), ("a", "b", "a", "c"), poolings, strict=True)
    features = [Feature(name=name, table=table, pooling=pooling) for name, table, pooling in of]  # type: ignore[arg-type]
    return EmbeddingTables(specs, features, seed=3, mode=mode, placement=placement)  # type: ignore[arg-type]


def ids(seed: int, batch: int, most: int, weighted: bool) -> KeyedJagged:
    """Random bags of 0 to `most` ids (1 each for most = 1); some beyond the third table."""
    random = torch.Generator().manual_seed(seed)
    low = 1 if most == 1 else 0
    lengths = torch.randint(low, most + 1, (4 * batch,), generator=random)
    ends = [0, *lengths.view(4, batch).sum(1).cumsum(0).tolist()] if batch else [0] * 5
    limits = (ROWS[0], 1 << 40, ROWS[0], ROWS[2] + 5)
    values = [
        torch.randint(0, n, (ends[i + 1] - ends[i],), generator=random)
        for i, n in enumerate(limits)
    ]
    weights_N = torch.rand(int(lengths.sum()), generator=random) if weighted else None
    return KeyedJagged(
        keys=("f1", "f2", "f3", "f4"),
        values_N=torch.cat(values),
        lengths=lengths,
        weights_N=weights_N,
    )


def upstream(shape: torch.Size, seed: int, whole: bool = False) -> Tensor:
    """A gradient; of whole numbers, which add up to the same in any order."""
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return grad.round() if whole else grad


def flat(found: dict[str, Tensor | Jagged]) -> dict[str, Tensor]:
    """Vectors, sequences' too."""
    return {name: v.values_N if isinstance(v, Jagged) else v for name, v in found.items()}


def train(
    world: World,
    plan: dict[str, Layout],
    rule: RowRule,
    poolings: tuple[str, ...],
    mode: str,
    batches: list[int],
    most: int,
    weighted: bool,
    steps: int,
    codecs: tuple[Codec, Codec] = (cast.Config(), cast.Config()),
    ahead: bool = False,
    unique: bool = False,
    scale: float = 1.0,
    dims: tuple[int, ...] = DIMS,
    before: Codec = EXACT,
) -> dict[str, Any]:
    """Some steps of the tables alone: each step's vectors, then the rows that are here.

    unique: see `grouped`. before: by which gradients are rounded before they leave.
    """
    sharded = tables(rule, poolings, mode, dims, UNALLOCATED)
    shard(sharded, plan, world, Codecs(forward=codecs[0], backward=codecs[1]))
    found = []
    begun = world.meter.bytes.copy()
    for step in range(steps):
        mine = (grouped if unique else ids)(
            100 * step + world.rank, batches[world.rank], most, weighted
        )
        if ahead:
            sharded.prefetch(mine)
        out = expanded(sharded(mine))
        found.append({name: v.detach().clone() for name, v in out.items()})
        seed = 7 * step + 31 * world.rank
        ups = [upstream(v.shape, seed + i, unique) for i, v in enumerate(out.values())]
        ups = [before.decode(before.encode(up, 0, False), *up.shape) for up in ups]
        loss = sum((v * up).sum() for v, up in zip(out.values(), ups, strict=True))
        torch.as_tensor(loss * scale).backward()
        sharded.update()
    chunks = plain(sharded.chunks())
    rows = {r.name: {n: t.clone() for n, t in r.fields.items()} for r in sharded.all_records()}
    sent, oov = world.meter.bytes - begun, sharded.oov_counts()
    return {"vectors": found, "chunks": chunks, "all rows": rows, "bytes": sent, "oov": oov}


def in_flight_after(world: World, steps: int, *arguments: Any) -> int:
    """How many batches are still there after some steps, see `train`."""
    train(world, *arguments, steps=steps)
    gc.collect()
    return sum(isinstance(value, InFlight) for value in gc.get_objects())


def copied(
    world: World, way: bool | None, rule: RowRule, batches: list[int], most: int
) -> dict[str, Any]:
    """Steps of copied tables; way: whether whole tables travel or rows, None for what takes fewer
    bytes.
    """
    found, chosen = copies.is_dense, []

    def is_dense(*arguments: Any) -> bool:
        chosen.append(found(*arguments))
        return chosen[-1] if way is None else way

    copies.is_dense = is_dense
    try:
        plan = dict.fromkeys("abc", Layout())
        out = train(
            world, plan, rule, ("sum", "mean", "none", "sum"), "fused", batches, most, True, 3
        )
    finally:
        copies.is_dense = found
    return {**out, "chosen": set(chosen)}


def grouped(seed: int, batch: int, most: int, weighted: bool) -> KeyedJagged:
    """As `ids`, but f2 and f3 are a dedup group, whose rows are half as many; weights are 1/2, 1 or
    2.

    With gradients of whole numbers no sum of theirs is ever rounded.
    """
    whole, unique = (
        ids(seed, batch, most, weighted),
        ids(seed + 50, (batch + 1) // 2, most, weighted),
    )
    parts = [(unique if key in ("f2", "f3") else whole)[key] for key in whole.keys]
    random = torch.Generator().manual_seed(seed)
    inverse_B = torch.randint(0, max((batch + 1) // 2, 1), (batch,), generator=random)
    return KeyedJagged(
        keys=whole.keys,
        values_N=torch.cat([p.values_N for p in parts]),
        lengths=torch.cat([p.lengths_B for p in parts]),
        weights_N=(
            torch.cat([2 ** (p.weights_N * 3 - 1).floor() for p in parts]) if weighted else None
        ),
        inverse_B={("f2", "f3"): inverse_B, ("f4",): torch.arange(batch)},
        rows=tuple(len(p.lengths_B) for p in parts),
    )


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


def norm(
    world: World, plan: dict[str, Layout], rule: RowRule, spoilt: bool, shares: int = 1
) -> float:
    """The norm of all gradients, as a step's guard and clipping see it; of so many ranks' shares in
    one process.
    """
    tables_here: Any = tables(rule, ("sum",) * 4, "deferred")
    if world.size > 1:
        shard(tables_here, plan, world, Codecs())
    for rank in range(shares) if world.size == 1 else [world.rank]:
        out = flat(tables_here(ids(rank, 6, 4, False)))
        loss = sum((v * upstream(v.shape, 31 * rank + i)).sum() for i, v in enumerate(out.values()))
        if spoilt and rank == 1:
            loss = loss + out["f2"].sum() * float("inf")
        torch.as_tensor(loss).backward()
    ranks: Any = SimpleNamespace(world=world)
    kind = ManyRanks if world.size > 1 else Ranks
    (squared,) = kind.sums(ranks, [kind.squared_norm(ranks, [], [tables_here])])
    tables_here.discard()
    return math.sqrt(squared)


def fit(
    world: World, prepared: str, run_dir: str, changes: dict[str, Any], again: bool
) -> dict[str, Any]:
    """A training job; with `again` one rank is told to stop in the middle, all do, and another job
    goes on.
    """
    if again:
        half(world, prepared, run_dir, changes)
    return rest(world, prepared, run_dir, changes, again)


def half(world: World, prepared: str, run_dir: str, changes: dict[str, Any]) -> None:
    """A training job of which one rank is told to stop in the middle, and all do."""
    first = Trainer(run_of(prepared, run_dir, **changes))
    take, middle = first.course.take_step, first.job.total_steps // 2

    def told(shares: Any, step: int, flags: tuple[bool, bool]) -> Any:
        return take(shares, step, (world.rank == 1 and step == middle, flags[1]))

    first.course.take_step = told  # type: ignore[assignment]
    assert first.fit()["step"] == middle + 1 < first.job.total_steps
    first.job.ranks.world.leave()


def rest(
    world: World, prepared: str, run_dir: str, changes: dict[str, Any], resume: bool
) -> dict[str, Any]:
    """A training job to its end."""
    trainer = Trainer(run_of(prepared, run_dir, **changes), resume=resume)
    results = trainer.fit()
    trainer.job.ranks.world.leave()
    dense = {name: value.clone() for name, value in trainer.job.model.state_dict().items()}
    return {"results": results, "dense": dense}


def fit_spoilt(
    world: World,
    prepared: str,
    run_dir: str,
    changes: dict[str, Any],
    spoilt: dict[tuple[int, int], tuple[str, int]],
) -> dict[str, Any]:
    """As `fit`, but the loss ("loss"), the scores too ("scores") or a gradient ("gradient") is not
    finite in some.

    spoilt: (step, batch of the step) -> which, and on which rank alone; in one process it befalls
    the whole batch.
    """
    trainer = Trainer(run_of(prepared, run_dir, **changes))
    learn, calls, apiece = (
        trainer.course.take_step.learn,
        itertools.count(),
        trainer.job.run.loop.accumulate,
    )

    def spoiling(batch: Batch) -> tuple[Tensor, Tensor]:
        loss, scores_BT = learn(batch)
        kind, rank = spoilt.get(divmod(next(calls), apiece), ("", 0))
        if not kind or world.rank != rank % world.size:
            return loss, scores_BT
        if kind == "gradient":
            loss.register_hook(lambda grad: grad * float("inf"))
            return loss, scores_BT
        return loss * float("nan"), scores_BT * float("nan") if kind == "scores" else scores_BT

    trainer.course.take_step.learn = spoiling
    results = trainer.fit()
    trainer.job.ranks.world.leave()
    dense = {name: value.clone() for name, value in trainer.job.model.state_dict().items()}
    return {"results": results, "dense": dense}


def scored(kind: str, rows: int = 400) -> dict[str, Tensor]:
    """Rows of two labels with scores, of `kind`: "plain", or what might go wrong."""
    random = torch.Generator().manual_seed(len(kind))
    scores_NT = torch.rand(rows, 2, generator=random)
    found = {
        "scores": scores_NT, "labels": torch.bernoulli(scores_NT, generator=random),
        "weights": torch.rand(rows, generator=random) + 0.1,
        "sessions": torch.randint(0, 60, (rows,), generator=random),
    }  # fmt: skip
    match kind:
        case "ties":
            found["scores"] = (scores_NT * 4).round() / 4
        case "equal scores":
            found["scores"] = torch.full_like(scores_NT, 0.3)
        case "one class":
            found["labels"][:, 0] = 1
        case "no weight":
            found["weights"].zero_()
        case "one group":
            found["sessions"].fill_(7)
        case "groups by the ranks":  # all are the same number modulo 2, 3, 4 and 5
            found["sessions"] *= 60
        case "rows without a group":  # each is alone, see `sparrow.features.transforms`
            found["sessions"][::2] = -1 - torch.arange(rows)[::2]
        case "a NaN":
            found["scores"][3, 0] = torch.nan
        case "a label that rows lack":  # all of the first rank's
            found["labels"][: rows // 3, 1] = torch.nan
            found["labels"][::3, 0] = torch.nan
        case "a label that all rows lack":
            found["labels"][:, 0] = torch.nan
        case "shares":  # on the last rank alone
            found["labels"][-9:] = torch.rand(9, 2, generator=random)
        case "few rows":
            found = {name: column[:3] for name, column in found.items()}
    return found


def evaluated(
    world: World, kind: str, weighted: bool, exact: bool
) -> tuple[list[dict[str, float]], int, int]:
    """Metrics of rows of which each rank scores some, the first one a third; bytes sent for AUC and
    GAUC.
    """
    rows = scored(kind)
    count, others, before = len(rows["scores"]), max(world.size - 1, 1), world.meter.bytes.copy()
    first = count // 3 if world.size > 1 else count
    cuts = [0, *(first + (count - first) * r // others for r in range(world.size))]
    batches = []
    for begin, end in ((0, count // 2), (count // 2, count)):
        low = max(begin, cuts[world.rank])
        high = max(low, min(end, cuts[world.rank + 1]))
        mine = {name: column[low:high] for name, column in rows.items()}
        batches.append(
            Batch(
                dense_BC=mine["scores"], ids=KeyedJagged.from_lists({}), labels_BT=mine["labels"],
                weights_B=mine["weights"] if weighted else None, session_B=mine["sessions"],
            )
        )  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + world.rank)  # which must not show in a bit
    found = evaluate_labels(lambda batch: batch.dense_BC, batches, [0, 1], exact=exact, world=world)
    torch.set_num_threads(threads)
    sent = world.meter.bytes - before
    auc, gauc = (
        sum(n for (what, link), n in sent.items() if what == name and link != "self")
        for name in ("auc", "gauc")
    )
    return found, auc, gauc


def judged_in_parts(world: World, stops: list[int]) -> list[float]:
    """Metrics of a stream in which each rank judges rows of its own, saved and taken up again
    behind these steps.
    """
    drawn = torch.Generator().manual_seed(world.rank)
    mine = Streaming()
    for step in range(12):
        scores_B = torch.rand(50, generator=drawn)
        mine.update(scores_B, (torch.rand(50, generator=drawn) < scores_B).float())
        if step in stops:
            (state,) = folded(world, [mine])
            mine = Streaming()
            mine.load_state_dict(state, world.rank, world.size)
    (state,) = folded(world, [mine])
    return [*state["sums"].flatten().tolist(), *state["masses"].flatten().tolist()]


def refused(world: World, prepared: str, run_dir: str, changes: list[dict[str, Any]]) -> str:
    """What training says that does not begin, each rank with settings of its own. sources: another
    Sparrow's.

    late: files of `init_from` are hard links to those of this folder, each of which is there when
    one waits for it. swap: file of vectors -> the one that lies there on this rank.
    """
    mine, wait = dict(changes[world.rank]), RunDir.await_file
    log, sources, place = (
        mine.pop("log", prepared),
        mine.pop("sources", None),
        mine.pop("run_dir", run_dir),
    )
    late, swap = mine.pop("late", None), mine.pop("swap", {})

    def arrives(folder: RunDir, path: Path, *how: Any) -> None:
        if late and not path.exists() and path.is_relative_to(mine["init_from"]):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(late / path.relative_to(mine["init_from"]), path)
        wait(folder, path, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDir, "await_file", arrives)
        patch.setattr("sparrow.training.rundir.PATIENCE_S", mine.pop("patience_s", 60.0))
        rows = pretrained._rows
        patch.setattr(
            pretrained, "_rows", lambda file, *how: rows(Path(swap.get(str(file), file)), *how)
        )
        digest = pretrained.sha256
        patch.setattr(pretrained, "sha256", lambda file: digest(Path(swap.get(str(file), file))))
        if sources:
            patch.setattr(many_ranks, "_sources", lambda: sources)
        try:
            fit(world, log, place, mine, False)
        except UserError as error:
            return str(error)
    return ""


def refused_fit(
    world: World, prepared: str, run_dir: str, changes: dict[str, Any], resume: bool
) -> tuple[str, int]:
    """What training says that does not begin, and how many models this rank had fitted whole
    before.
    """
    fits = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Offset, "fit", lambda model, *how: fits.append(1))
        try:
            rest(world, prepared, run_dir, changes, resume)
        except UserError as error:
            return str(error), len(fits)
    return "", len(fits)


def fit_with_a_stale_view(
    world: World, prepared: str, run_dir: str, changes: dict[str, Any], late_s: float
) -> str:
    """Two jobs, the second of which goes on; rank 1 sees checkpoints so late and lists none. What a
    rank says.
    """
    exists, begun = Path.exists, dict[Path, float]()

    def late(path: Path, **how: Any) -> bool:
        of_checkpoint = any(part.startswith("step-") for part in path.parts)
        return exists(path, **how) and (
            not of_checkpoint
            or time.monotonic() - begun.setdefault(path, time.monotonic()) > late_s
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparrow.training.rundir.PATIENCE_S", 2.0)
        if world.rank == 1:
            patch.setattr("sparrow.checkpoint.store.steps", lambda directory: [])
            patch.setattr(Path, "exists", late)
        try:
            fit(world, prepared, run_dir, changes, True)
        except UserError as error:
            return str(error)
    return ""


def commanded(world: World, arguments: list[list[str]]) -> str:
    """What `sparrow train` refuses, each rank with arguments of its own."""
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
    ):
        patch.setattr(World, "end", World.leave)
        try:
            command.main(arguments[world.rank])
        except UserError as error:
            return str(error)
    return ""


def begun_with(world: World, local_sizes: list[int]) -> str:
    """What a world says that does not begin: each rank's ranks a host."""
    try:
        begin_world(local_size=local_sizes[world.rank])
    except UserError as error:
        return str(error)
    return ""


HOST = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")


def waits(
    world: World, prepared: str, run_dir: str, changes: dict[str, Any], control: bool
) -> list[str]:
    """What a rank waits for between forward and backward: collectives, and numbers of tensors that
    the host asks for.

    control: with one that does. What the thread beside the loop asks of judged scores keeps no step
    waiting.
    """
    loop = threading.get_ident()
    trainer = Trainer(run_of(prepared, run_dir, **changes))
    learn, seen, between = trainer.course.take_step.learn, list[str](), False

    def learned(batch: Batch) -> tuple[Tensor, Tensor]:
        nonlocal between
        found = learn(batch)
        between = True
        if control:
            world.all_sum("a sum", found[0].detach().clone()).item()
        return found

    def watched(name: str, call: Any, ends: bool = False) -> Any:
        def inner(*given: Any, **more: Any) -> Any:
            nonlocal between
            between = between and not ends
            if between and threading.get_ident() == loop:
                seen.append(name)
            return call(*given, **more)

        return inner

    trainer.course.take_step.learn = learned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.Tensor, "backward", watched("backward", torch.Tensor.backward, ends=True)
        )
        patch.setattr(World, "at", watched("at", World.at))
        patch.setattr(Pending, "wait", watched("wait", Pending.wait))
        for name in HOST:
            patch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
        trainer.fit()
    trainer.job.ranks.world.leave()
    return sorted(set(seen))


def save(world: World, plan: dict[str, Layout], rule: RowRule, directory: str) -> list[Any]:
    """Train a little and save; the chunks that are here."""
    sharded = tables(rule, ("sum", "mean", "sum", "none"), "fused", placement=UNALLOCATED)
    shard(sharded, plan, world, Codecs())
    out = flat(sharded(ids(world.rank, 6, 4, False)))
    torch.as_tensor(sum(v.square().sum() for v in out.values())).backward()
    sharded.update()
    chunks, dense = list(sharded.chunks()), torch.nn.ModuleList([sharded]).state_dict()
    checkpoint.save(
        Path(directory),
        1,
        identity={},
        state={},
        parts={"dense": dense},
        chunks=chunks,
        team=checkpoint.Team(
            rank=world.rank, ranks=world.size, all_written=lambda: world.barrier("checkpoint")
        ),
    )
    world.barrier("checkpoint")
    return plain(chunks)


def load(world: World, plan: dict[str, Layout], rule: RowRule, directory: str) -> list[Any]:
    """What is here of a checkpoint, by another plan."""
    sharded = tables(rule, ("sum", "mean", "sum", "none"), "fused", placement=UNALLOCATED)
    shard(sharded, plan, world, Codecs())
    load_weights(torch.nn.ModuleList([sharded]), checkpoint.load(Path(directory)))
    return plain(sharded.chunks())


def plain(chunks: Any) -> list[Any]:
    """Chunks as plain values."""
    return [
        (c.table, c.rows, c.columns, {n: t.clone() for n, t in c.fields.items()}) for c in chunks
    ]


def launched(
    world: World, prepared: str, run_dir: str, changes: dict[str, Any], lanes: bool
) -> tuple[list[tuple[str, str, str]], dict[str, Any]]:
    """What a rank launched of a training job, in order, and its last evaluation. lanes: as on
    GPUs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshWorld, "has_lanes", lanes)
        trainer = Trainer(run_of(prepared, run_dir, **changes))
        results = trainer.fit()
        order = list(trainer.job.ranks.world.launched)
        trainer.job.ranks.world.leave()
    return order, results["valid"]


def operands(size: int) -> list[tuple[str, Operands]]:
    """Operands of four products, as so many ranks see them: (site, operands), rank after rank.

    c is of two activations; d too, and in the share of each rank it has another size.
    """
    found, random = [], torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random) * 2 + 3

    for rank in range(size):
        for name, columns in (("a", 5), ("b", 4)):
            rows = 0 if name == "b" and rank == 0 else 7 + 3 * rank
            found.append(
                (name, Operands(drawn(rows, columns), torch.ones(2, columns), drawn(rows, 2), rows))
            )
        for name, longer in (("c", 0), ("d", rank)):
            rows, x, y = 5 + rank, 3 + longer, 2 + longer
            two = Operands(drawn(rows, x, 4), drawn(rows, y, 4), drawn(rows, x, y), rows * x, True)
            found.append((name, two))
    return [(name, of) for name, of in found if of.rows]


def probed(world: World, run_dir: str) -> None:
    """A probe of which each rank sees its share of `operands`."""
    mine, at = Probe(torch.nn.Linear(1, 1), 64, world, folder=Path(run_dir)), 0
    for name, of in operands(world.size):
        at += name == "a"  # each rank has rows of it
        if at - 1 == world.rank:
            mine.see(name, of)
    mine.before_save(3)


def settled(
    world: World, prepared: str, run_dir: str, changes: dict[str, Any]
) -> tuple[Precision, Precision, int | None, list[str]]:
    """The precision on which `auto` settles, once more for a run that goes on, and what it refuses.

    By the times of rank 0 bf16 is faster, and by all others' fp32. Also how many rows the probe had
    seen of the head.
    """
    seen: list[int] = []
    gathered, init = auto.gather_sites, Probe.__init__

    def gathering(found: Any, dataset: Any, learned: Any, told: Any) -> Any:
        seen.append(learned["head.weight"].x.count)
        return gathered(found, dataset, learned, told)

    def times(of: Operands, which: str, there: dict[str, Any]) -> dict[str, float]:
        return {name: 2.0 if (name == "fp32") == (world.rank == 0) else 1.0 for name in there}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "STEPS", 6)
        patch.setattr(auto, "ROWS", 300)
        patch.setattr(auto, "BUDGET", 1.0)
        patch.setattr(auto, "gather_sites", gathering)
        patch.setattr(
            Probe,
            "__init__",
            lambda self, *args, **how: init(self, *args, **{"interval": 3, **how}),
        )
        patch.setattr("sparrow.apps.numerics.dispatch.milliseconds", times)
        patch.setattr("sparrow.layers.precisions.bf16.missing", lambda device: "")
        run = run_of(prepared, run_dir, **changes)
        first = auto.choose_precision(run, resume=False, overwrite=False).precision
        refused = []
        patch.setattr(auto, "_try", lambda *what: pytest.fail("it trained"))
        again = auto.choose_precision(run, resume=True, overwrite=False).precision
        for more in ({"compile": True}, {"sharding.ranks_per_host": 1}):
            if "tiers.folder" in changes or "compile" in more:
                with pytest.raises(UserError) as error:
                    auto.choose_precision(
                        run_of(prepared, run_dir, **changes | more), resume=False, overwrite=True
                    )
                refused.append(str(error.value))
    return first, again, seen[0] if seen else None, [*refused, ""][:2]


def agreed(
    world: World, prepared: str, run_dir: str, settings: list[dict[str, Any]], drifts: bool
) -> dict[str, Any]:
    """A training job, each rank with settings of its own: all that every rank is to have alike.

    drifts: whether the last rank's dense weights are others before the last checkpoint, as of
    another processor.
    """
    notes: list[str] = []
    fits = [world.rank]

    def hear(event: str, values: dict[str, Any]) -> None:
        notes.extend([values["text"]] if event == "note" else [])

    trainer = Trainer(
        run_of(prepared, run_dir, **settings[world.rank % len(settings)]), listener=hear
    )
    fitted = getattr(trainer.job.model.model, "fit", None)
    if fitted is not None:
        trainer.job.model.model.fit = lambda *of: (fits.append(world.rank), fitted(*of))
    save, last = trainer.checkpointer.save, trainer.job.total_steps

    def drift(progress: Progress) -> None:
        is_new = progress.step == last != trainer.checkpointer.saved_step
        if drifts and world.rank == world.size - 1 and is_new:
            with torch.no_grad():
                trainer.job.dense[0].mul_(1 + 1e-6)
        save(progress)

    trainer.checkpointer.save = drift  # type: ignore[method-assign]
    results = trainer.fit()
    trainer.job.ranks.world.leave()
    dense = {name: value.clone() for name, value in trainer.job.model.state_dict().items()}
    state = optimizer_state(trainer.job.model, trainer.job.optimizer)
    kept = {":".join(names): value.clone() for names, value in state.items()}
    parts = results["best"].get("parts", {})
    return {
        "dense": dense,
        "optimizer": kept,
        "parts": parts,
        "notes": notes,
        "fits": len(fits) - 1,
    }
