"""What goes along with a run whose tables are larger than memory."""

from __future__ import annotations

from sparrow.extensions.tiers.block_files import BlockFiles
from sparrow.extensions.tiers.hits import Hits
from sparrow.training.callbacks import Callback, Callbacks, Job


def callback(job: Job) -> Callback:
    """Returns the files of a run, and what its caches did."""
    world = job.ranks.world
    return Callbacks(
        [BlockFiles(world, job.run, job.dir, job.tables, job.say), Hits(world, job.tables)]
    )
