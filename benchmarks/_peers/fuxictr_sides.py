"""Both sides of the comparisons with FuxiCTR: a job of either is a process, steps are noted by the
same hook.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _peers import click_log, process
from _peers.targets import print_target

from sparrow import data
from sparrow.kernels.flops import count_flops
from sparrow.trained.build import tables_of
from sparrow.trained.scorer import restore

HERE = Path(__file__).parent
BATCH, EPOCHS, DIM = 4096, 2, 16
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model as each side spells it. source: of FuxiCTR's class, in its model_zoo. theirs: as in
    its template.

    work: the operations that Sparrow does of an example, forward, as a share of FuxiCTR's; `check`
    sees to it.
    """

    name: str
    source: str
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]
    work: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process, or two in a row, took and reached. bytes_peak: 0 in runs that are timed."""

    seconds: float
    bytes_peak: int = 0
    processes: int = 0
    steps: Sequence[float] = ()  # when each ended
    auc: float = math.nan
    logloss: float = math.nan
    parameters: int = 0
    flop: float = 0.0  # of the matrix products of an example, forward

    @property
    def step_s(self) -> float:
        """Median interval in the last epoch."""
        last = self.steps[len(self.steps) - len(self.steps) // EPOCHS :]
        return statistics.median(b - a for a, b in itertools.pairwise(last))


# -- FuxiCTR ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FuxiCTR:
    """One version with one worker setting. work: where its prepared data and checkpoints go."""

    python: str
    checkout: str
    log: Path
    work: Path
    version: str
    workers: int = 0
    model: Model = field(kw_only=True)

    def __str__(self) -> str:
        return f"FuxiCTR {self.version}, {self.workers} workers"

    def run(self, stage: str, seed: int = 0, *, memory: bool = False) -> Job:
        """stage: "prepare" begins from nothing, "train" from what was prepared, "all" is both in
        one process.
        """
        if stage != "train":
            shutil.rmtree(self.work / self.version, ignore_errors=True)
        spec, out = self.work / "spec.json", self.work / "out.json"
        settings: dict[str, Any] = {
            "checkout": self.checkout,
            "version": self.version,
            "log": str(self.log),
        }
        settings |= {
            "work": str(self.work),
            "stage": stage,
            "workers": self.workers,
            "seed": seed,
            "epochs": EPOCHS,
        }
        settings |= {"source": self.model.source, "settings": dict(self.model.theirs)}
        settings |= {"batch_size": BATCH, "dim": DIM, "out": str(out)}
        spec.write_text(json.dumps(settings))
        took = process.run([self.python, HERE / "fuxictr_job.py", spec], memory=memory)
        found = json.loads(out.read_text())
        if found["package"].startswith(str(Path(self.checkout).resolve())) != (
            self.version == "git"
        ):
            sys.exit(
                f"FuxiCTR {self.version}: ran {found['package']}; the comparison would be of"
                " something else"
            )
        return Job(
            seconds=took.seconds, bytes_peak=took.bytes_peak, processes=took.processes,
            steps=tuple(found.get("steps", ())), parameters=found.get("parameters", 0),
            flop=found.get("flop", 0.0), **found.get("test", {}),
        )  # fmt: skip


# -- Sparrow ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparrow:
    """work: where its prepared log and runs go."""

    log: Path
    work: Path
    model: Model = field(kw_only=True)

    def prepare(self, *, memory: bool = False) -> Job:
        """`sparrow prepare` with the vocabulary of every id seen in training, as FuxiCTR's."""
        schema = ["[columns]", 'label = { kind = "label" }']
        schema += [f'{name} = {{ kind = "numeric" }}' for name in click_log.NUMERIC]
        schema += [
            f'{name} = {{ kind = "categorical", table = "{name}" }}'
            for name in click_log.CATEGORICAL
        ]
        schema += ["[encodings]"]
        schema += [
            f'{name} = {{ kind = "vocabulary", min_count = 1 }}' for name in click_log.CATEGORICAL
        ]
        file = self.work / "schema.toml"
        file.write_text("\n".join([*schema, "[source]", 'format = "csv"', ""]))
        shutil.rmtree(self.work / "data", ignore_errors=True)
        files = [self.log / f"{part}.csv" for part in ("train", "valid", "test")]
        held_out: list[str | Path] = ["--valid-files", files[1], "--test-files", files[2]]
        return self._command(
            ["prepare", files[0], *held_out, "--schema", file, "--out", self.work / "data"],
            memory=memory,
        )

    def train(self, precision: str, seed: int = 0, *, memory: bool = False) -> Job:
        """`sparrow train`, then, not part of the time, `sparrow evaluate` on the test part."""
        run_dir, file, out = (
            self.work / f"{precision}-{seed}",
            self.work / "run.toml",
            self.work / "out.json",
        )
        settings: dict[str, Mapping[str, Any]] = {
            "": {"run_dir": str(run_dir), "seed": seed, "precision": precision},
            "data": {"path": str(self.work / "data"), "batch_size": BATCH, "shuffle": True},
            "model": {"name": self.model.name, "dim": DIM, **self.model.ours},
            "loop": {"epochs": EPOCHS},
        }
        lines = []
        for section, values in settings.items():
            lines += [f"[{section}]"] if section else []
            lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        file.write_text("\n".join(lines))
        job = self._command(["train", file, "--overwrite"], out, memory=memory)
        self._command(
            ["evaluate", run_dir, "--split", "test", "--json-out", self.work / "test.json"]
        )
        (test,) = json.loads((self.work / "test.json").read_text()).values()
        model = restore(run_dir).model
        rows = sum(
            record.rows * record.component.dim
            for tables in tables_of(model)
            for record in tables.all_records()
        )
        dense = sum(p.numel() for p in model.parameters() if p.requires_grad)
        batch = next(iter(data.open(self.work / "data").loader(BATCH, split="test")))
        with torch.no_grad():
            flop = count_flops(lambda: model(batch)) / batch.batch_size
        return Job(
            seconds=job.seconds,
            bytes_peak=job.bytes_peak,
            processes=job.processes,
            auc=test["auc"],
            steps=tuple(json.loads(out.read_text())["steps"]),
            logloss=test["logloss"],
            parameters=rows + dense,
            flop=flop,
        )

    def _command(
        self, arguments: Sequence[str | Path], out: Path | None = None, *, memory: bool = False
    ) -> Job:
        program = ["-m", "sparrow"] if out is None else [HERE / "sparrow_job.py", out]
        command: list[str | Path] = [sys.executable, *program, *arguments]
        took = process.run(command, memory=memory)
        return Job(seconds=took.seconds, bytes_peak=took.bytes_peak, processes=took.processes)


