"""The training loop. It knows a model by `loss(batch)` and `score(batch)` and tables by their lifecycle."""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparrow import checkpoint, data
from sparrow.core import Batch, UserError
from sparrow.core.config import flatten, to_dict
from sparrow.core.files import cannot_write, to_json, write_text
from sparrow.data.schema import Schema
from sparrow.metrics import Streaming, evaluate
from sparrow.training.restore import build, check_schema, identity, load_weights, tables_of
from sparrow.training.run import Run
from sparrow.training.runlog import RunLog

WINDOWS = 5  # progressive validation is reported by fifths of the first epoch
PATIENCE_NONFINITE = 100
_STATE = ("step", "epoch", "examples", "skipped", "skipped_in_row", "worse", "best", "best_step", "last_evaluation")

Listener = Callable[[str, dict[str, Any]], None]
"""Told (event, values): "begin", "progress", "evaluation", "note", "end"."""


def train(
    run: Run, *, resume: bool = False, overwrite: bool = False, listener: Listener | None = None
) -> dict[str, Any]:
    """Train to the end (or to a SIGTERM) and return the results, which are also in `run_dir/results.json`.

    resume: go on from the last checkpoint, to bitwise the same weights on the same machine and threads.
    overwrite: begin again where another run's files are. Raises UserError.
    """
    return Trainer(run, resume=resume, overwrite=overwrite, listener=listener).fit()


