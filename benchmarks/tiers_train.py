"""Training over a table on an SSD, beside the same model with a table in memory: a part of tiers.py."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiers_blocks import bare, filled, one_row_a_block
from torch import Tensor

from sparrow.core import Batch, KeyedJagged
from sparrow.embeddings import EmbeddingTables, Folder, TableChoices, on_ssd
from sparrow.embeddings.choices import Override
from sparrow.embeddings.spec import BYTES_QUEUE
from sparrow.embeddings.tiers import SsdStore
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.kernels.block_io import Blocks
from sparrow.kernels.formats import RowFormat, bf16, fp32
from sparrow.kernels.row_cache import WAYS
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.losses import binary_cross_entropy
from sparrow.models import dlrm

BATCH, DIM, NUMBERS, SMALL_TABLES, SMALL_ROWS = 4096, 16, 13, 25, 10_000
WINDOW, TURN = 6, 16  # batches whose rows never leave; steps of a turn
PIECE = 1 << 20  # rows that are written at a time
FOLD = 10  # the table in memory has so many times fewer rows


@dataclass(frozen=True, kw_only=True)
class Case:
    """rows: of the table. frames: bytes of those of its rows that are in memory. lookups: ids of an example in it."""

    rows: int
    frames: int
    lookups: int
    skew: float
    format: RowFormat
    written: bool = True  # every row was, before the first step
    ahead: int = 2

    def __str__(self) -> str:
        name = type(self.format).__module__.rsplit(".", 1)[1]
        state = "all written, frames full and dirty" if self.written else "nothing written, frames empty"
        what = f"{self.rows:,} rows of {DIM} in {name}, {self.frames / 2**30:.2f} GiB of frames, {state}"
        return f"{what}; {self.lookups} ids an example, Zipf {self.skew}, {self.ahead} batches ahead"


class Zipf:
    """Draws ids of 0 <= id < rows with probabilities in proportion to 1 / rank**skew; ranks are scattered.

    The draw inverts the integral of the density, which is exact but for the first ranks' rounding.
    """

    def __init__(self, rows: int, skew: float, seed: int) -> None:
        self.rows, self.power = rows, 1 - skew
        self.random = torch.Generator().manual_seed(seed)
        self.factor = next(f for f in itertools.count(int(rows * 0.6180339887) | 1, 2) if _is_prime_to(f, rows))

    def __call__(self, count: int) -> Tensor:
        """Returns ids int64 [count]."""
        u_N = torch.rand(count, generator=self.random, dtype=torch.float64)
        end = (self.rows + 1.0) ** self.power
        rank_N = ((1 + u_N * (end - 1)) ** (1 / self.power)).long().sub_(1).clamp_(0, self.rows - 1)
        return self.scattered(rank_N)

    def scattered(self, rank_N: Tensor) -> Tensor:
        """Returns the id of each rank."""
        return rank_N * self.factor % self.rows  # below 2**63 for rows below 3e9


def _is_prime_to(one: int, other: int) -> bool:
    while other:
        one, other = other, one % other
    return one == 1


def model_of(case: Case, rows: int, folder: Path | None) -> Any:
    """The demo's DLRM with one large table, on an SSD where there is a folder."""
    columns = {f"x{i}": Column(kind="numeric") for i in range(NUMBERS)}
    columns |= {f"c{i}": Column(kind="categorical", table=f"t{i}") for i in range(SMALL_TABLES)}
    columns |= {"large": Column(kind="list", table="large", pooling="sum"), "y": Column(kind="label")}
    encodings = {f"t{i}": Encoding(kind="range", rows=SMALL_ROWS) for i in range(SMALL_TABLES)}
    schema = Schema(columns=columns, encodings={**encodings, "large": Encoding(kind="range", rows=rows)})
    tier = Override(names=("large",), tier={"name": "ssd", "bytes": case.frames})
    choices = TableChoices(
        format=case.format, rule=rowwise_adagrad.Config(lr=0.05), overrides=() if folder is None else (tier,)
    )
    torch.manual_seed(0)
    with on_ssd(None if folder is None else Folder(path=folder, window=WINDOW)):
        return dlrm.Config(dim=DIM, bottom=(64,), top=(128, 64)).build(schema, choices)


