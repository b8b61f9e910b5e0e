"""What one rank of `benchmarks/sharded.py` runs: steps of a DLRM whose tables are sharded by each
of some plans.

    torchrun --nproc-per-node 2 benchmarks/cluster/rank_job.py --cases table_wise:fp32,row_wise:bf16

First the losses of some steps must be those of one process; then the cases take turns, some steps
each. Prints a line of JSON: {"rank", "link", "cases": {case: {"ms", "cpu_ms", "main_ms", "parts",
...}}}, all per step. ms: the median. cpu_ms: of CPU, main_ms: of that in the main thread (the rest
is Gloo's and the kernel's for it).
parts: milliseconds by what the rank was at: "compute", "tables" (lookups and updates), "exchange"
(cutting, packing, unpacking) and "wait: WHAT" of what was sent. bytes: [what, link, bytes] as
`World.meter` counts them; wire: bytes that left by each device of the host, headers included.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from box import ready

from sparrow.core import Batch, KeyedJagged
from sparrow.data.batches.loader import Share
from sparrow.distributed import World
from sparrow.distributed.codecs import cast, mx
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.models import dlrm
from sparrow.sharding import ShardedExchange
from sparrow.trained.build import tables_of
from sparrow.trained.run import Data, Loop, Run, Sharding
from sparrow.training.begin import begin_ranks
from sparrow.training.callbacks import Callback, Outcome
from sparrow.training.ranks import Ranks
from sparrow.training.step import Step

# the last LISTS features have LENGTH ids a sample, others one
TABLES, LISTS, LENGTH, NUMBERS, DIM = 26, 6, 10, 13, 16
ROWS = [int(100 * 1.4**i) for i in range(TABLES)]  # 100 to 450 thousand, 1.6 million together
# of losses, relative
CLOSE = {"fp32": 1e-5, "bf16": 2e-3, "mxint8": 2e-3, "mxfp8": 1e-2, "mxfp6": 1e-2, "mxfp4": 5e-2}


def schema() -> Schema:
    """13 numbers, 26 tables."""
    columns = {"label": Column(kind="label")} | {
        f"I{i}": Column(kind="numeric") for i in range(NUMBERS)
    }
    for i in range(TABLES):
        of = {"kind": "list", "pooling": "sum"} if i >= TABLES - LISTS else {"kind": "categorical"}
        columns[f"C{i}"] = Column(table=f"C{i}", **of)  # type: ignore[arg-type]
    return Schema(
        columns=columns,
        encodings={f"C{i}": Encoding(kind="range", rows=n) for i, n in enumerate(ROWS)},
    )


def made(size: int, seed: int) -> Batch:
    """A batch: few ids are frequent, most are rare."""
    random = torch.Generator().manual_seed(seed)
    lengths = [1] * (TABLES - LISTS) + [LENGTH] * LISTS
    each = [
        (n * torch.rand(size * many, generator=random) ** 4).long()
        for n, many in zip(ROWS, lengths, strict=True)
    ]
    return Batch(
        dense_BC=torch.randn(size, NUMBERS, generator=random),
        ids=KeyedJagged(
            keys=tuple(f"C{i}" for i in range(TABLES)), values_N=torch.cat(each),
            lengths=torch.tensor(lengths).repeat_interleave(size),
        ),
        labels_BT=(torch.rand(size, 1, generator=random) < 0.25).float(),
    )  # fmt: skip


class Clock:
    """Wall time by what this rank is at; one thing at a time."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.at, self._since = "compute", time.perf_counter()

    def turn(self, to: str) -> str:
        """From now on it is something else; gives what it was."""
        now, before = time.perf_counter(), self.at
        self.spent[before] += now - self._since  # type: ignore[assignment]
        self.at, self._since = to, now
        return before

    def timed(
        self, what: str, call: Callable[..., Any], then: str | None = None
    ) -> Callable[..., Any]:
        """The call, counted for `what`; behind it comes `then`, or what was before."""

        def inner(*given: Any) -> Any:
            before = self.turn(what)
            found = call(*given)
            self.turn(then or before)
            return found

        return inner

    def waits(self, world: World) -> None:
        """Count what the world waits for."""
        plain = world.at

        @contextmanager
        def at(what: str) -> Iterator[None]:
            before = self.turn(f"wait: {what}")
            with plain(what):
                yield
            self.turn(before)

        world.at = at  # type: ignore

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A part of a step. Backward ends with a wait for the dense gradients."""
        before = self.turn("tables" if name == "table update" else "compute")
        yield
        self.turn(before)


class _Clocked(Callback):
    """Sends the ids of the next step in the forward of this one, and tells a clock what a step is
    at.
    """

    def __init__(self, case: Case, clock: Clock | None) -> None:
        self._case, self._clock = case, clock

    def stage(self, name: str) -> AbstractContextManager[object]:
        return self._clock.stage(name) if self._clock else nullcontext()

    def look_ahead(self, step: int, waiting: Sequence[Share]) -> None:
        assert self._case.coming is not None
        for tables in self._case.tables:
            if tables.exchange.is_sharded:
                tables.prefetch(self._case.coming)


class Case:
    """A model, sharded in one way, and its step. log: what it is trained on, `schema()` unless
    told.
    """

    def __init__(
        self, run: Run, first: Ranks, clock: Clock | None = None, log: Schema | None = None
    ) -> None:
        torch.manual_seed(run.seed)
        self.ranks = copy.copy(first)  # of the same world
        self.model = model = self.ranks.build(run, log or schema())
        tables = tables_of(model)
        for one in tables:
            one.mode = run.loop.table_mode
            if clock and isinstance(one.exchange, ShardedExchange):
                road = one.exchange.group
                road.send = clock.timed("exchange", road.send)  # type: ignore[method-assign]
                road.lookup = clock.timed("exchange", road.lookup)  # type: ignore[method-assign]
                road._assemble = clock.timed("exchange", road._assemble)  # type: ignore[method-assign]
                road.send_grads = clock.timed("exchange", road.send_grads)  # type: ignore[method-assign]
                road.learn = clock.timed("exchange", road.learn, "wait: dense gradients")  # type: ignore[method-assign]
            if clock:
                local = one.exchange.parts[0]
                local.run_lookup = clock.timed("tables", local.run_lookup)
                local.run_backward = clock.timed("tables", local.run_backward)
        optimizer = run.dense.build([p for p in model.parameters() if p.requires_grad])
        self.coming: KeyedJagged | None = None  # the ids of the next step
        self.take_step = Step(run, model, tables, optimizer, self.ranks, _Clocked(self, clock))
        self.tables = tables
        self.dense = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.ms: list[float] = []
        self.cpu_s, self.main_s, self.parts = 0.0, 0.0, Counter[str]()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.wire: Counter[str] = Counter()

    def step(self, share: Share, following: Share) -> Outcome:
        """One step, as the training loop takes it: the ids of the next one leave in its forward."""
        self.coming = following.batch.ids
        return self.take_step([share], 0, (False, False))

    def losses(self, batches: list[Batch]) -> list[float]:
        """The global loss of a step on each batch."""
        rank, ranks = self.ranks.world.rank, self.ranks.world.size
        cuts = [(b.batch_size * rank // ranks, b.batch_size * (rank + 1) // ranks) for b in batches]
        self.shares = [
            Share(b.part(*cut), b.batch_size, b.mass) for b, cut in zip(batches, cuts, strict=True)
        ]
        ends = [*self.shares[1:], self.shares[0]]
        found = [self.step(*pair).losses for pair in zip(self.shares, ends, strict=True)]
        return [float(total / mass) for total, mass in found]

    def timed(self, clock: Clock) -> None:
        """A step on each batch, all measured. Each sends the ids of the next one, the last those of
        the first, which a step before them has sent: as many leave as are looked up.
        """
        world, shares = self.ranks.world, self.shares
        self.step(shares[-1], shares[0])
        world.barrier("beginning")
        clock.turn("compute")
        clock.spent.clear()
        meter, wire, cpu, main = (
            world.meter.bytes.copy(),
            sent(),
            time.process_time(),
            time.thread_time(),
        )
        for share, following in zip(shares, [*shares[1:], shares[0]], strict=True):
            begin = time.perf_counter()
            self.step(share, following)
            self.ms.append(1000 * (time.perf_counter() - begin))
        clock.turn("compute")
        self.parts.update(clock.spent)
        self.cpu_s += time.process_time() - cpu
        self.main_s += time.thread_time() - main
        self.bytes.update(world.meter.bytes - meter)
        world.barrier("end")  # what other ranks of the host have sent is sent
        self.wire.update({name: count - wire[name] for name, count in sent().items()})

    def found(self) -> dict[str, Any]:
        """Everything per step."""
        steps = len(self.ms)
        return {
            "ms": statistics.median(self.ms),
            "cpu_ms": 1000 * self.cpu_s / steps,
            "main_ms": 1000 * self.main_s / steps,
            "dense": self.dense,
            "parts": {name: 1000 * s / steps for name, s in self.parts.items()},
            "bytes": [
                [what, link, count / steps] for (what, link), count in sorted(self.bytes.items())
            ],
            "wire": {name: count / steps for name, count in self.wire.items()},
        }


def sent() -> dict[str, int]:
    """Bytes sent so far by each network device of this host."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return {line.split(":")[0].strip(): int(line.split(":")[1].split()[8]) for line in lines}


