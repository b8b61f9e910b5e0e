"""What advances a run: by default a step on each of the feed's batches, at the schedule's rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparrow import kernels
from sparrow.data.batches.loader import Share
from sparrow.training.callbacks import Callback, Job, Outcome
from sparrow.training.step import Step

Flags = tuple[bool, bool]


@dataclass(frozen=True, kw_only=True)
class Advance:
    """What was made of a run. shares: this rank's share of each batch that it learnt from. outcome:
    what it came to.
    """

    shares: Sequence[Share]
    outcome: Outcome


class Course(Callback):
    """Advances a run. It is a callback too, so that what it knows is saved, told and loaded as
    theirs is.

    A dense optimizer that owns more than a step (a solver, a pipeline of batches) has a method
    `course(job, step)` in its `Config`, which returns another one.

    Args:
        job: the run.
        step: makes one step of some shares.
    """

    def __init__(self, job: Job, step: Step) -> None:
        self.job = job
        self.take_step = step
        self._step = step

    @property
    def total(self) -> int:
        """How many steps the run has at most."""
        return self.job.total_steps

    @property
    def finished(self) -> bool:
        """Whether nothing is left to learn, before `total` steps were made."""
        return False

    def advance(self, number: int, flags: Flags) -> Advance | None:
        """Makes a step, or returns None at the end of an epoch. All ranks call it together.

        Args:
            number: of the step.
            flags: whether this rank was asked to stop, and whether its checkpoint waits for the
                others'.
        """
        world = self.job.ranks.world
        with self._step.callbacks.stage("load"), world.at("load"):
            shares = self.job.feed.take()
        if not shares:
            return None
        if 4 * shares[-1].samples < 3 * self.job.run.data.batch_size:
            # the last batch has other sizes, which fit into nothing that larger ones left
            kernels.let_go()
        with world.at("computing"):
            return self.learn(shares, number, flags)

    def learn(self, shares: Sequence[Share], number: int, flags: Flags = (False, False)) -> Advance:
        """Makes a step of some shares. number, flags: see `advance`."""
        self.set_rates(self.job.run.schedule.factor(number, self.total))
        return Advance(shares=shares, outcome=self.take_step(shares, number, flags))

    def set_rates(self, factor: float) -> None:
        """Set the learning rates to this share of what the run says."""
        for group in self.job.optimizer.param_groups:
            group["lr"] = self.job.run.dense.lr * factor
        for tables in self.job.tables:
            tables.scale_lr(factor)


def course_of(job: Job, step: Step) -> Course:
    """Returns what advances a run: of its dense optimizer, where that has one."""
    build = getattr(job.run.dense, "course", Course)
    course: Course = build(job, step)
    return course
