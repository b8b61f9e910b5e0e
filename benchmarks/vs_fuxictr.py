"""DCNv2 from a CSV click log: Sparrow against FuxiCTR, on this machine, as their users run them.

    python benchmarks/vs_fuxictr.py --fuxictr DIR --fuxictr-python PYTHON           # about half an hour
    python benchmarks/vs_fuxictr.py --fuxictr DIR --fuxictr-python PYTHON --quick   # a small log, the same checks

DIR is a checkout of FuxiCTR's public repository (its wheel lacks the models); PYTHON has fuxictr
2.3.10 installed (how: README.md beside this file). Both of its versions run: "git", the checkout
itself, and "wheel", the installed package with the checkout's model. The log is that of
`_peers/click_log.py`: 200,000 rows for training and 25,000 each for validation and test, 13 numbers
and 26 ids. The model is one: DCNv2, parallel, all 39 fields embedded at 16 (624 inputs), 3 full
cross layers, MLP 400-400-400; batch 4096, 2 epochs, the better of them by validation. The function
and its weights are the same; Sparrow does 12 % fewer operations for it, since (W w) x needs fewer
than W (w x) where x is a number and w its vector. FuxiCTR learns by its template's settings (Adam
1e-3) with the fastest of its versions and worker settings; Sparrow by its defaults (row-wise
AdaGrad for tables, Adam for the rest, rates that go down over the last third). Every job is a
process of its own, and sides take turns. A step is the median interval between the ends of
optimizer steps in the second epoch, loading included, by the same hook on
both sides. Memory is the proportional set size of the process tree, watched in runs that are not
timed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from _peers import click_log
from _peers.fuxictr_sides import (
    BATCH,
    DIM,
    PRECISIONS,
    FuxiCTR,
    Job,
    Model,
    Sparrow,
    check,
    head,
    line,
    log_of,
    options,
    quality_targets,
    speed_target,
    target,
)
from torch import Tensor

CROSS, DEEP = 3, [400, 400, 400]
WIDTH = DIM * (len(click_log.NUMERIC) + len(click_log.CATEGORICAL))
LAYERS = [(WIDTH, WIDTH)] * CROSS + list(zip([WIDTH, *DEEP], DEEP, strict=False))
# of an example: forward, and the two products of its backward
FLOP = 6 * sum(a * b for a, b in LAYERS)
# what Sparrow's first products take: numbers once, not times vectors
NARROW = 16 + DIM * len(click_log.CATEGORICAL)
DONE = FLOP - 6 * (WIDTH - NARROW) * (WIDTH + DEEP[0])  # of an example, by Sparrow
MODEL = Model(
    name="dcnv2",
    source="DCNv2/src/DCNv2.py",
    ours={"cross_layers": CROSS, "deep": DEEP, "structure": "parallel", "embed_dense": True},
    theirs={
        "num_cross_layers": CROSS,
        "parallel_dnn_hidden_units": DEEP,
        "model_structure": "parallel",
    },
    work=DONE / FLOP,
)


# -- the limit -------------------------------------------------------------------------------------


def best_s(a: Tensor, b: Tensor) -> float:
    """The shortest of some products."""
    times = [time.perf_counter()]
    for _ in range(10):
        a @ b
        times.append(time.perf_counter())
    return min(later - earlier for earlier, later in itertools.pairwise(times))


def gemm_gflop_per_s(precision: str) -> float:
    """All matrix products of a step, one after the other, each in the best time of several
    tries.
    """
    kind = torch.float32 if precision == "fp32" else torch.bfloat16
    total = 0.0
    for inputs, outputs in LAYERS:
        x, w, g = (
            torch.randn(*shape).to(kind)
            for shape in ((BATCH, inputs), (outputs, inputs), (BATCH, outputs))
        )
        total += sum(best_s(a, b) for a, b in ((x, w.t()), (g, w), (g.t(), x)))
    return BATCH * FLOP / total / 1e9


# -- what was found --------------------------------------------------------------------------------


def median(values: Sequence[float]) -> str:
    """Of some times, with their range."""
    return f"{statistics.median(values):.2f} s ({min(values):.2f}-{max(values):.2f})"


def share(jobs: Sequence[Job], peak: float, flop: float = FLOP) -> str:
    """Of the machine's products a second. flop: that the side really does for an example."""
    rate = BATCH / statistics.median(job.step_s for job in jobs)
    return f"{100 * rate * flop / 1e9 / peak:5.0f} %"


# -- the comparison --------------------------------------------------------------------------------


def ready(sides: Sequence[FuxiCTR], mine: Sparrow, times: int) -> tuple[float, float]:
    """From CSV to data ready to train on, whole processes: (Sparrow, the better of FuxiCTR's
    versions) in seconds.
    """
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


