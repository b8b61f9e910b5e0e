"""Training steps of a sharded model on a cluster in a box: time, bytes by kind of link, and what
the time goes to.

    python benchmarks/sharded.py           # 4 hosts of 2 ranks; 0.1, 1 and 10 Gbit/s, 1 with latency; about ten minutes
    python benchmarks/sharded.py --quick   # 2 hosts of 1 rank, one speed, under a minute, the same checks

A DLRM on 13 numbers and 26 tables of dim 16 (six of lists of ten ids), 4096 samples in all, one
thread a rank; every rank has an equal part of the machine for as many ranks as the largest job has,
so that one rank alone has no more. Batches are cut beforehand. Each rank checks before it is timed
that the loss of its first steps is that of one process (1e-5; with bf16 between ranks 2e-3), and
codecs and plans take turns. Needs Linux, root and cgroup v1, see cluster/box.py; other programs on
the same cores spoil the times, not the bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from _peers.targets import print_target

sys.path.insert(0, str(Path(__file__).parent / "cluster"))

from box import Box, told
from rank_job import DIM, LENGTH, LISTS, TABLES

JOB = Path(__file__).parent / "cluster" / "rank_job.py"
PLANS, CODECS = ("table_wise", "row_wise", "table_row_wise"), ("fp32", "bf16")
BATCH, LINKS = 4096, ("network", "host", "self")
Found = dict[str, Any]
"""What a case's ranks found together: the mean over ranks of times, the sum of bytes."""


def measure(
    box: Box, cases: list[str], steps: int, rounds: int, dim: int = DIM
) -> tuple[dict[str, Found], dict[str, float]]:
    """The cases on a box, and what rank 0 found of its link; SystemExit with the ranks' words when
    one fails.
    """
    program = [
        sys.executable,
        "-W",
        "ignore",
        str(JOB),
        "--cases",
        ",".join(cases),
        "--batch",
        str(BATCH),
    ]
    program += ["--steps", str(steps), "--rounds", str(rounds), "--dim", str(dim)]
    ended = box.run(program, timeout_s=300, begins_free=True)
    if failed := [one for one in ended if one.code]:
        sys.exit(
            "\n".join(f"rank {one.rank} ended with {one.code}: {one.err[-2000:]}" for one in failed)
        )
    ranks = [json.loads(one.out.splitlines()[-1]) for one in ended]
    found = {
        name: together([rank["cases"][name] for rank in ranks], box.ranks_per_host)
        for name in cases
    }
    return found, ranks[0]["link"]


def together(ranks: list[Found], ranks_per_host: int) -> Found:
    """One case's ranks."""
    count: Counter[tuple[str, str]] = Counter()
    parts: Counter[str] = Counter()
    for rank in ranks:
        count.update({(what, link): n for what, link, n in rank["bytes"]})
        parts.update({name: ms / len(ranks) for name, ms in rank["parts"].items()})
    hosts = [rank["wire"] for rank in ranks[::ranks_per_host]]
    return {
        "ms": statistics.mean(rank["ms"] for rank in ranks),
        "cpu_ms": sum(rank["cpu_ms"] for rank in ranks),
        "main_ms": sum(rank["main_ms"] for rank in ranks),
        "parts": parts,
        "bytes": count,
        "dense": ranks[0]["dense"],
        "wire": {"network": sum(h["eth0"] for h in hosts), "host": sum(h["lo"] for h in hosts)},
    }


def over(found: Found, link: str) -> float:
    """Bytes of a step over a kind of link, of all ranks."""
    return float(sum(n for (_, kind), n in found["bytes"].items() if kind == link))


