"""LightGBM as a user would try it beside Sparrow's defaults, on the same rows: quality, time, memory.

    python benchmarks/vs_trees.py --lightgbm-python PYTHON --data DIR           # about half an hour
    python benchmarks/vs_trees.py --lightgbm-python PYTHON --quick              # a small log, one seed

PYTHON has lightgbm, scikit-learn, pandas and pyarrow (README.md beside this file). Three sets, each cut once into
files for training, validation and test that both sides read: the made log of `_peers/click_log.py` (200,000 training
rows), census_kdd (random rows) and one session in five of the Globo request log (in time order). Sparrow is `sparrow
prepare` with its inferred schema and `sparrow train` with its defaults. LightGBM gets its categorical columns either as
the mean label and count of each value (of training rows in four other folds, smoothed by 20 rows) or as they are, lists
as their last id and length, learning rate 0.05 and early stopping on the validation file; both see all columns but
times and keys. The whole of both jobs is timed, from raw files to scores; memory is watched in runs of its own.
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
import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import torch
from _peers import click_log, process, raw_logs

from sparrow.metrics import auc, gauc, logloss, ne

PARTS = ("train", "valid", "test")
HERE = Path(__file__).parent / "_peers"


@dataclass(frozen=True, kw_only=True)
class Set:
    """files: of the three parts. categorical, lists: as LightGBM is told. dropped: keys and times it does not see."""

    files: dict[str, str]
    label: str
    categorical: list[str]
    lists: list[str]
    dropped: list[str]
    group: str | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one seed."""

    auc: float
    gauc: float
    logloss: float
    ne: float
    seconds: float


# -- the sets ----------------------------------------------------------------------------------------------------------


def made(data: Path | None, work: Path, quick: bool) -> Set:
    """The made log."""
    click_log.write(work, rows=30_000 if quick else click_log.ROWS)
    files = {part: str(work / f"{part}.csv") for part in PARTS}
    return Set(files=files, label="label", categorical=click_log.CATEGORICAL, lists=[], dropped=[])


def census(data: Path | None, work: Path, quick: bool) -> Set:
    """Random 80/10/10 of the rows, with a header; codes that are integers are numbers to both sides unless named."""
    assert data is not None
    (file, _, label) = raw_logs.census(data, work).arguments
    options = pcsv.ReadOptions(autogenerate_column_names=True)
    table = pcsv.read_csv(file, read_options=options)
    names = [f"c{i}" for i in range(table.num_columns)]
    table = table.rename_columns(names)
    income = np.char.find(table[label].to_numpy().astype(str), "50000+") >= 0
    table = table.drop_columns([label]).append_column("label", pa.array(income.astype(np.int8)))
    files = _cut(table.take(pa.array(np.random.default_rng(0).permutation(table.num_rows))), work)
    words = [field.name for field in table.schema if pa.types.is_string(field.type)]
    return Set(files=files, label="label", categorical=words, lists=[], dropped=[])


def globo(data: Path | None, work: Path, quick: bool) -> Set:
    """One session in five; the last rows in time are validation and test."""
    assert data is not None
    (file,) = raw_logs.globo(data, work, every=5).arguments
    names = ["article", "user", "environment", "device", "os", "country", "region", "referrer", "hour"]
    return Set(
        files=_cut(pq.read_table(file), work), label="label", categorical=names, group="request_id",
        lists=["session_clicks", "user_history"], dropped=["request_id", "session_id", "ts"],
    )  # fmt: skip


SETS: dict[str, Callable[[Path | None, Path, bool], Set]] = {"made": made, "census_kdd": census, "globo, 1 in 5": globo}


def _cut(table: pa.Table, work: Path) -> dict[str, str]:
    files, begin = {}, 0
    for part, share in click_log.SHARES:
        files[part] = str(work / f"{part}.parquet")
        pq.write_table(table.slice(begin, round(share * table.num_rows)), files[part])
        begin += round(share * table.num_rows)
    return files


Side = Callable[[Set, Path, int], tuple[Result, int]]

# -- the sides ---------------------------------------------------------------------------------------------------------


def sparrow(rows: Set, work: Path, seed: int) -> tuple[Result, int]:
    """Prepare, train and score by the defaults; memory is watched for the seed below 0. Returns its peak too."""
    prepared, run_dir, out = work / "prepared", work / "run", work / "test.json"
    files = [rows.files["train"], "--valid-files", rows.files["valid"], "--test-files", rows.files["test"]]
    commands: list[list[str | Path]] = [
        ["prepare", *files, "--label", rows.label, "--out", prepared, "--overwrite"],
        ["train", prepared, "--run_dir", run_dir, "--seed", str(max(seed, 0)), "--overwrite"],
        ["evaluate", run_dir, "--split", "test", "--json-out", out],
    ]
    took = [process.run([sys.executable, "-m", "sparrow", *command], memory=seed < 0) for command in commands]
    test = next(iter(json.loads(out.read_text()).values()))
    values = {name: float(test.get(name) or math.nan) for name in ("auc", "gauc", "logloss", "ne")}
    return Result(seconds=sum(t.seconds for t in took), **values), max(t.bytes_peak for t in took)


