"""One training step: loss, backward, guard, clip, the dense step, the tables' update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparrow.data.batches.loader import Share
from sparrow.embeddings import EmbeddingTables
from sparrow.layers.precision import computing
from sparrow.trained.run import Run
from sparrow.training.callbacks import Callback, Outcome
from sparrow.training.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """What the forward of this rank's share of a batch gave.

    Args:
        scores_BT: the probabilities, on the host.
        measures_BM: what the model measures of each row, on the host.
        loss: times its mass, float64 [].
        is_spoilt: 1 where a score or a measure is not finite, float64 [].
    """

    scores_BT: Tensor
    measures_BM: Tensor | None
    loss: Tensor
    is_spoilt: Tensor


class Step:
    """Changes the model once when it is called with the batches of one step."""

    def __init__(
        self,
        run: Run,
        model: Any,
        tables: Sequence[EmbeddingTables],
        optimizer: Optimizer,
        ranks: Ranks,
        callbacks: Callback,
    ) -> None:
        self.learn = ranks.learner(model, run)
        self.model = model
        self.ranks = ranks
        self.tables = tables
        self.optimizer = optimizer
        self.callbacks = callbacks
        self.loop = run.loop
        self.precision = run.precision
        self.device = torch.device(run.device)
        self.dense = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, shares: Sequence[Share], step: int, flags: tuple[bool, bool]) -> Outcome:
        """Trains on the mean over all examples of these batches, or leaves them out when it is not
        finite.

        The callbacks look ahead before the last forward, so that ids leave early and reads of an
        SSD have all of the step, but where a GPU is to have its work first.

        Args:
            shares: this rank's shares of the step's batches.
            step: its number.
            flags: whether this rank was asked to stop, and whether its checkpoint waits for the
                others'.
        """
        stage = self.callbacks.stage
        is_late = self.ranks.world.size == 1 and self.device.type != "cpu"
        total = sum(share.mass for share in shares) or 1.0  # weights may all be 0
        passes = []
        for share in shares:
            is_last = share is shares[-1]
            if is_last and not is_late:
                self.callbacks.look_ahead(step, shares[-1:])
            with nullcontext() if is_last else self.ranks.apart(), stage("batch"):
                passes.append(self._forward_and_backward(share, total))
        losses = [one.loss for one in passes]
        spoilt = [one.is_spoilt for one in passes]
        if is_late:
            self.callbacks.look_ahead(step, shares[-1:])
        with stage("guard and clip"):
            self.ranks.sum_placed(self.dense)
            squared = [self._squared_norm()] if self._needs_norm else []
            sums = self.ranks.sums([*squared, *losses, *spoilt], *map(float, flags))
            norms, loss_sums, spoilt_sums, flag_sums = _cut(
                sums, len(squared), len(shares), len(shares), len(flags)
            )
            norm = math.sqrt(norms[0]) if norms else None
            summed, is_finite = self._summed(loss_sums, shares)
            norm = norm if is_finite else math.nan
            left_out = self.loop.nonfinite != "off" and norm is not None and not math.isfinite(norm)
            if not left_out:
                self._clip(norm)
        if left_out:
            for tables in self.tables:
                tables.discard()
        else:
            with stage("dense optimizer"):
                self.optimizer.step()
            with stage("table update"):
                for tables in self.tables:
                    tables.update()
        self.optimizer.zero_grad(set_to_none=True)
        sound = [
            None if ranks else one.scores_BT for one, ranks in zip(passes, spoilt_sums, strict=True)
        ]
        return Outcome(
            scores=sound,
            measures=[one.measures_BM for one in passes],
            losses=summed,
            norm=norm,
            left_out=left_out,
            flags=flag_sums,
        )

    def _forward_and_backward(self, share: Share, total: float) -> _Pass:
        """Adds the gradients of a batch. Between forward and backward nobody waits, neither for a
        device nor for what other ranks found. total: the mass of the step.
        """
        stage = self.callbacks.stage
        own = share.batch.mass
        with stage("forward"), computing(self.precision, self.device):
            loss, scores_BT = self.learn(share.batch)
        is_spoilt = (~scores_BT.isfinite()).any()
        # it is there when the sums of the step are
        scores_on_host_BT = scores_BT.to("cpu", non_blocking=True)
        measures_on_host_BM = None
        if self.model.measures:
            measures_BM = self.model.measure()
            measures_on_host_BM = measures_BM.to("cpu", non_blocking=True)
            is_spoilt |= (~measures_BM.isfinite()).any()
        outcome = _Pass(
            scores_BT=scores_on_host_BT,
            measures_BM=measures_on_host_BM,
            loss=loss.detach().double() * own,
            is_spoilt=is_spoilt.double(),
        )
        # backward in any case: a forward without one leaves DDP waiting for gradients, and it would
        # take those of the next step's first batch for them
        with stage("backward"):
            # together: the mean over all of the step's examples
            (loss * (own / total)).backward()
        return outcome

    def _summed(self, losses: Sequence[float], shares: Sequence[Share]) -> tuple[Tensor, bool]:
        """Returns the sums of loss * mass and of mass, up to a loss that is not finite, and whether
        there is none.
        """
        summed = torch.zeros(2, dtype=torch.float64)
        for loss, share in zip(losses, shares, strict=True):
            if self.loop.nonfinite != "off" and not math.isfinite(loss):
                return summed, False
            summed += torch.tensor([loss, share.mass], dtype=torch.float64)
        return summed, True

    def _gradients(self) -> list[Tensor]:
        tables = [g.grad_UD for tables in self.tables for g in tables.gradients().values()]
        return [p.grad for p in self.dense if p.grad is not None] + tables

    @property
    def _needs_norm(self) -> bool:
        return self.loop.nonfinite != "off" or self.loop.clip_norm is not None

    def _squared_norm(self) -> Tensor:
        return self.ranks.squared_norm(self.dense, self.tables)

    def _clip(self, norm: float | None) -> None:
        bound = self.loop.clip_norm
        if bound is not None and norm is not None and norm > bound:
            for gradient in self._gradients():
                gradient.mul_(bound / norm)


def _cut(values: Sequence[float], *lengths: int) -> list[list[float]]:
    """Returns the values in pieces of these lengths."""
    rest = iter(values)
    return [list(islice(rest, length)) for length in lengths]
