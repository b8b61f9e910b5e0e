"""What a run saw of its own predictions: every batch is judged before it is learnt (progressive validation)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparrow.checkpoint import Checkpoint
from sparrow.data.batches.loader import Share
from sparrow.distributed import World
from sparrow.embeddings import EmbeddingTables
from sparrow.metrics import Streaming, folded, labelled, merged
from sparrow.trained.build import of_whole_log
from sparrow.trained.labels import first_label
from sparrow.trained.run import Run
from sparrow.training.step import Outcome

WINDOWS = 5  # progressive validation is reported by fifths of the first epoch


def fitted(tables: Sequence[EmbeddingTables], run: Run, log: str, say: Callable[[str], None]) -> float:
    """Returns how many of the first rows tell nothing about a model, because a map of ids was fitted to them.

    Args:
        tables: the model's.
        run: whether it shuffles: then these rows are anywhere in the epoch, and no row of it tells. A run that goes on
            with another may have a map that was fitted to another log; of this one all rows tell.
        log: the fingerprint of the run's.
        say: is told so, and of a map that was fitted to another log, whose rows may be anywhere in this one.
    """
    every = [spec.addressing.traits for of in tables for spec in of.specs]
    if not run.init_from and any(one.fitted_log not in ("", log) for one in every):
        say("a map of ids was fitted to another log; if its rows judge this run, the metrics are too good")
    most = max((one.fitted for one in every if not run.init_from or one.fitted_log in ("", log)), default=0)
    if not most or not run.data.shuffle:
        return most
    say("metrics of the first epoch: left out, because rows to which a map of ids was fitted are anywhere in it")
    return math.inf


class Seen:
    """Sums over what this rank has judged: by fifths of the first epoch, and since the last line of the run log.

    kept: the share of the negatives that training has; scores are judged as if all were there, like those of valid.
    fitted: see there; of these rows only the loss counts. first_epoch: its rows, or 0 for no sums by fifths.
    """

    def __init__(self, world: World, kept: float, fitted: float, first_epoch: int) -> None:
        self._world = world
        self._kept = kept
        self._fitted, self._first_epoch = fitted, first_epoch
        self._fifths = [Streaming() for _ in range(WINDOWS)]
        self._window = Streaming()
        self._losses = torch.zeros(2, dtype=torch.float64)  # sum of loss * mass, sum of masses

    def take(self, micro: Sequence[Share], done: Outcome, before: int | None) -> None:
        """Judge a step's batches.

        Args:
            micro: this rank's shares of the batches.
            done: what the step found.
            before: how many rows of the first epoch came before; None in later ones, whose rows were learnt before.
        """
        fifth = min(WINDOWS - 1, (before or 0) * WINDOWS // max(self._first_epoch, 1))
        also = [self._fifths[fifth]] if self._first_epoch and before is not None else []
        tells = before is None or before >= self._fitted
        for share, scores_BT in zip(micro, done.scores, strict=True):
            if scores_BT is not None and tells:  # else the step is left out, and said to be; a NaN stays in a sum
                scores_B = of_whole_log(scores_BT[:, 0], self._kept)
                labels_B, weights_B = first_label(share.batch, self._kept)
                labels_B, scores_B, weights_B = labelled(labels_B, scores_B, weights_B)
                self._window.update(scores_B, labels_B, weights_B, also)
        self._losses += done.losses

    def line(self) -> dict[str, float]:
        """Returns the mean loss and the metrics of all ranks since the last such line."""
        loss, mass = self._losses.tolist()
        window = merged(self._world, [self._window])[0].result()
        self._window = Streaming()
        self._losses = torch.zeros_like(self._losses)
        metrics = {name: window[name] for name in ("logloss", "ne", "auc", "calibration") if window["examples"]}
        return {"loss": loss / mass if mass else math.nan, **metrics}

    def results(self) -> dict[str, Any]:
        """Returns the results of all ranks.

        progressive: the metrics of every fifth that has begun. calibration: the reliability curve of all.
        """
        fifths = merged(self._world, self._fifths)
        together = Streaming()
        for fifth in fifths:
            together.merge(fifth)
        found = [fifth.result() for fifth in fifths]
        curve = {name: points.tolist() for name, points in together.reliability()._asdict().items()}
        return {"progressive": [one for one in found if one["examples"]], "calibration": curve}

    def state(self) -> dict[str, Tensor]:
        """Returns the sums, for a checkpoint."""
        streams = enumerate(folded(self._world, [*self._fifths, self._window]))
        return {f"{i}.{k}": v for i, of_one in streams for k, v in of_one.items()} | {"losses": self._losses}

    def load(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint."""
        state = saved.part("progressive")
        self._losses = state.pop("losses")
        for i, stream in enumerate([*self._fifths, self._window]):
            prefix = f"{i}."
            mine = {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
            stream.load_state_dict(mine, self._world.rank, self._world.size)