HEAD = head("of peak")


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
    """Peaks of the whole job, preparation and training: (Sparrow by precision, the leaner of
    FuxiCTR's) in bytes.
    """
    peers = {str(side): side.run("all", memory=True) for side in sides}
    prepared = mine.prepare(memory=True).bytes_peak
    print("\npeak memory of the process tree, MB: preparation, training")
    for name, peer in peers.items():
        print(
            f"{name:28} | {peer.bytes_peak / 1e6:6.0f} (both in one process; {peer.processes}"
            " processes)"
        )
    peaks = {}
    for precision in PRECISIONS:
        trained = mine.train(precision, memory=True).bytes_peak
        print(
            f"{'Sparrow ' + precision:28} | {prepared / 1e6:6.0f}, {trained / 1e6:6.0f}", flush=True
        )
        peaks[precision] = max(prepared, trained)
    return peaks, min(peer.bytes_peak for peer in peers.values())


def compare(asked: argparse.Namespace, work: Path) -> None:
    """Everything, printed as it comes."""
    log, facts = log_of(asked, work / "log")
    print(f"{facts}; {FLOP / 1e6:.2f} MFLOP an example", flush=True)
    for folder in ("fuxictr", "sparrow"):
        (work / folder).mkdir(exist_ok=True)
    mine = Sparrow(work / "log", work / "sparrow", model=MODEL)
    python, checkout = str(asked.fuxictr_python), str(asked.fuxictr.resolve())
    sides = [
        FuxiCTR(python, checkout, work / "log", work / "fuxictr", v, w, model=MODEL)
        for v in ("git", "wheel")
        for w in range(4)
    ]
    if asked.quick:
        sides = sides[:1]
    first = {side.version: side for side in reversed(sides)}
    ours_ready, peer_ready = ready([*first.values()], mine, 1 if asked.quick else asked.pairs)
    tried = [side for side in sides if asked.workers is None or side.workers in asked.workers]
    theirs = sides[0] if asked.quick else fastest(tried)
    peaks_gemm = {p: gemm_gflop_per_s(p) for p in PRECISIONS}
    jobs: dict[str, list[Job]] = {"FuxiCTR": [], **{p: [] for p in PRECISIONS}}
    for seed in range(1 if asked.quick else asked.pairs):
        for name in list(jobs)[:: 1 if seed % 2 else -1]:
            jobs[name].append(
                theirs.run("train", seed) if name == "FuxiCTR" else mine.train(name, seed)
            )
        for precision in PRECISIONS:
            check(jobs["FuxiCTR"][-1], jobs[precision][-1], log, MODEL)
        if abs(3 * jobs["FuxiCTR"][-1].flop / FLOP - 1) > 0.01:
            sys.exit(
                f"no speed is printed: {jobs['FuxiCTR'][-1].flop:,.0f} FLOP forward,"
                f" {FLOP / 3:,.0f} meant"
            )
    peaks_gemm = {p: max(peaks_gemm[p], gemm_gflop_per_s(p)) for p in PRECISIONS}
    print(
        f"\n{len(jobs['fp32'])} seeds, in turns; matrix products alone reach "
        + " and ".join(f"{value:,.0f} GFLOP/s in {p}" for p, value in peaks_gemm.items())
        + f"\n{HEAD}"
    )
    line(str(theirs), jobs["FuxiCTR"], share(jobs["FuxiCTR"], peaks_gemm["fp32"]))
    for precision in PRECISIONS:
        line(
            f"Sparrow {precision}",
            jobs[precision],
            share(jobs[precision], peaks_gemm[precision], DONE),
        )
    peaks, peer_peak = memory([theirs] if asked.quick else [*first.values()], mine)
    print()
    for precision, goal, aim in (("fp32", 1.5, 1.8), ("bf16", 4.0, 6.0)):
        speed_target(precision, jobs[precision], jobs["FuxiCTR"], goal, f", aim {aim}")
    for precision in PRECISIONS:
        quality_targets(precision, jobs[precision], jobs["FuxiCTR"])
    target(
        "log to ready against FuxiCTR",
        f"{peer_ready / ours_ready:.1f}",
        "5",
        peer_ready >= 5 * ours_ready,
    )
    for precision in PRECISIONS:
        part = peaks[precision] / peer_peak
        target(
            f"peak memory against FuxiCTR, {precision}", f"{part:.2f}", "at most 0.5", part <= 0.5
        )


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers", type=int, nargs="*", help="FuxiCTR's worker settings to choose from (0 1 2 3)"
    )
    asked = options(parser)
    with tempfile.TemporaryDirectory() as work:
        compare(asked, Path(work))


if __name__ == "__main__":
    main()
