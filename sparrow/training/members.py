"""Which callbacks a run has, by its settings, and in which order."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from sparrow.core.errors import listed
from sparrow.core.extensions import callback_modules, modules_elsewhere
from sparrow.distributed import run_on_rank0
from sparrow.training.callbacks import Callback, Callbacks, Job
from sparrow.training.look_ahead import LookAhead
from sparrow.training.progressive_validation import ProgressiveValidation, count_fitted_rows
from sparrow.training.table_stats import TableStats


def few_parts(model: Any) -> str:
    """Returns a sentence on a model of several parts, for a log without valid rows."""
    return (
        f"the model is {listed(model.part_names)} alone: the log has no valid rows to fit its"
        " other parts by"
    )


class FirstWeights(Callback):
    """What a new run begins with: a model alone where nothing can judge a blend."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @override
    def begin(self) -> None:
        job = self._job
        if not job.run.init_from and job.model.fitted_prefixes and not job.dataset.rows("valid"):
            job.say(f"{few_parts(job.model)}; prepare it with --valid 0.1")


def callbacks_of(job: Job) -> list[Callback]:
    """Returns the members of a run."""
    run = job.run
    world = job.ranks.world
    tables = job.tables
    first = min(
        job.dataset.rows("train"), job.total_steps * run.loop.accumulate * run.data.batch_size
    )
    fitted_rows = count_fitted_rows(tables, run, job.dataset.fingerprint, job.say)
    options = set(job.options)
    if run_on_rank0(
        world, "what the run has elsewhere", lambda: bool(modules_elsewhere(job.dir.path))
    ):
        options.add("elsewhere")
    of_extensions = Callbacks([module.callback(job) for module in callback_modules(run, options)])
    ahead = of_extensions.steps_ahead()
    members = [
        FirstWeights(job),
        LookAhead(run, job.feed, tables, world.size, job.total_steps, ahead),
        ProgressiveValidation(
            world,
            job.dataset.schema.split.negatives,
            fitted_rows,
            first if run.loop.progressive else 0,
            job.model.measures,
        ),
        TableStats(world, tables, job.say, run.init_from is not None),
        *of_extensions.members,
    ]
    if "profile" in job.options and job.ranks.leads:
        from sparrow.training.profiling import Profiler  # few runs are profiled

        members.append(Profiler(job.dir.path))
    return members