class Trainer:
    """One run: its model, optimizer, loader and position."""

    def __init__(
        self, run: Run, *, resume: bool = False, overwrite: bool = False, listener: Listener | None = None
    ) -> None:
        if resume and overwrite:
            raise UserError("resume and overwrite: one goes on with the old run, the other drops it; give one of them")
        self.dir = Path(run.run_dir)
        self.checkpoints = self.dir / "checkpoints"
        self.listen = listener or (lambda event, values: None)
        self.dataset = data.open(run.data.path)
        self.identity = identity(run, self.dataset.schema)
        saved = self._find(resume, overwrite)
        self.run = run = self._continued(run) if saved else run.resolved()
        torch.set_num_threads(run.threads)
        torch.manual_seed(run.seed)
        self.device = torch.device(run.device)
        self.model: Any = build(run.model, self.dataset.schema, run)
        self.tables = tables_of(self.model)
        for tables in self.tables:
            tables.mode = run.loop.table_mode
        self.dense = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = run.dense.build(self.dense)
        self.loader = self.dataset.loader(run.data.batch_size, shuffle=run.data.shuffle, seed=run.seed)
        per_epoch = math.ceil(len(self.loader) / run.loop.accumulate)
        self.total_steps = min(per_epoch * run.loop.epochs, run.loop.max_steps or per_epoch * run.loop.epochs)
        self.first_epoch = min(self.dataset.rows("train"), self.total_steps * run.loop.accumulate * run.data.batch_size)
        self.step = self.epoch = self.examples = self.skipped = self.skipped_in_row = self.worse = 0
        self.best: float | None = None
        self.best_step: int | None = None
        self.last_evaluation: dict[str, float] = {}
        self.progressive = [Streaming() for _ in range(WINDOWS)]
        self.window = Streaming()  # since the last line of the run log, as is:
        self.losses = torch.zeros(2, dtype=torch.float64)  # sum of loss * mass, sum of masses
        self.stop: str | None = None  # the signal that asked for it
        self._check_monitor()
        self.saved = saved

    # -- the loop -----------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        """Run to the end, to early stopping or to a signal."""
        with self._locked():
            if self.saved:
                self._load(self.saved)
            else:
                self._begin()
            self.run.save(self.dir / "run.toml")
            return self._fit()

    def _fit(self) -> dict[str, Any]:
        old = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)} if _in_main() else {}
        evaluated = self.last_evaluation.get("step") == self.step
        self.log = RunLog(self.dir, tensorboard=self.run.log.tensorboard, step=self.step, evaluated=evaluated)
        self.listen("begin", {"step": self.step, "total": self.total_steps})
        if self.run.schedule.warmup_steps >= self.total_steps:
            text = f"schedule.warmup_steps: {self.run.schedule.warmup_steps}, but the run has {self.total_steps} steps"
            self.listen("note", {"text": f"{text}: the learning rate never gets there; lower it or data.batch_size"})
        self.clock, self.clock_examples = time.perf_counter(), self.examples
        try:
            if self.step and self._time_to_evaluate():
                self._evaluate()  # a signal came between the step and its evaluation
            while self.epoch < self.run.loop.epochs and not self._finished():
                self._epoch()
            self._save()
        finally:
            self.log.close()
            for number, handler in old.items():
                signal.signal(number, handler)
        results = self._results()
        self.listen("end", results)
        return results

    def _epoch(self) -> None:
        batches = iter(self.loader)
        while not self._finished():
            micro = list(itertools.islice(batches, self.run.loop.accumulate))
            if not micro:
                self.epoch += 1
                return
            self._train_step([batch.to(self.device) for batch in micro])
            if self._time_to_log():
                self._log()
            if self._time_to_evaluate() and not self.stop:
                self._evaluate()
            every = self.run.checkpoint.every
            if every and self.step % every == 0:  # after the evaluation, so that it is part of what is saved
                self._save()

    def _finished(self) -> bool:
        loop = self.run.loop
        return (
            self.stop is not None
            or self.step >= self.total_steps
            or (loop.patience is not None and self.worse >= loop.patience)
        )

    def _time_to_log(self) -> bool:
        """Every so many steps; at the end only if enough steps have come together to say something."""
        since = self.step % self.run.log.every
        return since == 0 or (self.step == self.total_steps and (since == self.step or 2 * since >= self.run.log.every))

    def _time_to_evaluate(self) -> bool:
        every = self.run.loop.evaluate_every
        due = self.step % every == 0 if every else self.loader.exhausted
        return due or self.step >= self.total_steps

    def _train_step(self, micro: list[Batch]) -> None:
        self._set_lr()
        masses = [_mass(batch) for batch in micro]
        total = sum(masses) or 1.0  # weights may all be 0
        if self._progressive():
            for batch in micro:
                self._predict(batch)
        finite = True
        for batch, mass in zip(micro, masses, strict=True):
            loss = self.model.loss(batch)
            value = loss.item()
            finite = finite and (self.run.loop.nonfinite == "off" or math.isfinite(value))
            if finite:
                (loss * (mass / total)).backward()  # together: the mean over all of the step's examples
                self.losses += torch.tensor([value * mass, mass], dtype=torch.float64)
        norm = self._gradient_norm() if finite else math.nan
        if norm is not None and not math.isfinite(norm) and self.run.loop.nonfinite != "off":
            self._leave_out(norm)
        else:
            self._clip(norm)
            self.optimizer.step()
            for tables in self.tables:
                tables.update()
            self.skipped_in_row = 0
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.examples += sum(batch.batch_size for batch in micro)

    def _set_lr(self) -> None:
        factor = self.run.schedule.factor(self.step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.dense.lr * factor
        for tables in self.tables:
            tables.scale_lr(factor)

    def _progressive(self) -> bool:
        """Predict before training: in the first epoch, after which no row is new."""
        return self.run.loop.progressive and self.epoch == 0

    @torch.no_grad()
    def _predict(self, batch: Batch) -> None:
        self.model.eval()
        scores = self.model.score(batch)
        self.model.train()
        assert batch.labels_BT is not None
        part = min(WINDOWS - 1, self.examples * WINDOWS // max(self.first_epoch, 1))
        for metric in (self.progressive[part], self.window):
            metric.update(scores[:, 0], batch.labels_BT[:, 0], batch.weights_B)

    def _gradients(self) -> list[Tensor]:
        tables = [g.grad_UD for tables in self.tables for g in tables.gradients().values()]
        return [p.grad for p in self.dense if p.grad is not None] + tables

    def _gradient_norm(self) -> float | None:
        """The norm of all gradients together, or None when nobody asks for it."""
        if self.run.loop.nonfinite == "off" and self.run.loop.clip_norm is None:
            return None
        return float(torch.nn.utils.get_total_norm(self._gradients()))

    def _clip(self, norm: float | None) -> None:
        bound = self.run.loop.clip_norm
        if bound is not None and norm is not None and norm > bound:
            for gradient in self._gradients():
                gradient.mul_(bound / norm)

    def _leave_out(self, norm: float) -> None:
        for tables in self.tables:
            tables.discard()
        self.skipped += 1
        self.skipped_in_row += 1
        place = f"step {self.step}: the loss or a gradient is not finite (norm {norm})"
        if self.run.loop.nonfinite == "stop" or self.skipped_in_row > PATIENCE_NONFINITE:
            raise UserError(
                f"{place}; lower the learning rates, clip with --loop.clip_norm, or check the numeric columns"
            )
        self.listen("note", {"text": f"{place}; left out"})

    # -- looking ------------------------------------------------------------------------------------------------

    def _log(self) -> None:
        now = time.perf_counter()
        rate = (self.examples - self.clock_examples) / max(now - self.clock, 1e-9)
        self.clock, self.clock_examples = now, self.examples
        for tables in self.tables:
            tables.raise_bad_ids()
        values: dict[str, float] = {"examples": self.examples, "examples_per_s": rate, "skipped": self.skipped}
        values["lr"] = self.optimizer.param_groups[0]["lr"]
        loss, mass = self.losses.tolist()
        base = self.dataset.label_mean("train")
        values["loss"] = loss / mass if mass else math.nan
        values["ne"] = values["loss"] / -(base * math.log(base) + (1 - base) * math.log(1 - base))
        window = self.window.result()
        if window["examples"]:  # better than the training loss: of rows not yet trained on
            values |= {name: window[name] for name in ("logloss", "ne", "auc", "calibration")}
        self.window, self.losses = Streaming(), torch.zeros_like(self.losses)
        self.log.write("train", self.step, values)
        self.listen("progress", {"step": self.step, "total": self.total_steps, **values})

    def _evaluate(self) -> None:
        if not self.dataset.rows("valid") or self.last_evaluation.get("step") == self.step:
            return
        self.model.eval()
        batches = self.dataset.loader(self.run.data.batch_size, split="valid")
        values = evaluate(self.model.score, (batch.to(self.device) for batch in batches))
        self.model.train()
        for tables in self.tables:
            tables.raise_bad_ids()
        if math.isnan(values["logloss"]):
            raise self._diverged("the model's scores")
        self.last_evaluation = {"step": self.step, **values}
        self.log.write("valid", self.step, {"trained": self.examples, **values})
        self.listen("evaluation", self.last_evaluation)
        self._compare(values[self.run.loop.monitor])
        self.clock, self.clock_examples = time.perf_counter(), self.examples

    def _diverged(self, what: str) -> UserError:
        remedy = "lower the learning rates and resume from the last checkpoint"
        return UserError(f"step {self.step}: {what} are not finite, the model diverged; {remedy}")

    def _compare(self, value: float) -> None:
        """Keep the best; count evaluations without a better one."""
        monitor = self.run.loop.monitor
        if math.isnan(value):
            self.listen(
                "note", {"text": f"step {self.step}: valid {monitor} is undefined (one class); it picks no best"}
            )
            return
        value = value if monitor in ("ne", "logloss") else -value
        if self.best is None or value < self.best:
            self.best, self.best_step, self.worse = value, self.step, 0
            self._save()
            checkpoint.mark_best(self.checkpoints, self.step)
        else:
            self.worse += 1

    def _results(self) -> dict[str, Any]:
        windows, together = [w.result() for w in self.progressive], Streaming()
        for window in self.progressive:
            together.merge(window)
        curve = together.reliability()
        results = {
            "run_dir": str(self.dir),
            "step": self.step,
            "epoch": self.epoch,
            "examples": self.examples,
            "skipped_steps": self.skipped,
            "stopped_by": self.stop,
            "best_step": self.best_step,
            "valid": self.last_evaluation,
            "progressive": [w for w in windows if w["examples"]],
            "calibration": {name: points.tolist() for name, points in curve._asdict().items()},
        }
        write_text(self.dir / "results.json", to_json(results, indent=1))
        return results

    # -- stopping and going on ----------------------------------------------------------------------------------

    def _find(self, resume: bool, overwrite: bool) -> checkpoint.Checkpoint | None:
        """The checkpoint to go on from; UserError rather than mix two runs in one directory."""
        found = checkpoint.latest(self.checkpoints)
        if found is None or overwrite:
            return None
        if not resume:
            raise UserError(
                f"{self.dir}: holds a run up to step {found}; add --resume, --overwrite or another --run_dir"
            )
        saved = checkpoint.load(self.checkpoints, found)
        saved.check(self.identity)
        check_schema(Schema.load(self.dir / "schema.toml"), self.dataset.schema, self.dataset.path)
        if saved.state.get("data") != self.dataset.fingerprint:
            raise UserError(
                f"{self.dataset.path}: the prepared log is not the one that this run began with; prepare it as it was, "
                "or begin a new run"
            )
        return saved

    def _continued(self, run: Run) -> Run:
        """`run` with the automatic choices that its beginning made; what else changed is said."""
        before = Run.load(self.dir / "run.toml")
        loop = run.loop
        if loop.update_mode == "auto":
            loop = dataclasses.replace(loop, update_mode=before.loop.update_mode)
        run = dataclasses.replace(run, threads=run.threads or before.threads, loop=loop).resolved()
        old, new = flatten(to_dict(before)), flatten(to_dict(run))
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                self.listen("note", {"text": f"resumed with {name} = {new.get(name)}, it was {old.get(name)}"})
        return run

    def _begin(self) -> None:
        checkpoint.clear(self.checkpoints)
        for name in ("log.jsonl", "results.json", "curves.png"):
            (self.dir / name).unlink(missing_ok=True)
        shutil.rmtree(self.dir / "tensorboard", ignore_errors=True)
        self.dataset.schema.save(self.dir / "schema.toml")

    def _check_monitor(self) -> None:
        """UserError for an impossible monitor, before any work."""
        loop, schema = self.run.loop, self.dataset.schema
        if loop.monitor == "gauc" and schema.role("group") is None:
            raise UserError("loop.monitor: 'gauc' needs a column of kind group; declare one, or monitor 'ne'")
        if loop.patience is not None and not self.dataset.rows("valid"):
            raise UserError(
                "loop.patience: nothing to be patient with, the valid part is empty; prepare with --valid 0.1"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep a second training out of the run directory; the system lets go when this process ends."""
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            file = open(self.dir / ".lock", "w", encoding="utf-8")  # noqa: SIM115 - closed below
        except OSError as error:
            raise cannot_write(self.dir, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                place = f"{self.dir}: another training is running here"
                raise UserError(f"{place}; wait for it or choose another --run_dir") from None
            yield

    def _on_signal(self, number: int, frame: object) -> None:
        self.stop = signal.Signals(number).name

    def _save(self) -> None:
        if self.run.loop.nonfinite != "off" and not all(bool(p.isfinite().all()) for p in self.dense):
            raise self._diverged("dense weights")  # never saved over ones that work
        state = {name: getattr(self, name) for name in _STATE} | {
            "loader": self.loader.state_dict(),
            "data": self.dataset.fingerprint,
        }
        parts: dict[str, dict[str, Tensor]] = {
            "dense": self.model.state_dict(),
            "optimizer": {
                f"{index}.{name}": value
                for index, values in self.optimizer.state_dict()["state"].items()
                for name, value in values.items()
                if value is not None
            },
            "random": {"cpu": torch.get_rng_state()}
            | ({"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {}),
            "progressive": {f"{i}.{k}": v for i, w in enumerate(self._streams()) for k, v in w.state_dict().items()}
            | {"losses": self.losses},
        }
        chunks = itertools.chain.from_iterable(tables.chunks() for tables in self.tables)
        keep = self.run.checkpoint.keep
        checkpoint.save(
            self.checkpoints, self.step, identity=self.identity, state=state, parts=parts, chunks=chunks, keep=keep
        )

    def _streams(self) -> list[Streaming]:
        return [*self.progressive, self.window]

    def _load(self, saved: checkpoint.Checkpoint) -> None:
        load_weights(self.model, saved)
        state = self.optimizer.state_dict()
        state["state"] = {}
        for key, value in saved.part("optimizer").items():
            index, name = key.split(".", 1)
            state["state"].setdefault(int(index), {})[name] = value
        self.optimizer.load_state_dict(state)
        random = saved.part("random")
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and self.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], self.device)
        progressive = saved.part("progressive")
        self.losses = progressive.pop("losses")
        for i, window in enumerate(self._streams()):
            prefix = f"{i}."
            window.load_state_dict({k[len(prefix) :]: v for k, v in progressive.items() if k.startswith(prefix)})
        for name in _STATE:
            setattr(self, name, saved.state[name])
        self.loader.load_state_dict(saved.state["loader"])
        if self.best_step == self.step:  # a kill may have come between the checkpoint and its mark
            checkpoint.mark_best(self.checkpoints, self.step)


def _mass(batch: Batch) -> float:
    return float(batch.batch_size if batch.weights_B is None else batch.weights_B.sum())


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()
