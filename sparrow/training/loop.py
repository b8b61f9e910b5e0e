"""The training loop. It knows a model by a step and a function that scores, and tables by their
lifecycle.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparrow import checkpoint, data, kernels, training
from sparrow.core import UserError
from sparrow.core.extensions import adapt_optimizer
from sparrow.core.files import to_json, write_text
from sparrow.core.memory import let_go
from sparrow.data.batches.loader import Loader
from sparrow.distributed import everywhere, run_on_rank0
from sparrow.layers.dropout import drops
from sparrow.layers.precision import computed, mixing, native
from sparrow.metrics import evaluate_labels, metric_of
from sparrow.models import MOST_FITTED
from sparrow.trained.build import fitted_values, identity, scoring, tables_of
from sparrow.trained.dense import optimizer_to_save, weights_to_save
from sparrow.trained.labels import first_label_suffix, join_labels
from sparrow.trained.run import Run
from sparrow.training.begin import begin_ranks
from sparrow.training.callbacks import Callbacks, Job, StepRecord, finish
from sparrow.training.course import Advance, course_of
from sparrow.training.dropout import Dropout
from sparrow.training.feed import Feed
from sparrow.training.group_batches import keep_groups_together
from sparrow.training.members import callbacks_of
from sparrow.training.plan import Plan, identities
from sparrow.training.preflight import (
    check_settings,
    resolved,
    threads_given_back,
    with_threads,
    within_device,
)
from sparrow.training.ranks import Ranks
from sparrow.training.rundir import Held, RunDir
from sparrow.training.runlog import RunLog
from sparrow.training.saver import Saver, random_state
from sparrow.training.signals import heeding
from sparrow.training.step import Step

PATIENCE_NONFINITE = 100
_STATE = (
    "step",
    "epoch",
    "examples",
    "skipped",
    "skipped_in_row",
    "worse",
    "best",
    "best_step",
    "last_evaluation",
)

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
        options: what else is asked for: "profile" writes a trace of some steps, see `Profiler`;
            "probe" learns what products look like, see `Probe`; "baseline" says that one will be
            fitted after the training.
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
    """One run: its model, optimizer, loader and position."""

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
        self.ranks = ranks = ranks or begin_ranks(run)
        self.listen = listener if listener and ranks.leads else (lambda event, values: None)
        self.dir = RunDir(Path(run.run_dir))
        self.dataset = data.open(run.data.path)
        self.labels = list(self.dataset.schema.labels)
        self.identity = identity(run, self.dataset.schema)
        self.options = frozenset(options)
        self.run, self.saved = self._chosen(run, resume, overwrite)
        check_settings(Plan(run=run, dataset=self.dataset, options=self.options))
        self._build()
        self._read()
        job = Job(
            run=self.run,
            dataset=self.dataset,
            model=self.model,
            optimizer=self.optimizer,
            tables=self.tables,
            feed=self.feed,
            total_steps=self.total_steps,
            ranks=ranks,
            dir=self.dir,
            say=self._say,
            options=self.options,
        )
        self.callbacks = Callbacks(callbacks_of(job))
        step = Step(self.run, self.model, self.tables, self.optimizer, ranks, self.callbacks)
        self.course = course_of(job, step)
        self.callbacks.add(self.course)
        self._count()

    def _chosen(
        self, run: Run, resume: bool, overwrite: bool
    ) -> tuple[Run, checkpoint.Checkpoint | None]:
        """Returns the run with every choice made, the same on all ranks, and the checkpoint from
        which it continues.
        """
        if resume and overwrite:
            raise UserError(
                "resume and overwrite: one continues the old run, the other drops it; give one of"
                " them"
            )
        ranks = self.ranks
        if ranks.restart_mark.restarted:  # by torchrun, after a rank had died
            resume = True
            overwrite = False
        if own := identities(Plan(run=run, dataset=self.dataset, options=self.options)):
            self.identity["extensions"] = own
        saved, settings = self.dir.find(ranks.world, resume, overwrite, self.identity, self.dataset)
        if saved:
            run = training.restart.with_choices(run, settings, self._say)
        before = None
        if run.init_from and not saved:
            before = training.earlier_run.read_settings(RunDir(Path(run.init_from)), ranks.world)
        run = resolved(run, self.dataset, before, self._say, self.options)
        ranks.check_same(run, self.dataset.fingerprint, saved.step if saved else 0)
        size = ranks.world.size
        per_host = ranks.world.local_size
        fits = partial(with_threads, run, self.dataset, size, per_host, self.options)
        run = everywhere(ranks.world, "memory and disks", fits, name_rank=True)
        for name, note in self.dataset.schema.suspects.items():
            self._say(f"{name}: {note}")
        if (remark := native(run.precision, torch.device(run.device))) is not None:
            self._say(f"precision: {remark}")
        return run, saved

    def _build(self) -> None:
        """The model and its optimizers."""
        run = self.run
        ranks = self.ranks
        torch.set_num_threads(run.threads)
        torch.manual_seed(run.seed)
        self.device = torch.device(run.device)
        self.model: Any = ranks.build(run, self.dataset.schema)
        self.model.begin(self.dataset.log_odds())
        if mixed := mixing(self.model, run.precision):
            self._say(f"precision: {mixed}")
        if ranks.layouts:
            self._say(ranks.layouts)
        self.tables = tables_of(self.model)
        for tables in self.tables:
            tables.mode = run.loop.table_mode
        self.dense = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = run.dense.build(self.dense)
        adapt_optimizer(self.optimizer, run)
        if run.compile:
            # else fused kernels leave out casts to bf16
            self.model.compile(options={"emulate_precision_casts": True})
        self.score = scoring(self.model, run, self.dataset.schema)
        self.saver = Saver(ranks.world)

    def _read(self) -> None:
        """The batches of training, and how many steps they make."""
        run = self.run
        loader = self._reader("train", shuffle=bool(run.data.shuffle))
        self.loader = keep_groups_together(loader, run, self.dataset, self._say)
        if drops(self.model):
            self.loader.with_rows()
        drop = Dropout(self.dataset.schema, run.data.id_dropout or {}, run.seed)
        self.feed = Feed(self.loader, run.loop.accumulate, drop, self.device)
        per_epoch = math.ceil(len(self.loader) / run.loop.accumulate)
        self.total_steps = min(
            per_epoch * run.loop.epochs, run.loop.max_steps or per_epoch * run.loop.epochs
        )

    def _count(self) -> None:
        """Set where the run stands: see `_STATE`."""
        self.step = self.epoch = self.examples = self.skipped = self.skipped_in_row = self.worse = 0
        self.best: float | None = None
        self.best_step: int | None = None
        # the step of the last checkpoint
        self.saved_step: int | None = self.saved.step if self.saved else None
        self.last_evaluation: dict[str, float] = {}
        self.best_evaluation: dict[str, Any] = {}  # with what the parts of a blend are worth
        self.signal_name: str | None = None  # the signal that came
        self.stop: str | None = None  # the one that is obeyed

    # -- the loop ----------------------------------------------------------------------------------

    def fit(self, held: Held | None = None) -> dict[str, Any]:
        """Run to the end, to early stopping or to a signal. Returns the results. held: see
        `train`.
        """
        with Held() as until_end:
            token = run_on_rank0(
                self.ranks.world, "run_dir", lambda: (held or until_end).take(self.dir)
            )
            self.dir.check_shared(token, self.ranks.world)
            self.dir.check_writable(self.ranks.world)
            if self.ranks.leads:
                self.dir.remove_leftovers()
            until_end.enter_context(self.callbacks.open())
            if self.saved:
                self._load(self.saved)
                self._say(self._goes_on())
            else:
                if not self.run.init_from:
                    log_odds = self.dataset.log_odds()
                    examples = partial(self.dataset.first, MOST_FITTED)
                    self.model.fit(examples, log_odds, self.run.seed, self.ranks.run_on_rank0)
                    let_go()  # a fit's memory is not a step's
                self.callbacks.initialize()
                self.callbacks.begin()
            self.ranks.take_rank0s(self.model, self.optimizer, self._say)
            if self.ranks.leads:
                checkpoint.clean(self.dir.checkpoints)
            self.ranks.world.barrier("beginning")  # all have read what the first may now drop
            if self.ranks.leads:
                if not self.saved:
                    self.dir.begin(self.dataset, self.run.precision)
                self.dir.write(self.run)
                self.ranks.restart_mark.write()
            with within_device(self.run, self.dataset.schema), heeding(self._on_signal):
                return self._fit()

    def _fit(self) -> dict[str, Any]:
        evaluated = self.last_evaluation.get("step") == self.step
        self.log = RunLog(
            self.dir.path if self.ranks.leads else None,
            tensorboard=self.run.log.tensorboard,
            step=self.step,
            evaluated=evaluated,
        )
        self.listen("begin", {"step": self.step, "total": self.course.total, "labels": self.labels})
        self.ranks.world.step = self.step
        self.ranks.world.stage = "between steps"
        if self.run.schedule.warmup_steps >= self.course.total:
            self._say(
                f"schedule.warmup_steps: {self.run.schedule.warmup_steps}, but the run has"
                f" {self.course.total} steps: the learning rate never gets there; lower it or"
                " data.batch_size"
            )
        self.clock = time.perf_counter()
        self.clock_examples = self.examples
        with closing(self.log):
            if self.step and self._time_to_evaluate():
                self._evaluate()  # a signal came between the step and its evaluation
            while self.epoch < self.run.loop.epochs and not self._finished():
                self._epoch()
            self.save()
            self.saver.finish()
        results = self._results()
        self.listen("end", results)
        return results

    def _epoch(self) -> None:
        while not self._finished():
            self.ranks.world.step = self.step
            advance = self.course.advance(
                self.step, (self.signal_name is not None, self.saver.waits)
            )
            if advance is None:
                self.epoch += 1
                return
            self.record(advance)
            if self._time_to_log():
                self._log()
            if self._time_to_evaluate() and not self.stop:
                self._evaluate()
            save_every = self.run.checkpoint.every
            # after the evaluation, so that it is part of what is saved
            if save_every and self.step % save_every == 0:
                self.save()

    def _finished(self) -> bool:
        patience = self.run.loop.patience
        out_of_patience = patience is not None and self.worse >= patience
        return self._has_learnt() or out_of_patience or self.stop is not None

    def _has_learnt(self) -> bool:
        return self.course.finished or self.step >= self.course.total

    def _goes_on(self) -> str:
        at = f"step {self.step} of {self.course.total}"
        loop = self.run.loop
        if not self._finished():
            return f"continuing from {at}"
        ended = "max_steps" if self.course.total == loop.max_steps else "epochs"
        ended = "patience" if self.step < self.course.total else ended
        return (
            f"the run is over at {at}, so that nothing is trained; it goes on with a larger"
            f" --loop.{ended}"
        )

    def _time_to_log(self) -> bool:
        """Whether to log now: every so many steps. At the end only if enough steps came together to
        say something.
        """
        log_every = self.run.log.every
        since = self.step % log_every
        return since == 0 or (
            self.step == self.course.total and (since == self.step or 2 * since >= log_every)
        )

    def _time_to_evaluate(self) -> bool:
        evaluate_every = self.run.loop.evaluate_every
        due = self.step % evaluate_every == 0 if evaluate_every else self.feed.exhausted
        return due or self._has_learnt()

    def record(self, advance: Advance) -> None:
        """Take note of a step that was made, and let the callbacks look at it."""
        shares = advance.shares
        outcome = advance.outcome
        stops, waiting = outcome.flags
        if stops:
            self.stop = self.signal_name or "a signal to another rank"
        if waiting == self.ranks.world.size:
            self.saver.release()
        with self.callbacks.stage("look"):
            record = StepRecord(
                number=self.step,
                epoch=self.epoch,
                examples=self.examples,
                shares=shares,
                outcome=outcome,
            )
            self.callbacks.after_step(record)
            self.skipped_in_row = self.skipped_in_row + 1 if outcome.left_out else 0
            if outcome.left_out:
                self._say_left_out(outcome.norm)
        self.step += 1
        self.examples += sum(share.samples for share in shares)

    def _say(self, text: str) -> None:
        self.listen("note", {"text": text})

    def _say_left_out(self, norm: float | None) -> None:
        self.skipped += 1
        place = f"step {self.step}: the loss or a gradient is not finite (norm {norm})"
        if self.run.loop.nonfinite == "stop" or self.skipped_in_row > PATIENCE_NONFINITE:
            remedy = (
                "lower the learning rates, clip with --loop.clip_norm, or check the numeric columns"
            )
            raise UserError(f"{place}; {remedy}")
        self._say(f"{place}; left out")

    # -- looking -----------------------------------------------------------------------------------

    def _log(self) -> None:
        now = time.perf_counter()
        rate = (self.examples - self.clock_examples) / max(now - self.clock, 1e-9)
        self.clock = now
        self.clock_examples = self.examples
        for tables in self.tables:
            tables.raise_bad_ids()
        values = {"examples": self.examples, "examples_per_s": rate, "skipped": self.skipped}
        values |= {"lr": self.optimizer.param_groups[0]["lr"], **self.callbacks.log_line()}
        for text in self.callbacks.notes():
            self._say(text)
        self.log.write("train", self.step, values)
        self.listen("progress", {"step": self.step, "total": self.course.total, **values})

    def _evaluate(self) -> None:
        if not self.dataset.rows("valid") or self.last_evaluation.get("step") == self.step:
            return
        kernels.let_go()  # a step's memory is not evaluation's nor a checkpoint's
        let_go()
        self.callbacks.before_evaluation()
        self.model.eval()
        with self.ranks.world.at("evaluation"):
            # on every rank
            loader = self.dataset.loader(
                self.run.data.batch_size, "valid", dedup=self.run.data.dedup
            )
            all_batches = (batch.to(self.device) for batch in loader)
            parts = self.model.weigh_parts(all_batches, self.ranks.run_on_rank0)
            if parts:
                self.ranks.take_rank0s(self.model, self.optimizer, self._say)
            own_batches = (batch.to(self.device) for batch in self._reader("valid"))
            label_results = evaluate_labels(
                self.score,
                own_batches,
                range(len(self.labels)),
                world=self.ranks.world,
                model=self.model,
            )
        self.model.train()
        for tables in self.tables:
            tables.raise_bad_ids()
        for result in label_results:  # without a base rate no row of the label counts
            if math.isnan(result["logloss"]) and not math.isnan(result["base_rate"]):
                raise self._diverged("the model's scores")
        values = join_labels(self.labels, label_results)
        self.last_evaluation = {"step": self.step, **values}
        self.log.write("valid", self.step, {"trained": self.examples, **values})
        self.listen("evaluation", self.last_evaluation)
        if self._compare(values[self.run.loop.monitor]):
            self.best_evaluation = {**self.last_evaluation, "parts": parts}
            self.save()
        self.clock = time.perf_counter()
        self.clock_examples = self.examples

    def _diverged(self, quantity: str) -> UserError:
        return UserError(
            f"step {self.step}: {quantity} are not finite, the model diverged; lower the learning"
            " rates and resume from the last checkpoint"
        )

    def _compare(self, value: float) -> bool:
        """Keep the best; count evaluations without a better one. Returns whether this is the
        best.
        """
        monitor = self.run.loop.monitor
        if math.isnan(value):
            metric = f"valid {monitor}{first_label_suffix(self.labels)}"
            self._say(f"step {self.step}: {metric} is undefined (one class); it picks no best")
            return False
        value = metric_of(monitor).cost(value)
        # a last bit may hang on a rank's threads
        value = self.ranks.world.broadcast("which is best", value)
        is_better = self.best is None or value < self.best
        if is_better:
            self.best = value
            self.best_step = self.step
        self.worse = 0 if is_better else self.worse + 1
        return is_better

    def _results(self) -> dict[str, Any]:
        results = {
            "run_dir": str(self.dir.path),
            "step": self.step,
            "epoch": self.epoch,
            "examples": self.examples,
            "skipped_steps": self.skipped,
            "stopped_by": self.stop,
            "best_step": self.best_step,
            "labels": self.labels,
            "valid": self.last_evaluation,
            "best": self.best_evaluation,
            "precision": computed(self.run.precision, self.device),
            **self.callbacks.results(),
        }
        if self.ranks.leads:
            write_text(self.dir.path / "results.json", to_json(results, indent=1))
        return results

    def _reader(self, split: str, shuffle: bool = False) -> Loader:
        """Returns a loader of this rank's share of a part's batches."""
        settings = self.run.data
        return self.dataset.loader(
            settings.batch_size,
            split,
            shuffle,
            self.run.seed,
            settings.dedup,
            rank=self.ranks.world.rank,
            ranks=self.ranks.world.size,
        )

    # -- stopping and resuming ---------------------------------------------------------------------

    def _on_signal(self, number: int, frame: object) -> None:
        self.signal_name = signal.Signals(number).name
        if self.ranks.world.size == 1:  # else all stop after the same step
            self.stop = self.signal_name

    def save(self) -> None:
        """Write a checkpoint of now. If there is one, only what is known of it since is written."""
        for tables in self.tables:
            tables.raise_bad_ids()  # what they changed is never saved
        if self.run.loop.nonfinite != "off" and not all(
            bool(p.isfinite().all()) for p in self.dense
        ):
            raise self._diverged("dense weights")  # never saved over ones that work
        is_new = self.saved_step != self.step
        if is_new:  # a run that goes on from here has these on all ranks
            self.ranks.take_rank0s(self.model, self.optimizer, self._say)
        state = {name: getattr(self, name) for name in (*_STATE, "best_evaluation")}
        state |= {"loader": self.feed.state_dict(), "data": self.dataset.fingerprint}
        state |= self.callbacks.before_save(self.step)
        state["features"] = fitted_values(self.dataset.schema)
        parts: dict[str, dict[str, Tensor]] = {
            "dense": weights_to_save(self.model, self.ranks.world),
            "optimizer": optimizer_to_save(self.model, self.optimizer, self.ranks.world),
        }
        progressive = self.callbacks.state_dict()  # on all ranks: members may wait for each other
        if self.ranks.leads:
            parts |= {"random": random_state(self.device), "progressive": progressive}
        chunks: Iterable[Any] = chain(
            *(tables.saved() for tables in self.tables), self.callbacks.pieces()
        )
        self.saved_step = self.step  # asked of memory: ranks may see the folder differently
        known: dict[str, Any] = {
            "identity": self.identity,
            "state": state,
            "keep": self.run.checkpoint.keep,
        }
        step = self.step
        world = self.ranks.world
        background = self.run.checkpoint.background
        if background and is_new:
            chunks = [chunk.copied() for chunk in chunks]
            for name, part in parts.items():
                parts[name] = {key: tensor.clone() for key, tensor in part.items()}

        def work(wait_for_ranks: Callable[[], None]) -> None:
            if is_new:
                team = checkpoint.Team(
                    rank=world.rank, ranks=world.size, all_written=wait_for_ranks
                )
                checkpoint.save(
                    self.dir.checkpoints, step, parts=parts, chunks=chunks, team=team, **known
                )
            elif self.ranks.leads:
                checkpoint.update_state(self.dir.checkpoints, step, state)

        self.saver.save(work, background)
        self.callbacks.after_save(step)

    def _load(self, saved: checkpoint.Checkpoint) -> None:
        training.restart.load(saved, self.model, self.optimizer, self.device)
        self.callbacks.load(saved)
        for name in _STATE:
            setattr(self, name, saved.state[name])
        # earlier checkpoints have none
        self.best_evaluation = saved.state.get("best_evaluation", {})
        self.loader.load_state_dict(saved.state["loader"])
