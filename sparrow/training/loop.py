"""The training loop. It knows a model by a step and a function that scores, and tables by their
lifecycle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial
from typing import Any

from sparrow import checkpoint
from sparrow.core import UserError
from sparrow.core.files import to_json, write_text
from sparrow.core.memory import let_go
from sparrow.distributed import run_on_rank0
from sparrow.layers.precision import computed
from sparrow.models import MOST_FITTED
from sparrow.trained.run import Run
from sparrow.training.begin import begin_ranks
from sparrow.training.callbacks import Callbacks, StepRecord, finish
from sparrow.training.checkpointer import Checkpointer
from sparrow.training.course import Advance, course_of
from sparrow.training.evaluator import Evaluator
from sparrow.training.members import callbacks_of
from sparrow.training.preflight import threads_given_back, within_device
from sparrow.training.progress import Progress
from sparrow.training.ranks import Ranks
from sparrow.training.rundir import Held
from sparrow.training.runlog import RunLog, Throughput
from sparrow.training.setup import set_up
from sparrow.training.signals import StopRequest
from sparrow.training.step import Step

PATIENCE_NONFINITE = 100

Listener = Callable[[str, dict[str, Any]], None]
"""Told (event, values): "begin", "progress", "evaluation", "note", "end"."""


def train(
    run: Run,
    *,
    resume: bool = False,
    overwrite: bool = False,
    options: Collection[str] = (),
    listener: Listener | None = None,
    held: Held | None = None,
) -> dict[str, Any]:
    """Train to the end, or to a SIGTERM. Returns the results, which are also in
    `run_dir/results.json`.

    Args:
        run: the settings.
        resume: go on from the last checkpoint, to bitwise the same weights on the same machine and
            threads.
        overwrite: begin again where another run's files are.
        options: what else is asked for, by name. "profile" writes a trace of some steps, see
            `Profiler`; others are of extensions, which say when they go along.
        listener: hears how the training goes.
        held: has the run directory until it is closed, and may have it already; by default this
            ends with the training.

    Raises:
        UserError: when settings, log and run directory do not fit together, or the training cannot
            go on.
    """
    ranks = begin_ranks(run)
    remedy = (
        "; start it again with --resume, which continues from the last checkpoint, if there is one"
    )
    with Held() as until_end, threads_given_back(), ranks.world.watched(remedy):
        job = Trainer(
            run, ranks, resume=resume, overwrite=overwrite, options=options, listener=listener
        )
        results = job.fit(held or until_end)
        finishing = job.callbacks.finishing
        del job
        results = finish(finishing, results)
        ranks.world.end()
    return results


class Trainer:
    """One run: its job, what goes along with it, and how far it is."""

    def __init__(
        self,
        run: Run,
        ranks: Ranks | None = None,
        *,
        resume: bool = False,
        overwrite: bool = False,
        options: Collection[str] = (),
        listener: Listener | None = None,
    ) -> None:
        ranks = ranks or begin_ranks(run)
        listen = listener if listener and ranks.leads else (lambda event, values: None)
        self.listen = listen
        self.job = job = set_up(
            run,
            ranks,
            lambda text: listen("note", {"text": text}),
            resume=resume,
            overwrite=overwrite,
            options=options,
        )
        self.callbacks = Callbacks(callbacks_of(job))
        step = Step(job.run, job.model, job.tables, job.optimizer, ranks, self.callbacks)
        self.course = course_of(job, step)
        self.callbacks.add(self.course)
        self.evaluator = Evaluator(job, self.callbacks)
        self.checkpointer = Checkpointer(job, self.callbacks)
        self.stop = StopRequest(alone=ranks.world.size == 1)
        self.progress = Progress()

    def fit(self, held: Held | None = None) -> dict[str, Any]:
        """Run to the end, to early stopping or to a signal. Returns the results. held: see
        `train`.
        """
        job = self.job
        with Held() as until_end:
            self._take_dir(held or until_end)
            until_end.enter_context(self.callbacks.open())
            if job.saved:
                self.progress = self.checkpointer.load(job.saved)
                job.say(self._goes_on())
            else:
                self._initialize()
            job.ranks.take_rank0s(job.model, job.optimizer, job.say)
            self._begin_dir()
            with within_device(job.run, job.dataset.schema), self.stop.heeding():
                return self._train()

    # -- the loop ----------------------------------------------------------------------------------

    def _train(self) -> dict[str, Any]:
        job = self.job
        world = job.ranks.world
        progress = self.progress
        stop = self.stop
        checkpointer = self.checkpointer
        save_every = job.run.checkpoint.every
        with closing(self._open_log()):
            if progress.step and self._time_to_evaluate():
                self._evaluate()  # a signal came between the step and its evaluation
            while progress.epoch < job.run.loop.epochs and not self._finished():
                world.step = progress.step
                flags = (stop.signal is not None, checkpointer.saver.waits)
                advance = self.course.advance(progress.step, flags)
                if advance is None:
                    progress.epoch += 1
                    continue
                self.record(advance)
                if self._time_to_log():
                    self._log()
                if self._time_to_evaluate() and not stop.reason:
                    self._evaluate()
                # after the evaluation, so that it is part of what is saved
                if save_every and progress.step % save_every == 0:
                    checkpointer.save(progress)
            checkpointer.save(progress)
            checkpointer.saver.finish()
        results = self._results()
        self.listen("end", results)
        return results

    def record(self, advance: Advance) -> None:
        """Take note of a step that was made, and let the callbacks look at it."""
        progress = self.progress
        outcome = advance.outcome
        stops, waiting = outcome.flags
        if stops:
            self.stop.obey()
        if waiting == self.job.ranks.world.size:
            self.checkpointer.saver.release()
        with self.callbacks.stage("look"):
            record = StepRecord(
                number=progress.step,
                epoch=progress.epoch,
                examples=progress.examples,
                shares=advance.shares,
                outcome=outcome,
            )
            self.callbacks.after_step(record)
            if outcome.left_out:
                self._count_left_out(outcome.norm)
            else:
                progress.skipped_in_row = 0
        progress.step += 1
        progress.examples += sum(share.samples for share in advance.shares)

    def _count_left_out(self, norm: float | None) -> None:
        """Go on after a step that changed nothing, unless there were too many."""
        progress = self.progress
        nonfinite = self.job.run.loop.nonfinite
        progress.skipped += 1
        progress.skipped_in_row += 1
        place = f"step {progress.step}: the loss or a gradient is not finite (norm {norm})"
        if nonfinite == "stop" or progress.skipped_in_row > PATIENCE_NONFINITE:
            remedy = (
                "lower the learning rates, clip with --loop.clip_norm, or check the numeric columns"
            )
            raise UserError(f"{place}; {remedy}")
        self.job.say(f"{place}; left out")

    def _log(self) -> None:
        job = self.job
        progress = self.progress
        rate = self.throughput.rate(progress.examples)
        for tables in job.tables:
            tables.raise_bad_ids()
        values = {
            "examples": progress.examples,
            "examples_per_s": rate,
            "skipped": progress.skipped,
            "lr": job.optimizer.param_groups[0]["lr"],
            **self.callbacks.log_line(),
        }
        for text in self.callbacks.notes():
            job.say(text)
        self.log.write("train", progress.step, values)
        self.listen("progress", {"step": progress.step, "total": self.course.total, **values})

    def _evaluate(self) -> None:
        progress = self.progress
        if not self.job.dataset.rows("valid") or progress.is_evaluated:
            return
        values, parts = self.evaluator.evaluate(progress)
        progress.last_evaluation = {"step": progress.step, **values}
        self.log.write("valid", progress.step, {"trained": progress.examples, **values})
        self.listen("evaluation", progress.last_evaluation)
        cost = self.evaluator.cost(values, progress.step)
        if cost is not None and progress.compare(cost):
            progress.best_evaluation = {**progress.last_evaluation, "parts": parts}
            self.checkpointer.save(progress)
        self.throughput.start(progress.examples)

    # -- when --------------------------------------------------------------------------------------

    def _finished(self) -> bool:
        patience = self.job.run.loop.patience
        out_of_patience = patience is not None and self.progress.worse >= patience
        return self._has_learnt() or out_of_patience or self.stop.reason is not None

    def _has_learnt(self) -> bool:
        return self.course.finished or self.progress.step >= self.course.total

    def _time_to_log(self) -> bool:
        """Whether to log now: every so many steps. At the end only if enough steps came together to
        say something.
        """
        step = self.progress.step
        log_every = self.job.run.log.every
        since = step % log_every
        return since == 0 or (
            step == self.course.total and (since == step or 2 * since >= log_every)
        )

    def _time_to_evaluate(self) -> bool:
        evaluate_every = self.job.run.loop.evaluate_every
        if evaluate_every:
            due = self.progress.step % evaluate_every == 0
        else:
            due = self.job.feed.exhausted
        return due or self._has_learnt()

    # -- the beginning and the end -----------------------------------------------------------------

    def _take_dir(self, held: Held) -> None:
        """Have the run's directory, which all ranks see and may write."""
        run_dir = self.job.dir
        ranks = self.job.ranks
        token = run_on_rank0(ranks.world, "run_dir", lambda: held.take(run_dir))
        run_dir.check_shared(token, ranks.world)
        run_dir.check_writable(ranks.world)
        if ranks.leads:
            run_dir.remove_leftovers()

    def _initialize(self) -> None:
        """Give a new run its first weights."""
        job = self.job
        if not job.run.init_from:
            log_odds = job.dataset.log_odds()
            examples = partial(job.dataset.first, MOST_FITTED)
            job.model.fit(examples, log_odds, job.run.seed, job.ranks.run_on_rank0)
            let_go()  # a fit's memory is not a step's
        self.callbacks.initialize()
        self.callbacks.begin()

    def _goes_on(self) -> str:
        total = self.course.total
        step = self.progress.step
        loop = self.job.run.loop
        at = f"step {step} of {total}"
        if not self._finished():
            return f"continuing from {at}"
        ended = "max_steps" if total == loop.max_steps else "epochs"
        ended = "patience" if step < total else ended
        return (
            f"the run is over at {at}, so that nothing is trained; it goes on with a larger"
            f" --loop.{ended}"
        )

    def _begin_dir(self) -> None:
        """Write what a run begins with, once all ranks have read what that replaces."""
        job = self.job
        ranks = job.ranks
        if ranks.leads:
            checkpoint.clean(job.dir.checkpoints)
        ranks.world.barrier("beginning")
        if ranks.leads:
            if not job.saved:
                job.dir.begin(job.dataset, job.run.precision)
            job.dir.write(job.run)
            ranks.restart_mark.write()

    def _open_log(self) -> RunLog:
        job = self.job
        world = job.ranks.world
        progress = self.progress
        total = self.course.total
        self.log = RunLog(
            job.dir.path if job.ranks.leads else None,
            tensorboard=job.run.log.tensorboard,
            step=progress.step,
            evaluated=progress.is_evaluated,
        )
        labels = list(job.dataset.schema.labels)
        self.listen("begin", {"step": progress.step, "total": total, "labels": labels})
        world.step = progress.step
        world.stage = "between steps"
        warmup_steps = job.run.schedule.warmup_steps
        if warmup_steps >= total:
            job.say(
                f"schedule.warmup_steps: {warmup_steps}, but the run has {total} steps: the"
                " learning rate never gets there; lower it or data.batch_size"
            )
        self.throughput = Throughput(progress.examples)
        return self.log

    def _results(self) -> dict[str, Any]:
        job = self.job
        progress = self.progress
        results = {
            "run_dir": str(job.dir.path),
            "step": progress.step,
            "epoch": progress.epoch,
            "examples": progress.examples,
            "skipped_steps": progress.skipped,
            "stopped_by": self.stop.reason,
            "best_step": progress.best_step,
            "labels": list(job.dataset.schema.labels),
            "valid": progress.last_evaluation,
            "best": progress.best_evaluation,
            "precision": computed(job.run.precision, job.device),
            **self.callbacks.results(),
        }
        if job.ranks.leads:
            write_text(job.dir.path / "results.json", to_json(results, indent=1))
        return results
