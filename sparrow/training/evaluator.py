"""A run is evaluated: all ranks score the valid part."""

from __future__ import annotations

import math
from typing import Any

from sparrow import kernels
from sparrow.core.memory import let_go
from sparrow.metrics import evaluate_labels, metric_of
from sparrow.trained.build import scoring
from sparrow.trained.labels import first_label_suffix, join_labels
from sparrow.training.callbacks import Callback, Job
from sparrow.training.feed import read_share
from sparrow.training.progress import Progress


class Evaluator:
    """Scores the valid part of a run's log.

    score: a function Batch -> probabilities [B, T].

    Args:
        job: the run.
        callbacks: hear that rows are about to be scored.
    """

    def __init__(self, job: Job, callbacks: Callback) -> None:
        self.score = scoring(job.model, job.run, job.dataset.schema)
        self._job = job
        self._callbacks = callbacks
        self._labels = list(job.dataset.schema.labels)

    def evaluate(self, progress: Progress) -> tuple[dict[str, float], dict[str, Any]]:
        """Returns the metrics of all labels, and what the parts of the model are worth.

        Raises:
            UserError: when a score is not finite.
        """
        kernels.let_go()  # a step's memory is not evaluation's nor a checkpoint's
        let_go()
        job = self._job
        self._callbacks.before_evaluation()
        job.model.eval()
        with job.ranks.world.at("evaluation"):
            parts = self._weigh_parts()
            batches = read_share(job.run, job.dataset, job.ranks.world, "valid")
            label_results = evaluate_labels(
                self.score,
                (batch.to(job.device) for batch in batches),
                range(len(self._labels)),
                world=job.ranks.world,
                model=job.model,
            )
        job.model.train()
        for tables in job.tables:
            tables.raise_bad_ids()
        for result in label_results:  # without a base rate no row of the label counts
            if math.isnan(result["logloss"]) and not math.isnan(result["base_rate"]):
                raise progress.diverged("the model's scores")
        return join_labels(self._labels, label_results), parts

    def _weigh_parts(self) -> dict[str, Any]:
        """Choose the weights of the model's parts, by all batches on every rank."""
        job = self._job
        data = job.run.data
        loader = job.dataset.loader(data.batch_size, "valid", dedup=data.dedup)
        batches = (batch.to(job.device) for batch in loader)
        parts: dict[str, Any] = job.model.weigh_parts(batches, job.ranks.run_on_rank0)
        if parts:
            job.ranks.take_rank0s(job.model, job.optimizer, job.say)
        return parts

    def cost(self, values: dict[str, float], step: int) -> float | None:
        """Returns what the run's monitor says of an evaluation, less where it is better, the same
        on all ranks. None where it is undefined.
        """
        monitor = self._job.run.loop.monitor
        value = values[monitor]
        if math.isnan(value):
            metric = f"valid {monitor}{first_label_suffix(self._labels)}"
            self._job.say(f"step {step}: {metric} is undefined (one class); it picks no best")
            return None
        # a last bit may hang on a rank's threads
        return self._job.ranks.world.broadcast("which is best", metric_of(monitor).cost(value))
