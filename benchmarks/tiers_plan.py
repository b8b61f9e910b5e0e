"""Eight unequal tables: the planned placement beside others, predicted time beside measured: a part
of tiers.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _peers.targets import print_target

from sparrow.apps.placement import divide, options_of
from sparrow.core import KeyedJagged
from sparrow.embeddings import Direct, EmbeddingTables, Feature, Placement, TableSpec
from sparrow.embeddings.spec import Tier, in_memory
from sparrow.extensions.tiers import ssd
from sparrow.extensions.tiers.curves import Trace
from sparrow.extensions.tiers.frames import tier_frames
from sparrow.extensions.tiers.tiering import Cost, Device, Use, cost, probe_disk, smallest

SHAPES = [  # rows, skew of ids, ids an example
    (500_000, 1.05, 1),
    (250_000, 0.8, 1),
    (125_000, 1.2, 2),
    (125_000, 0.0, 1),
    (50_000, 1.05, 1),
    (25_000, 0.6, 4),
    (12_500, 1.0, 1),
    (2_500, 1.0, 1),
]
BATCH, DIM, SHARE, AHEAD = 512, 16, 0.3, 2


@dataclass(frozen=True)
class Table:
    """One of the tables, and how its ids come."""

    name: str
    rows: int
    ids: int
    cumulative_R: torch.Tensor
    scattered_R: torch.Tensor

    def draw(self, random: torch.Generator) -> torch.Tensor:
        """The ids of a batch."""
        u_N = torch.rand(BATCH * self.ids, generator=random, dtype=torch.float64)
        return self.scattered_R[torch.searchsorted(self.cumulative_R, u_N).clamp(max=self.rows - 1)]


def tables(scale: int) -> list[Table]:
    """All of them, with a share of their rows."""
    made = []
    for n, (rows, skew, ids) in enumerate(SHAPES):
        weights_R = torch.arange(1, rows // scale + 1, dtype=torch.float64) ** -skew
        scattered_R = torch.randperm(rows // scale, generator=torch.Generator().manual_seed(n))
        made.append(
            Table(f"t{n}", rows // scale, ids, weights_R.cumsum(0) / weights_R.sum(), scattered_R)
        )
    return made


def batches(of: list[Table], count: int) -> list[KeyedJagged]:
    """The same batches each time."""
    random, made = torch.Generator().manual_seed(0), []
    for _ in range(count):
        values_N = torch.cat([table.draw(random) for table in of])
        lengths = torch.cat([torch.full((BATCH,), table.ids) for table in of])
        made.append(KeyedJagged(keys=tuple(t.name for t in of), values_N=values_N, lengths=lengths))
    return made


def uses_of(of: list[Table], steps: list[KeyedJagged], filling: int) -> dict[str, list[Use]]:
    """What `sparrow plan` would know of them."""
    found = {}
    for table in of:
        trace = Trace(window=5)
        for ids in steps:
            trace.add(ids[table.name].values_N)
        component = TableSpec(name=table.name, dim=DIM, addressing=Direct(table.rows)).components[0]
        lookups = float(BATCH * table.ids)
        found[table.name] = [
            Use(component=component, curve=trace.curve(filling), lookups=lookups, is_whole=False)
        ]
    return found


def measured(
    of: list[Table], tiers: dict[str, Tier], steps: list[KeyedJagged], filling: int, folder: Path
) -> tuple[list[tuple[float, float]], dict[str, dict[str, int]]]:
    """What steps took once caches are full, and the processor of it, and what stores counted. All
    rows are on disk.
    """
    specs = [
        TableSpec(name=t.name, dim=DIM, addressing=Direct(t.rows), tier=tiers[t.name]) for t in of
    ]
    features = [Feature(name=t.name, table=t.name) for t in of]
    made = EmbeddingTables(specs, features, placement=Placement(folder=folder))
    stores: dict[str, Any] = {
        r.component.name: r.store for r in made.all_records() if r.component.tier.is_on
    }
    for store in stores.values():
        for first in range(0, store.rows, 1 << 16):
            at = torch.arange(first, min(first + (1 << 16), store.rows))
            fields = store.read(at)
            store.write(at, {**fields, "touched": torch.ones_like(fields["touched"])})
        store._blocks.sync()
    seconds, before = [], {}
    for n, ids in enumerate(steps):
        if n == filling:
            before = {name: store.counters for name, store in stores.items()}
        began, cpu = time.perf_counter(), time.process_time()
        for coming in steps[n : n + 1 + AHEAD]:
            made.prefetch(coming)
        made.pooled(ids).sum().backward()
        made.update()
        seconds.append((time.perf_counter() - began, time.process_time() - cpu))
    counted = {
        n: {k: v - before[n][k] for k, v in store.counters.items()} for n, store in stores.items()
    }
    for store in stores.values():
        store.close()
    return seconds[filling:], counted


def static(table: Table, steps: list[KeyedJagged], use: Use, tier: Tier) -> float:
    """The hit ratio of the best static choice: the most frequent rows, as many as there are frames,
    never leave.
    """
    is_in_R = torch.zeros(table.rows, dtype=torch.bool)
    is_in_R[
        table.scattered_R[: sum(tier_frames(replace(use.component, tier=tier), table.rows))]
    ] = True
    hits_N = torch.cat([is_in_R[ids[table.name].values_N.unique()] for ids in steps])
    return hits_N.double().mean().item()


def others(
    uses: dict[str, list[Use]], device: Device, budget: int
) -> Iterator[tuple[str, dict[str, Cost]]]:
    """Yields the placements beside which the planned one stands, as far as they fit."""
    whole = {name: cost(of, in_memory(), device) for name, of in uses.items()}
    least = {name: cost(of, ssd.Config(bytes=smallest(of)), device) for name, of in uses.items()}

    def best(tier_of: dict[str, list[Tier]]) -> dict[str, Cost] | None:
        found = None
        for tiers in zip(*tier_of.values(), strict=True):
            costs = {n: cost(uses[n], tier, device) for n, tier in zip(tier_of, tiers, strict=True)}
            costs = {n: one if one.bytes < whole[n].bytes else whole[n] for n, one in costs.items()}
            if sum(one.bytes for one in costs.values()) <= budget:
                found = costs
        return found

    parts = [1.05**n / 1e4 for n in range(190)]
    bytes_of = {
        "the same share of each": lambda n: whole[n].bytes,
        "the same bytes for each": lambda n: budget,
        "by lookups": lambda n: uses[n][0].references * 100,
    }
    for name, size in bytes_of.items():
        tiers = {
            n: [ssd.Config(bytes=max(int(p * size(n)), smallest(of))) for p in parts]
            for n, of in uses.items()
        }
        if (found := best(tiers)) is not None:
            yield name, found
    order = {
        "the smallest in memory": lambda n: whole[n].bytes,
        "the busiest a byte in memory": lambda n: -uses[n][0].references / whole[n].bytes,
    }
    for name, key in order.items():
        chosen = dict(least)
        for n in sorted(whole, key=key):
            if (
                sum(one.bytes for one in chosen.values()) - chosen[n].bytes + whole[n].bytes
                <= budget
            ):
                chosen[n] = whole[n]
        yield name, chosen


def step_ms(
    costs: dict[str, Cost], alone: float, uses: dict[str, list[Use]], device: Device
) -> float:
    """The predicted time of a step. alone: with all tables in memory."""
    more = sum(
        one.ms_processor - cost(uses[n], in_memory(), device).ms_processor
        for n, one in costs.items()
    )
    return max(alone + more, sum(one.ms_disk for one in costs.values()))


def run(folder: Path, quick: bool) -> None:
    """Measure and print."""
    scale, filling, count, turns = (8, 15, 35, 1) if quick else (1, 80, 160, 3)
    of = tables(scale)
    steps = batches(of, count)
    device = probe_disk(folder)
    uses = uses_of(of, steps, filling)
    options = {name: options_of(use, device, True) for name, use in uses.items()}
    budget = int(SHARE * sum(costs[0].bytes for costs in options.values()))
    in_memory = {name: costs[0] for name, costs in options.items()}
    placements = {
        "all in memory": in_memory,
        "planned": divide(options, budget),
        **dict(others(uses, device, budget)),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in placements}
    counted = {}
    for _ in range(turns):  # in turns, since machines are noisy
        for name, costs in placements.items():
            tiers = {n: one.tier for n, one in costs.items()}
            each, counted[name] = measured(of, tiers, steps, filling, folder)
            seconds[name] += each
    took = {
        n: [1e3 * statistics.median(k) for k in zip(*each, strict=True)]
        for n, each in seconds.items()
    }
    alone = took["all in memory"][0]
    print(
        f"disk: {device.reads_per_s:,.0f} reads/s, {device.bytes_per_s / 1e6:,.0f} MB/s,"
        f" {1e6 * device.processor_s:.1f} us of processor for a block, {1e6 * device.miss_s:.1f}"
        f" for a row that was out, {1e6 * device.batch_s:.0f} for a table and batch;"
        f" {budget / 1e6:.1f} MB"
    )
    for name, costs in placements.items():
        size, predicted = (
            sum(one.bytes for one in costs.values()) / 1e6,
            step_ms(costs, alone, uses, device),
        )
        print(
            f"{name:<30} {size:6.1f} MB  step {predicted:7.2f} ms predicted, {took[name][0]:7.2f}"
            " ms measured",
            end="",
        )
        print(f", of which the processor {took[name][1]:7.2f}")
    planned, counts = placements["planned"], counted["planned"]
    fixed = {
        t.name: static(t, steps[filling:], uses[t.name][0], planned[t.name].tier)
        for t in of
        if t.name in counts
    }
    _tell(planned, counts, fixed, count - filling)
    error = max(
        abs(1 - placements[name][n].miss_ratio - c["hits"] / c["used"])
        for name, of_tables in counted.items()
        for n, c in of_tables.items()
    )
    best = min(step for name, (step, _) in took.items() if name != "all in memory")
    ratio = took["planned"][0] / best
    within = step_ms(placements["planned"], alone, uses, device) / took["planned"][0]
    print_target("planned over the best tried", f"{ratio:.2f}", "at most 1.10", ratio <= 1.1)
    print_target("predicted over measured", f"{within:.2f}", "0.85 to 1.15", 0.85 <= within <= 1.15)
    print_target("hit ratio beside the curve", f"{error:.3f}", "at most 0.02", error <= 0.02)


def _tell(
    planned: dict[str, Cost],
    counted: dict[str, dict[str, int]],
    fixed: dict[str, float],
    steps: int,
) -> None:
    for n, c in counted.items():
        read, written = (c[key] / steps for key in ("blocks_read", "blocks_written"))
        blocks = planned[n].blocks
        measured = (
            f"{c['hits'] / c['used']:.3f} measured, {fixed[n]:.3f} for the best static choice"
        )
        print(f"  {n} hit ratio {1 - planned[n].miss_ratio:.3f} predicted, {measured}", end="")
        print(
            f"; blocks read {blocks[0]:,.0f} and {read:,.0f}, written {blocks[1]:,.0f} and"
            f" {written:,.0f}"
        )