def link(world: World) -> dict[str, float]:
    """From rank 0 to the first of the next host and back: Mbit/s of 2 MB, microseconds of a round
    trip.
    """
    if world.hosts == 1:
        return {}
    other = {0: world.local_size, world.local_size: 0}.get(world.rank)
    found: dict[str, float] = {}
    for name, size, times in (("us", 1, 20), ("mbit", 2_000_000, 3)):
        each = []
        for _ in range(times) if other is not None else ():
            begin, block = time.perf_counter(), torch.zeros(size, dtype=torch.uint8)
            order = (dist.send, dist.recv) if world.rank == 0 else (dist.recv, dist.send)
            for call in order:
                call(block, other)
            each.append(time.perf_counter() - begin)
        if each:
            took = statistics.median(each)
            found[name] = 1e6 * took if name == "us" else 2 * 8 * size / took / 1e6
    world.barrier("link")
    return found


def settings(plan: str, codec: str, dim: int = DIM) -> Run:
    """The run of a case."""
    narrow: Any = mx.Config(format=codec) if codec.startswith("mx") else cast.Config(dtype=codec)  # type: ignore
    return Run(
        run_dir="unused",
        data=Data(path="unused"),
        model=dlrm.Config(dim=dim, bottom=(64,), top=(128, 64)),
        loop=Loop(),
        sharding=Sharding(plan=plan, forward=narrow, backward=narrow, timeout_s=120),
        threads=1,
    )


