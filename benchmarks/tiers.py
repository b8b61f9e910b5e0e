"""Tables larger than memory.

    python benchmarks/tiers.py --dir DIR --cases blocks           # some minutes; 2.1 GB in DIR
    python benchmarks/tiers.py --dir DIR --cases train --rows 400_000_000    # a quarter of an hour; 15 GB in DIR
    python benchmarks/tiers.py --dir DIR --cases rocksdb          # some minutes; 6 GB in DIR; needs rocksdict
    python benchmarks/tiers.py --dir DIR --quick                  # about a minute, the same checks on small tables

"blocks" is the block store alone: reads/s through `fetch` beside a bare io_uring loop over the same
blocks, by block size, and the CPU that each takes. Both take turns, since devices are noisy.

"rocksdb" is the block store beside RocksDB: rows/s read and written, CPU of a row, bytes written
for each of a row.

"train" is the demo's DLRM with one large table on the SSD, beside the same model with a tenth of
its rows in memory: with an id an example in it, with four, with 26, and with ids that are all as
frequent. Its frames, 8 GiB for 1e9 rows, are full of the rows that LRU would have there, and every
row was written, as after a long run. Then with few, and with frames that are empty at first. 1e9
rows in bf16 take 37 GB.

"mapped" is "train" beside the same table as a mapped file, with the same memory (as root, with
cgroup v1). Both take turns.

"throttled" is "train" on a device with few reads a second, for each depth of looking ahead: how
long a step waits for rows, and what the device allows (as root, with cgroup v1).

"plan" is eight unequal tables in memory for three tenths of their rows: the placement that
`sparrow plan` would choose beside others, and the time that it predicts beside what steps took. Hit
ratios stand beside those of LRU's curve and of the most frequent rows.

"globo" is recipes/globo.toml with its user table on the SSD, with frames for 1 % of its rows,
beside the same in memory: all that is learnt has the same bits. It needs the log (--globo).

"pause" is for how long training waits for a checkpoint, beside a plain write of as many bytes. What
was written is read back before a time is printed, in the order of rows and by a run that goes on.

"serve" is a model folder whose large table is on the SSD, with frames for a tenth of its rows and
for other shares, beside the same in memory, and beside the plain mapped file with as much memory
(cgroup v1, root). Scores are equal to the bit. Rates, p99 at several rates, CPU of a read, bytes
beside the kernel's, a swap of models, lists that come again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import tiers_blocks
import tiers_globo
import tiers_mapped
import tiers_pause
import tiers_plan
import tiers_rocksdb
import tiers_serve
import tiers_throttled
import tiers_train
import torch
from limited import ROOT

CASES = {
    "blocks": tiers_blocks.run,
    "rocksdb": tiers_rocksdb.run,
    "train": tiers_train.run,
    "mapped": tiers_mapped.run,
    "throttled": tiers_throttled.run,
    "pause": tiers_pause.run,
    "plan": tiers_plan.run,
    "globo": tiers_globo.run,
    "serve": tiers_serve.run,
}


def lacks(case: str, quick: bool, globo: Path | None) -> str:
    """Returns what a case needs that is not here, or ""."""
    if case == "rocksdb" and find_spec("rocksdict") is None:
        return "rocksdict"
    if case in ("mapped", "throttled", *([] if quick else ["train"])) and not os.access(
        ROOT / "memory", os.W_OK
    ):
        return "root and cgroup v1"
    return "--globo LOG" if case == "globo" and globo is None else ""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, required=True, help="a folder on the device to be measured"
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--rows", type=int, default=1_000_000_000, help='of the large table of "train" and "mapped"'
    )
    parser.add_argument(
        "--served-rows", type=int, default=20_000_000, help='of the large table of "serve"'
    )
    parser.add_argument(
        "--clicks",
        type=Path,
        help='of "serve": Globo\'s, as one Parquet file (kept lists that grow)',
    )
    parser.add_argument(
        "--globo", type=Path, help='of "globo": its requests, as a file, or prepared for the recipe'
    )
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    cases: dict[str, Any] = {
        **CASES,
        "train": partial(tiers_train.run, rows=options.rows),
        "mapped": partial(tiers_mapped.run, rows=options.rows),
        "serve": partial(tiers_serve.run, clicks=options.clicks, rows=options.served_rows),
        "globo": partial(tiers_globo.run, log=options.globo),
    }
    multiprocessing.set_start_method("forkserver" if options.quick else "spawn")
    # processes are forks of one that has imported all, else each imports it for seconds
    if options.quick:
        os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        # with two, each small operation waits for a core that somebody else uses
        torch.set_num_threads(1)
        # optimizers need that
        multiprocessing.set_forkserver_preload(["tiers_globo", "tiers_serve", "torch._dynamo"])
        forkserver.ensure_running()
    for case in options.cases:
        if lack := lacks(case, options.quick, options.globo):
            print(f"{case}: left out, it needs {lack}")
            continue
        # of each case: some leave a file of the same name
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            cases[case](Path(folder), options.quick)


if __name__ == "__main__":
    main()
