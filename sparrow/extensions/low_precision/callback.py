"""What goes along with a run: weights in few bits, and the probe."""

from __future__ import annotations

from typing_extensions import override

from sparrow.extensions.low_precision.few_bits import settle, to_fp32
from sparrow.extensions.low_precision.probe import Probe
from sparrow.training.callbacks import Callback, Callbacks, Job


class RoundedWeights(Callback):
    """Rounds the weights that a new run begins with; the optimizer rounds them from there on.

    They may come from a run that kept its own otherwise. It goes along after the member that brings
    them.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    @override
    def begin(self) -> None:
        optimizer = self._job.optimizer
        run = self._job.run
        if run.init_from is not None:
            to_fp32(optimizer)
        settle(optimizer, run.precision.weights, run.seed)


def callback(job: Job) -> Callback:
    """Returns both. Without the option "probe", checkpoints only go on to name the file of a probe
    before.
    """
    run = job.run
    watched = job.model.model if "probe" in job.options else None
    probe = Probe(watched, run.data.batch_size, job.ranks.world, folder=job.dir.path, say=job.say)
    return Callbacks([RoundedWeights(job), probe])
