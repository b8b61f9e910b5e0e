"""The ranks of a training job. What many ranks need is loaded when there are many."""

from __future__ import annotations

from sparrow.distributed import begin_world
from sparrow.trained.run import Run
from sparrow.training.ranks import Ranks


def begin_ranks(run: Run) -> Ranks:
    """Returns the ranks of this process's job.

    Raises:
        UserError: when they do not fill a grid, or do not all come, and for what is only for one
            process.
    """
    setting = run.sharding
    world = begin_world(run.device, setting.ranks_per_host, setting.timeout_s)
    if world.size == 1:
        return Ranks(run, world)
    from sparrow.training.many_ranks import ManyRanks  # one process needs none of it

    return ManyRanks(run, world)
