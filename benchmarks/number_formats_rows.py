"""MX formats where they save bytes: in table rows, and in vectors and gradients between ranks.

    python benchmarks/number_formats_rows.py GLOBO_REQUESTS.parquet --cells CELLS
    python benchmarks/number_formats_rows.py --quick --cases rows     # a small made log, two seeds; about a minute

`rows`: NE over the bytes that the tables allocate, with vectors of 16 and of 64 numbers, for tables
in MX formats beside fp32, bf16, int8 and int4. Log, model and settings are those of
`formats_quality.py`: every row is predicted before it is trained on, and the last fifth of the
stream counts. Seeds are paired: for a seed, rows come in the same order, and weights begin with the
same numbers before they are rounded.

`exchange`: vectors and gradients between ranks in MX formats beside bf16, on a cluster in a box
(`cluster/box.py`; Linux, root, cgroup v1): bytes of a step by kind of message, and its time on
links of two speeds, by the steps of `sharded.py` with vectors of 64 numbers. Each case is checked
first: its losses are near those of one process in fp32. Then whole runs on two ranks, without
limits on links: NE of the last fifth, paired by seed, from that of bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _peers.cells import kept
from _peers.stats import paired
from _peers.targets import print_target
from _peers.tiny import sized
from formats_quality import FP32, QUICK, RECIPES, Setting, cell, generated
from row_formats import processor
from sharded import measure, over

from sparrow import data
from sparrow.core.memory import keep_freed_memory
from sparrow.features.schema import Schema
from sparrow.numerics.formats import FORMATS

sys.path.insert(0, str(Path(__file__).parent / "cluster"))

from box import Box, told

MX = ("mxint8", "mxfp8", "mxfp6", "mxfp4")
STORED = [FP32, *(Setting(name, "stochastic") for name in ("bf16", "int8", *MX[:3], "int4", MX[3]))]
FEW = (FP32, *(Setting(name, "stochastic") for name in ("mxfp8", "int4", "mxfp4")))
FEW_SENT = ("bf16", "mxfp8", "mxfp4")  # in whole runs
DIMS, DIM = sized((16, 64), (64,)), 64  # of rows; of what is sent
PAIRS = {"mxint8": "int8", "mxfp8": "int8", "mxfp4": "int4"}  # beside which they are judged
Log = tuple[Path, dict[str, Any]]
"""A prepared log, and settings of its runs."""


def rows_case(log: Log, asked: argparse.Namespace, cells: Path, seeds: int) -> None:
    """Print NE and bytes of tables in each format."""
    place, settings = log
    fingerprint = data.open(place).fingerprint
    stored = [s for s in STORED if s in FEW] if asked.quick else STORED
    for dim in DIMS:
        found: dict[Setting, list[dict[str, float]]] = {setting: [] for setting in stored}
        for seed in range(seeds):
            for setting in stored:
                name, of = (
                    f"rows-{setting.name.replace(' ', '-')}-{dim}-{seed}",
                    {**settings, "model.dim": dim},
                )
                found[setting].append(
                    kept(cells, name, partial(cell, place), setting, seed, of, of=fingerprint)
                )
                print(f"{name}: {found[setting][-1]}", file=sys.stderr, flush=True)
        print(
            f"\n{dim} numbers a row, {seeds} seeds; differences from fp32 are paired, with their"
            " standard errors"
        )
        print(
            f"{'tables':<20}{'MB':>8}{'of fp32':>9}{'NE':>9}{'sd':>8}{'- fp32':>10}{'error':>9}{'AUC':>9}"
        )
        whole = found[FP32][0]["bytes"]
        for setting in stored:
            of = found[setting]
            (ne, auc), size = (
                ([one[metric] for one in of] for metric in ("ne", "auc")),
                of[0]["bytes"],
            )
            gap, error = paired(ne, [one["ne"] for one in found[FP32]])
            sizes = f"{size / 1e6:8.2f}{size / whole:9.3f}"
            means = f"{statistics.mean(ne):9.4f}{statistics.stdev(ne):8.4f}{gap:+10.5f}{error:9.5f}"
            print(f"{setting.name:<20}{sizes}{means}{statistics.mean(auc):9.4f}")
        for setting in stored:
            other = Setting(PAIRS.get(setting.format, ""), setting.rounding)
            if other in found:
                gap, error = paired(
                    *([one["ne"] for one in found[each]] for each in (setting, other))
                )
                bytes_saved = 1 - found[setting][0]["bytes"] / found[other][0]["bytes"]
                print(
                    f"{setting.name} beside {other.name}: {bytes_saved:.1%} fewer bytes, NE"
                    f" {gap:+.5f} +- {error:.5f}"
                )


def exchange_case(log: Log, asked: argparse.Namespace, cells: Path, seeds: int) -> None:
    """Print bytes and times of steps on a cluster in a box, then NE of whole runs."""
    sent = FEW_SENT if asked.quick else ("bf16", *MX)
    hosts, local, mbits, steps, rounds = (
        (2, 1, (1000,), 4, 1) if asked.quick else (2, 1, (100, 1000), 4, 4)
    )
    with Box(hosts=hosts, ranks_per_host=local, mbit=mbits[0]) as box:
        for mbit in mbits:
            box.rate(mbit)
            found, _ = measure(box, [f"table_wise:{name}" for name in sent], steps, rounds, DIM)
            times = {name: found[f"table_wise:{name}"] for name in sent}
            size = f"{hosts} hosts x {local} ranks, {DIM} numbers a vector"
            print(f"\n{size}; {told(box.links, mbit)}; a step of all ranks")
            print(
                f"{'sent':<8}{'ms':>8}{'/ bf16':>8}{'CPU ms':>8} | kB"
                f" {'vectors':>9}{'gradients':>10}{'all':>9}"
            )
            for name, one in times.items():
                kinds = [one["bytes"][what, "network"] / 1e3 for what in ("vectors", "gradients")]
                ms = f"{one['ms']:8.1f}{one['ms'] / times['bf16']['ms']:8.2f}{one['cpu_ms']:8.1f}"
                print(
                    f"{name:<8}{ms} |   "
                    f" {kinds[0]:9,.0f}{kinds[1]:10,.0f}{over(one, 'network') / 1e3:9,.0f}"
                )
    for name in sent[1:]:
        for what in ("vectors", "gradients"):
            ratio, goal = (
                of[what, "network"] for of in (times[name]["bytes"], times["bf16"]["bytes"])
            )
            ratio, goal = ratio / goal, FORMATS[name].bytes_row(DIM) / (2 * DIM)
            is_met = abs(ratio - goal) < 1e-9
            print_target(
                f"{what} in {name} over bf16, bytes", f"{ratio:.4f}", f"{goal:.4f} exactly", is_met
            )
    if not seeds:
        return
    place, settings = log
    fingerprint, scores = data.open(place).fingerprint, dict[str, list[float]]()
    for seed in range(seeds):
        for name in ("fp32", *FEW_SENT):
            kind = f"sent-{name}-{seed}"
            found_one = kept(
                cells, kind, partial(trained, place), name, seed, settings, of=fingerprint
            )
            scores.setdefault(name, []).append(found_one["ne"])
            print(f"{kind}: {found_one}", file=sys.stderr, flush=True)
    print(
        f"\nruns on two ranks, vectors and gradients alike, {seeds} seeds; differences from bf16"
        " are paired"
    )
    for name, ne in scores.items():
        gap, error = paired(ne, scores["bf16"])
        print(f"{name:<8}NE {statistics.mean(ne):.4f}  - bf16 {gap:+.5f} +- {error:.5f}")


def trained(log: Path, codec: str, seed: int, settings: dict[str, Any]) -> dict[str, float]:
    """The last fifth of a run on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "data.path": log,
            "run_dir": folder,
            "model.dim": DIM,
            "seed": seed,
            "threads": 1,
            **settings,
        }
        changes |= {
            "log.tensorboard": "false",
            "checkpoint.every": 1_000_000,
            "sharding.plan": "table_wise",
        }
        for way in ("forward", "backward"):
            is_mx = codec in MX
            changes[f"sharding.{way}.name"] = "mx" if is_mx else "cast"
            changes[f"sharding.{way}.{'format' if is_mx else 'dtype'}"] = codec
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        command += ["-m", "sparrow", "train", str(RECIPES / "globo.toml")]
        for name, value in changes.items():
            command += [f"--{name}", str(value)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        if done.returncode:
            sys.exit(f"a run with {codec} ended with {done.returncode}: {done.stderr[-2000:]}")
        results = json.loads((Path(folder) / "results.json").read_text())
    last = results["progressive"][-1]
    return {name: last[name] for name in ("ne", "auc")}


CASES = {"rows": rows_case, "exchange": exchange_case}


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "globo", nargs="?", type=Path, help="the request log that globo_requests.py makes"
    )
    parser.add_argument(
        "--cells", type=Path, help="where results are kept; a folder of its own unless told"
    )
    seeds = "how many; with 0 the exchange has no whole runs, and needs no log"
    parser.add_argument("--seeds", type=int, default=3, help=seeds)
    parser.add_argument(
        "--quick", action="store_true", help="20,000 rows of a made log, two seeds, fewer formats"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    asked = parser.parse_args()
    # steps of the exchange alone make their own ids
    trains = "rows" in asked.cases or asked.seeds > 0
    if trains and not asked.globo and not asked.quick:
        parser.error("name the request log, or say --quick")
    torch.set_num_threads(1)
    keep_freed_memory()
    print(
        f"{processor()}, {os.cpu_count()} cores, load before the start {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if asked.quick:
            log: Log = generated(work, QUICK, 200)
        elif not trains:
            log = work, {}
        else:
            schema = Schema.load(RECIPES / "globo.schema.toml")
            log = data.prepare([asked.globo], work / "globo", schema=schema).out, {}
        for case in asked.cases:
            CASES[case](
                log, asked, asked.cells or work / "cells", 2 if asked.quick else asked.seeds
            )


if __name__ == "__main__":
    main()