def table_wise_bytes(
    hosts: int, local: int, width: int, dense: int
) -> dict[tuple[str, str], float]:
    """What a step must send when each table is whole on one rank: (what, link) -> bytes of all
    ranks.

    Every rank has BATCH / W samples. It sends every other their ids, int32, one length a bag and
    one row an id; each owner sends its vectors to every rank and gets as many gradients. Ahead of
    the ids go int64: samples, lengths and rows together, rows, and the rows of each table that the
    receiver has. Dense gradients: 2 (W - 1) / W of them a rank.
    """
    world, mine = hosts * local, BATCH // (hosts * local)
    peers = {"network": world - local, "host": local - 1, "self": 1}
    ids = 4 * (2 * (TABLES - LISTS) + (1 + LENGTH) * LISTS)
    want: dict[tuple[str, str], float] = {}
    for link, count in peers.items():
        want["ids", link] = mine * count * ids
        want["vectors", link] = want["gradients", link] = mine * count * TABLES * DIM * width
        want["sizes of ids", link] = count * 8 * (3 * world + TABLES)
    everywhere = "network" if hosts > 1 else "host"
    want["dense gradients", everywhere] = world * (2 * (world - 1) * 4 * dense // world)
    return {key: n for key, n in want.items() if n}


def check_bytes(name: str, found: Found, box: Box) -> None:
    """The target line of a table-wise case."""
    want = table_wise_bytes(
        box.hosts, box.ranks_per_host, 2 if name.endswith("bf16") else 4, found["dense"]
    )
    kinds = {what for what, _ in want}
    got = {key: n for key, n in found["bytes"].items() if n and key[0] in kinds}
    rest = sum(n for (what, _), n in found["bytes"].items() if what not in kinds)
    wrong = sorted(
        key for key in want.keys() | got.keys() if abs(want.get(key, 0) - got.get(key, 0)) > 0.5
    )
    told = (
        ", ".join(f"{what} over {link} {got.get((what, link), 0):,.0f}" for what, link in wrong)
        or "all"
    )
    title = f"bytes of {name} on {box.hosts} x {box.ranks_per_host} ranks by closed form"
    total = f"{sum(want.values()):,.0f} a step"
    print_target(
        f"{title} ({rest:,.0f} of scores and norms left out)",
        told,
        f"equal, {total}",
        not wrong,
    )


HEAD = (
    f"{'plan':<15}{'codec':<6}{'ms':>7}{'CPU ms':>8}{'main':>6}"
    f" |{'compute':>8}{'tables':>7}{'exch.':>7}{'wait':>7} |{'network':>9}{'host':>8}{'self':>8}"
    f" |{'on wire':>9}{'lo':>8}"
)


def row(name: str, found: Found) -> str:
    """A line of the table."""
    plan, codec = name.split(":")
    parts, total = found["parts"], sum(found["parts"].values())
    wait = sum(ms for what, ms in parts.items() if what.startswith("wait"))
    shares = [
        100 * ms / total for ms in (parts["compute"], parts["tables"], parts["exchange"], wait)
    ]
    sent = [over(found, link) / 1000 for link in LINKS]
    text = (
        f"{plan:<15}{codec:<6}{found['ms']:7.1f}{found['cpu_ms']:8.1f}{found['main_ms']:6.0f}"
        f" |{shares[0]:7.0f}%"
    )
    text += "".join(f"{share:6.0f}%" for share in shares[1:])
    text += f" |{sent[0]:9,.0f}{sent[1]:8,.0f}{sent[2]:8,.0f}"
    return f"{text} |{found['wire']['network'] / 1000:9,.0f}{found['wire']['host'] / 1000:8,.0f}"


def waits(found: Found) -> str:
    """What ranks wait for, the longest first."""
    rows = [
        (ms, what.removeprefix("wait: "))
        for what, ms in found["parts"].items()
        if what.startswith("wait")
    ]
    return ", ".join(f"{what} {ms:.1f}" for ms, what in sorted(rows, reverse=True)[:6])


def speeds(
    mbits: list[float],
    hosts: int,
    local: int,
    parts: int,
    steps: int,
    rounds: int,
    latency_us: float = 0,
) -> dict[float, Any]:
    """Every plan and codec at every speed."""
    cases = [f"{plan}:{codec}" for plan in PLANS for codec in CODECS]
    every = {}
    with Box(
        hosts=hosts, ranks_per_host=local, mbit=mbits[0], parts=parts, latency_us=latency_us
    ) as box:
        for mbit in mbits:
            box.rate(mbit)
            found, link = measure(box, cases, steps, rounds)
            every[mbit] = found
            print(
                f"\n{hosts} hosts x {local} ranks; {told(box.links, mbit)}; from rank to rank, with"
                f" quotas and Gloo, {link['mbit']:,.0f} Mbit/s, {link['us']:,.0f} us; kB a step of"
                f" all ranks\n{HEAD}"
            )
            for name in cases:
                print(row(name, found[name]))
            print(f"waits of table_wise:fp32, ms: {waits(found['table_wise:fp32'])}")
            for name in cases[:2]:
                check_bytes(name, found[name], box)
    return every


def scaling(largest: dict[str, Found], steps: int, rounds: int) -> None:
    """The same global batch on 1, 2, 4 and 8 equal ranks at 10 Gbit/s."""
    plans = ["table_wise:fp32", "row_wise:fp32"]
    rows = []
    for hosts, local in ((1, 1), (1, 2), (2, 2)):
        with Box(hosts=hosts, ranks_per_host=local, mbit=10_000, parts=8) as box:
            found, _ = measure(box, plans, steps, rounds)
        rows.append((hosts * local, found))
    rows.append((8, largest))
    print(
        f"\n{BATCH} samples a step on ranks of {(os.cpu_count() or 1) / 8:g} cores each, 10 Gbit/s;"
        " as one rank = 1"
    )
    print(
        f"{'ranks':>5}"
        + "".join(f" |{plan:>16} ms{'speed-up':>9}{'CPU ms':>8}{'wait':>6}" for plan in plans)
    )
    for size, found in rows:
        text = f"{size:5}"
        for plan in plans:
            one, first = found[plan], rows[0][1][plan]
            wait = sum(ms for what, ms in one["parts"].items() if what.startswith("wait")) / sum(
                one["parts"].values()
            )
            text += f" |{one['ms']:19.1f}{first['ms'] / one['ms']:9.2f}{one['cpu_ms']:8.1f}{100 * wait:5.0f}%"
        print(text)


def main() -> None:
    """Measure, check, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="2 hosts of 1 rank at 1 Gbit/s, few steps"
    )
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"{os.cpu_count()} cores, load before the start {load:.1f} (of other programs)", flush=True
    )
    if asked.quick:
        speeds([1000], 2, 1, 2, steps=5, rounds=1)
        return
    found = speeds([100, 1000, 10_000], 4, 2, 8, steps=4, rounds=2)
    speeds([1000], 4, 2, 8, steps=4, rounds=2, latency_us=500)
    scaling(found[10_000], steps=4, rounds=2)


if __name__ == "__main__":
    main()
