"""Real logs, from the raw file to a trained model with nothing said but where the file is: quality,
time, memory.

    python benchmarks/real_data.py --data DIR           # every set, under half an hour
    python benchmarks/real_data.py --data DIR --quick   # the small ones, under a minute

Each set goes through `sparrow prepare` (the schema is inferred), `sparrow train` (a run of
defaults) and `sparrow evaluate --split test`, in processes of their own; a set that is not in DIR
is left out with the reason. Rows/s prepared is all rows over the wall time of `prepare`, examples/s
those of the training loop in its later half. Memory is the largest proportional set size (PSS) of
the process tree in a second pass, in which nothing is timed. What no model can learn from is no
quality: Open Bandit's test part has a handful of clicks, Criteo's 800 rows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _peers import process
from _peers.raw_logs import SETS, RawLog
from _peers.targets import print_target

QUICK = ("criteo", "ml_100k", "open_bandit")
COLUMNS = (
    "prepared rows/s | trained examples/s |   AUC  |  GAUC  |   NE   | wall s | MB prepare, train"
)
HEAD = f"{'':12} | {'rows':>9} | {COLUMNS}"


def sparrow(*arguments: str | Path, memory: bool = False) -> process.Outcome:
    """A command of this environment's Sparrow."""
    return process.run([sys.executable, "-m", "sparrow", *arguments], memory=memory)


def measure(log: RawLog, work: Path) -> dict[str, Any]:
    """Prepare, train and evaluate twice: timed, then with memory watched."""
    prepared, run_dir, out = work / "prepared", work / "run", work / "test.json"
    begin: list[str | Path] = ["prepare", *log.arguments, "--out", prepared, "--overwrite"]
    train: list[str | Path] = ["train", prepared, "--run_dir", run_dir, "--overwrite"]
    times = [sparrow(*begin).seconds, sparrow(*train).seconds]
    sparrow("evaluate", run_dir, "--split", "test", "--json-out", out)
    test = next(iter(json.loads(out.read_text()).values()))
    facts = json.loads((prepared / "manifest.json").read_text())
    events = [json.loads(text) for text in (run_dir / "log.jsonl").read_text().splitlines()]
    rates = [event["examples_per_s"] for event in events if "examples_per_s" in event]
    peaks = [sparrow(*begin, memory=True).bytes_peak, sparrow(*train, memory=True).bytes_peak]
    rows = sum(facts["rows"].values())
    return {
        "rows": rows,
        "prepared_per_s": rows / times[0],
        "trained_per_s": statistics.median(rates[len(rates) // 2 :]) if rates else math.nan,
        "auc": test["auc"],
        "gauc": float(test.get("gauc") or math.nan),
        "ne": test["ne"],
        "wall_s": sum(times),
        "megabytes": [peak / 1e6 for peak in peaks],
    }


def line(name: str, found: dict[str, Any], made: str) -> str:
    """One row of the table."""
    quality = " | ".join(
        "      " if math.isnan(found[m]) else f"{found[m]:.4f}" for m in ("auc", "gauc", "ne")
    )
    return (
        f"{name:12} | {found['rows']:9,} | {found['prepared_per_s']:15,.0f} |"
        f" {found['trained_per_s']:18,.0f} | {quality} | {found['wall_s']:6.1f} |"
        f" {found['megabytes'][0]:6.0f}, {found['megabytes'][1]:6.0f} | {made}"
    )


def main() -> None:
    """One row a set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of real sets")
    parser.add_argument("--only", nargs="*", choices=tuple(SETS), help="these sets")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} alone")
    options = parser.parse_args()
    print(HEAD)
    learned = {}
    for name in options.only or (QUICK if options.quick else SETS):
        with tempfile.TemporaryDirectory() as work:
            try:
                log = SETS[name](options.data, Path(work))
            except FileNotFoundError as error:
                print(f"{name:12} | left out: no {error}")
                continue
            found = measure(log, Path(work))
        print(line(name, found, log.made), flush=True)
        learned[name] = found
    print()
    for name, found in learned.items():
        met = found["ne"] < 1
        print_target(f"{name}, test NE of the defaults", f"{found['ne']:.4f}", "below 1", met)


if __name__ == "__main__":
    main()