def main() -> None:
    """Check, take turns, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="table_wise:fp32", help="PLAN:CODEC, ...")
    parser.add_argument("--batch", type=int, default=1024, help="samples of all ranks together")
    parser.add_argument("--steps", type=int, default=10, help="of each case in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dim", type=int, default=DIM, help="of all vectors")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    names = asked.cases.split(",")
    runs = {}
    for name in names:
        plan, codec = name.split(":")
        runs[name] = settings(plan, codec, asked.dim)
    first, plain = begin_ranks(runs[names[0]]), settings("auto", "fp32", asked.dim)
    world, clock = first.world, Clock()
    batches = [made(asked.batch, seed) for seed in range(asked.steps)]
    with world.watched():
        want: list[float] = []
        if world.rank == 0:
            with mock.patch.dict(os.environ, {"WORLD_SIZE": "1"}):
                alone = begin_ranks(plain)
            want = Case(plain, alone).losses(batches)
        # rank 0's, and zeros
        everyone = torch.tensor(want or [0.0] * asked.steps, dtype=torch.float64)
        want = world.all_sum("losses of one process", everyone).tolist()
        clock.waits(world)
        cases = {}
        for name in names:
            cases[name] = Case(runs[name], first, clock)
            for step, (loss, goal) in enumerate(
                zip(cases[name].losses(batches), want, strict=True)
            ):
                if abs(loss - goal) > CLOSE[name.split(":")[1]] * goal:
                    raise SystemExit(
                        f"{name}: the loss of step {step} is {loss}, of one process {goal}"
                    )
        ready()
        speed = link(world)
        for _ in range(asked.rounds):
            for case in cases.values():
                case.timed(clock)
    print(
        json.dumps(
            {
                "rank": world.rank,
                "link": speed,
                "cases": {n: case.found() for n, case in cases.items()},
            }
        )
    )
    world.end()


if __name__ == "__main__":
    main()
