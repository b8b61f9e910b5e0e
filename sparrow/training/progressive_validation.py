"""What a run saw of its own predictions: every batch is judged before it is learnt (progressive
validation).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from sparrow.checkpoint import Checkpoint
from sparrow.distributed import World
from sparrow.embeddings import EmbeddingTables
from sparrow.metrics import METRICS, Streaming, folded, labelled, merged
from sparrow.trained.build import undo_sampling
from sparrow.trained.labels import read_first_label
from sparrow.trained.run import Run
from sparrow.training.callbacks import Callback, StepRecord

WINDOWS = 5  # progressive validation is reported by fifths of the first epoch


def count_fitted_rows(
    tables: Sequence[EmbeddingTables], run: Run, log: str, say: Callable[[str], None]
) -> float:
    """Returns how many of the first rows tell nothing about a model, because a map of ids was
    fitted to them.

    Args:
        tables: the model's.
        run: whether it shuffles: then these rows are anywhere in the epoch, and no row of it tells.
            A run that goes on with another may have a map that was fitted to another log; of this
            one all rows tell.
        log: the fingerprint of the run's.
        say: is told so, and of a map that was fitted to another log, whose rows may be anywhere in
            this one.
    """
    specs = itertools.chain.from_iterable(part.specs for part in tables)
    maps = [spec.addressing.traits for spec in specs]
    maps_of_log = [traits for traits in maps if traits.fitted_log in ("", log)]
    if run.init_from:
        maps = maps_of_log
    elif len(maps_of_log) < len(maps):
        say(
            "a map of ids was fitted to another log; if its rows judge this run, the metrics are"
            " too good"
        )
    most = max((traits.fitted for traits in maps), default=0)
    if not most or not run.data.shuffle:
        return most
    say(
        "metrics of the first epoch: left out, because rows to which a map of ids was fitted are"
        " anywhere in it"
    )
    return math.inf


class ProgressiveValidation(Callback):
    """Sums over what this rank has judged: by fifths of the first epoch, and since the last line of
    the run log.

    negatives: the share of the negatives that training has; scores are judged as if all were there,
    like those of valid. fitted: what `count_fitted_rows` returns; of these rows only the loss
    counts. first_epoch: its rows, or 0 for no sums by fifths. measures: of the model.
    """

    def __init__(
        self,
        world: World,
        negatives: float,
        fitted: float,
        first_epoch: int,
        measures: Sequence[str] = (),
    ) -> None:
        self._world = world
        self._negatives = negatives
        self._fitted = fitted
        self._first_epoch = first_epoch
        self._fifths = [Streaming(measures=measures) for _ in range(WINDOWS)]
        self._window = Streaming(measures=measures)
        self._losses = torch.zeros(2, dtype=torch.float64)  # sum of loss * mass, sum of masses

    @override
    def after_step(self, step: StepRecord) -> None:
        """Judges the batches of a step by the scores before it."""
        # rows of later epochs were learnt before
        before = step.examples if step.epoch == 0 else None
        fifth = min(WINDOWS - 1, (before or 0) * WINDOWS // max(self._first_epoch, 1))
        also = [self._fifths[fifth]] if self._first_epoch and before is not None else []
        tells = before is None or before >= self._fitted
        outcome = step.outcome
        for share, scores_BT, measures_BM in zip(
            step.shares, outcome.scores, outcome.measures, strict=True
        ):
            # else the step is left out, and said to be; a NaN stays in a sum
            if scores_BT is not None and tells:
                scores_B = undo_sampling(scores_BT[:, 0], self._negatives)
                labels_B, weights_B = read_first_label(share.batch, self._negatives)
                labels_B, scores_B, weights_B, measures_BM = labelled(
                    labels_B, scores_B, weights_B, measures_BM
                )
                self._window.update(scores_B, labels_B, weights_B, also, measures_BM)
        self._losses += outcome.losses

    @override
    def log_line(self) -> dict[str, float]:
        """Returns the mean loss and the metrics of all ranks since the last such line."""
        loss, mass = self._losses.tolist()
        window = merged(self._world, [self._window])[0].result()
        self._window = Streaming(measures=self._window.measures)
        self._losses = torch.zeros_like(self._losses)
        metrics = {
            name: value for name, value in window.items() if name in METRICS and window["examples"]
        }
        return {"loss": loss / mass if mass else math.nan, **metrics}

    @override
    def results(self) -> dict[str, Any]:
        """Returns the results of all ranks.

        progressive: the metrics of every fifth that has begun. calibration: the reliability curve
        of all.
        """
        fifths = merged(self._world, self._fifths)
        together = Streaming(measures=self._window.measures)
        for fifth in fifths:
            together.merge(fifth)
        metrics_of_fifths = [fifth.result() for fifth in fifths]
        begun = [metrics for metrics in metrics_of_fifths if metrics["examples"]]
        curve = {name: points.tolist() for name, points in together.reliability()._asdict().items()}
        return {"progressive": begun, "calibration": curve}

    @override
    def state_dict(self) -> dict[str, Tensor]:
        state = {"losses": self._losses}
        for i, sums in enumerate(folded(self._world, [*self._fifths, self._window])):
            state |= {f"{i}.{name}": value for name, value in sums.items()}
        return state

    @override
    def load(self, saved: Checkpoint) -> None:
        state = saved.part("progressive")
        self._losses = state["losses"]
        for i, stream in enumerate([*self._fifths, self._window]):
            prefix = f"{i}."
            sums = {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
            stream.load_state_dict(sums, self._world.rank, self._world.size)
