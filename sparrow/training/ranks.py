"""One training job on many ranks: what each does of a batch, and what all must agree on. With one rank, nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparrow import kernels, sharding
from sparrow.core import Batch, UserError
from sparrow.core.config import flatten, to_dict
from sparrow.distributed import World, check_same
from sparrow.embeddings import EmbeddingTables
from sparrow.features.schema import Schema
from sparrow.layers import drawing, drops
from sparrow.losses import Loss, judged
from sparrow.sharding import Codecs, Layout, ShardedTables
from sparrow.sharding.plan import Grid
from sparrow.trained.build import build, tables_of
from sparrow.trained.run import Run
from sparrow.training.again import Again

MAY_DIFFER = ("run_dir", "data.path", "init_from", "sharding.plan", "device", "threads", "ssd")
"""Settings that ranks may have each for itself: names under which they see the same files (what those hold is
compared), the device of its kind, and threads, of which nothing that all ranks must have in common depends."""


class Ranks:
    """Every rank reads, computes and judges its share of each batch. The batches are the same as on one process."""

    def __init__(self, run: Run) -> None:
        setting = run.sharding
        self.world = World.begin(run.device, setting.ranks_per_host, setting.timeout_s)
        self.leads = self.world.rank == 0
        self.again = Again(self.world, Path(run.run_dir))
        if self.world.size > 1 and run.compile:
            raise UserError("compile: not on many ranks yet; leave it out")
        self.plan: dict[str, Layout] = {}  # of all tables, on many ranks

    def check_same(self, run: Run, fingerprint: str, step: int) -> None:
        """Check that all ranks are about to run the same job.

        Args:
            run: this rank's settings.
            fingerprint: of the prepared log.
            step: the one to go on from.

        Raises:
            UserError: on every rank, when their jobs differ. It names what differs, ranks and values.
        """
        if self.world.size == 1:
            return
        settings = flatten(to_dict(run, unset=True))
        held = {name: value for name, value in settings.items() if name not in MAY_DIFFER}
        held |= {"device": torch.device(run.device).type, "prepared log": fingerprint[:12], "step": step}
        held |= {"sources of Sparrow": _sources(), "torch": torch.__version__}
        held["compiled kernels"] = "missing" if kernels.missing() else "loaded"
        check_same(self.world, "settings", held)

    def build(self, run: Run, schema: Schema) -> Any:
        """Returns the model, its tables sharded by the run's plan. What `learner` returns has the log's loss.

        Raises:
            UserError: for a plan or a loss that does not fit, and when a model with dropout is to be compiled.
        """
        setting = run.sharding
        self._loss = run.loss.build(schema.labels)

        def shard(model: nn.Module) -> None:
            components = [record.component for tables in tables_of(model) for record in tables.all_records()]
            self.plan = sharding.plan(setting.plan, components, Grid(self.world.hosts, self.world.local_size))
            check_same(self.world, "the plan", flatten({"plan": {name: to_dict(v) for name, v in self.plan.items()}}))
            sharding.shard(model, self.plan, self.world, Codecs(forward=setting.forward, backward=setting.backward))

        model = build(run, schema, shard if self.world.size > 1 else None)
        if run.compile and drops(model):
            raise UserError("compile: not with model.dropout yet; leave one of them out")
        return model

    def learner(self, model: Any, run: Run) -> Callable[[Batch], tuple[Tensor, Tensor]]:
        """Returns a function Batch -> `judged`. Its dense gradients are summed over all ranks while backward runs."""
        if self.world.size == 1:
            return lambda batch: learn(batch, model, self._loss, run.seed)
        dense = self.world.group()  # of its own: its sums overlap the tables' exchange
        learner = _Learner(model, self._loss, run.seed)
        rows = [name for name, _ in learner.named_buffers()]  # each rank has others
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(learner, rows)
        # find_unused_parameters: else DDP makes other buckets from the second step on, and an all-reduce adds in an
        # order that depends on the place in the bucket; a resumed run has a first step too
        self._ddp = DistributedDataParallel(learner, process_group=dense, init_sync=False, find_unused_parameters=True)
        narrow = torch.bfloat16 if run.sharding.dense == "bf16" else None
        self._ddp.register_comm_hook((self.world, dense, narrow), _sum)
        return self._ddp

    def apart(self) -> AbstractContextManager[None]:
        """Returns a context in which dense gradients stay where they are, for all but the last of a step's batches."""
        return nullcontext() if self.world.size == 1 else self._ddp.no_sync()

    def sums(self, values: Sequence[Tensor], *numbers: float) -> list[float]:
        """Returns the sums over all ranks of values and of numbers. values: tensors [], which may be on a device.

        This is where the host waits for a GPU in each step.
        """
        device = values[-1].device  # the norm of nothing is on the host
        here = [value.to(device, non_blocking=True) for value in values]
        mine = torch.cat([torch.stack(here).double().cpu(), torch.tensor(numbers, dtype=torch.float64)])
        found: list[float] = self.world.all_sum("what a step found", mine).tolist()
        return found

    def squared_norm(self, dense: Sequence[Tensor], tables: Sequence[EmbeddingTables]) -> Tensor:
        """Returns this rank's part of the squared norm of all gradients of the model together, float64 []."""
        for t in tables:
            t.gradients()  # copied tables' are everyone's from now on
        parts = [t.components for t in tables]
        sharded = [part for part in parts if isinstance(part, ShardedTables)]
        copied = [g.grad_UD for part in sharded for g in part.copies.gradients().values()]
        own = [part.local if isinstance(part, ShardedTables) else part for part in parts]
        here = [g.grad_UD for part in own for g in part.gradients().values()]
        if self.world.size == 1:
            return torch.nn.utils.get_total_norm([*dense, *here]).double().square()
        squared = torch.nn.utils.get_total_norm(here).double().square()
        if self.world.rank == 0:  # of what all have, one rank's: a last bit of it may hang on a processor or threads
            squared = squared + torch.nn.utils.get_total_norm([*dense, *copied]).double().square()
        return squared


def _sources() -> str:
    """Returns a digest of this Sparrow's code."""
    digest, root = hashlib.sha256(), Path(sharding.__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


def learn(batch: Batch, model: Any, loss: Loss, seed: int) -> tuple[Tensor, Tensor]:
    """Returns what `judged` does of a batch in training. seed: of what is drawn for its rows."""
    with drawing(seed, batch.row_B):
        return judged(model(batch), batch, loss)


class _Learner(nn.Module):
    def __init__(self, model: Any, loss: Loss, seed: int) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.seed = seed

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        for tables in tables_of(self.model):
            tables.begin(batch.ids)
        return learn(batch, self.model, self.loss, self.seed)


def _sum(
    state: tuple[World, dist.ProcessGroup, torch.dtype | None], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """DDP's exchange: the sum over ranks (its own is the mean), rounded to a narrower format on the way if told."""
    world, group, narrow = state
    buffer = bucket.buffer()
    sent = buffer if narrow is None else buffer.to(narrow)
    world.count("dense gradients", sent, 2)
    world.launches("dense gradients", "dense")
    future = dist.all_reduce(sent, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


# DDP compares these with the classes themselves
_sum.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
