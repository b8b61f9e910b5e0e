"""How a run will use the rows of its tables, from the batches with which it begins."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sparrow.core import Batch
from sparrow.core.memory import gb
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import Component, EmbeddingTables, TableSpec, unallocated
from sparrow.embeddings.spec import Tier
from sparrow.embeddings.tiers import ssd
from sparrow.sharding.curves import Trace
from sparrow.sharding.tiering import Device, Use, cost, largest, probed, smallest, speed
from sparrow.trained.build import tables_of, untrained, within_memory
from sparrow.trained.run import MOST_AHEAD, Run
from sparrow.training.compared import side_by_side
from sparrow.training.dropout import Dropout
from sparrow.training.feed import Feed

EXAMPLES = 1_000_000  # read by default, which takes some seconds
FEW = 100_000  # read for a word of advice
TRIED = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)  # of the bytes with which each row has a frame


def silent(what: str, done: int, total: int) -> None:
    """Nobody hears."""


def uses(run: Run, dataset: Dataset, examples: int = EXAMPLES, told: Progress = silent) -> dict[str, list[Use]]:
    """Returns table -> how each of its components is used. The batches are those of training, on one process.

    Tables whose ids come and go are left out: their rows stay in memory.

    Args:
        run: its settings, with every choice made.
        dataset: the prepared log.
        examples: at most so many are read. A run that has more is judged by those with which it begins.
        told: hears how it goes on.
    """
    tables = tables_for(run, dataset)
    specs = [spec for of in tables for spec in of.specs if may_leave(spec)]
    window = (1 + MOST_AHEAD) * run.loop.accumulate  # of these no row leaves its frame
    traces = {part.name: Trace(window=window) for spec in specs for part in spec.components}
    lookups = dict.fromkeys(traces, 0)
    count, total = 0, _batches(run, dataset)
    most = min(max(examples // run.data.batch_size, 1), total)
    for count, batch in enumerate(_training(run, dataset, most), 1):
        for name, rows_N in _rows(tables, batch, set(traces)).items():
            traces[name].add(rows_N)
            lookups[name] += len(rows_N)
        told("reading batches", count, most)
    is_whole = count >= total and run.init_from is None
    filling = 0 if is_whole else count // 2  # the beginning of a long run fills caches, and is a small part of it

    def use(component: Component) -> Use:
        name = component.name
        curve, each = traces[name].curve(filling), lookups[name] / max(count, 1)
        return Use(component=component, curve=curve, lookups=each, is_whole=is_whole)

    return {spec.name: [use(component) for component in spec.components] for spec in specs}


def placed(run: Run, dataset: Dataset, tiers: Mapping[str, Tier]) -> Run:
    """Returns the run with tables in these places."""
    rows = {name: table.rows or 0 for name, table in dataset.schema.encodings.items()}
    return replace(run, tables=run.tables.placed(tiers, rows))


def on_ssd(run: Run, dataset: Dataset, fits: Callable[[Run], bool]) -> str:
    """Returns with which settings a run fits when its tables are on an SSD, and how fast it is then; "" for none.

    They are the smallest, with which all batches under way have their rows, and the largest that was tried. What
    `sparrow plan` finds is at least as fast. The disk is probed if the run names a folder.

    Args:
        run: its settings, with every choice made.
        dataset: the prepared log.
        fits: whether a run with other tiers fits into memory.
    """
    window = (1 + MOST_AHEAD) * run.loop.accumulate
    found = uses(run, dataset, max(FEW, 2 * window * run.data.batch_size))
    least, most = (max(map(bound, found.values()), default=0) for bound in (smallest, largest))

    sizes = sorted({least, *(max(least, int(share * most)) for share in TRIED)}, reverse=True)
    tiers = {size: ssd.Config(bytes=size) for size in sizes}
    fitting = next((n for n, tier in tiers.items() if fits(placed(run, dataset, dict.fromkeys(found, tier)))), None)
    if not found or fitting is None:
        return ""
    device = Device() if run.ssd is None else probed(Path(run.ssd))
    told = []
    for size in sorted({least, fitting}):
        costs = [cost(of, tiers[size], device) for of in found.values()]
        memory, rate = gb(sum(one.bytes for one in costs)), speed(costs, run.data.batch_size)
        told.append(f"--tables.tier.bytes {size} ({memory} of them in memory, at most {rate:,.0f} examples/s)")
    setting = f"--ssd {run.ssd or 'DIR'} --tables.tier.name ssd"
    return f"{setting} with {' to '.join(told)}, at {device.reads_per_s:,.0f} reads/s"


def tables_for(run: Run, dataset: Dataset) -> list[EmbeddingTables]:
    """Returns the tables of a run's model. They have no memory."""
    with torch.random.fork_rng(devices=[]), within_memory("cpu"), unallocated():
        return tables_of(untrained(run, dataset.schema))


def may_leave(spec: TableSpec) -> bool:
    """Whether ids of a table have the same rows for ever, so that its rows can be elsewhere than in memory."""
    return spec.addressing.traits.policy is None


def _batches(run: Run, dataset: Dataset) -> int:
    """Returns how many batches the run trains on."""
    of_epoch = math.ceil(dataset.rows("train") / run.data.batch_size)
    found = of_epoch * run.loop.epochs
    return found if run.loop.max_steps is None else min(found, run.loop.max_steps * run.loop.accumulate)


def _training(run: Run, dataset: Dataset, most: int) -> Iterator[Batch]:
    """Yields the batches of training, at most so many."""
    loader = dataset.loader(run.data.batch_size, "train", bool(run.data.shuffle), run.seed, run.data.dedup)
    loader = side_by_side(loader, run, dataset, lambda text: None)
    drop = Dropout(dataset.schema, run.data.id_dropout or {}, run.seed)
    feed = Feed(loader, run.loop.accumulate, drop, torch.device("cpu"))
    given = epochs = 0
    while given < most and epochs < run.loop.epochs:
        shares = feed.take()
        epochs += not shares
        for share in shares[: most - given]:
            given += 1
            yield share.batch


def _rows(tables: list[EmbeddingTables], batch: Batch, names: set[str]) -> dict[str, Tensor]:
    """Returns component -> the rows that a batch looks up, for the components of these names."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for of in tables:
        known = {spec.name for spec in of.specs if names.issuperset(c.name for c in spec.components)}
        for feature in of.features:
            if feature.table in known:
                for name, rows_N in of.rows_of(batch.ids, feature.name).items():
                    found[name].append(rows_N[rows_N >= 0])
    return {name: torch.cat(parts) for name, parts in found.items()}
