"""Training over an SSD with few reads a second, with and without looking ahead: a part of
tiers.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from limited import device_of, group, limited
from tiers_blocks import probed
from tiers_train import BATCH, QUICK, TURN, Case, Disk, Side, filled_file

from sparrow.extensions.tiers.stores.ssd import SsdStore
from sparrow.kernels.formats import bf16

RATES = (2_000, 5_000, 20_000, None)  # reads/s, and writes/s; None: as many as the device can
DEPTHS = (0, 1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Depth:
    """What training was with one depth of looking ahead.

    Args:
        per_s: examples/s.
        waited: share of the time for which it waited for rows.
        blocks: how often an example reads or writes: the larger of the two, since the device has a
            limit for each.
    """

    per_s: float
    waited: float
    blocks: float


def waits(store: SsdStore) -> Callable[[], float]:
    """Returns what says for how many seconds in all training has waited for rows of a store from
    now on.
    """
    arrive, waited = store.arrive, [0.0]

    def timed(last: int | None = None) -> None:
        begun = time.perf_counter()
        arrive(last)
        waited[0] += time.perf_counter() - begun

    store.arrive = timed  # type: ignore[method-assign]
    return lambda: waited[0]


def trained(case: Case, disk: Disk, folder: Path, turns: int, depths: Sequence[int]) -> list[Depth]:
    """Returns what training was with each depth of looking ahead."""
    side = Side(replace(case, ahead=0), folder)
    store = disk.under(side)
    side.steps(TURN)
    waited, found = waits(store), []
    for depth in depths:
        side.turn_to(replace(case, ahead=depth))
        side.steps(depth + 1)  # what is ahead is under way
        before, were = store.counters, waited()
        seconds = [side.steps(TURN)[0] for _ in range(turns)]
        blocks = max(
            store.counters[name] - before[name] for name in ("blocks_read", "blocks_written")
        )
        of_all = blocks / (turns * TURN * case.batch)
        per_s = TURN * case.batch / statistics.median(seconds)
        found.append(Depth(per_s=per_s, waited=(waited() - were) / sum(seconds), blocks=of_all))
    store.close()
    return found


def run(folder: Path, quick: bool) -> None:
    """Print examples/s by reads/s of the device and by depth, how long rows kept training waiting,
    and the bound.
    """
    rows, turns, batch = (500_000, 1, QUICK) if quick else (50_000_000, 2, BATCH)
    rates, depths = ((20_000, None), (0, 2)) if quick else (RATES, DEPTHS)
    near = bf16.Config(rounding="nearest")
    case = Case(
        rows=rows,
        frames=int(8 * 2**30 * rows / 1e9),
        lookups=1,
        skew=1.05,
        format=near,
        batch=batch,
    )
    probed(folder, quick)
    disk = filled_file(case, folder)
    print(f"{case}; batches of {batch}")
    print(
        f"{'reads/s':>10}{'ahead':>7}{'examples/s':>12}{'the device allows':>19}{'waits for rows':>20}"
    )
    for rate in rates:
        files = [f"blkio__throttle__{way}_iops_device" for way in ("read", "write")]
        with group(
            "blkio", **(dict.fromkeys(files, f"{device_of(folder)} {rate}") if rate else {})
        ) as within:
            found = limited([within], trained, case, disk, folder, turns, depths)
        for depth, of in zip(depths, found, strict=True):
            allows = f"{rate / max(of.blocks, 1e-12):,.0f}" if rate else ""
            step_ms = 1e3 * batch / of.per_s
            waited = f"{of.waited * step_ms:.1f} of {step_ms:.1f} ms"
            print(
                f"{rate or 'all':>10}{depth:>7}{of.per_s:>12,.0f}{allows:>19}{waited:>20}",
                flush=True,
            )
