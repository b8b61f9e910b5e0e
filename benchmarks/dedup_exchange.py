"""Bytes between ranks and time of a step with and without dedup, over sessions' length and what
repeats in them.

    python benchmarks/dedup_exchange.py           # 4 hosts of 2 ranks at 1 Gbit/s, four logs; about six minutes
    python benchmarks/dedup_exchange.py --quick   # 2 hosts of 1 rank, one log, the same checks

The made log of dedup_storage.py: ten lists of twelve ids that change together, two ids and a number
of the candidate, clustered; S rows a session, a share d of all numbers as in the row before. A DLRM
of dim 32 on it, 2048 rows a step, table-wise and row-wise. Both forms must have the same logloss
(1e-5). Beside the ratio of the user's lists, what the formula 1 / (1 - (S - 1) / S * d) says for
them (RecD, arXiv 2211.05239, section 3). Needs what cluster/box.py needs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from dedup_storage import LENGTH, LISTS, MADE, made

from sparrow import data
from sparrow.data.batches.repeats import repeats
from sparrow.features.schema import Cluster

sys.path.insert(0, str(Path(__file__).parent / "cluster"))

from box import Box, told

JOB = Path(__file__).parent / "cluster" / "dedup_job.py"
PLANS = ("table_wise", "row_wise")
# rows a session, share of numbers as before
LOGS = ((16.5, 0.8), (5.0, 0.7), (16.5, 0.3), (1.15, 0.1))


def measure(box: Box, prepared: Path, runs: Path) -> dict[str, Any]:
    """The cases of a log: bytes of all ranks together; SystemExit with the ranks' words when one
    fails.
    """
    program = [
        sys.executable,
        "-W",
        "ignore",
        str(JOB),
        str(prepared),
        str(runs),
        "--plans",
        ",".join(PLANS),
    ]
    ended = box.run(program, timeout_s=400, begins_free=True)
    if failed := [one for one in ended if one.code]:
        sys.exit(
            "\n".join(f"rank {one.rank} ended with {one.code}: {one.err[-2000:]}" for one in failed)
        )
    ranks = [json.loads(one.out.splitlines()[-1])["cases"] for one in ended]
    found = {}
    for name in ranks[0]:
        sent: Counter[str] = Counter()
        for rank in ranks:
            for what, link, n in rank[name]["bytes"]:
                if link != "self" and what in ("ids", "vectors", "gradients"):
                    sent[what] += n
        found[name] = {
            "ms": ranks[0][name]["ms"],
            "logloss": ranks[0][name]["logloss"],
            "sent": sent,
        }
    return found


def show(box: Box, place: Path, rows: int, session_rows: float, same: float) -> None:
    """One log."""
    made(rows, place / "log.parquet", session_rows, same)
    data.prepare(
        [place / "log.parquet"], place / "log", schema=replace(MADE, cluster=Cluster(by="session"))
    )
    dataset = data.open(place / "log")
    what = repeats(dataset)
    per_session, d = what.rows / what.sessions, what.equal["user_0"]
    formula = 1 / (1 - (per_session - 1) / per_session * d)
    found = measure(box, place / "log", place)
    policy = "on" if dataset.pays("user") else "off"
    print(
        f"\n{told(box.links, box.mbit)}\nS {per_session:.2f}, d {d:.2f} of the lists: formula"
        f" {formula:.2f}",
        end="",
    )
    print(f", {dataset.factor('user'):.2f} rows a run, so auto is {policy}")
    print(f"{'plan':<12}{'dedup':<6}{'ms a step':>10}{'faster':>8} |", end="")
    print(f"{'kB of ids':>11}{'vectors':>9}{'gradients':>10}{'fewer':>7}")
    for plan in PLANS:
        off, on = found[f"{plan}:off"], found[f"{plan}:on"]
        assert abs(on["logloss"] - off["logloss"]) < 1e-5 * off["logloss"], (
            f"{plan}: {on['logloss']}, {off['logloss']}"
        )
        for name, one in (("off", off), ("on", on)):
            kb = [one["sent"][what] / 1000 for what in ("ids", "vectors", "gradients")]
            ratio = sum(off["sent"].values()) / sum(one["sent"].values())
            sent = f"{kb[0]:11,.0f}{kb[1]:9,.0f}{kb[2]:10,.0f}{ratio:7.2f}"
            print(f"{plan:<12}{name:<6}{one['ms']:10.1f}{off['ms'] / one['ms']:8.2f} |{sent}")


def main() -> None:
    """All logs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 hosts of 1 rank, one log")
    asked = parser.parse_args()
    hosts, local = (2, 1) if asked.quick else (4, 2)
    print(
        f"{hosts} hosts x {local} ranks, 1 Gbit/s a host; {LISTS} lists of {LENGTH} ids, 2 ids, 1"
        " number a row"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Box(hosts=hosts, ranks_per_host=local, mbit=1000) as box,
    ):
        for i, (session_rows, same) in enumerate(LOGS[:1] if asked.quick else LOGS):
            place = Path(folder) / str(i)
            place.mkdir()
            show(box, place, 100_000, session_rows, same)


if __name__ == "__main__":
    main()
