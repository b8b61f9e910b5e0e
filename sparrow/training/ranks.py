"""One training job on many ranks: what each does of a batch, and what all must agree on. With one rank, nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparrow import sharding
from sparrow.core import Batch, UserError
from sparrow.data.schema import Schema
from sparrow.distributed import World, watch
from sparrow.embeddings import EmbeddingTables
from sparrow.losses import judged
from sparrow.sharding import Layout, ShardedTables
from sparrow.training.feed import Portion
from sparrow.training.restore import build, tables_of
from sparrow.training.run import Run


class Ranks:
    """Every rank reads the same batches, in the order of one process, and computes its share of each."""

    def __init__(self, run: Run) -> None:
        setting = run.sharding
        self.world = World.begin(run.device, setting.ranks_per_host, setting.timeout_s)
        self.leads = self.world.rank == 0
        # what an earlier attempt began is gone on with; what it found here is not
        self.restarted = watch.attempt() > 0 and watch.store("run").check(["begun"])
        if self.world.size > 1 and run.compile:
            raise UserError("compile: not on many ranks yet; leave it out")
        self.plan: dict[str, Layout] = {}  # of all tables, on many ranks

    def build(self, run: Run, schema: Schema) -> Any:
        """The model, its tables sharded by the run's plan."""
        setting = run.sharding

        def shard(model: nn.Module) -> None:
            specs = [record.spec for tables in tables_of(model) for record in tables.all_records()]
            self.plan = sharding.plan(setting.plan, specs, self.world)
            sharding.shard(model, self.plan, self.world, setting.forward, setting.backward)

        return build(run, schema, shard if self.world.size > 1 else None)

    def learner(self, model: Any, run: Run) -> Callable[[Batch], tuple[Tensor, Tensor]]:
        """Batch -> `judged`, whose dense gradients are summed over all ranks while backward runs."""
        if self.world.size == 1:
            return lambda batch: judged(model(batch), batch)
        dense = self.world.group()  # of its own: its sums overlap the tables' exchange
        learner = _Learner(model)
        rows = [name for name, _ in learner.named_buffers()]  # each rank has others
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(learner, rows)
        # find_unused_parameters: else DDP makes other buckets from the second step on, and an all-reduce adds in an
        # order that depends on the place in the bucket; a resumed run has a first step too
        self._ddp = DistributedDataParallel(learner, process_group=dense, init_sync=False, find_unused_parameters=True)
        narrow = torch.bfloat16 if run.sharding.dense == "bf16" else None
        self._ddp.register_comm_hook((self.world, dense, narrow), _sum)
        return self._ddp

    def begun(self) -> None:
        """The run directory holds this job's run: when torchrun starts the ranks again, they go on with it."""
        if self.leads and "TORCHELASTIC_RESTART_COUNT" in os.environ:
            watch.store("run").set("begun", "")

    def apart(self) -> AbstractContextManager[None]:
        """In which dense gradients stay where they are, for all but the last of a step's batches."""
        return nullcontext() if self.world.size == 1 else self._ddp.no_sync()

    def share(self, batch: Batch) -> Batch:
        """This rank's samples: one block of nearly as many as any other's."""
        if self.world.size == 1:
            return batch
        return batch.part(*self._cut(batch.batch_size, self.world.rank))

    def portion(self, batch: Batch, device: torch.device) -> Portion:
        """A batch with this rank's share of it on its device."""
        if self.world.size == 1:
            batch = batch.to(device)
            return Portion(batch, batch)
        return Portion(batch, self.share(batch).to(device))

    def _cut(self, samples: int, rank: int) -> tuple[int, int]:
        return samples * rank // self.world.size, samples * (rank + 1) // self.world.size

    def together(self, scores_BT: Tensor, samples: int, *numbers: float) -> tuple[Tensor, list[float]]:
        """Everyone's scores in the batch's order, [samples, T]; the sums of everyone's numbers."""
        if self.world.size == 1:
            return scores_BT, list(numbers)
        parts = [self._cut(samples, rank) for rank in range(self.world.size)]
        tasks, most = scores_BT.shape[1], max(high - low for low, high in parts)
        mine = torch.zeros(len(numbers) + most * tasks, dtype=torch.float64)
        mine[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        mine[len(numbers) : len(numbers) + scores_BT.numel()] = scores_BT.detach().flatten().double().cpu()
        everyone = self.world.all_gather("scores", mine, same=True)
        scores = [one[len(numbers) :][: (high - low) * tasks] for one, (low, high) in zip(everyone, parts, strict=True)]
        sums = torch.stack([one[: len(numbers)] for one in everyone]).sum(0).tolist()
        return torch.cat(scores).view(samples, tasks).to(scores_BT.dtype), sums

    def scoring(self, score: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """`score` of whole batches, of which every rank computes its share."""
        return lambda batch: self.together(score(self.share(batch)), batch.batch_size)[0]

    def norm(self, dense: Sequence[Tensor], tables: Sequence[EmbeddingTables | ShardedTables]) -> float:
        """The norm of all gradients of the model together."""
        for t in tables:
            t.gradients()  # copied tables' are everyone's from now on
        copied = [g.grad_UD for t in tables if isinstance(t, ShardedTables) for g in t.copies.gradients().values()]
        whole = [t for t in tables if isinstance(t, EmbeddingTables)]
        local = [t.local for t in tables if isinstance(t, ShardedTables)]
        here = [g.grad_UD for t in (*whole, *local) for g in t.gradients().values()]
        if self.world.size == 1:
            return float(torch.nn.utils.get_total_norm([*dense, *here]))
        everywhere = torch.nn.utils.get_total_norm([*dense, *copied])
        squares = torch.nn.utils.get_total_norm(here).double().square().cpu().reshape(1)
        return float((self.world.all_sum("gradient norm", squares) + everywhere.double().square().cpu()).sqrt())


class _Learner(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        for tables in tables_of(self.model):
            if isinstance(tables, ShardedTables):
                tables.begin(batch.ids)
        return judged(self.model(batch), batch)


def _sum(
    state: tuple[World, dist.ProcessGroup, torch.dtype | None], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """DDP's exchange: the sum over ranks (its own is the mean), rounded to a narrower format on the way if told."""
    world, group, narrow = state
    buffer = bucket.buffer()
    sent = buffer if narrow is None else buffer.to(narrow)
    world.count("dense gradients", sent, 2)
    future = dist.all_reduce(sent, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


# DDP compares these with the classes themselves
_sum.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
