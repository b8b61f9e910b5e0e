"""What goes along with a run whose tables are larger than memory."""

from __future__ import annotations

from itertools import chain

from typing_extensions import override

from sparrow.extensions.tiers.block_files import BlockFiles
from sparrow.extensions.tiers.hits import Hits
from sparrow.extensions.tiers.settings import Config
from sparrow.training.callbacks import Callback, Callbacks, Job


class Prefetch(Callback):
    """Rows without frames are read before they are needed. A compiled model looks them up
    itself.
    """

    def __init__(self, job: Job) -> None:
        specs = chain.from_iterable(tables.specs for tables in job.tables)
        components = chain.from_iterable(spec.components for spec in specs)
        has_frames = any(component.tier.is_on for component in components)
        is_on = has_frames and not job.run.compile
        self._steps = job.run.settings_of(Config).prefetch if is_on else 0

    @override
    def steps_ahead(self) -> int:
        return self._steps


def callback(job: Job) -> Callback:
    """Returns the files of a run, what is read ahead, and what its caches did."""
    world = job.ranks.world
    files = BlockFiles(world, job.run, job.dir, job.tables, job.say)
    return Callbacks([files, Prefetch(job), Hits(world, job.tables)])
