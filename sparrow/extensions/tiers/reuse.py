"""How a run will use the rows of its tables, from the batches with which it begins."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from sparrow.core import Batch
from sparrow.core.memory import gb
from sparrow.core.progress import Progress
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import UNALLOCATED, Component, EmbeddingTables, TableSpec
from sparrow.embeddings.spec import Tier
from sparrow.extensions.tiers import ssd
from sparrow.extensions.tiers.curves import Trace
from sparrow.extensions.tiers.settings import Config
from sparrow.extensions.tiers.tiering import Device, Use, cost, largest, probe_disk, smallest, speed
from sparrow.trained.build import tables_of, untrained, within_memory
from sparrow.trained.run import MOST_AHEAD, Run
from sparrow.training.dropout import Dropout
from sparrow.training.feed import Feed
from sparrow.training.group_batches import keep_groups_together

EXAMPLES = 1_000_000  # read by default, which takes some seconds
FEW = 100_000  # read for a word of advice
TRIED = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)  # of the bytes with which each row has a frame


def silent(part: str, count: int, total: int) -> None:
    """Nobody hears."""


def uses(
    run: Run, dataset: Dataset, examples: int = EXAMPLES, progress: Progress = silent
) -> dict[str, list[Use]]:
    """Returns table -> how each of its components is used. The batches are those of training, on
    one process.

    Of a table whose ids come and go, ids stand for rows. Its rows stay in memory.

    Args:
        run: its settings, with every choice made.
        dataset: the prepared log.
        examples: at most so many are read. A run that has more is judged by those with which it
            begins.
        progress: hears how it goes on.
    """
    tables = tables_for(run, dataset)
    components = list(chain.from_iterable(features.components for features in tables))
    window = (1 + MOST_AHEAD) * run.loop.accumulate  # of these no row leaves its frame
    traces = {component.name: Trace(window=window) for component in components}
    lookups = dict.fromkeys(traces, 0)
    count = 0
    total = _batches(run, dataset)
    most = min(max(examples // run.data.batch_size, 1), total)
    for count, batch in enumerate(_training(run, dataset, most), 1):
        for name, rows_N in _rows(tables, batch).items():
            traces[name].add(rows_N)
            lookups[name] += len(rows_N)
        progress("reading batches", count, most)
    is_whole = count >= total and run.init_from is None
    # the beginning of a long run fills caches, and is a small part of it
    filling = 0 if is_whole else count // 2

    def use(component: Component) -> Use:
        name = component.name
        return Use(
            component=component,
            curve=traces[name].curve(filling),
            lookups=lookups[name] / max(count, 1),
            is_whole=is_whole,
        )

    specs = chain.from_iterable(features.specs for features in tables)
    return {spec.name: list(map(use, spec.components)) for spec in specs}


def placed(run: Run, dataset: Dataset, tiers: Mapping[str, Tier]) -> Run:
    """Returns the run with tables in these places."""
    rows = {name: table.rows or 0 for name, table in dataset.schema.encodings.items()}
    return replace(run, tables=run.tables.placed(tiers, rows))


def on_ssd(run: Run, dataset: Dataset, fits: Callable[[Run], bool]) -> str:
    """Returns with which settings a run fits when its tables are on an SSD, and how fast it is
    then; "" for none.

    They are the smallest, with which all batches under way have their rows, and the largest that
    was tried. What `sparrow plan` finds is at least as fast. The disk is probed if the run names a
    folder.

    Args:
        run: its settings, with every choice made.
        dataset: the prepared log.
        fits: whether a run with other tiers fits into memory.
    """
    window = (1 + MOST_AHEAD) * run.loop.accumulate
    specs = chain.from_iterable(features.specs for features in tables_for(run, dataset))
    table_uses = uses(run, dataset, max(FEW, 2 * window * run.data.batch_size))
    table_uses = {spec.name: table_uses[spec.name] for spec in specs if may_leave(spec)}
    least = max(map(smallest, table_uses.values()), default=0)
    most = max(map(largest, table_uses.values()), default=0)
    sizes = sorted({least, *(max(least, int(share * most)) for share in TRIED)}, reverse=True)
    tiers = {size: ssd.Config(bytes=size) for size in sizes}
    fitting = None
    for size, tier in tiers.items():
        if fits(placed(run, dataset, dict.fromkeys(table_uses, tier))):
            fitting = size
            break
    if not table_uses or fitting is None:
        return ""
    folder = run.settings_of(Config).folder
    device = Device() if folder is None else probe_disk(Path(folder))
    options = []
    for size in sorted({least, fitting}):
        costs = [cost(parts, tiers[size], device) for parts in table_uses.values()]
        memory = gb(sum(price.bytes for price in costs))
        rate = speed(costs, run.data.batch_size)
        options.append(
            f"--tables.tier.bytes {size} ({memory} of them in memory, at most {rate:,.0f}"
            " examples/s)"
        )
    setting = f"--tiers.folder {folder or 'DIR'} --tables.tier.name ssd"
    return f"{setting} with {' to '.join(options)}, at {device.reads_per_s:,.0f} reads/s"


def tables_for(run: Run, dataset: Dataset) -> list[EmbeddingTables]:
    """Returns the tables of a run's model. They have no memory."""
    with torch.random.fork_rng(devices=[]), within_memory("cpu"):
        return tables_of(untrained(run, dataset.schema, UNALLOCATED))


def may_leave(spec: TableSpec) -> bool:
    """Whether ids of a table have the same rows for ever, so that its rows can be elsewhere than in
    memory.
    """
    return spec.addressing.traits.policy is None


def _batches(run: Run, dataset: Dataset) -> int:
    """Returns how many batches the run trains on."""
    per_epoch = math.ceil(dataset.rows("train") / run.data.batch_size)
    count = per_epoch * run.loop.epochs
    if run.loop.max_steps is None:
        return count
    return min(count, run.loop.max_steps * run.loop.accumulate)


def _training(run: Run, dataset: Dataset, most: int) -> Iterator[Batch]:
    """Yields the batches of training, at most so many."""
    loader = dataset.loader(
        run.data.batch_size, "train", bool(run.data.shuffle), run.seed, run.data.dedup
    )
    loader = keep_groups_together(loader, run, dataset, lambda text: None)
    drop = Dropout(dataset.schema, run.data.id_dropout or {}, run.seed)
    feed = Feed(loader, run.loop.accumulate, drop, torch.device("cpu"))
    yielded = epochs = 0
    while yielded < most and epochs < run.loop.epochs:
        shares = feed.take()
        epochs += not shares
        for share in shares[: most - yielded]:
            yielded += 1
            yield share.batch


def _rows(tables: list[EmbeddingTables], batch: Batch) -> dict[str, Tensor]:
    """Returns component -> the rows that a batch looks up, or its ids where these come and go."""
    rows: dict[str, list[Tensor]] = defaultdict(list)
    for table in tables:
        changing = {spec.name: spec for spec in table.specs if not may_leave(spec)}
        for feature in table.features:
            if (spec := changing.get(feature.table)) is None:
                for name, rows_N in table.rows_of(batch.ids, feature.name).items():
                    rows[name].append(rows_N[rows_N >= 0])
                continue
            ids = spec.addressing.rows_of(batch.ids[feature.name].values_N.long())
            for component, ids_N in zip(spec.components, ids, strict=True):
                rows[component.name].append(ids_N)
    return {name: torch.cat(parts) for name, parts in rows.items()}
