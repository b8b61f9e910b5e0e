"""Training over an SSD with few reads a second, with and without looking ahead: a part of tiers.py."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

from limited import device_of, group, limited
from tiers_train import BATCH, TURN, Case, Disk, Side, filled_file

from sparrow.kernels.formats import bf16

RATES = (2_000, 5_000, 20_000)  # reads/s, and writes/s
DEPTHS = (0, 1, 2, 4, 8)


def trained(case: Case, disk: Disk, folder: Path, turns: int) -> tuple[list[float], float]:
    """Returns the examples/s of turns with each depth of looking ahead, and how often an example reads or writes.

    Of the two, that which is more often, since the device has a limit for each.
    """
    side = Side(replace(case, ahead=0), folder)
    store = disk.under(side)
    side.steps(TURN)
    before, found = store.counters, []
    for depth in DEPTHS:
        side.turn_to(replace(case, ahead=depth))
        side.steps(depth + 1)  # what is ahead is under way
        found.append(TURN * BATCH / statistics.median(side.steps(TURN)[0] for _ in range(turns)))
    blocks = max(store.counters[name] - before[name] for name in ("blocks_read", "blocks_written"))
    store.close()
    steps = sum(depth + 1 + turns * TURN for depth in DEPTHS)
    return found, blocks / (steps * BATCH)


def run(folder: Path, quick: bool) -> None:
    """Print examples/s by reads/s of the device and by depth, beside what the device allows."""
    rows, turns = (2_000_000, 1) if quick else (50_000_000, 2)
    near = bf16.Config(rounding="nearest")
    case = Case(rows=rows, frames=int(8 * 2**30 * rows / 1e9), lookups=1, skew=1.05, format=near)
    disk = filled_file(case, folder)
    print(f"{case}; examples/s by batches ahead, of batches of {BATCH}")
    print(f"{'reads/s':>10} " + "".join(f"{depth:>10}" for depth in DEPTHS) + "   the device allows")
    for rate in (*RATES, None):
        files = [f"blkio__throttle__{way}_iops_device" for way in ("read", "write")]
        with group("blkio", **(dict.fromkeys(files, f"{device_of(folder)} {rate}") if rate else {})) as within:
            found, blocks = limited([within], trained, case, disk, folder, turns)
        bound = f"{rate / blocks:10,.0f}" if rate else ""
        print(f"{rate or 'all':>10} " + "".join(f"{each:>10,.0f}" for each in found) + f"   {bound}", flush=True)
