"""What a run does after its last step: it fits the calibrators of its best checkpoint, if it is to have some."""

from __future__ import annotations

import gc
from typing import Any

from sparrow.distributed import World, said
from sparrow.trained.calibrate import calibrate
from sparrow.trained.run import Run


def calibrated(results: dict[str, Any], run: Run, world: World) -> dict[str, Any]:
    """Returns a run's results with those of its calibrators, see `calibrate`. A run that was stopped fits none yet.

    Rank 0 fits them, with the whole model in its memory, like `sparrow calibrate` in a process of its own. So any
    number of ranks, and a run that was resumed, get the same ones from the same checkpoint.

    Args:
        results: of the run, which has ended.
        run: its settings.
        world: its ranks.

    Raises:
        UserError: as `calibrate`, on all ranks.
    """
    if run.calibrate == "none" or results["stopped_by"]:
        return results
    gc.collect()  # the trainer's tables go before the checkpoint's come
    with world.at("calibrating"):
        return {**results, "calibrated": said(world, "calibrators", lambda: calibrate(run.run_dir, run.calibrate))}
