"""DCNv2 from a CSV click log: Sparrow against FuxiCTR, on this machine, as their users run them.

    python benchmarks/vs_fuxictr.py --fuxictr DIR --fuxictr-python PYTHON           # about half an hour
    python benchmarks/vs_fuxictr.py --fuxictr DIR --fuxictr-python PYTHON --quick   # a small log, the same checks

DIR is a checkout of FuxiCTR's public repository (its wheel lacks the models); PYTHON has fuxictr 2.3.10 installed (how:
README.md beside this file). Both of its versions run: "git", the checkout itself, and "wheel", the installed package
with the checkout's model. The log is that of `_peers/click_log.py`: 200,000 rows for training and 25,000 each for
validation and test, 13 numbers and 26 ids. The model is one: DCNv2, parallel, all 39 fields embedded at 16 (624
inputs), 3 full cross layers, MLP 400-400-400; batch 4096, 2 epochs, the better of them by validation. The function and
its weights are the same; Sparrow does 12 % fewer operations for it, since (W w) x needs fewer than W (w x) where x is
a number and w its vector. FuxiCTR learns by its template's settings (Adam 1e-3) with the fastest of its versions and
worker settings; Sparrow by its defaults (row-wise AdaGrad for tables, Adam for the rest, rates that go down over the
last third). Every job is a process of its own, and sides take turns. A step is
the median interval between the ends of optimizer steps in the second epoch, loading included, by the same hook on
both sides. Memory is the proportional set size of the process tree, watched in runs that are not timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _peers import click_log, process
from torch import Tensor

from sparrow.training import restore
from sparrow.training.restore import tables_of

HERE = Path(__file__).parent / "_peers"
BATCH, EPOCHS, DIM, CROSS, DEEP = 4096, 2, 16, 3, [400, 400, 400]
WIDTH = DIM * (len(click_log.NUMERIC) + len(click_log.CATEGORICAL))
LAYERS = [(WIDTH, WIDTH)] * CROSS + list(zip([WIDTH, *DEEP], DEEP, strict=False))
FLOP = 6 * sum(a * b for a, b in LAYERS)  # of an example: forward, and the two products of its backward
NARROW = 16 + DIM * len(click_log.CATEGORICAL)  # what Sparrow's first products take: numbers once, not times vectors
DONE = FLOP - 6 * (WIDTH - NARROW) * (WIDTH + DEEP[0])  # of an example, by Sparrow
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process, or two in a row, took and reached. bytes_peak: 0 in runs that are timed."""

    seconds: float
    bytes_peak: int = 0
    processes: int = 0
    steps: tuple[float, ...] = ()  # when each ended
    auc: float = math.nan
    logloss: float = math.nan
    parameters: int = 0
    width: int = 0

    @property
    def step_s(self) -> float:
        """Median interval in the last epoch."""
        last = self.steps[len(self.steps) - len(self.steps) // EPOCHS :]
        return statistics.median(b - a for a, b in itertools.pairwise(last))

    @property
    def rate(self) -> float:
        """Examples/s."""
        return BATCH / self.step_s


# -- FuxiCTR -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FuxiCTR:
    """One version with one worker setting. work: where its prepared data and checkpoints go."""

    python: str
    checkout: str
    log: Path
    work: Path
    version: str
    workers: int = 0

    def __str__(self) -> str:
        return f"FuxiCTR {self.version}, {self.workers} workers"

    def run(self, stage: str, seed: int = 0, *, memory: bool = False) -> Job:
        """stage: "prepare" begins from nothing, "train" from what was prepared, "all" is both in one process."""
        if stage != "train":
            shutil.rmtree(self.work / self.version, ignore_errors=True)
        spec, out = self.work / "spec.json", self.work / "out.json"
        settings: dict[str, Any] = {"checkout": self.checkout, "version": self.version, "log": str(self.log)}
        settings |= {"work": str(self.work), "stage": stage, "workers": self.workers, "seed": seed, "epochs": EPOCHS}
        settings |= {"batch_size": BATCH, "dim": DIM, "deep": DEEP, "cross_layers": CROSS, "out": str(out)}
        spec.write_text(json.dumps(settings))
        took = process.run([self.python, HERE / "fuxictr_job.py", spec], memory=memory)
        found = json.loads(out.read_text())
        if found["package"].startswith(str(Path(self.checkout).resolve())) != (self.version == "git"):
            sys.exit(f"FuxiCTR {self.version}: ran {found['package']}; the comparison would be of something else")
        return Job(
            seconds=took.seconds, bytes_peak=took.bytes_peak, processes=took.processes,
            steps=tuple(found.get("steps", ())), parameters=found.get("parameters", 0),
            width=found.get("input_width", 0), **found.get("test", {}),
        )  # fmt: skip


# -- Sparrow -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparrow:
    """work: where its prepared log and runs go."""

    log: Path
    work: Path

    def prepare(self, *, memory: bool = False) -> Job:
        """`sparrow prepare` with the vocabulary of every id seen in training, as FuxiCTR's."""
        schema = ["[columns]", 'label = { kind = "label" }']
        schema += [f'{name} = {{ kind = "numeric" }}' for name in click_log.NUMERIC]
        schema += [f'{name} = {{ kind = "categorical", table = "{name}" }}' for name in click_log.CATEGORICAL]
        schema += ["[tables]"]
        schema += [f'{name} = {{ encoding = "vocabulary", min_count = 1 }}' for name in click_log.CATEGORICAL]
        file = self.work / "schema.toml"
        file.write_text("\n".join([*schema, "[source]", 'format = "csv"', ""]))
        shutil.rmtree(self.work / "data", ignore_errors=True)
        files = [self.log / f"{part}.csv" for part in ("train", "valid", "test")]
        held_out: list[str | Path] = ["--valid-files", files[1], "--test-files", files[2]]
        return self._command(
            ["prepare", files[0], *held_out, "--schema", file, "--out", self.work / "data"], memory=memory
        )

    def train(self, precision: str, seed: int = 0, *, memory: bool = False) -> Job:
        """`sparrow train`, then, not part of the time, `sparrow evaluate` on the test part."""
        run_dir, file, out = self.work / f"{precision}-{seed}", self.work / "run.toml", self.work / "out.json"
        settings: dict[str, dict[str, Any]] = {
            "": {"run_dir": str(run_dir), "seed": seed, "precision": precision},
            "data": {"path": str(self.work / "data"), "batch_size": BATCH, "shuffle": True},
            "model": {"name": "dcnv2", "dim": DIM, "cross_layers": CROSS, "deep": DEEP},
            "loop": {"epochs": EPOCHS},
        }
        settings["model"] |= {"structure": "parallel", "embed_dense": True}
        lines = []
        for section, values in settings.items():
            lines += [f"[{section}]"] if section else []
            lines += [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        file.write_text("\n".join(lines))
        job = self._command(["train", file, "--overwrite"], out, memory=memory)
        self._command(["evaluate", run_dir, "--split", "test", "--json-out", self.work / "test.json"])
        (test,) = json.loads((self.work / "test.json").read_text()).values()
        model = restore(run_dir).model
        rows = sum(record.rows * record.spec.dim for tables in tables_of(model) for record in tables.all_records())
        dense = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return Job(
            seconds=job.seconds, bytes_peak=job.bytes_peak, processes=job.processes, auc=test["auc"],
            steps=tuple(json.loads(out.read_text())["steps"]), logloss=test["logloss"], parameters=rows + dense,
            width=model.head.weight.shape[1] - DEEP[-1],
        )  # fmt: skip

    def _command(self, arguments: Sequence[str | Path], out: Path | None = None, *, memory: bool = False) -> Job:
        program = ["-m", "sparrow"] if out is None else [HERE / "sparrow_job.py", out]
        command: list[str | Path] = [sys.executable, *program, *arguments]
        took = process.run(command, memory=memory)
        return Job(seconds=took.seconds, bytes_peak=took.bytes_peak, processes=took.processes)


# -- the limit ---------------------------------------------------------------------------------------------------------


def best_s(a: Tensor, b: Tensor) -> float:
    """The shortest of some products."""
    times = [time.perf_counter()]
    for _ in range(10):
        a @ b
        times.append(time.perf_counter())
    return min(later - earlier for earlier, later in itertools.pairwise(times))


def gemm_gflop_per_s(precision: str) -> float:
    """All matrix products of a step, one after the other, each in the best time of several tries."""
    kind = torch.float32 if precision == "fp32" else torch.bfloat16
    total = 0.0
    for inputs, outputs in LAYERS:
        x, w, g = (torch.randn(*shape).to(kind) for shape in ((BATCH, inputs), (outputs, inputs), (BATCH, outputs)))
        total += sum(best_s(a, b) for a, b in ((x, w.t()), (g, w), (g.t(), x)))
    return BATCH * FLOP / total / 1e9


# -- what was found ----------------------------------------------------------------------------------------------------


def check(theirs: Job, mine: Job, log: dict[str, float]) -> None:
    """Both sides did the same work and learned something; SystemExit otherwise."""
    wrong = []
    if abs(mine.parameters / theirs.parameters - 1) > 0.01:
        wrong.append(f"parameters differ: {mine.parameters:,} here, {theirs.parameters:,} there")
    if (mine.width, theirs.width) != (WIDTH, WIDTH):
        wrong.append(f"inputs of the first layers: {mine.width} here, {theirs.width} there, {WIDTH} meant")
    expected = EPOCHS * math.ceil(round(log["rows"] * 0.8) / BATCH)
    if (len(mine.steps), len(theirs.steps)) != (expected, expected):
        wrong.append(f"steps: {len(mine.steps)} here, {len(theirs.steps)} there, {expected} meant")
    for name, job in (("Sparrow", mine), ("FuxiCTR", theirs)):
        if not 0.5 + (log["auc"] - 0.5) / 4 < job.auc < log["auc"]:
            wrong.append(f"{name}: AUC {job.auc:.4f} where the limit is {log['auc']:.4f}")
    if wrong:
        sys.exit("no speed is printed: " + "; ".join(wrong))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error (0 of a single value)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def median(values: Sequence[float]) -> str:
    """Of some times, with their range."""
    return f"{statistics.median(values):.2f} s ({min(values):.2f}-{max(values):.2f})"


def target(name: str, shown: str, goal: str, met: bool) -> None:
    """One line per target, as every benchmark ends."""
    print(f"TARGET {name}: {shown} (goal {goal}) {'met' if met else 'missed'}")


def quality_targets(precision: str, mine: Sequence[Job], theirs: Sequence[Job]) -> None:
    """AUC and logloss: no worse than one standard error of the difference of the means."""
    for name, sign in (("auc", 1), ("logloss", -1)):
        (ours, error), (peer, peer_error) = (mean_and_error([getattr(j, name) for j in js]) for js in (mine, theirs))
        together = math.hypot(error, peer_error)
        shown = f"{ours:.4f} against {peer:.4f}, one standard error {together:.4f}"
        goal = f"no worse than one standard error over {len(mine)} seeds"
        target(f"test {name}, {precision}", shown, goal, sign * (ours - peer) >= -together)


def line(name: str, jobs: Sequence[Job], peak: float = math.nan, flop: float = FLOP) -> None:
    """One row of the table, over the jobs' seeds. flop: that the side really does for an example."""
    steps = [1e3 * job.step_s for job in jobs]
    step, rate = statistics.median(steps), BATCH / statistics.median(steps) * 1e3
    (auc, auc_error), (logloss, logloss_error) = (
        mean_and_error([getattr(j, m) for j in jobs]) for m in ("auc", "logloss")
    )
    share = f"{100 * rate * flop / 1e9 / peak:5.0f} %" if peak == peak else " " * 7
    print(
        f"{name:28} | {step:7.1f} ({min(steps):6.1f}-{max(steps):6.1f}) | {rate:10,.0f} | {share} | "
        f"{auc:.4f} +- {auc_error:.4f} | {logloss:.4f} +- {logloss_error:.4f} | "
        f"{statistics.median(job.seconds for job in jobs):6.1f} | {jobs[0].parameters:10,}", flush=True
    )  # fmt: skip


# -- the comparison ----------------------------------------------------------------------------------------------------


def ready(sides: Sequence[FuxiCTR], mine: Sparrow, times: int) -> tuple[float, float]:
    """From CSV to data ready to train on, whole processes: (Sparrow, the better of FuxiCTR's versions) in seconds."""
    seconds: dict[str, list[float]] = {}
    for _ in range(times):
        for side in sides:
            seconds.setdefault(f"FuxiCTR {side.version}", []).append(side.run("prepare").seconds)
            seconds.setdefault("Sparrow", []).append(mine.prepare().seconds)
    print("\nlog to ready, the whole process, median and range")
    for name, values in seconds.items():
        print(f"{name:28} | {median(values)}")
    ours = statistics.median(seconds.pop("Sparrow"))
    return ours, min(statistics.median(values) for values in seconds.values())


COLUMNS = "examples/s | of peak | test AUC         | test logloss     | wall s | parameters"
HEAD = f"{'':28} | {'step ms, median (range)':24}| {COLUMNS}"


def fastest(sides: Sequence[FuxiCTR]) -> FuxiCTR:
    """The one of FuxiCTR's versions and worker settings with the shortest step, each tried once."""
    print(f"\nFuxiCTR's settings, one run each\n{HEAD}")
    best, best_step = sides[0], math.inf
    for side in sides:
        job = side.run("train")
        line(str(side), [job])
        if job.step_s < best_step:
            best, best_step = side, job.step_s
    return best


def memory(sides: Sequence[FuxiCTR], mine: Sparrow) -> tuple[dict[str, int], int]:
    """Peaks of the whole job, preparation and training: (Sparrow by precision, the leaner of FuxiCTR's) in bytes."""
    peers = {str(side): side.run("all", memory=True) for side in sides}
    prepared = mine.prepare(memory=True).bytes_peak
    print("\npeak memory of the process tree, MB: preparation, training")
    for name, peer in peers.items():
        print(f"{name:28} | {peer.bytes_peak / 1e6:6.0f} (both in one process; {peer.processes} processes)")
    peaks = {}
    for precision in PRECISIONS:
        trained = mine.train(precision, memory=True).bytes_peak
        print(f"{'Sparrow ' + precision:28} | {prepared / 1e6:6.0f}, {trained / 1e6:6.0f}", flush=True)
        peaks[precision] = max(prepared, trained)
    return peaks, min(peer.bytes_peak for peer in peers.values())


def compare(options: argparse.Namespace, work: Path) -> None:
    """Everything, printed as it comes."""
    log = click_log.write(work / "log", rows=40_000 if options.quick else click_log.ROWS)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}\n"
        f"{log['rows']:,} rows, {log['distinct_ids']:,} ids in training, {100 * log['clicks']:.1f} % clicks, "
        f"AUC of the true probability {log['auc']:.4f}; {FLOP / 1e6:.2f} MFLOP an example", flush=True
    )  # fmt: skip
    for folder in ("fuxictr", "sparrow"):
        (work / folder).mkdir(exist_ok=True)
    mine = Sparrow(work / "log", work / "sparrow")
    python, checkout = str(options.fuxictr_python), str(options.fuxictr.resolve())
    sides = [
        FuxiCTR(python, checkout, work / "log", work / "fuxictr", v, w) for v in ("git", "wheel") for w in range(4)
    ]
    if options.quick:
        sides = sides[:1]
    first = {side.version: side for side in reversed(sides)}
    ours_ready, peer_ready = ready([*first.values()], mine, 1 if options.quick else options.pairs)
    tried = [side for side in sides if options.workers is None or side.workers in options.workers]
    theirs = sides[0] if options.quick else fastest(tried)
    peaks_gemm = {p: gemm_gflop_per_s(p) for p in PRECISIONS}
    jobs: dict[str, list[Job]] = {"FuxiCTR": [], **{p: [] for p in PRECISIONS}}
    for seed in range(1 if options.quick else options.pairs):
        for name in list(jobs)[:: 1 if seed % 2 else -1]:
            jobs[name].append(theirs.run("train", seed) if name == "FuxiCTR" else mine.train(name, seed))
        for precision in PRECISIONS:
            check(jobs["FuxiCTR"][-1], jobs[precision][-1], log)
    peaks_gemm = {p: max(peaks_gemm[p], gemm_gflop_per_s(p)) for p in PRECISIONS}
    print(f"\n{len(jobs['fp32'])} seeds, in turns; matrix products alone reach "
          + " and ".join(f"{value:,.0f} GFLOP/s in {p}" for p, value in peaks_gemm.items()) + f"\n{HEAD}")  # fmt: skip
    line(str(theirs), jobs["FuxiCTR"], peaks_gemm["fp32"])
    for precision in PRECISIONS:
        line(f"Sparrow {precision}", jobs[precision], peaks_gemm[precision], DONE)
    peaks, peer_peak = memory([theirs] if options.quick else [*first.values()], mine)
    print()
    for precision, goal, aim in (("fp32", 1.5, 1.8), ("bf16", 4.0, 6.0)):
        ratios = [b.step_s / a.step_s for a, b in zip(jobs[precision], jobs["FuxiCTR"], strict=True)]
        shown = f"{statistics.median(ratios):.2f} (pairs {min(ratios):.2f}-{max(ratios):.2f})"
        target(
            f"examples/s against FuxiCTR, {precision}", shown, f"{goal}, aim {aim}", statistics.median(ratios) >= goal
        )
    for precision in PRECISIONS:
        quality_targets(precision, jobs[precision], jobs["FuxiCTR"])
    target("log to ready against FuxiCTR", f"{peer_ready / ours_ready:.1f}", "5", peer_ready >= 5 * ours_ready)
    for precision in PRECISIONS:
        share = peaks[precision] / peer_peak
        target(f"peak memory against FuxiCTR, {precision}", f"{share:.2f}", "at most 0.5", share <= 0.5)


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fuxictr", type=Path, required=True, help="a checkout of FuxiCTR's public repository")
    parser.add_argument("--fuxictr-python", type=Path, required=True, help="the Python that has fuxictr 2.3.10")
    parser.add_argument("--pairs", type=int, default=3, help="seeds, and repetitions of what is timed (3)")
    parser.add_argument("--quick", action="store_true", help="a small log, one run of each")
    parser.add_argument("--workers", type=int, nargs="*", help="FuxiCTR's worker settings to choose from (0 1 2 3)")
    options = parser.parse_args()
    if not (options.fuxictr / "model_zoo" / "DCNv2").is_dir():
        sys.exit(
            f"--fuxictr: {options.fuxictr} has no model_zoo/DCNv2; clone its public repository and name that folder"
        )
    with tempfile.TemporaryDirectory() as work:
        compare(options, Path(work))


if __name__ == "__main__":
    main()
