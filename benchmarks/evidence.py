"""Every benchmark's quick form in turn, and a page of what each claim gave on this machine.

    python benchmarks/evidence.py                  # what this commit has not run on this processor; two hours
    python benchmarks/evidence.py --only tiers     # these programs alone, again
    python benchmarks/evidence.py --page           # the page alone

A program's result is a line of `results/evidence.jsonl` when the program has ended, so that a run
which was stopped goes on where it was. The newest line of a program on a processor counts, and
`notes/evidence.md` is made of these.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "evidence.jsonl", HERE.parent / "notes" / "evidence.md"
LIMIT_S = 900  # of a program
PROGRAMS: dict[str, str] = tomllib.loads((HERE / "evidence.toml").read_text())
HEAD = """# Evidence

`make evidence` runs the quick form of every benchmark and writes this page. A quick form has the
checks of the whole one and fewer points, so that its figure is rougher. The whole runs are in
`benchmarks/results/`. Load is how many programs were running before it began: times beside others
on the same cores are worth little. A line of another processor stays when the page is written anew.
"""


def processor() -> str:
    """Its name, and how many cores it has."""
    cpus = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else None
    return f"{name[1] if name else platform.processor()}, {os.cpu_count()} cores"


def commit() -> str:
    """The last one that touched what is measured; with a + where files differ from it."""
    paths = ["sparrow", "recipes", "benchmarks", ":!benchmarks/results"]

    def git(*command: str) -> str:
        return subprocess.check_output(["git", *command, "--", *paths], cwd=HERE.parent, text=True)

    changes = git("status", "--porcelain")
    return git("log", "-1", "--format=%h").strip() + ("+" if changes else "")


def run(name: str) -> tuple[str, list[dict[str, str]]]:
    """Returns how a program ended ("ran", or why it did not), and its targets."""
    with tempfile.TemporaryDirectory() as folder:
        places = {"python": sys.executable, "folder": folder, "data": os.getenv("SPARROW_DATA", "")}
        if "{data}" in PROGRAMS[name] and not places["data"]:
            return "not run: SPARROW_DATA names no folder of real logs", []
        targets = Path(folder, "targets")
        command = [sys.executable, "-W", "ignore", str(HERE / f"{name}.py")]
        command += shlex.split(PROGRAMS[name].format(**places))
        os.environ["SPARROW_TARGETS"] = str(targets)
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, process_group=0
        ) as program:
            try:
                errors = program.communicate(timeout=LIMIT_S)[1]
            except subprocess.TimeoutExpired:
                os.killpg(program.pid, signal.SIGKILL)  # with the ranks and services that it began
                return f"failed: took more than {LIMIT_S} s", []
        lines = targets.read_text().splitlines() if targets.exists() else []
    if program.returncode == 0:
        return "ran", [json.loads(line) for line in lines]
    sys.stderr.write(errors)
    last = (errors.strip().splitlines() or [f"status {program.returncode}"])[-1]
    return f"{'failed' if 'Traceback' in errors else 'not run'}: {last}", []


def stored() -> dict[tuple[str, str], dict[str, Any]]:
    """(program, processor) -> its newest result."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    results = [json.loads(line) for line in lines]
    return {(result["program"], result["processor"]): result for result in results}


def row(result: dict[str, Any], *cells: str) -> str:
    """A line of a table of the page."""
    where = [str(result[key]) for key in ("processor", "load", "date", "commit")]
    cells = (f"`{result['program']}.py`", *cells, *where)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n"


def write_page(results: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Claims, then the programs that have none or did not run."""
    order = list(PROGRAMS)
    every = sorted(results.values(), key=lambda r: (order.index(r["program"]), r["processor"]))
    claims, others, verdicts = "", "", []
    for result in every:
        for target in result["targets"]:
            verdicts.append(target["met"])
            claims += row(result, *(target[key] for key in ("claim", "goal", "figure", "met")))
        if not result["targets"]:
            others += row(result, result["outcome"])
    met, missed = verdicts.count("met"), verdicts.count("missed")
    PAGE.write_text(
        f"{HEAD}\n{met} of {met + missed} figures meet their goal.\n\n"
        f"| program | claim | goal | figure | | processor | load | date | commit |\n{'|---' * 9}|\n{claims}"
        "\n## Programs that print no target, or did not run\n\n"
        f"| program | | processor | load | date | commit |\n{'|---' * 6}|\n{others}"
    )


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, help="run these, again if need be")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args()
    results, here, now = stored(), processor(), commit()
    for name in () if options.page else options.only or PROGRAMS:
        before = results.get((name, here))
        if not options.only and before and before["commit"] == now and "+" not in now:
            continue
        print(f"-- {name}", flush=True)
        begun, load = time.perf_counter(), round(os.getloadavg()[0], 1)
        outcome, targets = run(name)
        result = {"program": name, "commit": now, "processor": here, "load": load}
        result |= {"date": str(datetime.date.today()), "outcome": outcome, "targets": targets}
        result["seconds"] = round(time.perf_counter() - begun)
        results[name, here] = result
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
        write_page(results)
    RESULTS.write_text("".join(json.dumps(result) + "\n" for result in results.values()))
    write_page(results)


if __name__ == "__main__":
    main()
