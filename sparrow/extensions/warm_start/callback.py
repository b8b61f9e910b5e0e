"""A new run gets what its settings say that it begins with."""

from __future__ import annotations

from typing_extensions import override

from sparrow.extensions.warm_start.pretrained import give_vectors
from sparrow.extensions.warm_start.warm_start import warm_start
from sparrow.training.callbacks import Callback, Job


class WarmStart(Callback):
    """Gives tables the vectors of files, and then the model what another run learnt.

    So a row that comes from an earlier run stays as it was there.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    @override
    def initialize(self) -> None:
        job = self._job
        give_vectors(job.model, job.run, job.dataset, job.say, job.ranks.world)
        if job.run.init_from:
            warm_start(job.model, job.optimizer, job.run, job.dataset, job.say, job.ranks)


def callback(job: Job) -> WarmStart:
    """Returns the callback of a run."""
    return WarmStart(job)