def trees(python: Path, encoding: str) -> Side:
    """LightGBM with this encoding, as `sparrow`."""

    def run(rows: Set, work: Path, seed: int) -> tuple[Result, int]:
        spec, out = work / "spec.json", work / "scores.npy"
        settings: dict[str, Any] = {**rows.files, "label": rows.label, "categorical": rows.categorical}
        settings |= {"lists": rows.lists, "dropped": rows.dropped, "encoding": encoding, "seed": max(seed, 0)}
        spec.write_text(json.dumps({**settings, "out": str(out)}))
        took = process.run([python, HERE / "lightgbm_job.py", spec], memory=seed < 0)
        score, label = (torch.from_numpy(column) for column in np.load(out))
        group = math.nan
        if rows.group:
            sessions = pq.read_table(rows.files["test"], columns=[rows.group])[0].to_numpy()
            group = gauc(score, label, torch.from_numpy(sessions.copy())).value
        values = {"auc": auc(score, label), "logloss": logloss(score, label), "ne": ne(score, label), "gauc": group}
        return Result(seconds=took.seconds, **values), took.bytes_peak

    return run


# -- what was found ----------------------------------------------------------------------------------------------------


def line(name: str, results: Sequence[Result], bytes_peak: int) -> str:
    """One row of the table: means and standard deviations over seeds."""

    def spread(metric: str) -> str:
        values = [getattr(result, metric) for result in results]
        if math.isnan(values[0]):
            return " " * 16
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        return f"{statistics.fmean(values):.4f} +- {deviation:.4f}"

    columns = " | ".join(spread(metric) for metric in ("auc", "gauc", "logloss", "ne"))
    seconds = statistics.median(result.seconds for result in results)
    return f"{name:28} | {columns} | {seconds:6.1f} | {bytes_peak / 1e6:6.0f}"


def mean(results: Sequence[Result], metric: str) -> float:
    """Over seeds."""
    return statistics.fmean(getattr(result, metric) for result in results)


def not_worse(mine: Sequence[Result], theirs: Sequence[Result], metric: str, sign: int) -> bool:
    """Within one standard error of the difference of the means."""
    sides = [[getattr(result, metric) for result in results] for results in (mine, theirs)]
    error = math.sqrt(sum(statistics.variance(side) / len(side) for side in sides if len(side) > 1))
    return sign * (mean(mine, metric) - mean(theirs, metric)) >= -error


def main() -> None:
    """A table a set, then the targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lightgbm-python", type=Path, required=True, help="the Python that has lightgbm")
    parser.add_argument("--data", type=Path, help="the folder of real sets; without it the made log alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=tuple(SETS), help="these sets")
    parser.add_argument("--quick", action="store_true", help="a small made log, one seed")
    options = parser.parse_args()
    sides: dict[str, Side] = {"Sparrow, defaults": sparrow}
    sides |= {f"LightGBM, {e}": trees(options.lightgbm_python, e) for e in ("target", "native")}
    verdicts = []
    for name, make in SETS.items():
        if options.only and name not in options.only:
            continue
        if name != "made" and (options.quick or options.data is None):
            continue
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            try:
                rows = make(options.data, work, options.quick)
            except FileNotFoundError as error:
                print(f"\n{name}: left out, no {error}")
                continue
            results: dict[str, list[Result]] = {side: [] for side in sides}
            for seed in range(1 if options.quick else options.seeds):
                for side, run in sides.items():
                    results[side].append(run(rows, work, seed)[0])
            metrics = " | ".join(f"{metric:16}" for metric in ("test AUC", "GAUC", "logloss", "NE"))
            print(f"\n{name:28} | {metrics} | wall s | MB", flush=True)
            for side, run in sides.items():
                print(line(side, results[side], run(rows, work, -1)[1]), flush=True)
        best = min(list(sides)[1:], key=lambda side: mean(results[side], "ne"))
        verdicts.append((name, results["Sparrow, defaults"], best, results[best]))
    print()
    for name, mine, best, theirs in verdicts:
        met = not_worse(mine, theirs, "auc", 1) and not_worse(mine, theirs, "ne", -1)
        shown = [f"{mean(some, 'auc'):.4f}, {mean(some, 'ne'):.4f}" for some in (mine, theirs)]
        print(
            f"TARGET {name}, AUC and NE of the defaults against {best}: {' against '.join(shown)} "
            f"(goal no worse than one standard error) {'met' if met else 'missed'}"
        )


if __name__ == "__main__":
    main()
