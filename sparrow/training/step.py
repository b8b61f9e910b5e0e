"""One training step: loss, backward, guard, clip, the dense step, the tables' update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparrow.data.batches.loader import Share
from sparrow.embeddings import EmbeddingTables
from sparrow.layers import computing
from sparrow.trained.run import Run
from sparrow.training.probe import Probe
from sparrow.training.profiling import Profiler
from sparrow.training.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step found.

    Args:
        scores: the probabilities of this rank's share of each batch before the step, [B, T], on the host. None where a
            rank's are not finite.
        losses: float64 [2], the sums of loss * mass and of mass.
        norm: of all gradients together, or None when nobody asks.
        left_out: whether the step changed nothing.
        flags: how many ranks raised each.
    """

    scores: list[Tensor | None]
    losses: Tensor
    norm: float | None
    left_out: bool
    flags: list[float]


class Step:
    """Changes the model once when it is called with the batches of one step."""

    def __init__(
        self,
        run: Run,
        model: Any,
        tables: Sequence[EmbeddingTables],
        optimizer: Optimizer,
        profiler: Profiler,
        ranks: Ranks,
        probe: bool = False,
    ) -> None:
        self.learn = ranks.learner(model, run)
        self.ranks = ranks
        self.tables = tables
        self.optimizer = optimizer
        self.part = profiler.part
        self.loop = run.loop
        self.precision = run.precision
        self.device = torch.device(run.device)
        self.dense = [p for group in optimizer.param_groups for p in group["params"]]
        self.probe = Probe(model.model if probe else None, run.data.batch_size, ranks.world)

    def __call__(
        self,
        micro: Sequence[Share],
        flags: tuple[bool, bool],
        ahead: Callable[[], None],
    ) -> Outcome:
        """Train on the mean over all examples of these batches, or leave them out when it is not finite.

        Returns what the step found.

        Args:
            micro: this rank's shares of the step's batches.
            flags: whether this rank was asked to stop, and whether its checkpoint waits for the others'.
            ahead: looks at the next step's batches. It is called before the last forward, so that ids leave early and
                reads of an SSD have all of the step, but where a GPU is to have its work first.
        """
        is_late = self.ranks.world.size == 1 and self.device.type != "cpu"
        own_masses = [share.batch.mass for share in micro]
        total = sum(share.mass for share in micro) or 1.0  # weights may all be 0
        scores = []
        losses = []
        spoilt = []
        for share, own in zip(micro, own_masses, strict=True):
            is_last = share is micro[-1]
            if is_last and not is_late:
                ahead()
            # between forward and backward nobody waits, neither for a device nor for what other ranks found
            with nullcontext() if is_last else self.ranks.apart(), self.probe.at(self.ranks.world.step):
                with self.part("forward"), computing(self.precision, self.device):
                    loss, mine = self.learn(share.batch)
                scores.append(mine.to("cpu", non_blocking=True))  # it is there when the sums below are
                losses.append(loss.detach().double() * own)
                spoilt.append((~mine.isfinite()).any().double())
                # backward in any case: a forward without one leaves DDP waiting for gradients, and it would take
                # those of the next step's first batch for them
                with self.part("backward"):
                    (loss * (own / total)).backward()  # together: the mean over all of the step's examples
        if is_late:
            ahead()
        with self.part("guard and clip"):
            squared = [self._squared_norm()] if self._needs_norm else []
            found = iter(self.ranks.sums([*squared, *losses, *spoilt], *map(float, flags)))
            norm = math.sqrt(next(found)) if squared else None
            summed, finite = torch.zeros(2, dtype=torch.float64), True
            for share in micro:
                value = next(found)
                finite = finite and (self.loop.nonfinite == "off" or math.isfinite(value))
                if finite:
                    summed += torch.tensor([value, share.mass], dtype=torch.float64)
            norm = norm if finite else math.nan
            left_out = self.loop.nonfinite != "off" and norm is not None and not math.isfinite(norm)
            if not left_out:
                self._clip(norm)
        if left_out:
            for tables in self.tables:
                tables.discard()
        else:
            with self.part("dense optimizer"):
                self.optimizer.step()
            with self.part("table update"):
                for tables in self.tables:
                    tables.update()
        self.optimizer.zero_grad(set_to_none=True)
        sound = [None if next(found) else mine for mine in scores]
        return Outcome(scores=sound, losses=summed, norm=norm, left_out=left_out, flags=list(found))

    def _gradients(self) -> list[Tensor]:
        tables = [g.grad_UD for tables in self.tables for g in tables.gradients().values()]
        return [p.grad for p in self.dense if p.grad is not None] + tables

    @property
    def _needs_norm(self) -> bool:
        return self.loop.nonfinite != "off" or self.loop.clip_norm is not None

    def _squared_norm(self) -> Tensor:
        return self.ranks.squared_norm([p.grad for p in self.dense if p.grad is not None], self.tables)

    def _clip(self, norm: float | None) -> None:
        bound = self.loop.clip_norm
        if bound is not None and norm is not None and norm > bound:
            for gradient in self._gradients():
                gradient.mul_(bound / norm)
