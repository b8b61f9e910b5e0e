"""Training beside programs that keep the cores busy: examples/s beside 0, 1, 2 and 4 loops that
never sleep.

    python benchmarks/busy.py GLOBO_REQUESTS.parquet --rounds 3 --cells CELLS   # about a minute a round
    python benchmarks/busy.py --quick                                          # a made log, one short round
    ... --fuxictr FuxiCTR --fuxictr-python fuxi/bin/python                     # its DCNv2, on a log of its own, too

`recipes/globo.toml` as the command line runs it: with one thread, with one for each core, by
default, and by default on one core alone. A round starts each of them in turn and measures it
beside every number of loops, which begin when it has begun to train. With --cells a round that was
measured is kept there, so that few can be measured at a time. FuxiCTR's model is another one, so
that its own rate when quiet is what to compare its curve with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from _peers import click_log
from _peers.cells import kept
from _peers.streams import RECIPES, stream
from _peers.targets import print_target
from _peers.tiny import sized

HERE = Path(__file__).parent
LOOPS = (0, 1, 2, 4)
# before each measurement; times that a slow side gets to write its lines
SETTLE_S, LONGEST = 0.5, 4
LINES = 3  # that a rate is of, at least
ALWAYS = {
    "log.tensorboard": False,
    "log.every": 10,
    "checkpoint.every": 1_000_000,
    "loop.epochs": 1000,
}

Rates = dict[str, float]
"""Loops beside it, as text -> examples/s."""


def beside(
    begin: Callable[[], subprocess.Popen[bytes]], log: Path, loops: Sequence[int], seconds: float
) -> Rates:
    """Examples/s of a program that writes lines of examples and examples_per_s to `log`."""
    found = {}
    program = begin()
    try:
        _wait_for(program, log, 2 * LINES, 120)
        for count in loops:
            busy = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)
            ]
            try:
                time.sleep(SETTLE_S)
                first = _wait_for(program, log, len(_lines(log)) + 1, 60)
                time.sleep(seconds)
                lines = _wait_for(program, log, len(first) + LINES, LONGEST * seconds)[
                    len(first) - 1 :
                ]
            finally:
                for loop in busy:
                    loop.kill()
                    loop.wait()
            each = [b["examples"] - a["examples"] for a, b in itertools.pairwise(lines)]
            took = [n / line["examples_per_s"] for n, line in zip(each, lines[1:], strict=True)]
            found[str(count)] = sum(each) / sum(took) if took else float("nan")
    finally:
        program.kill()
        program.wait()
    return found


def _wait_for(
    program: subprocess.Popen[bytes], log: Path, count: int, most_s: float
) -> list[dict[str, Any]]:
    end = time.perf_counter() + most_s
    while len(found := _lines(log)) < count and time.perf_counter() < end:
        if program.poll() is not None:
            sys.exit(
                f"the program ended by itself ({program.returncode}):"
                f" {' '.join(map(str, program.args))}"
            )
        time.sleep(0.02)
    return found


def _lines(log: Path) -> list[dict[str, Any]]:
    text = log.read_text() if log.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line for line in lines if "examples_per_s" in line]  # others are of evaluations


def sparrow(
    prepared: Path, work: Path, cores: Sequence[int] = (), **settings: Any
) -> subprocess.Popen[bytes]:
    """`sparrow train`, on these cores alone if any are named."""
    shutil.rmtree(work / "run", ignore_errors=True)
    given = {"data.path": str(prepared), "run_dir": str(work / "run"), **ALWAYS, **settings}
    command = [sys.executable, "-m", "sparrow", "train", str(RECIPES / "globo.toml")]
    for name, value in given.items():
        command += [f"--{name}", str(value)]
    keep = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=keep
    )


def fuxictr(python: str, checkout: str, work: Path) -> subprocess.Popen[bytes]:
    """FuxiCTR's DCNv2 as its own trainer runs it, on what `prepare_fuxictr` made."""
    (work / "progress").unlink(missing_ok=True)
    peers = HERE / "_peers"
    command = [python, peers / "progress.py", work / "progress", "4096", peers / "fuxictr_job.py"]
    with (work / "fuxictr.out").open("wb") as out:
        return subprocess.Popen(
            [*map(str, command), _spec(checkout, work, "train")], stdout=out, stderr=out
        )


def prepare_fuxictr(python: str, checkout: str, work: Path, rows: int) -> None:
    """Its log, prepared by it."""
    click_log.write(work / "click_log", rows=rows)
    job = [python, str(HERE / "_peers" / "fuxictr_job.py"), _spec(checkout, work, "prepare")]
    done = subprocess.run(job, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"FuxiCTR could not prepare its log:\n{done.stderr[-1000:]}")


