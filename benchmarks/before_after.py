"""Two checkouts of Sparrow beside each other: is a step slower after a change of structure?

    python benchmarks/before_after.py CHECKOUT             # CHECKOUT against this one; its kernels must be built
    python benchmarks/before_after.py CHECKOUT --quick

A process for each checkout builds the same case; they take turns of some milliseconds, so that both
meet the same moments of a shared machine. Outputs are compared first: both must give the same sum.
Printed are the median step and the ratio of neighbouring turns, after over before: above 1 is
slower. Memory lies otherwise in every process, which moves a step by a tenth and more, so each case
has five pairs of processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _peers.targets import print_target

HERE = Path(__file__).resolve().parents[1]
GOAL = 1.03
PAIRS = 5
# tables, rows, dim, samples, ids of a bag, mode
TABLES = {
    "26 tables, one id": (26, 20_000, 32, 2048, 1, "fused"),
    "26 tables, one id, deferred": (26, 20_000, 32, 2048, 1, "deferred"),
    "26 tables, ten ids": (26, 20_000, 32, 2048, 10, "fused"),
    "26 tables, small batch": (26, 20_000, 16, 128, 1, "fused"),
    "1 table, 80 ids": (1, 1_000_000, 64, 1024, 80, "fused"),
    "1 table, 4 columns": (1, 1_000_000, 4, 8192, 4, "fused"),
}
RUNS = {"dcnv2 step": "dcnv2", "dlrm step": "dlrm"}


def tables_step(name: str) -> Callable[[], float]:
    """Lookup, backward and update of tables."""
    import torch

    from sparrow.core import KeyedJagged
    from sparrow.embeddings import Direct, EmbeddingTables, Feature, TableSpec

    count, rows, dim, samples, most, mode = TABLES[name]
    keys = tuple(f"t{i}" for i in range(count))
    specs = [TableSpec(name=key, dim=dim, addressing=Direct(rows)) for key in keys]
    made: Any = EmbeddingTables(
        specs, [Feature(name=key, table=key) for key in keys], seed=1, mode=mode
    )  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(0)
    values_N = (rows * torch.rand(count * samples * most, generator=random) ** 3).long()
    ids = KeyedJagged(keys=keys, values_N=values_N, lengths=torch.full((count * samples,), most))
    grad = torch.randn(samples, count * dim, generator=random)

    def step() -> float:
        vectors = made.pooled(ids)
        vectors.backward(grad)
        made.update()
        return float(vectors.detach()[0].sum())

    return step


def run_step(name: str, folder: Path) -> Callable[[], float]:
    """A step of training, tables, dense weights and guard."""
    from sparrow import data

    try:
        from sparrow.apps.generate import generate
    except ImportError:  # before it was an app
        generate = data.generate  # type: ignore[attr-defined]
    try:
        from sparrow.trained.run import Run
        from sparrow.training import Trainer
    except ImportError:  # before the rooms were made
        from sparrow.training import Run, Trainer  # type: ignore[attr-defined, no-redef]
    log = folder / "log.parquet"
    generate(log, rows=40_000, users=2000, items=1000, seed=3, overwrite=True)
    data.prepare([log], folder / "prepared", overwrite=True)
    settings = {
        "model.name": RUNS[name],
        "data.batch_size": 2048,
        "run_dir": str(folder / "run"),
        "threads": 1,
    }
    trainer: Any = Trainer(Run.of(folder / "prepared", settings))
    # before the trainer had a job
    loader = trainer.job.feed.loader if hasattr(trainer, "job") else trainer.loader
    share = next(loader.shares())

    def step() -> float:
        if hasattr(trainer, "callbacks"):
            owner = trainer.course if hasattr(trainer, "course") else trainer
            done = owner.take_step([share], 0, (False, False))
        else:  # before the callbacks had one protocol
            done = trainer.take_step([share], (False, False), lambda: None)
        return float(done.losses[0])

    return step


def child(name: str, folder: Path) -> None:
    """Build a case, then take a turn of so many steps for each line that comes in; say its seconds
    and last result.
    """
    step = run_step(name, folder) if name in RUNS else tables_step(name)
    print(json.dumps([0.0, step()]), flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            result = step()
        print(json.dumps([time.perf_counter() - begun, result]), flush=True)


class Side:
    """A checkout's process."""

    def __init__(self, checkout: Path, name: str, folder: Path) -> None:
        folder.mkdir()
        command = [
            sys.executable,
            "-W",
            "ignore",
            __file__,
            "--child",
            name,
            "--folder",
            str(folder),
        ]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.last = self._said()[1]

    def _said(self) -> list[float]:
        assert self.process.stdout is not None
        found: list[float] = json.loads(self.process.stdout.readline())
        return found

    def turn(self, steps: int) -> float:
        """Seconds of some steps."""
        assert self.process.stdin is not None
        print(steps, file=self.process.stdin, flush=True)
        seconds, self.last = self._said()
        return seconds

    def end(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def pair(before: Path, name: str, seconds: float) -> tuple[list[tuple[float, float]], bool]:
    """Seconds of a step in each turn of two new processes, before and after; whether their outputs
    are the same.
    """
    with tempfile.TemporaryDirectory() as work:
        sides = [Side(before, name, Path(work) / "before"), Side(HERE, name, Path(work) / "after")]
        same = sides[0].last == sides[1].last
        steps = max(1, round(0.05 / max(sides[0].turn(3) / 3, 1e-6)))
        times: list[tuple[float, float]] = []
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            order = sides if len(times) % 2 == 0 else sides[::-1]
            turn = {side: side.turn(steps) / steps for side in order}
            times.append((turn[sides[0]], turn[sides[1]]))
        for side in sides:
            side.end()
    return times, same


def compare(before: Path, name: str, seconds: float) -> float:
    """The ratio of a case: the median over pairs of processes, as memory lies otherwise in each."""
    found = [pair(before, name, seconds / PAIRS) for _ in range(PAIRS)]
    each = sorted(statistics.median(b / a for a, b in times) for times, _ in found)
    ms = [
        1e3 * statistics.median(of)
        for of in zip(*(t for times, _ in found for t in times), strict=True)
    ]
    same = all(same for _, same in found)
    ratio = statistics.median(each)
    told = f"{ratio:5.3f} ({each[0]:5.3f} - {each[-1]:5.3f})  {'same' if same else 'OTHER'}"
    print(f"{name:<28} {ms[0]:9.3f} {ms[1]:9.3f}   {told}", flush=True)
    return ratio if same else float("inf")


def main() -> None:
    """Compare, or be one of the processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--quick", action="store_true", help="3 seconds a case")
    parser.add_argument("--cases", nargs="*", default=[*TABLES, *RUNS])
    parser.add_argument("--child")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child, asked.folder)
        return
    if asked.before is None:
        parser.error("give the checkout to compare with")
    print(f"{'case':<28} {'before ms':>9} {'after ms':>9}   after / before (least - most)  outputs")
    worst = max(
        compare(asked.before.resolve(), name, 3 if asked.quick else asked.seconds)
        for name in asked.cases
    )
    print_target("slowest case after / before", f"{worst:.3f}", GOAL, worst <= GOAL)


if __name__ == "__main__":
    main()
