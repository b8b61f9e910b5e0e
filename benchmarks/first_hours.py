"""The first hour with each of seven logs: the commands that notes/first-hours.md gives, and how
long each one takes.

    python benchmarks/first_hours.py --data DIR           # all but the log of 20 M rows
    python benchmarks/first_hours.py --data DIR --large   # that one too
    python benchmarks/first_hours.py --data DIR --quick   # ads and ratings alone

DIR is the folder of real sets. What a user would bring is made first, and not timed: links to files
of the sets, and Globo's requests with a row for each candidate, with a list of candidates in each
row, and as a file for each day. Every command is then a process of its own, and the time is that of
the process. What ends with an error ends the program.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from _peers import process, raw_logs

DAY_MS = 86_400_000
LARGE_ROWS = 20_000_000
QUICK = ("ads", "ratings")


def from_log_to_report(log: str, *flags: str, name: str) -> list[str]:
    """The commands of the README's "Your own log"."""
    return [
        " ".join(["prepare", log, *flags, "--out", f"data/{name}"]),
        f"train data/{name}",
        f"evaluate runs/{name} --split test --json-out {name}.json",
        f"report runs/{name}",
        f"predict runs/{name} {log} --out {name}-scores.parquet",
    ]


def ads(data: Path) -> list[str]:
    """Criteo's display ads: tabs, no header."""
    Path("ads.tsv").symlink_to(raw_logs.present(data / "criteo" / "train_8000.tsv"))
    return from_log_to_report("ads.tsv", name="ads")


def ratings(data: Path) -> list[str]:
    """MovieLens 100k, with its users and films as side tables."""
    for part in ("inter", "item", "user"):
        Path(f"ml-100k.{part}").symlink_to(raw_logs.present(data / "ml_100k" / f"ml-100k.{part}"))
    joins = [
        "--join",
        "ml-100k.item",
        "--on",
        "item_id:token",
        "--join",
        "ml-100k.user",
        "--on",
        "user_id:token",
    ]
    return from_log_to_report("ml-100k.inter", *joins, name="ratings")


def impressions(data: Path) -> list[str]:
    """Globo's requests, each a row with a list of candidates and a list of the clicked ones."""
    rows = requests(data)
    first = np.flatnonzero(np.diff(rows["request_id"].to_numpy(), prepend=-1))
    offsets = pa.array(np.append(first, rows.num_rows), pa.int32())
    clicked = rows["label"].to_numpy() == 1
    clicks = pa.array(np.append(0, np.cumsum(clicked))[np.asarray(offsets)], pa.int32())
    shared = (
        "request_id",
        "ts",
        "user",
        "environment",
        "device",
        "os",
        "country",
        "region",
        "referrer",
    )
    articles, whole = rows["article"].combine_chunks(), rows.take(pa.array(first))
    columns = {name: whole[name] for name in (*shared, "session_clicks", "user_history")}
    columns["articles_inview"] = pa.ListArray.from_arrays(offsets, articles)
    columns["articles_clicked"] = pa.ListArray.from_arrays(
        clicks, articles.filter(pa.array(clicked))
    )
    columns["age_h"] = pa.ListArray.from_arrays(offsets, rows["article_age_h"].combine_chunks())
    pq.write_table(pa.table(columns), "impressions.parquet")
    return from_log_to_report("impressions.parquet", name="impressions")


def sessions(data: Path) -> list[str]:
    """Globo's requests, a row for each candidate, with the session and what was clicked in it
    before.
    """
    pq.write_table(requests(data), "sessions.parquet")
    return from_log_to_report("sessions.parquet", name="sessions")


def small(data: Path) -> list[str]:
    """UCI Census-Income (KDD): no header, so the label is named."""
    Path("census.csv.gz").symlink_to(
        raw_logs.present(data / "census_kdd" / "census-income.test.gz")
    )
    return from_log_to_report("census.csv.gz", "--label", "c41", name="census")


def large(_: Path) -> list[str]:
    """A generated log."""
    commands = from_log_to_report("large.parquet", name="large")
    return [f"generate large.parquet --rows {LARGE_ROWS}", *commands[:4]]


def week(data: Path) -> list[str]:
    """Globo's requests of seven days, a file for each. Each day's model is measured on the day
    after, then goes on.
    """
    rows = requests(data)
    day_N = rows["ts"].to_numpy() // DAY_MS
    for day in range(7):
        pq.write_table(rows.filter(pa.array(day_N == day_N[0] + 1 + day)), f"day-{day}.parquet")
    commands = ["prepare day-0.parquet --out data/day-0", "train data/day-0"]
    for day in range(1, 7):
        last, now = f"day-{day - 1}", f"day-{day}"
        commands += [
            f"prepare {now}.parquet --like runs/{last} --grow --out data/{now}",
            f"train data/{now} --init_from runs/{last}",
        ]
    return [*commands, "evaluate runs/day-6 --split test --json-out week.json"]


HOURS: dict[str, Callable[[Path], list[str]]] = {
    "ads": ads,
    "ratings": ratings,
    "impressions": impressions,
    "sessions": sessions,
    "census": small,
    "week": week,
    "large": large,
}


def requests(data: Path) -> pa.Table:
    """One session in five of Globo's request log, in order of time."""
    rows = pq.read_table(raw_logs.globo(data, Path.cwd(), every=5).arguments[0])
    assert pc.all(pc.equal(rows["ts"], rows.sort_by("ts")["ts"])).as_py()
    return rows


def timed(name: str, commands: Sequence[str]) -> None:
    """Runs and prints them."""
    total = 0.0
    for command in commands:
        seconds = process.run([sys.executable, "-m", "sparrow", *command.split()]).seconds
        total += seconds
        print(f"{name:12} | {seconds:8.1f} | sparrow {command}", flush=True)
    measured = Path(f"{name}.json")
    found = next(iter(json.loads(measured.read_text()).values())) if measured.exists() else {}
    quality = ", ".join(
        f"{metric} {found[metric]:.4f}" for metric in ("auc", "gauc", "ne") if found.get(metric)
    )
    print(f"{name:12} | {total:8.1f} | all; test part: {quality}", flush=True)


def main() -> None:
    """A line for each command, and one for each hour."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="the folder of real sets")
    parser.add_argument("--only", nargs="*", choices=tuple(HOURS), help="these hours")
    parser.add_argument(
        "--large", action="store_true", help="with the log of 20 M rows, which takes 10 GB of disk"
    )
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(QUICK)} alone")
    options = parser.parse_args()
    chosen = options.only or (
        QUICK if options.quick else [n for n in HOURS if n != "large" or options.large]
    )
    data = options.data.resolve()
    print(f"{'hour':12} | {'seconds':>8} | command")
    for name in chosen:
        with tempfile.TemporaryDirectory() as work, chdir(work):
            try:
                commands = HOURS[name](data)
            except FileNotFoundError as error:
                print(f"{name:12} | left out: no {error}")
                continue
            timed(name, commands)


if __name__ == "__main__":
    begun = time.perf_counter()
    main()
    print(f"{'':12} | {time.perf_counter() - begun:8.1f} | the whole program")
