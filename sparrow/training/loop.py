"""The training loop. It knows a model by a step and a function that scores, and tables by their lifecycle."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparrow import checkpoint, data, kernels
from sparrow.core import UserError
from sparrow.core.files import to_json, write_text
from sparrow.data.batches.loader import Loader, Share
from sparrow.distributed import said
from sparrow.layers import drops
from sparrow.layers.precision import computed, native
from sparrow.metrics import evaluate_labels
from sparrow.optimizers import FewBits
from sparrow.sharding import summary
from sparrow.trained.build import identity, load_optimizer, load_weights, scoring, tables_of
from sparrow.trained.labels import of_first, together
from sparrow.trained.run import Run
from sparrow.training.ahead import Ahead
from sparrow.training.blocks import BlockFiles
from sparrow.training.calibrated import calibrated
from sparrow.training.compared import side_by_side
from sparrow.training.dropout import Dropout
from sparrow.training.feed import Feed
from sparrow.training.preflight import check_settings, resolved, threads_given_back, with_threads, within_device
from sparrow.training.profiling import Profiler
from sparrow.training.ranks import Ranks
from sparrow.training.rundir import Held, RunDir
from sparrow.training.runlog import RunLog
from sparrow.training.saver import Saver, random_state, set_random_state
from sparrow.training.seen import Seen, fitted
from sparrow.training.step import Step
from sparrow.training.stored import Stored
from sparrow.training.turnover import in_time
from sparrow.training.warm import WHOLE, begin, earlier

PATIENCE_NONFINITE = 100
_STATE = ("step", "epoch", "examples", "skipped", "skipped_in_row", "worse", "best", "best_step", "last_evaluation")

Listener = Callable[[str, dict[str, Any]], None]
"""Told (event, values): "begin", "progress", "evaluation", "note", "end"."""


def train(
    run: Run,
    *,
    resume: bool = False,
    overwrite: bool = False,
    profile: bool = False,
    probe: bool = False,
    listener: Listener | None = None,
    held: Held | None = None,
) -> dict[str, Any]:
    """Train to the end, or to a SIGTERM. Returns the results, which are also in `run_dir/results.json`.

    Args:
        run: the settings.
        resume: go on from the last checkpoint, to bitwise the same weights on the same machine and threads.
        overwrite: begin again where another run's files are.
        profile: write a trace of some steps, see `Profiler`.
        probe: learn what products look like, see `Probe`. The weights do not depend on it.
        listener: hears how the training goes.
        held: has the run directory until it is closed, and may have it already; by default this ends with the training.

    Raises:
        UserError: when settings, log and run directory do not fit together, or the training cannot go on.
    """
    ranks = Ranks(run)
    remedy = "; start it again with --resume, which continues from the last checkpoint, if there is one"
    with Held() as mine, threads_given_back(), ranks.world.watched(remedy):
        job = Trainer(run, ranks, resume=resume, overwrite=overwrite, profile=profile, probe=probe, listener=listener)
        results = calibrated(job.fit(held or mine), run, ranks.world)
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
        profile: bool = False,
        probe: bool = False,
        listener: Listener | None = None,
    ) -> None:
        self.ranks = ranks = ranks or Ranks(run)
        self.listen = listener if listener and ranks.leads else (lambda event, values: None)
        self.dir = RunDir(Path(run.run_dir))
        self.dataset = data.open(run.data.path)
        self.labels = list(self.dataset.schema.labels)
        self.identity = identity(run, self.dataset.schema)
        self.run, self.saved = self._chosen(run, resume, overwrite, probe)
        check_settings(run, self.dataset, probe)
        self._build(profile, probe)
        self._read()
        self._count()

    def _chosen(self, run: Run, resume: bool, overwrite: bool, probe: bool) -> tuple[Run, checkpoint.Checkpoint | None]:
        """Returns the run with every choice made, the same on all ranks, and the checkpoint from which it continues."""
        if resume and overwrite:
            raise UserError("resume and overwrite: one continues the old run, the other drops it; give one of them")
        ranks = self.ranks
        if ranks.again.restarted:  # by torchrun, after a rank had died
            resume, overwrite = True, False
        saved, settings = self.dir.find(ranks.world, resume, overwrite, self.identity, self.dataset)
        if saved:
            run = self.dir.continued(run, settings, self._say)
        run = resolved(run, self.dataset, earlier(run, ranks.world) if run.init_from and not saved else None, self._say)
        ranks.check_same(run, self.dataset.fingerprint, saved.step if saved else 0)
        run = with_threads(run, self.dataset, ranks.world.size, ranks.world.local_size, probe)
        if (told := native(run.precision, torch.device(run.device))) is not None:
            self._say(f"precision: {told}")
        return run, saved

    def _build(self, profile: bool, probe: bool) -> None:
        """The model, its optimizers and the step."""
        run, ranks = self.run, self.ranks
        torch.set_num_threads(run.threads)
        torch.manual_seed(run.seed)
        self.device = torch.device(run.device)
        self.model: Any = ranks.build(run, self.dataset.schema)
        self.model.begin(self.dataset.log_odds())
        if not self.saved and not run.init_from:
            self.model.fit(lambda part: self.dataset.first(WHOLE, part), self.dataset.log_odds(), run.seed)
        if ranks.plan:
            self._say(f"{ranks.world.size} ranks on {ranks.world.hosts} hosts; tables: {summary(ranks.plan)}")
        self.tables = tables_of(self.model)
        for tables in self.tables:
            tables.mode = run.loop.table_mode
        self.dense = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = run.dense.build(self.dense)
        self.few_bits = FewBits(self.optimizer, run.precision.weights, run.seed)
        if run.compile:
            self.model.compile()
        self.score = scoring(self.model, run, self.dataset.schema)
        self.profiler = Profiler(self.dir.path if profile and ranks.leads else None)
        self.take_step = Step(run, self.model, self.tables, self.optimizer, self.profiler, ranks, probe)
        self.probe = self.take_step.probe
        self.saver = Saver(ranks.world)
        self.stored = Stored(ranks.world, self.tables)
        self.blocks = BlockFiles(ranks.world, run, self.dir, self.tables)
        self.fitted = fitted(self.tables, run, self.dataset.fingerprint, self._say)

    def _read(self) -> None:
        """The batches of training, and how many steps they make."""
        run = self.run
        loader = side_by_side(self._reader("train", shuffle=bool(run.data.shuffle)), run, self.dataset, self._say)
        self.loader = in_time(loader, self.tables, run, self.dataset)
        if drops(self.model):
            self.loader.with_rows()
        drop = Dropout(self.dataset.schema, run.data.id_dropout or {}, run.seed)
        self.feed = Feed(self.loader, run.loop.accumulate, drop, self.device)
        per_epoch = math.ceil(len(self.loader) / run.loop.accumulate)
        self.total_steps = min(per_epoch * run.loop.epochs, run.loop.max_steps or per_epoch * run.loop.epochs)
        self.ahead = Ahead(run, self.feed, self.tables, self.ranks.world.size, self.total_steps)
        first = min(self.dataset.rows("train"), self.total_steps * run.loop.accumulate * run.data.batch_size)
        self.first_epoch = first if run.loop.progressive else 0

    def _count(self) -> None:
        """Set where the run stands, and what it has seen: see `_STATE`."""
        self.step = self.epoch = self.examples = self.skipped = self.skipped_in_row = self.worse = 0
        self.best: float | None = None
        self.best_step: int | None = None
        self.kept: int | None = self.saved.step if self.saved else None  # the step of the last checkpoint
        self.last_evaluation: dict[str, float] = {}
        self.best_evaluation: dict[str, Any] = {}  # with what the parts of a blend are worth
        self.seen = Seen(self.ranks.world, self.dataset.schema.split.negatives, self.fitted, self.first_epoch)
        self.asked: str | None = None  # the signal that came
        self.stop: str | None = None  # the one that is obeyed

    # -- the loop -----------------------------------------------------------------------------------------------

    def fit(self, held: Held | None = None) -> dict[str, Any]:
        """Run to the end, to early stopping or to a signal. Returns the results. held: see `train`."""
        with Held() as mine:
            token = said(self.ranks.world, "run_dir", lambda: (held or mine).take(self.dir))
            self.dir.check_shared(token, self.ranks.world)
            mine.enter_context(self.blocks.opened())
            if self.saved:
                self._load(self.saved)
                self._say(self._goes_on())
            else:
                begin(self.model, self.optimizer, self.run, self.dataset, self._say, self.ranks.world)
                self.few_bits.settle()
            if (self.saved or self.run.init_from) and (rounded := self.stored.rounded()):
                self._say(rounded)
            if self.ranks.leads:
                checkpoint.clean(self.dir.checkpoints)
            self.ranks.world.barrier("beginning")  # all have read what the first may now drop
            if self.ranks.leads:
                if not self.saved:
                    self.dir.begin(self.dataset, self.run.precision)
                self.dir.write(self.run)
                self.ranks.again.begun()
            with within_device(self.run, self.dataset.schema):
                return self._fit()

    def _fit(self) -> dict[str, Any]:
        heard = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        old = {s: signal.signal(s, self._on_signal) for s in heard}
        evaluated = self.last_evaluation.get("step") == self.step
        place, events = self.dir.path if self.ranks.leads else None, self.run.log.tensorboard
        self.log = RunLog(place, tensorboard=events, step=self.step, evaluated=evaluated)
        self.listen("begin", {"step": self.step, "total": self.total_steps, "labels": self.labels})
        self.ranks.world.step, self.ranks.world.stage = self.step, "between steps"
        if self.run.schedule.warmup_steps >= self.total_steps:
            text = f"schedule.warmup_steps: {self.run.schedule.warmup_steps}, but the run has {self.total_steps} steps"
            self._say(f"{text}: the learning rate never gets there; lower it or data.batch_size")
        self.clock, self.clock_examples = time.perf_counter(), self.examples
        try:
            if self.step and self._time_to_evaluate():
                self._evaluate()  # a signal came between the step and its evaluation
            while self.epoch < self.run.loop.epochs and not self._finished():
                self._epoch()
            self.save()
            self.saver.finish()
            self.profiler.finish()
        finally:
            self.log.close()
            for number, handler in old.items():
                signal.signal(number, handler)
        results = self._results()
        self.listen("end", results)
        return results

    def _epoch(self) -> None:
        while not self._finished():
            self.ranks.world.step = self.step
            with self.profiler.part("load"), self.ranks.world.at("load"):
                micro = self.feed.take()
            if not micro:
                self.epoch += 1
                return
            with self.ranks.world.at("computing"):
                self._train_step(micro)
            self.profiler.stepped()
            if self._time_to_log():
                self._log()
            if self._time_to_evaluate() and not self.stop:
                self._evaluate()
            every = self.run.checkpoint.every
            if every and self.step % every == 0:  # after the evaluation, so that it is part of what is saved
                self.save()

    def _finished(self) -> bool:
        patience = self.run.loop.patience
        is_over = self.step >= self.total_steps or (patience is not None and self.worse >= patience)
        return is_over or self.stop is not None

    def _goes_on(self) -> str:
        at, loop = f"step {self.step} of {self.total_steps}", self.run.loop
        if not self._finished():
            return f"continuing from {at}"
        ended = "max_steps" if self.total_steps == loop.max_steps else "epochs"
        ended = "patience" if self.step < self.total_steps else ended
        return f"the run is over at {at}, so that nothing is trained; it goes on with a larger --loop.{ended}"

    def _time_to_log(self) -> bool:
        """Whether to log now: every so many steps. At the end only if enough steps came together to say something."""
        since = self.step % self.run.log.every
        return since == 0 or (self.step == self.total_steps and (since == self.step or 2 * since >= self.run.log.every))

    def _time_to_evaluate(self) -> bool:
        every = self.run.loop.evaluate_every
        due = self.step % every == 0 if every else self.feed.exhausted
        return due or self.step >= self.total_steps

    def _train_step(self, micro: list[Share]) -> None:
        self._set_lr()
        flags = self.asked is not None, self.saver.waits
        done = self.take_step(micro, flags, lambda: self.ahead(self.step, micro[-1:]))
        stops, waiting = done.flags
        if stops:
            self.stop = self.asked or "a signal to another rank"
        if waiting == self.ranks.world.size:
            self.saver.all_wait()
        with self.profiler.part("look"):
            self.seen.take(micro, done, self.examples if self.epoch == 0 else None)
            self.skipped_in_row = self.skipped_in_row + 1 if done.left_out else 0
            if done.left_out:
                self._say_left_out(done.norm)
        self.step += 1
        self.examples += sum(share.samples for share in micro)

    def _set_lr(self) -> None:
        factor = self.run.schedule.factor(self.step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.dense.lr * factor
        for tables in self.tables:
            tables.scale_lr(factor)

    def _say(self, text: str) -> None:
        self.listen("note", {"text": text})

    def _say_left_out(self, norm: float | None) -> None:
        self.skipped += 1
        place = f"step {self.step}: the loss or a gradient is not finite (norm {norm})"
        if self.run.loop.nonfinite == "stop" or self.skipped_in_row > PATIENCE_NONFINITE:
            remedy = "lower the learning rates, clip with --loop.clip_norm, or check the numeric columns"
            raise UserError(f"{place}; {remedy}")
        self._say(f"{place}; left out")

    # -- looking ------------------------------------------------------------------------------------------------

    def _log(self) -> None:
        now = time.perf_counter()
        rate = (self.examples - self.clock_examples) / max(now - self.clock, 1e-9)
        self.clock, self.clock_examples = now, self.examples
        for tables in self.tables:
            tables.raise_bad_ids()
        values = {"examples": self.examples, "examples_per_s": rate, "skipped": self.skipped}
        values |= {"lr": self.optimizer.param_groups[0]["lr"], **self.seen.line(), **self.stored.line()}
        for text in self.stored.crowded():
            self._say(text)
        self.log.write("train", self.step, values)
        self.listen("progress", {"step": self.step, "total": self.total_steps, **values})

    def _evaluate(self) -> None:
        if not self.dataset.rows("valid") or self.last_evaluation.get("step") == self.step:
            return
        kernels.let_go()  # a step's memory is not evaluation's nor a checkpoint's
        self.model.eval()
        with self.ranks.world.at("evaluation"):
            whole = self.dataset.loader(self.run.data.batch_size, "valid", dedup=self.run.data.dedup)  # on every rank
            parts = self.model.settle(batch.to(self.device) for batch in whole)
            mine = (batch.to(self.device) for batch in self._reader("valid"))
            found = evaluate_labels(self.score, mine, range(len(self.labels)), world=self.ranks.world)
        self.model.train()
        for tables in self.tables:
            tables.raise_bad_ids()
        if any(math.isnan(one["logloss"]) for one in found if one["examples"]):
            raise self._diverged("the model's scores")
        values = together(self.labels, found)
        self.last_evaluation = {"step": self.step, **values}
        self.log.write("valid", self.step, {"trained": self.examples, **values})
        self.listen("evaluation", self.last_evaluation)
        if self._compare(values[self.run.loop.monitor]):
            self.best_evaluation = {**self.last_evaluation, "parts": parts}
            self.save(best=True)
        self.clock, self.clock_examples = time.perf_counter(), self.examples

    def _diverged(self, what: str) -> UserError:
        told = f"step {self.step}: {what} are not finite, the model diverged; lower the learning rates"
        return UserError(f"{told} and resume from the last checkpoint")

    def _compare(self, value: float) -> bool:
        """Keep the best; count evaluations without a better one. Returns whether this is the best."""
        monitor = self.run.loop.monitor
        if math.isnan(value):
            what = f"valid {monitor}{of_first(self.labels)}"
            self._say(f"step {self.step}: {what} is undefined (one class); it picks no best")
            return False
        value = value if monitor in ("ne", "logloss") else -value
        value = self.ranks.world.told("which is best", value)  # a last bit may hang on a rank's threads
        is_better = self.best is None or value < self.best
        if is_better:
            self.best, self.best_step = value, self.step
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
            "tables": self.stored.results(),
            **self.seen.results(),
        }
        if self.ranks.leads:
            write_text(self.dir.path / "results.json", to_json(results, indent=1))
        return results

    def _reader(self, split: str, shuffle: bool = False) -> Loader:
        """Returns a loader of this rank's share of a part's batches."""
        of, share = self.run.data, {"rank": self.ranks.world.rank, "ranks": self.ranks.world.size}
        return self.dataset.loader(of.batch_size, split, shuffle, self.run.seed, of.dedup, **share)

    # -- stopping and resuming ----------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: object) -> None:
        self.asked = signal.Signals(number).name
        if self.ranks.world.size == 1:  # else all stop after the same step
            self.stop = self.asked

    def save(self, best: bool = False) -> None:
        """Write a checkpoint of now, unless there is one. best: it is the best so far."""
        for tables in self.tables:
            tables.raise_bad_ids()  # what they changed is never saved
        if self.run.loop.nonfinite != "off" and not all(bool(p.isfinite().all()) for p in self.dense):
            raise self._diverged("dense weights")  # never saved over ones that work
        state = {name: getattr(self, name) for name in (*_STATE, "best_evaluation")}
        state |= {"loader": self.feed.state_dict(), "data": self.dataset.fingerprint}
        parts: dict[str, dict[str, Tensor]] = {
            "dense": self.model.state_dict(),
            "optimizer": {
                f"{index}.{name}": value
                for index, values in self.optimizer.state_dict()["state"].items()
                for name, value in values.items()
                if value is not None
            },
            "random": random_state(self.device),
            "progressive": self.seen.state() | self.stored.state(),
        }
        chunks: Iterable[Any] = self.blocks.saved()
        is_new = self.kept != self.step
        self.kept = self.step  # asked of memory: ranks may see the folder differently
        self.probe.save(self.dir.path, self.step)
        known: dict[str, Any] = {"identity": self.identity, "state": state, "keep": self.run.checkpoint.keep}
        step, world, background = self.step, self.ranks.world, self.run.checkpoint.background
        if background and is_new:
            chunks = [chunk.copied() for chunk in chunks]
            parts = {name: {n: t.clone() for n, t in part.items()} for name, part in parts.items()}

        def work(all_written: Callable[[], None]) -> None:
            if is_new:
                team = checkpoint.Team(rank=world.rank, ranks=world.size, all_written=all_written)
                checkpoint.save(self.dir.checkpoints, step, parts=parts, chunks=chunks, team=team, **known)
            if best and self.ranks.leads:
                checkpoint.mark_best(self.dir.checkpoints, step)

        self.saver.save(work, background)
        self.blocks.keep(step)

    def _load(self, saved: checkpoint.Checkpoint) -> None:
        load_weights(self.model, saved)
        load_optimizer(self.optimizer, saved)
        set_random_state(saved.part("random"), self.device)
        self.probe.load(self.dir.path, saved.step, self._say)
        self.seen.load(saved)
        self.stored.load(saved)
        for name in _STATE:
            setattr(self, name, saved.state[name])
        self.best_evaluation = saved.state.get("best_evaluation", {})  # earlier checkpoints have none
        self.loader.load_state_dict(saved.state["loader"])
        if self.best_step == self.step and self.ranks.leads:  # a kill may have come between the checkpoint and its mark
            checkpoint.mark_best(self.dir.checkpoints, self.step)