class Side:
    """A model that trains on a stream of batches, and looks at coming ones."""

    def __init__(self, case: Case, folder: Path | None, rows: int = 0) -> None:
        rows = rows or (case.rows if folder else case.rows // FOLD)
        self.case = case
        self.model = model_of(case, rows, folder)
        self.tables = [of for of in self.model.modules() if isinstance(of, EmbeddingTables)]
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        stores = [record.store for of in self.tables for record in of.all_records()]
        self.stores = [store for store in stores if isinstance(store, SsdStore)]
        self.depth = case.ahead if self.stores else 0
        self.stream = stream(case, rows)
        self.ahead: deque[Batch] = deque()
        self.made: deque[Batch] = deque()

    def steps(self, count: int) -> tuple[float, list[Tensor]]:
        """Train on the next batches. Returns the seconds of it, and the logits of each batch."""
        while len(self.made) + len(self.ahead) < count + self.depth:
            self.made.append(next(self.stream))
        logits, start = [], time.perf_counter()
        for _ in range(count):
            while self.made and len(self.ahead) <= self.depth:
                self.ahead.append(self.made.popleft())
                for of in self.tables if self.stores else ():
                    of.prefetch(self.ahead[-1].ids)
            batch = self.ahead.popleft()
            self.optimizer.zero_grad()
            logits_B1 = self.model(batch)
            binary_cross_entropy(logits_B1, batch).backward()
            self.optimizer.step()
            logits.append(logits_B1.detach())
        return time.perf_counter() - start, logits


def stream(case: Case, rows: int, seed: int = 1) -> Iterator[Batch]:
    """Yields batches. Ids of the large table are taken modulo `rows`."""
    draw, random = Zipf(case.rows, case.skew, seed), torch.Generator().manual_seed(seed)
    keys = (*(f"c{i}" for i in range(SMALL_TABLES)), "large")
    lengths = torch.cat([torch.ones(SMALL_TABLES * BATCH, dtype=torch.long), torch.full((BATCH,), case.lookups)])
    while True:
        small_N = torch.randint(SMALL_ROWS, (SMALL_TABLES * BATCH,), generator=random)
        large_N = draw(BATCH * case.lookups) % rows
        ids = KeyedJagged(keys=keys, values_N=torch.cat([small_N, large_N]), lengths=lengths)
        labels_B1 = (torch.rand(BATCH, 1, generator=random) < 0.3).float()
        yield Batch(dense_BC=torch.randn(BATCH, NUMBERS, generator=random), ids=ids, labels_BT=labels_B1)


def fill(side: Side) -> None:
    """Bring the table where a long run brings it: the most frequent rows in frames, and every row in the file."""
    case, (store,) = side.case, side.stores
    draw = Zipf(case.rows, case.skew, 0)
    flights = side.tables[0].components.flights
    for rows_U in reversed(_fitting(store, draw)):  # the least frequent first, so that they leave first
        flights._batch += 1  # a batch that nobody looks up
        store.fetch(rows_U, flights._batch, flights._batch - 1)
        store.arrive()
        flights._settled = flights._batch
    for first in range(0, case.rows, PIECE):
        rows_U = torch.arange(first, min(first + PIECE, case.rows))
        made = store._first(rows_U)
        made["touched"] = torch.ones_like(made["touched"])
        store._blocks.put(rows_U, made)
    store._blocks.sync()
    random = torch.Generator().manual_seed(2)
    rank_N = torch.randint(case.rows // 2, case.rows, (2 * BYTES_QUEUE // store.component.bytes_row,), generator=random)
    rows_U = draw.scattered(rank_N).unique()  # the queue is full, so each row that leaves has another written
    made = store._first(rows_U)
    made["touched"] = torch.ones_like(made["touched"])
    store._blocks.put(rows_U, made)


def _fitting(store: SsdStore, draw: Zipf) -> list[Tensor]:
    """Returns the most frequent rows that fill all sets of the cache and no more, in pieces."""
    free_S = torch.full((len(store.get_buffer("tag")) // WAYS,), WAYS)
    found = []
    for first in range(0, store.rows, PIECE):
        rows_N = draw.scattered(torch.arange(first, min(first + PIECE, store.rows)))
        set_N, order_N = store.frames.sets_of(rows_N).sort(stable=True)
        place_N = torch.arange(len(set_N)) - torch.searchsorted(set_N, set_N)  # among the piece's rows of the set
        rows_U = rows_N[order_N[place_N < free_S[set_N]]]
        free_S = (free_S - torch.bincount(set_N, minlength=len(free_S))).clamp(min=0)
        found.append(rows_U)
        if not free_S.any():
            break
    return found


def same_bits(folder: Path) -> None:
    """Check that a small table on the SSD learns what one in memory does, with rows that leave."""
    for format in (fp32.Config(), bf16.Config(rounding="nearest")):
        case = Case(rows=200_000, frames=2 << 20, lookups=2, skew=1.05, format=format, written=False)
        one, other = Side(case, folder), Side(case, None, case.rows)
        for mine, memory in zip(one.steps(20)[1], other.steps(20)[1], strict=True):
            assert torch.equal(mine, memory), "the two sides differ"
        assert one.stores[0].left > 0, "no row has left"
        one.stores[0].close()
    print("20 steps of each format: the same bits as in memory, with rows that left")


def compare(case: Case, folder: Path, turns: int, reads_per_s: float) -> float:
    """Returns the median of the ratios of examples/s over in memory, of turns that follow each other."""
    print(f"\n{case}", flush=True)
    begun = time.perf_counter()
    mine, memory = Side(case, folder), Side(case, None)
    (store,) = mine.stores
    if case.written:
        fill(mine)
    for side in (mine, memory):
        side.steps(TURN)
    size = os.fstat(store._blocks.file.fd).st_blocks * 512
    print(f"made in {time.perf_counter() - begun:.0f} s, {size / 1e9:.2f} GB on the SSD", flush=True)
    before = store.counters
    taken = [(mine.steps(TURN)[0], memory.steps(TURN)[0]) for _ in range(turns)]
    told = {name: value - before[name] for name, value in store.counters.items()}
    store.close()
    examples = turns * TURN * BATCH
    misses, left = (told["used"] - told["hits"]) / examples, told["left"] / examples
    low, middle, high = statistics.quantiles([in_memory / own for own, in_memory in taken], n=4)
    rates = [TURN * BATCH / statistics.median(side) for side in zip(*taken, strict=True)]
    print(
        f"examples/s {rates[0]:,.0f}, in memory {rates[1]:,.0f}: ratio {middle:.2f} ({low:.2f} to {high:.2f}); "
        f"the device allows {reads_per_s / max(misses + 2 * left, 1e-12):,.0f}"
    )
    rest = ", ".join(f"{name} {value:,}" for name, value in told.items() if name not in ("hits", "used", "left"))
    print(
        f"of {told['used'] / examples:.2f} different rows an example {1 - told['hits'] / told['used']:.1%} were out; "
        f"{told['left']:,} rows left in {examples:,} examples; {rest}"
    )
    assert told["blocks_written"], "a run that writes nothing counts for nothing"
    return middle


def probed(folder: Path, blocks: int = 100_000) -> float:
    """Returns how many random blocks of 4 KiB a second the device reads, 16 at a time."""
    with filled(folder, blocks, 4096) as (path, layout, map):
        rows_N = one_row_a_block(layout, blocks, torch.Generator().manual_seed(0))
        with Blocks(path, layout, table="t", map=map, is_written=False) as opened:
            return bare(opened, map.places_K[rows_N // layout.per_block].contiguous()).per_s


def run(folder: Path, quick: bool, rows: int) -> None:
    """Measure and print.

    Args:
        folder: on the SSD.
        quick: a small table.
        rows: of the large table; frames are for as large a share of it as 8 GiB are for 1e9 rows in fp32.
    """
    same_bits(folder)
    rate = probed(folder, 20_000 if quick else 100_000)
    print(f"the device reads {rate:,.0f} blocks of 4 KiB a second, 16 at a time")
    rows, turns = (2_000_000, 4) if quick else (rows, 12)
    near = bf16.Config(rounding="nearest")
    full = int(8 * 2**30 * rows / 1e9)
    ratios = {
        (lookups, skew): compare(
            Case(rows=rows, frames=full, lookups=lookups, skew=skew, format=near), folder, turns, rate
        )
        for lookups, skew in ((1, 1.05), (4, 1.17))
    }
    for (lookups, skew), ratio in ratios.items():
        met = "met" if ratio >= 0.6 else "missed"
        print(f"TARGET examples/s of in memory, {lookups} ids, Zipf {skew}: {ratio:.2f} (goal 0.6) {met}")
