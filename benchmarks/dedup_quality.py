"""What the order of rows and dedup do to the quality of a stream that is predicted before it is
trained on.

    python benchmarks/dedup_quality.py GLOBO_REQUESTS.parquet   # about five minutes
    python benchmarks/dedup_quality.py --quick                  # a made log, the same checks

DLRM of `recipes/globo.toml`, three seeds, NE and AUC of the last fifth of the stream. The same rows
in four forms: permuted within the hour (seed 0), as a log of many servers comes in; in the order of
time; sessions side by side within the hour; and those with groups looked up once. All must have the
same rows; the two last differ by rounding alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _peers.targets import print_target
from _peers.tiny import sized
from dedup_storage import HOUR_MS, MADE, everything, made, prints

from sparrow import data
from sparrow.features.schema import Cluster, Column, Schema, Split
from sparrow.trained.run import Run
from sparrow.training import train

RECIPES = Path(__file__).parents[1] / "recipes"
SESSIONS = RECIPES / "globo_sessions.schema.toml"
SEEDS = sized((0, 1, 2), (0, 1))


def prepared(log: Path, sessions: Schema, work: Path) -> dict[str, tuple[Path, str]]:
    """Form -> the prepared log and how to read it, all of the same rows."""
    time = str(sessions.role("time"))
    by_time = replace(sessions, cluster=None, groups={})
    untimed = replace(
        by_time,
        columns={**by_time.columns, time: Column(kind="ignore")},
        split=Split(by="ratio", valid=0, test=0),
    )
    rows = pq.read_table(log)
    hours = rows[time].to_numpy() // HOUR_MS
    order = np.lexsort((np.random.default_rng(0).random(len(hours)), hours))
    pq.write_table(rows.take(pa.array(order)), work / "permuted.parquet")
    made = {
        "permuted": (work / "permuted.parquet", untimed),
        "time": (log, by_time),
        "sessions": (log, sessions),
    }
    found = [
        data.open(data.prepare([source], work / name, schema=s).out)
        for name, (source, s) in made.items()
    ]
    want = prints(everything(found[0]))
    for other in found[1:]:
        table = everything(other)
        assert np.array_equal(prints(table.drop_columns([time])), want), (
            f"{other.path.name}: other rows"
        )
    return {
        "permuted within the hour": (work / "permuted", "off"),
        "in the order of time": (work / "time", "off"),
        "sessions side by side": (work / "sessions", "off"),
        "and groups looked up once": (work / "sessions", "on"),
    }


def quality(
    path: Path, dedup: str, seed: int, run_dir: Path, settings: dict[str, Any]
) -> dict[str, float]:
    """AUC and NE of the last fifth of the stream."""
    changes = {"data.path": str(path), "data.dedup": dedup, "data.shuffle": False, "seed": seed}
    run = Run.load(
        RECIPES / "globo.toml",
        {**changes, "run_dir": str(run_dir), "log.tensorboard": False, **settings},
    )
    last: dict[str, float] = train(run)["progressive"][-1]
    return last


def main() -> None:
    """All forms and seeds, a seed after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "globo", nargs="?", type=Path, help="the request log that globo_requests.py makes"
    )
    parser.add_argument("--quick", action="store_true", help="20,000 rows of a made log")
    asked = parser.parse_args()
    if not asked.globo and not asked.quick:
        parser.error("name the request log, or say --quick")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        log, schema, settings = asked.globo, Schema.load(SESSIONS), {}
        if asked.quick:
            log, settings = work / "log.parquet", {"data.batch_size": 200}
            made(sized(20_000, 600), log)
            schema = replace(MADE, cluster=Cluster(by="session"))
        forms = prepared(log, schema, work)
        found: dict[str, list[dict[str, float]]] = {form: [] for form in forms}
        for seed in SEEDS:
            for number, (form, (path, dedup)) in enumerate(forms.items()):
                found[form].append(
                    quality(path, dedup, seed, work / f"run-{seed}-{number}", settings)
                )
    print(
        f"{log.name}: the last fifth of the stream, {len(SEEDS)} seeds, mean and standard deviation"
    )
    print(f"{'rows':<28}{'NE':>8}{'+-':>8}{'AUC':>8}{'+-':>8}   NE of each seed")
    for form, each in found.items():
        ne, auc = ([one[name] for one in each] for name in ("ne", "auc"))
        every = " ".join(f"{x:.4f}" for x in ne)
        spread = statistics.stdev(ne), statistics.stdev(auc)
        print(
            f"{form:<28}{statistics.mean(ne):8.4f}{spread[0]:8.4f}{statistics.mean(auc):8.4f}{spread[1]:8.4f}"
            f"   {every}"
        )
    off, on = (
        [one["ne"] for one in found[form]]
        for form in ("sessions side by side", "and groups looked up once")
    )
    apart, within = (
        abs(statistics.mean(off) - statistics.mean(on)),
        max(statistics.stdev(off), statistics.stdev(on)),
    )
    is_met = apart <= within
    print_target(
        "NE with dedup as without",
        f"{apart:.4f} apart",
        f"within the spread, {within:.4f}",
        is_met,
    )


if __name__ == "__main__":
    main()
