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

from sparrow.core import Batch
from sparrow.layers import computing
from sparrow.training.feed import Portion
from sparrow.training.profiling import Profiler
from sparrow.training.ranks import Ranks
from sparrow.training.restore import AnyTables
from sparrow.training.run import Run


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step found.

    scores: the probabilities of each batch before the step, [B, T]. losses: float64 [2], the sums of loss * mass and of
    mass. norm: of all gradients together, None when nobody asks; left_out: the step changed nothing. flags: how many
    ranks raised each.
    """

    scores: list[Tensor]
    losses: Tensor
    norm: float | None
    left_out: bool
    flags: list[float]


class Step:
    """Called with the batches of one step, changes the model once."""

    def __init__(
        self,
        run: Run,
        model: Any,
        tables: Sequence[AnyTables],
        optimizer: Optimizer,
        profiler: Profiler,
        ranks: Ranks,
    ) -> None:
        self.learn, self.ranks = ranks.learner(model, run), ranks
        self.tables, self.optimizer, self.part = tables, optimizer, profiler.part
        self.loop, self.precision, self.device = run.loop, run.precision, torch.device(run.device)
        self.dense = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, micro: Sequence[Portion], flags: tuple[bool, bool], ahead: Callable[[], None]) -> Outcome:
        """Train on the mean over all examples of these batches, or leave them out when it is not finite.

        flags: whether this rank was asked to stop, and whether its checkpoint waits for the others'. ahead: called
        before the last backward, unless a rank was asked to stop.
        """
        guarded = self.loop.nonfinite != "off"
        masses = [_mass(portion.whole) for portion in micro]
        total = sum(masses) or 1.0  # weights may all be 0
        scores, finite, losses = [], True, torch.zeros(2, dtype=torch.float64)
        counts = [0.0, 0.0]
        for portion, mass in zip(micro, masses, strict=True):
            own, is_last = _mass(portion.mine), portion is micro[-1]
            with nullcontext() if is_last else self.ranks.apart():
                with self.part("forward"), computing(self.precision, self.device):
                    loss, mine = self.learn(portion.mine)
                    value = loss.item() * own
                found = self.ranks.together(mine, portion.whole.batch_size, value, *map(float, flags))
                probabilities, (value, *counts) = found
                scores.append(probabilities)
                if is_last and not counts[0]:
                    ahead()
                finite = finite and (not guarded or math.isfinite(value))
                if finite:
                    with self.part("backward"):
                        (loss * (own / total)).backward()  # together: the mean over all of the step's examples
                    losses += torch.tensor([value, mass], dtype=torch.float64)
        with self.part("guard and clip"):
            norm = self._gradient_norm() if finite else math.nan
            left_out = guarded and norm is not None and not math.isfinite(norm)
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
        return Outcome(scores=scores, losses=losses, norm=norm, left_out=left_out, flags=counts)

    def _gradients(self) -> list[Tensor]:
        tables = [g.grad_UD for tables in self.tables for g in tables.gradients().values()]
        return [p.grad for p in self.dense if p.grad is not None] + tables

    def _gradient_norm(self) -> float | None:
        """The norm of all gradients together, or None when nobody asks for it."""
        if self.loop.nonfinite == "off" and self.loop.clip_norm is None:
            return None
        return self.ranks.norm([p.grad for p in self.dense if p.grad is not None], self.tables)

    def _clip(self, norm: float | None) -> None:
        bound = self.loop.clip_norm
        if bound is not None and norm is not None and norm > bound:
            for gradient in self._gradients():
                gradient.mul_(bound / norm)


def _mass(batch: Batch) -> float:
    return float(batch.batch_size if batch.weights_B is None else batch.weights_B.sum())
