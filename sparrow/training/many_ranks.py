"""One training job on many ranks. One process does not load this."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from sparrow import kernels, sharding
from sparrow.core import Batch, UserError
from sparrow.core.comparison import settings_of_each_rank, with_extensions
from sparrow.core.config import flatten, to_dict
from sparrow.core.errors import counted
from sparrow.core.extensions import settings_names
from sparrow.distributed import Grid, World, check_same
from sparrow.distributed.mesh import MeshWorld
from sparrow.distributed.places import EVERYWHERE, place_of
from sparrow.distributed.sharing import share
from sparrow.embeddings import EmbeddingTables
from sparrow.losses import Loss
from sparrow.sharding import Codecs
from sparrow.trained.build import records_of, tables_of
from sparrow.trained.dense import common_weights, optimizer_state, places
from sparrow.trained.run import Run
from sparrow.training.ranks import Ranks, gradients_of, learn

MAY_DIFFER = ("run_dir", "data.path", "init_from", "sharding.plan", "device", "threads")
"""Settings that ranks may have each for itself: names under which they see the same files (what
those hold is compared), the device of its kind, and threads, of which nothing that all ranks must
have in common depends.
"""


class ManyRanks(Ranks):
    """See `Ranks`. Tables are sharded, and the gradients of dense weights are summed over all
    ranks.

    Raises:
        UserError: for what is only for one process.
    """

    world: MeshWorld

    def __init__(self, run: Run, world: World) -> None:
        super().__init__(run, world)
        if run.compile:
            raise UserError("compile: not on many ranks yet; leave it out")

    @override
    def check_same(self, run: Run, fingerprint: str, step: int) -> None:
        complete = with_extensions(run, settings_names())
        settings = flatten(to_dict(complete, unset=True))
        may_differ = {*MAY_DIFFER, *settings_of_each_rank()}
        held = {name: value for name, value in settings.items() if name not in may_differ}
        held |= {
            "device": torch.device(run.device).type,
            "prepared log": fingerprint[:12],
            "step": step,
        }
        held |= {"sources of Sparrow": _sources(), "torch": torch.__version__}
        held["compiled kernels"] = "missing" if kernels.missing() else "loaded"
        check_same(self.world, "settings", held)

    @override
    def _shard_by(self, run: Run) -> Callable[[nn.Module], None]:
        setting = run.sharding

        def shard(model: nn.Module) -> None:
            components = [record.component for record in records_of(model)]
            plan = sharding.plan(
                setting.plan, components, Grid(self.world.hosts, self.world.local_size)
            )
            check_same(
                self.world,
                "the plan",
                flatten({"plan": {name: to_dict(v) for name, v in plan.items()}}),
            )
            codecs = Codecs(forward=setting.forward, backward=setting.backward)
            sharding.shard(model, plan, self.world, codecs, run.placement)
            grid = f"{counted(self.world.size, 'rank')} on {counted(self.world.hosts, 'host')}"
            self.layouts = f"{grid}; tables: {sharding.summary(plan)}" if plan else ""

        return shard

    @override
    def learner(self, model: Any, run: Run) -> Callable[[Batch], tuple[Tensor, Tensor]]:
        dense = self.world.group()  # of its own: its sums overlap the tables' exchange
        learner = _Learner(model, self._loss, run.seed)
        rows = [name for name, _ in learner.named_buffers()]  # each rank has others
        apart = [*rows, *places(learner)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(learner, apart)
        # find_unused_parameters: else DDP makes other buckets from the second step on, and an
        # all-reduce adds in an order that depends on the place in the bucket; a resumed run has a
        # first step too
        self._ddp = DistributedDataParallel(
            learner, process_group=dense, init_sync=False, find_unused_parameters=True
        )
        narrow = torch.bfloat16 if run.sharding.dense == "bf16" else None
        self._ddp.register_comm_hook((self.world, dense, narrow), _sum)
        return self._ddp

    @override
    def take_rank0s(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, say: Callable[[str], None]
    ) -> None:
        placed = places(model)
        state = {
            f"{name}:{key}": values
            for (name, key), values in optimizer_state(model, optimizer).items()
            if name not in placed
        }
        weights = share(self.world, "dense weights", common_weights(model))
        if weights:
            model.load_state_dict({**model.state_dict(), **weights})
        numbers = share(self.world, "state of the optimizer", state)
        for name, values in numbers.items():
            state[name].copy_(values)
        if drifted := [name for name, _ in model.named_parameters() if name in weights]:
            why = "as on processors that round differently; all go on with rank 0's"
            say(f"{counted(len(drifted), 'dense weight')} differed between ranks, {why}")

    @override
    def apart(self) -> AbstractContextManager[None]:
        return self._ddp.no_sync()

    @override
    def sum_placed(self, dense: Sequence[nn.Parameter]) -> None:
        for parameter in dense:
            if (place := place_of(parameter)) != EVERYWHERE:
                if parameter.grad is None:  # this rank's rows did not reach it
                    parameter.grad = torch.zeros_like(parameter)
                self.world.all_sum("dense gradients", parameter.grad, place.dim)

    @override
    def squared_norm(
        self, dense: Sequence[nn.Parameter], tables: Sequence[EmbeddingTables]
    ) -> Tensor:
        for t in tables:
            t.gradients()  # copied tables' are everyone's from now on
        sharded_grads: list[Tensor] = []
        copied_grads: list[Tensor] = []
        for part in chain.from_iterable(t.exchange.parts for t in tables):
            grads = [gradients.grad_UD for gradients in part.gradients().values()]
            (copied_grads if part.is_copied else sharded_grads).extend(grads)
        squared = torch.nn.utils.get_total_norm(sharded_grads).double().square()
        # of what several have, one rank's: a last bit of it may hang on a processor or threads
        own = [p for p in dense if self.world.ranks(place_of(p).dim)[0] == self.world.rank]
        if counted_grads := [*gradients_of(own), *(copied_grads if self.world.rank == 0 else ())]:
            squared = squared + torch.nn.utils.get_total_norm(counted_grads).double().square()
        return squared


def _sources() -> str:
    """Returns a digest of this Sparrow's code."""
    digest = hashlib.sha256()
    root = Path(sharding.__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        file_digest = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {file_digest}\n".encode())
    return digest.hexdigest()[:12]


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
    state: tuple[MeshWorld, dist.ProcessGroup, torch.dtype | None], bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """DDP's exchange: the sum over ranks (its own is the mean), rounded to a narrower format on the
    way if told.
    """
    world, group, narrow = state
    buffer = bucket.buffer()
    sent = buffer if narrow is None else buffer.to(narrow)
    world.count("dense gradients", sent, 2)
    world.launches("dense gradients", "dense")
    future = dist.all_reduce(sent, group=group, async_op=True).get_future()

    def finish(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(reduced.value()[0])

    return future.then(finish) if buffer.is_cuda else world.waits.future(future, finish)


# DDP compares these with the classes themselves
_sum.__annotations__ |= {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
