"""The training loop. It knows a model by `loss(batch)` and `score(batch)` and tables by their lifecycle."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparrow import checkpoint, data
from sparrow.core import Batch, UserError
from sparrow.core.config import flatten, to_dict
from sparrow.metrics import Streaming, evaluate
from sparrow.training.restore import identity, load_weights, tables_of
from sparrow.training.run import Run
from sparrow.training.runlog import RunLog

WINDOWS = 5  # progressive validation is reported by fifths of the run
PATIENCE_NONFINITE = 100

Listener = Callable[[str, dict[str, Any]], None]
"""Told (event, values): "begin", "progress", "evaluation", "checkpoint", "note", "end"."""


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
        self.model: Any = run.model.build(self.dataset.schema, run.tables, run.seed).to(self.device)
        self.tables = tables_of(self.model)
        for tables in self.tables:
            tables.mode = run.loop.table_mode
        self.dense = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = run.dense.build(self.dense)
        self.loader = self.dataset.loader(run.data.batch_size, shuffle=run.data.shuffle, seed=run.seed)
        per_epoch = math.ceil(len(self.loader) / run.loop.accumulate)
        self.total_steps = min(per_epoch * run.loop.epochs, run.loop.max_steps or per_epoch * run.loop.epochs)
        self.total_examples = self.dataset.rows("train") * run.loop.epochs
        self.step = self.epoch = self.examples = self.skipped = self.skipped_in_row = self.worse = 0
        self.best: float | None = None
        self.best_step: int | None = None
        self.last_evaluation: dict[str, float] = {}
        self.progressive = [Streaming() for _ in range(WINDOWS)]
        self.window = Streaming()  # since the last line of the run log
        self.stop = False
        if saved:
            self._load(saved)
        else:
            self._begin()
        run.save(self.dir / "run.toml")
        self.dataset.schema.save(self.dir / "schema.toml")

    # -- the loop -----------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        """Run to the end, to early stopping or to a signal."""
        old = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)} if _in_main() else {}
        self.log = RunLog(self.dir, tensorboard=self.run.log.tensorboard, after_step=self.step)
        self.listen("begin", {"step": self.step, "total": self.total_steps, "examples": self.examples})
        self.clock, self.clock_examples = time.perf_counter(), self.examples
        try:
            while self.epoch < self.run.loop.epochs and not self._finished():
                self._epoch()
            if not self.stop and self.last_evaluation.get("step") != self.step:
                self._evaluate()
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
                if self.run.loop.evaluate_every is None and not self._finished():
                    self._evaluate()
                return
            self._train_step([batch.to(self.device) for batch in micro])
            loop, every = self.run.loop, self.run.checkpoint.every
            if self._time_to_log():
                self._log()
            if loop.evaluate_every and self.step % loop.evaluate_every == 0:
                self._evaluate()
            if every and self.step % every == 0:
                self._save()

    def _finished(self) -> bool:
        loop = self.run.loop
        return self.stop or self.step >= self.total_steps or (loop.patience is not None and self.worse >= loop.patience)

    def _time_to_log(self) -> bool:
        """Every so many steps; at the end only if enough steps have come together to say something."""
        since = self.step % self.run.log.every
        return since == 0 or (self.step == self.total_steps and (since == self.step or 2 * since >= self.run.log.every))

    def _train_step(self, micro: list[Batch]) -> None:
        self._set_lr()
        masses = [_mass(batch) for batch in micro]
        if self.run.loop.progressive:
            for batch in micro:
                self._predict(batch)
        finite = True
        for batch, mass in zip(micro, masses, strict=True):
            loss = self.model.loss(batch) * (mass / sum(masses))  # together: the mean over all of the step's examples
            finite = finite and (self.run.loop.nonfinite == "off" or math.isfinite(loss.item()))
            if finite:
                loss.backward()
        norm = self._gradient_norm() if finite else math.nan
        if norm is not None and not math.isfinite(norm):
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

    @torch.no_grad()
    def _predict(self, batch: Batch) -> None:
        self.model.eval()
        scores = self.model.score(batch)
        self.model.train()
        assert batch.labels_BT is not None
        part = min(WINDOWS - 1, self.examples * WINDOWS // max(self.total_examples, 1))
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
        if self.run.loop.progressive:
            window = self.window.result()
            values |= {name: window[name] for name in ("logloss", "ne", "auc", "calibration")}
            self.window = Streaming()
        self.log.write("train", self.step, values)
        self.listen("progress", {"step": self.step, "total": self.total_steps, **values})

    def _evaluate(self) -> None:
        if not self.dataset.rows("valid"):
            return
        self.model.eval()
        values = self.evaluate("valid")
        self.model.train()
        self.last_evaluation = {"step": self.step, **values}
        self.log.write("valid", self.step, {"trained": self.examples, **values})
        self.listen("evaluation", {"step": self.step, **values})
        monitor = self.run.loop.monitor
        if monitor not in values:
            raise UserError(f"loop.monitor: {monitor!r} is not measured here; have {', '.join(values)}")
        value = values[monitor] * (1 if monitor in ("ne", "logloss") else -1)
        if self.best is None or value < self.best:
            self.best, self.best_step, self.worse = value, self.step, 0
            self._save()
            checkpoint.mark_best(self.checkpoints, self.step)
        else:
            self.worse += 1
        self.clock, self.clock_examples = time.perf_counter(), self.examples

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float]:
        """Exact metrics of the model as it is on a split."""
        batches = self.dataset.loader(self.run.data.batch_size, split=split)
        return evaluate(self.model.score, (batch.to(self.device) for batch in batches), exact=True)

    def _results(self) -> dict[str, Any]:
        windows = [w.result() for w in self.progressive]
        results = {
            "run_dir": str(self.dir),
            "step": self.step,
            "epoch": self.epoch,
            "examples": self.examples,
            "skipped_steps": self.skipped,
            "stopped_by_signal": self.stop,
            "best_step": self.best_step,
            "valid": self.last_evaluation,
            "progressive": [w for w in windows if w["examples"]] if self.run.loop.progressive else [],
        }
        partial = self.dir / ".results.json"
        partial.write_text(json.dumps(results, indent=1), encoding="utf-8")
        os.replace(partial, self.dir / "results.json")
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
        if saved.state["train_rows"] != self.dataset.rows("train"):
            raise UserError(
                f"{self.dataset.path}: the prepared log had {saved.state['train_rows']} training rows when this run "
                f"began and has {self.dataset.rows('train')} now; prepare it as it was, or begin a new run"
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
        for step in checkpoint.steps(self.checkpoints):
            checkpoint.remove(self.checkpoints, step)
        (self.dir / "log.jsonl").unlink(missing_ok=True)
        self.dir.mkdir(parents=True, exist_ok=True)

    def _on_signal(self, number: int, frame: object) -> None:
        self.stop = True

    def _save(self) -> None:
        if checkpoint.latest(self.checkpoints) == self.step:
            return
        state = {name: getattr(self, name) for name in _STATE} | {
            "loader": self.loader.state_dict(),
            "train_rows": self.dataset.rows("train"),
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
            "progressive": {f"{i}.{k}": v for i, w in enumerate(self.progressive) for k, v in w.state_dict().items()},
        }
        chunks = itertools.chain.from_iterable(tables.chunks() for tables in self.tables)
        keep = self.run.checkpoint.keep
        path = checkpoint.save(
            self.checkpoints, self.step, identity=self.identity, state=state, parts=parts, chunks=chunks, keep=keep
        )
        self.listen("checkpoint", {"step": self.step, "path": str(path)})

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
        for i, window in enumerate(self.progressive):
            prefix = f"{i}."
            window.load_state_dict({k[len(prefix) :]: v for k, v in progressive.items() if k.startswith(prefix)})
        for name in _STATE:
            setattr(self, name, saved.state[name])
        self.loader.load_state_dict(saved.state["loader"])
        if self.best_step == self.step:  # a kill may have come between the checkpoint and its mark
            checkpoint.mark_best(self.checkpoints, self.step)


_STATE = ("step", "epoch", "examples", "skipped", "skipped_in_row", "worse", "best", "best_step", "last_evaluation")


def _mass(batch: Batch) -> float:
    return float(batch.batch_size if batch.weights_B is None else batch.weights_B.sum())


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()
