"""What a run does after its last step: it fits the calibrators of its best checkpoint, if it is to
have some.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from typing_extensions import override

from sparrow.distributed import World, run_on_rank0
from sparrow.extensions.calibration.calibrate import calibrate
from sparrow.trained.run import Run
from sparrow.training.callbacks import Callback, Job


class Calibration(Callback):
    """Fits calibrators when a run has ended. One that was stopped fits none yet.

    Where they make scores worse these stay as they are, and "refused" in the results says why.

    Rank 0 fits them, with the whole model in its memory, like `sparrow calibrate` in a process of
    its own. So any number of ranks, and a run that was resumed, get the same ones from the same
    checkpoint.

    Args:
        run: its settings.
        world: its ranks.
    """

    def __init__(self, run: Run, world: World) -> None:
        self._run = run
        self._world = world

    @override
    def after_run(self, results: Mapping[str, Any]) -> dict[str, Any]:
        if results["stopped_by"]:
            return {}
        with self._world.at("calibrating"):
            fit = partial(calibrate, self._run.run_dir, self._run.calibrator, else_none=True)
            return {"calibrated": run_on_rank0(self._world, "calibrators", fit)}


def callback(job: Job) -> Calibration:
    """Returns the callback of a run."""
    return Calibration(job.run, job.ranks.world)