def _spec(checkout: str, work: Path, stage: str) -> str:
    """Written for `fuxictr_job.py`."""
    settings = {
        "checkout": checkout,
        "version": "wheel",
        "log": str(work / "click_log"),
        "work": str(work),
        "workers": 0,
        "stage": stage,
        "seed": 0,
        "epochs": 1000,
        "batch_size": 4096,
        "dim": 16,
        "source": "DCNv2/src/DCNv2.py",
        "out": str(work / "out.json"),
        "settings": {
            "model_structure": "parallel",
            "num_cross_layers": 3,
            "parallel_dnn_hidden_units": [400, 400, 400],
        },
    }
    (work / f"{stage}.json").write_text(json.dumps(settings))
    return str(work / f"{stage}.json")


def show(rounds: dict[str, list[Rates]], loops: Sequence[int]) -> None:
    """The table of medians, least and most."""
    print(f"\n{'examples/s beside':28}" + "".join(f"{f'{count} loops':>26}" for count in loops))
    for side, found in rounds.items():
        row = f"{side:28}"
        for count in loops:
            rates = [rates[str(count)] for rates in found if str(count) in rates]
            text = (
                f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
                if rates
                else "-"
            )
            row += f"{text:>26}"
        print(row)


def ratio(
    rounds: dict[str, list[Rates]], these: str, those: Sequence[str], count: int
) -> tuple[float, float, float]:
    """Median, least and most of a side's rate over the best of others, round by round."""
    pairs = zip(rounds[these], *(rounds[name] for name in those), strict=True)
    found = [one[str(count)] / max(other[str(count)] for other in others) for one, *others in pairs]
    return statistics.median(found), min(found), max(found)


def target(name: str, found: tuple[float, float, float], goal: float) -> None:
    """One line."""
    value, low, high = found
    print_target(name, f"{value:.2f} ({low:.2f} to {high:.2f})", goal, value >= goal)


def main() -> None:
    """Rounds, the table, the targets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "requests",
        type=Path,
        nargs="?",
        help="what globo_requests.py wrote; a made log unless given",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--cells", type=Path, help="a folder for rounds and the prepared log")
    parser.add_argument("--fuxictr", help="a checkout of FuxiCTR's public repository")
    parser.add_argument("--fuxictr-python", help="the Python that has fuxictr 2.3.10")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.quick:
        asked.rounds, asked.seconds = 1, sized(1.0, 0.1)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        work, cells = Path(folder), asked.cells or Path(folder)
        prepared = stream(cells, asked.requests)
        plain = partial(sparrow, prepared, work)
        sides: dict[str, tuple[Any, ...]] = {
            "1 thread": (partial(plain, threads=1), work / "run" / "log.jsonl", LOOPS),
            f"{cores} threads": (partial(plain, threads=cores), work / "run" / "log.jsonl", LOOPS),
            "default": (plain, work / "run" / "log.jsonl", LOOPS),
            "default, on one core": (partial(plain, [0]), work / "run" / "log.jsonl", (0,)),
        }
        if asked.fuxictr:
            prepare_fuxictr(asked.fuxictr_python, asked.fuxictr, work, 40_000)
            begin = partial(fuxictr, asked.fuxictr_python, asked.fuxictr, work)
            sides["FuxiCTR's DCNv2"] = (begin, work / "progress", LOOPS)
        rounds: dict[str, list[Rates]] = {side: [] for side in sides}
        for number in range(asked.rounds):
            order = list(sides)[number % len(sides) :] + list(sides)[: number % len(sides)]
            for side in order:
                begin, log, loops = sides[side]
                name = f"busy-{number}-{''.join(c for c in side if c.isalnum())}"
                rounds[side].append(
                    kept(cells, name, partial(beside, begin, log), loops, asked.seconds)
                )
                print(number + 1, side, rounds[side][-1], file=sys.stderr, flush=True)
    print(f"{_processor()}, {cores} cores, {asked.rounds} rounds of {asked.seconds:g} s")
    show(rounds, LOOPS)
    if not asked.fuxictr:
        print(
            "FuxiCTR was not asked for: give --fuxictr and --fuxictr-python (benchmarks/README.md)"
        )
    fixed = ["1 thread", f"{cores} threads"]
    for count in LOOPS:
        target(
            f"default over the best fixed choice, beside {count} loops",
            ratio(rounds, "default", fixed, count),
            0.9,
        )
    target(
        f"{cores} cores over one, quiet", ratio(rounds, "default", ["default, on one core"], 0), 1.6
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        "unknown processor",
    )


if __name__ == "__main__":
    main()
