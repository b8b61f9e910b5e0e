"""Mutants of the library's Python: which of them no test notices.

    python lint/mutants.py                     # 400, two at a time; goes on where it was stopped
    python lint/mutants.py --tests ../before   # the same ones under the tests of another checkout

Cosmic-ray's operators change one place: a sign, a comparison, a number, a branch; never a string or
an annotation. Places are drawn with a seed, from each folder by its size. A mutant stands in a copy
of the tree and runs the tests that execute its line, in whatever process, the quickest first. One
that fails kills it, and so does an endless run (three times the time that they take).

Which test executes which line is measured once for each checkout, by the suite under coverage.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from xml.etree import ElementTree

import parso  # noqa: F401 (cosmic-ray 8.7 cannot be the first to import it)
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from coverage import CoverageData

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "runs", "data", "__pycache__", "*.egg-info")
# a process that a test starts names the test, since pytest says it in the environment
COVERAGE = """[run]
data_file = {}/coverage
context = ${{PYTEST_CURRENT_TEST-}}
patch = subprocess, fork, _exit
parallel = true
sigterm = true
"""
LEFT_ALONE = {"NoOp", "ExceptionReplacer"}  # the second fails at names with a dot (8.7)
Mutant = tuple[str, int, str, int]  # file, line, operator, which of its places in the file


def run_tests(tree: Path, arguments: list[str], limit_s: float | None = None) -> int:
    """The exit code of pytest in a tree; 124 if it took longer."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with tree.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return 124


def copy_tree(tests: Path, to: Path) -> Path:
    """A checkout with this one's library."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(tests, to, ignore=LEFT_OUT)
    shutil.copytree(ROOT / "sparrow", to / "sparrow", ignore=LEFT_OUT, dirs_exist_ok=True)
    return to


def measure(tests: Path, build: Path) -> None:
    """Run the suite under coverage."""
    settings = build / "coverage.ini"
    settings.write_text(COVERAGE.format(build))
    arguments = ["--cov=sparrow", "--cov-context=test", f"--cov-config={settings}", "--cov-report="]
    arguments += ["-n2", "--dist=loadfile", f"--junit-xml={build}/tests.xml"]
    run_tests(copy_tree(tests, build / "measured"), arguments)


def read_tests(build: Path) -> tuple[dict[str, dict[int, set[str]]], dict[str, float]]:
    """The tests that execute each line of each file, and how long each test takes."""
    data, lines = CoverageData(f"{build}/coverage"), {}
    data.read()
    for file in data.measured_files():
        contexts = data.contexts_by_lineno(file)
        lines[file.partition("/measured/")[2]] = {
            # "TEST|run" in pytest's processes, "TEST (call)" in those that a test started
            line: {re.sub(r"\|\w+$| \(\w+\)(\|.*)?$", "", name) for name in names if "::" in name}
            for line, names in contexts.items()
        }
    seconds = {}
    for case in ElementTree.parse(build / "tests.xml").iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        seconds[f"{file}::{case.attrib['name']}"] = float(case.attrib["time"])
    return lines, seconds


def changes_of(name: str) -> dict[tuple[int, int], list[Mutant]]:
    """What can be changed in a file, by line and column."""
    source = (ROOT / name).read_text()
    types = [
        part
        for node in ast.walk(ast.parse(source))
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if part is not None
    ]
    nodes, changes, places = list(ast_nodes(get_ast(source))), defaultdict(list), {}
    for operator in plugins.operator_names():
        kind = plugins.get_operator(operator)
        if kind.arguments() or kind.__name__ == "NoOp":
            continue
        replaced = (
            operator.rpartition("_")[0] or operator
        )  # with what it is replaced, no place hangs on
        if replaced not in places:
            starts = [start for node in nodes for start, _ in kind().mutation_positions(node)]
            places[replaced] = list(enumerate(starts))
        for number, at in places[replaced]:
            if not any(
                (t.lineno, t.col_offset) <= at < (t.end_lineno, t.end_col_offset) for t in types
            ):
                changes[at].append((name, at[0], operator, number))
    return changes


def draw(count: int, seed: int) -> list[Mutant]:
    """Mutants of places drawn from each folder's code, as many as its share of bytes asks for."""
    generator, folders = random.Random(seed), defaultdict(list)
    for path in sorted((ROOT / "sparrow").rglob("*.py")):
        folders[path.relative_to(ROOT).parts[1]].append(path)
    sizes = {
        folder: sum(path.stat().st_size for path in paths) for folder, paths in folders.items()
    }
    mutants: list[Mutant] = []
    for folder, paths in folders.items():
        wanted = round(count * sizes[folder] / sum(sizes.values()))
        weights = [path.stat().st_size for path in paths]
        for path in generator.choices(paths, weights, k=wanted):
            changes = changes_of(str(path.relative_to(ROOT)))
            if changes:
                mutants.append(generator.choice(changes[generator.choice(sorted(changes))]))
    return mutants


def judge(mutant: Mutant, tree: Path, tests: set[str], seconds: dict[str, float]) -> str:
    """Whether these tests kill it."""
    file, _, operator, number = mutant
    source = (ROOT / file).read_text()
    quickest_first = sorted(tests, key=lambda test: seconds.get(test, 60.0))
    (tree / "chosen").write_text("\n".join(quickest_first))
    (tree / file).write_text(mutate_code(source, plugins.get_operator(operator)(), number))
    limit_s = 30 + 3 * sum(seconds.get(test, 60.0) for test in tests)
    code = run_tests(tree, ["-x", "@chosen"], limit_s) if tests else 0
    (tree / file).write_text(source)
    return f"{'killed' if code else 'survived'} (exit {code}, {len(tests)} tests)"


def main() -> None:
    """Draw, measure, judge; print what survives."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=Path, default=ROOT, help="whose tests are to kill them")
    given = parser.parse_args()
    build = ROOT / "build" / "mutants" / given.tests.resolve().name
    build.mkdir(parents=True, exist_ok=True)
    if not (build / "tests.xml").exists():
        measure(given.tests, build)
    lines, seconds = read_tests(build)
    (build / "results.jsonl").touch()
    outcomes = {}
    for line in (build / "results.jsonl").read_text().splitlines():
        *mutant, outcome = json.loads(line)
        outcomes[tuple(mutant)] = outcome
    trees: Queue[Path] = Queue()
    for number in range(2):
        trees.put(copy_tree(given.tests, build / str(number)))

    def judge_next(mutant: Mutant) -> None:
        tree, executed = trees.get(), lines.get(mutant[0], {})
        # of a statement's lines coverage names the first
        first = max((line for line in executed if line <= mutant[1]), default=0)
        outcomes[mutant] = judge(mutant, tree, executed.get(first, set()), seconds)
        trees.put(tree)
        with (build / "results.jsonl").open("a") as results:
            print(json.dumps([*mutant, outcomes[mutant]]), file=results)
        print(*mutant, outcomes[mutant], flush=True)

    mutants = draw(given.count, given.seed)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(judge_next, [mutant for mutant in mutants if mutant not in outcomes]))
    killed = sum(outcomes[mutant].startswith("killed") for mutant in mutants)
    print(f"{killed} of {len(mutants)} killed ({killed / len(mutants):.1%})")


if __name__ == "__main__":
    main()
