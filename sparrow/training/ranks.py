"""One training job on its ranks: what each does of a batch, and what all must agree on.

One process does all of it. What many ranks do besides is in `many_ranks`, which is loaded when
there are many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sparrow.core import Batch, UserError
from sparrow.distributed import World, run_on_rank0
from sparrow.embeddings import EmbeddingTables
from sparrow.features.schema import Schema
from sparrow.layers.dropout import drawing, drops
from sparrow.losses import Loss, loss_and_probabilities
from sparrow.metrics import metric_of
from sparrow.trained.build import build
from sparrow.trained.run import Run
from sparrow.training.restart_mark import RestartMark

T = TypeVar("T")


class Ranks:
    """Every rank reads, computes and judges its share of each batch. The batches are the same as on
    one process.

    layouts: where the tables are, in words; "" on one process.

    Args:
        run: its settings.
        world: the ranks.
    """

    def __init__(self, run: Run, world: World) -> None:
        self.world = world
        self.leads = world.rank == 0
        self.restart_mark = RestartMark(world, Path(run.run_dir))
        self.layouts = ""

    def check_same(self, run: Run, fingerprint: str, step: int) -> None:
        """Check that all ranks are about to run the same job.

        Args:
            run: this rank's settings.
            fingerprint: of the prepared log.
            step: the one to go on from.

        Raises:
            UserError: on every rank, when their jobs differ. It names what differs, ranks and
                values.
        """

    def build(self, run: Run, schema: Schema) -> Any:
        """Returns the model, its tables sharded by the run's plan. What `learner` returns has the
        log's loss.

        Raises:
            UserError: for a plan, a loss or a monitor that does not fit, and when a model with
                dropout is to be compiled.
        """
        self._loss = run.loss.build(schema.labels)
        model = build(run, schema, self._shard_by(run))
        check_compiles(run, model)
        check_monitor(run, model)
        return model

    def _shard_by(self, run: Run) -> Callable[[nn.Module], None] | None:
        return None

    def learner(self, model: Any, run: Run) -> Callable[[Batch], tuple[Tensor, Tensor]]:
        """Returns a function Batch -> `loss_and_probabilities`. Its dense gradients are summed over
        all ranks while backward runs.
        """
        return lambda batch: learn(batch, model, self._loss, run.seed)

    def run_on_rank0(self, key: str, call: Callable[[], T]) -> T:
        """Returns on every rank what `call` returns on rank 0; it runs only there. See
        `run_on_rank0`.

        Whatever is fitted to data, and not learnt by steps, is fitted here: on other ranks it would
        have other bits.
        """
        with self.world.at(key):
            return run_on_rank0(self.world, key, call)

    def take_rank0s(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, say: Callable[[str], None]
    ) -> None:
        """Give all ranks rank 0's dense weights, buffers and state of the optimizer. All ranks call
        it together.

        So all have what was fitted on rank 0 alone. Digests are compared, and what differs on no
        rank is not sent.

        Args:
            model: is changed.
            optimizer: of its dense weights; is changed.
            say: is told of weights that differed, which are never fitted.
        """

    def apart(self) -> AbstractContextManager[None]:
        """Returns a context in which dense gradients stay where they are, for all but the last of a
        step's batches.
        """
        return nullcontext()

    def sums(self, values: Sequence[Tensor], *numbers: float) -> list[float]:
        """Returns the sums over all ranks of values and of numbers. values: tensors [], which may
        be on a device.

        This is where the host waits for a GPU in each step.
        """
        device = values[-1].device  # the norm of nothing is on the host
        on_device = [value.to(device, non_blocking=True) for value in values]
        local_sums = torch.cat(
            [torch.stack(on_device).double().cpu(), torch.tensor(numbers, dtype=torch.float64)]
        )
        sums: list[float] = self.world.all_sum("what a step found", local_sums).tolist()
        return sums

    def sum_placed(self, dense: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of parameters that only some ranks hold alike. The others' are summed
        in backward.
        """

    def squared_norm(
        self, dense: Sequence[nn.Parameter], tables: Sequence[EmbeddingTables]
    ) -> Tensor:
        """Returns this rank's part of the squared norm of all gradients of the model together,
        float64 [].
        """
        row_grads = [gradients.grad_UD for t in tables for gradients in t.gradients().values()]
        return torch.nn.utils.get_total_norm([*gradients_of(dense), *row_grads]).double().square()


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Returns the gradients of the parameters that have one."""
    return [p.grad for p in parameters if p.grad is not None]


def check_compiles(run: Run, model: nn.Module) -> None:
    """Check that a run's model can be compiled, if it is to be.

    Raises:
        UserError: when it draws in training: a compiled program has no numbers of rows to draw
            from.
    """
    if run.compile and drops(model):
        raise UserError(
            "compile: not with dropout yet; leave compile out, or set model.dropout to 0"
        )


def check_monitor(run: Run, model: Any) -> None:
    """Check that a run's model has the metric by which it is judged.

    Raises:
        UserError: when it does not measure what the metric is made of.
    """
    monitor = run.loop.monitor
    if not {*metric_of(monitor).measures} <= {*model.measures}:
        raise UserError(
            f"loop.monitor: this model does not measure what {monitor!r} is made of; monitor 'ne'"
        )


def learn(batch: Batch, model: Any, loss: Loss, seed: int) -> tuple[Tensor, Tensor]:
    """Returns loss and probabilities of a batch in training, see `loss_and_probabilities`. seed: of
    what is drawn for its rows.
    """
    with drawing(seed, batch.row_B):
        return loss_and_probabilities(model(batch), batch, model.loss_of(loss))