# -- what was found --------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What both comparisons are told besides their own; SystemExit for a checkout without
    models.
    """
    parser.add_argument(
        "--fuxictr", type=Path, required=True, help="a checkout of FuxiCTR's public repository"
    )
    parser.add_argument(
        "--fuxictr-python", type=Path, required=True, help="the Python that has fuxictr 2.3.10"
    )
    parser.add_argument(
        "--pairs", type=int, default=3, help="seeds, and repetitions of what is timed (3)"
    )
    parser.add_argument("--quick", action="store_true", help="a small log, one run of each")
    asked = parser.parse_args()
    if not (asked.fuxictr / "model_zoo" / "DCNv2").is_dir():
        sys.exit(
            f"--fuxictr: {asked.fuxictr} has no model_zoo/DCNv2; clone its public repository and"
            " name that folder"
        )
    return asked


def log_of(asked: argparse.Namespace, folder: Path) -> tuple[dict[str, float], str]:
    """Writes the log; its facts, and a line of them and of the machine."""
    log = click_log.write(folder, rows=40_000 if asked.quick else click_log.ROWS)
    return (
        log,
        (
            f"torch {torch.__version__}, {torch.get_num_threads()} threads,"
            f" {torch.backends.cpu.get_cpu_capability()}\n{log['rows']:,} rows,"
            f" {log['distinct_ids']:,} ids in training, {100 * log['clicks']:.1f} % clicks, AUC of"
            f" the true probability {log['auc']:.4f}"
        ),
    )


def check(
    theirs: Job, mine: Job, log: dict[str, float], model: Model, learned: float = 0.25
) -> None:
    """Both sides did the same work, but for what `model` says, and learned something; SystemExit
    otherwise.

    learned: of what can be known of a click, the least by AUC.
    """
    wrong = []
    if abs(mine.parameters / theirs.parameters - 1) > 0.01:
        wrong.append(f"parameters differ: {mine.parameters:,} here, {theirs.parameters:,} there")
    if abs(mine.flop / theirs.flop - model.work) > 0.01:
        wrong.append(
            f"FLOP of an example: {mine.flop:,.0f} here, {theirs.flop:,.0f} there, {model.work:.2f}"
            " of it meant"
        )
    expected = EPOCHS * math.ceil(round(log["rows"] * 0.8) / BATCH)
    if (len(mine.steps), len(theirs.steps)) != (expected, expected):
        wrong.append(f"steps: {len(mine.steps)} here, {len(theirs.steps)} there, {expected} meant")
    for name, job in (("Sparrow", mine), ("FuxiCTR", theirs)):
        if not 0.5 + (log["auc"] - 0.5) * learned < job.auc < log["auc"]:
            wrong.append(f"{name}: AUC {job.auc:.4f} where the limit is {log['auc']:.4f}")
    if wrong:
        sys.exit(f"{model.name}: no speed is printed: " + "; ".join(wrong))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error (0 of a single value)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def target(name: str, shown: str, goal: str, met: bool) -> None:
    """One line per target, as every benchmark ends."""
    print_target(name, shown, goal, met)


def speed_target(
    label: str, mine: Sequence[Job], theirs: Sequence[Job], least: float, aim: str = ""
) -> None:
    """Examples/s against FuxiCTR: the median of the pairs, and their range."""
    ratios = [b.step_s / a.step_s for a, b in zip(mine, theirs, strict=True)]
    middle = statistics.median(ratios)
    shown = f"{middle:.2f} (pairs {min(ratios):.2f}-{max(ratios):.2f})"
    target(f"examples/s against FuxiCTR, {label}", shown, f"{least}{aim}", middle >= least)


def quality_targets(label: str, mine: Sequence[Job], theirs: Sequence[Job]) -> None:
    """AUC and logloss: no worse than one standard error of the difference of the means."""
    for name, sign in (("auc", 1), ("logloss", -1)):
        (ours, error), (peer, peer_error) = (
            mean_and_error([getattr(j, name) for j in js]) for js in (mine, theirs)
        )
        together = math.hypot(error, peer_error)
        shown = f"{ours:.4f} against {peer:.4f}, one standard error {together:.4f}"
        goal = f"no worse than one standard error over {len(mine)} seeds"
        target(f"test {name}, {label}", shown, goal, sign * (ours - peer) >= -together)


def head(third: str) -> str:
    """Titles of `line`'s columns. third: 7 characters."""
    columns = f"examples/s | {third} | test AUC         | test logloss     | wall s | parameters"
    return f"{'':28} | {'step ms, median (range)':24}| {columns}"


def line(name: str, jobs: Sequence[Job], third: str = "") -> None:
    """One row of the table, over the jobs' seeds."""
    steps = [1e3 * job.step_s for job in jobs]
    step, rate = statistics.median(steps), BATCH / statistics.median(steps) * 1e3
    (auc, auc_error), (logloss, logloss_error) = (
        mean_and_error([getattr(j, m) for j in jobs]) for m in ("auc", "logloss")
    )
    print(
        f"{name:28} | {step:7.1f} ({min(steps):6.1f}-{max(steps):6.1f}) | {rate:10,.0f} |"
        f" {third:>7} | {auc:.4f} +- {auc_error:.4f} | {logloss:.4f} +- {logloss_error:.4f} |"
        f" {statistics.median(job.seconds for job in jobs):6.1f} | {jobs[0].parameters:10,}",
        flush=True,
    )
