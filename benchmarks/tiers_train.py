"""Training over a table on an SSD, beside the same model with a table in memory: a part of
tiers.py.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _peers.targets import print_target
from limited import group, limited
from tiers_blocks import of_process, probed
from torch import Tensor

from sparrow.core import Batch, KeyedJagged
from sparrow.embeddings import ON_CPU, EmbeddingTables, Placement, TableChoices
from sparrow.embeddings.choices import Override
from sparrow.extensions.tiers.frames import TAG_BYTES
from sparrow.extensions.tiers.stores.ssd import SsdStore, queue_bytes
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.kernels.block_io import BlockMap, Blocks
from sparrow.kernels.formats import RowFormat, bf16, fp32
from sparrow.kernels.row_cache import WAYS
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.losses import binary_cross_entropy
from sparrow.models import dlrm

BATCH, DIM, NUMBERS, SMALL_TABLES, SMALL_ROWS = 4096, 16, 13, 25, 10_000
WINDOW, TURN = 10, 16  # batches whose rows never leave; steps of a turn
QUICK = 256  # examples of a batch of --quick
PIECE = 1 << 20  # rows that are written at a time
AGES = 64  # classes of how long a row was not used
FOLD = 10  # the table in memory has so many times fewer rows


@dataclass(frozen=True, kw_only=True)
class Case:
    """rows: of the table. frames: bytes of those of its rows that are in memory. lookups: ids of an
    example in it.

    batch: examples.
    """

    rows: int
    frames: int
    lookups: int
    skew: float
    format: RowFormat
    warm: bool = True  # frames begin full
    steady: bool = True  # timed once as many rows leave as come in
    ahead: int = 2
    batch: int = BATCH

    def __str__(self) -> str:
        name = type(self.format).__module__.rsplit(".", 1)[1]
        state = "frames full and dirty" if self.warm else "frames empty at first"
        what = (
            f"{self.rows:,} rows of {DIM} in {name}, all written, {self.frames / 2**30:.2f} GiB of"
            f" frames, {state}"
        )
        return (
            f"{what}; {self.lookups} ids an example, Zipf {self.skew}, {self.ahead} batches ahead"
        )


class Zipf:
    """Draws ids of 0 <= id < rows with probabilities in proportion to 1 / rank**skew; ranks are
    scattered.

    The draw inverts the integral of the density, which is exact but for the first ranks' rounding.
    """

    def __init__(self, rows: int, skew: float, seed: int) -> None:
        self.rows, self.power = rows, 1 - skew
        self.random = torch.Generator().manual_seed(seed)
        self.factor = next(
            f for f in itertools.count(int(rows * 0.6180339887) | 1, 2) if _is_prime_to(f, rows)
        )

    def __call__(self, count: int) -> Tensor:
        """Returns ids int64 [count]."""
        u_N = torch.rand(count, generator=self.random, dtype=torch.float64)
        end = (self.rows + 1.0) ** self.power
        rank_N = ((1 + u_N * (end - 1)) ** (1 / self.power)).long().sub_(1).clamp_(0, self.rows - 1)
        return self.scattered(rank_N)

    def oldest(self, count: float) -> tuple[float, float]:
        """Returns the sum of rank ** -skew, and after how many draws so many different rows are
        expected.
        """
        edge_E = torch.logspace(0, math.log10(self.rows + 1), 20_000, dtype=torch.float64)
        width_E, weight_E = edge_E.diff(), (edge_E[1:] * edge_E[:-1]) ** ((self.power - 1) / 2)
        total = (width_E * weight_E).sum().item()
        low, high = 1.0, 1e15
        while high / low > 1.0001:
            draws = math.sqrt(low * high)
            different = (width_E * -torch.expm1(-draws * weight_E / total)).sum().item()
            low, high = (draws, high) if different < count else (low, draws)
        return total, low

    def scattered(self, rank_N: Tensor) -> Tensor:
        """Returns the id of each rank."""
        return rank_N * self.factor % self.rows  # below 2**63 for rows below 3e9


def _is_prime_to(one: int, other: int) -> bool:
    while other:
        one, other = other, one % other
    return one == 1


def model_of(case: Case, rows: int, folder: Path | None, placement: Placement = ON_CPU) -> Any:
    """The demo's DLRM with one large table, on an SSD where there is a folder."""
    columns = {f"x{i}": Column(kind="numeric") for i in range(NUMBERS)}
    columns |= {f"c{i}": Column(kind="categorical", table=f"t{i}") for i in range(SMALL_TABLES)}
    columns |= {
        "large": Column(kind="list", table="large", pooling="sum"),
        "y": Column(kind="label"),
    }
    encodings = {f"t{i}": Encoding(kind="range", rows=SMALL_ROWS) for i in range(SMALL_TABLES)}
    schema = Schema(
        columns=columns, encodings={**encodings, "large": Encoding(kind="range", rows=rows)}
    )
    tier = Override(names=("large",), tier={"name": "ssd", "bytes": case.frames})
    choices = TableChoices(
        format=case.format,
        rule=rowwise_adagrad.Config(lr=0.05),
        overrides=() if folder is None else (tier,),
    )
    torch.manual_seed(0)
    placement = replace(placement, folder=folder, window=WINDOW)
    return dlrm.Config(dim=DIM, bottom=(64,), top=(128, 64)).build(schema, choices.at(placement))


class Side:
    """A model that trains on a stream of batches, and looks at coming ones."""

    def __init__(
        self, case: Case, folder: Path | None, rows: int = 0, placement: Placement = ON_CPU
    ) -> None:
        self.rows = rows or (case.rows if folder else case.rows // FOLD)
        self.model = model_of(case, self.rows, folder, placement)
        self.tables = [of for of in self.model.modules() if isinstance(of, EmbeddingTables)]
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        stores = [record.store for of in self.tables for record in of.all_records()]
        self.stores = [store for store in stores if isinstance(store, SsdStore)]
        self.ahead: deque[Batch] = deque()
        self.made: deque[Batch] = deque()
        self.streams = 0
        self.turn_to(case)

    def turn_to(self, case: Case) -> None:
        """Go on with a new stream of another case."""
        self.case, self.depth = case, case.ahead if self.stores else 0
        self.streams += 1
        self.stream = stream(case, self.rows, self.streams)
        self.made.clear()

    def steps(self, count: int, store: SsdStore | None = None) -> tuple[float, list[Tensor]]:
        """Train on the next batches. Returns the seconds of it, and the logits of each batch.

        store: whose rows of coming batches are awaited too, so that nothing is read while another
        side has its turn.
        """
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
        if store:
            store.arrive()
        return time.perf_counter() - start, logits

    def settle(self) -> int:
        """Train until nine in ten of the rows that come into frames let another one leave, if the
        case says so.

        Returns how many examples it took.
        """
        (store,), turns = self.stores, 1
        self.steps(1)
        while self.case.steady:
            before = store.counters
            self.steps(TURN)
            turns += 1
            used, hits, left = (
                store.counters[name] - before[name] for name in ("used", "hits", "left")
            )
            if left >= 0.9 * (used - hits):
                break
        return turns * TURN * self.case.batch


def stream(case: Case, rows: int, seed: int) -> Iterator[Batch]:
    """Yields batches. Ids of the large table are taken modulo `rows`."""
    draw, random, batch = (
        Zipf(case.rows, case.skew, seed),
        torch.Generator().manual_seed(seed),
        case.batch,
    )
    keys = (*(f"c{i}" for i in range(SMALL_TABLES)), "large")
    lengths = torch.cat(
        [torch.ones(SMALL_TABLES * batch, dtype=torch.long), torch.full((batch,), case.lookups)]
    )
    while True:
        small_N = torch.randint(SMALL_ROWS, (SMALL_TABLES * batch,), generator=random)
        large_N = draw(batch * case.lookups) % rows
        ids = KeyedJagged(keys=keys, values_N=torch.cat([small_N, large_N]), lengths=lengths)
        labels_B1 = (torch.rand(batch, 1, generator=random) < 0.3).float()
        yield Batch(
            dense_BC=torch.randn(batch, NUMBERS, generator=random), ids=ids, labels_BT=labels_B1
        )


def filled_file(case: Case, folder: Path) -> Disk:
    """Returns a file in which every row of the large table was written."""
    side = Side(case, folder)
    (store,) = side.stores
    begun = time.perf_counter()
    path = folder / "rows.blocks"
    with Blocks(path, store._layout, table="large") as blocks:
        for first in range(0, case.rows, PIECE):
            blocks.put(
                rows_U := torch.arange(first, min(first + PIECE, case.rows)), _learnt(store, rows_U)
            )
        map = blocks.sync()
    disk = Disk(path, map)
    print(
        f"{case.rows:,} rows in {disk.gigabytes:.2f} GB, written in"
        f" {time.perf_counter() - begun:.0f} s",
        flush=True,
    )
    return disk


@dataclass(frozen=True)
class Disk:
    """A file that is full. What it held when it was made stays, so that each case begins with
    it.
    """

    path: Path
    map: BlockMap

    @property
    def gigabytes(self) -> float:
        """Of the file."""
        return self.path.stat().st_blocks * 512 / 1e9

    def under(self, side: Side) -> SsdStore:
        """Let a side go on with this file, with rows in all frames if its case says so.

        They are those that LRU would have there after a long run, see `_lately_used`. They are
        brought in while the table has no file. So they are computed, and 1e8 blocks need not be
        read.
        """
        (store,) = side.stores
        draw = Zipf(side.case.rows, side.case.skew, 0)
        if side.case.warm:
            flights: Any = side.tables[0].exchange.parts[0].transit
            for rows_U in _lately_used(store, draw).split(PIECE):
                flights._batch += 1  # a batch that nobody looks up
                store.fetch(rows_U, flights._batch, flights._batch - 1)
                store.arrive()
                flights._settled = flights._batch
        assert not store.left, "frames overflowed"
        store.close()
        queue = queue_bytes(store.component, store.rows)
        blocks = Blocks(self.path, store._layout, table="large", map=self.map, bytes_queue=queue)
        blocks.keep(self.map)
        store._opened = blocks
        random = torch.Generator().manual_seed(2)
        rank_N = torch.randint(
            store.rows // 2, store.rows, (2 * queue // store.component.bytes_row,), generator=random
        )
        # the queue is full, so each row that leaves has another written
        rows_U = draw.scattered(rank_N).unique()
        blocks.put(rows_U, _learnt(store, rows_U))
        return store


def _learnt(store: SsdStore, rows_U: Tensor) -> dict[str, Tensor]:
    made = store._first(rows_U)
    made["touched"] = torch.ones_like(made["touched"])
    return made


def _lately_used(store: SsdStore, draw: Zipf) -> Tensor:
    """Returns the rows that LRU has in its sets after a long stream of draws, the longest unused
    first: int32.

    For how many draws nobody used row r is exponential with the rate of its probability p_r, apart
    from other rows. A set has those of its rows that were used last (Che et al., 2002, where all
    sets are one). AGES classes of ages are told apart. Rows older than all of them are of no set,
    since there are one and a half times as many as frames.
    """
    total, oldest = draw.oldest(1.5 * store.ways)
    young_N, age_N, count = (
        torch.empty(2 * store.ways, dtype=torch.int32),
        torch.empty(2 * store.ways).byte(),
        0,
    )
    for first in range(0, store.rows, PIECE):
        rank_N = torch.arange(first, min(first + PIECE, store.rows))
        rate_N = (rank_N + 1.0).pow(draw.power - 1) / total  # p_r
        ages_N = (
            torch.empty(len(rank_N))
            .exponential_(generator=draw.random)
            .div_(rate_N)
            .div_(oldest / AGES)
        )
        found_V = (ages_N < AGES).nonzero()[:, 0]
        last = count + len(found_V)
        young_N[count:last], age_N[count:last] = (
            draw.scattered(rank_N[found_V]).int(),
            ages_N[found_V].byte(),
        )
        count = last
    free_S = torch.full((store.ways // WAYS,), WAYS)
    found_F, begin = torch.full((store.ways,), -1, dtype=torch.int32), store.ways
    for age in range(AGES):
        for rows_N in young_N[:count][age_N[:count] == age].long().split(PIECE):
            set_N, order_N = store.frames.sets_of(rows_N).sort(stable=True)
            # among the piece's rows of the set
            place_N = torch.arange(len(set_N)) - torch.searchsorted(set_N, set_N)
            rows_U = rows_N[order_N[place_N < free_S[set_N]]]
            free_S = (free_S - torch.bincount(set_N, minlength=len(free_S))).clamp(min=0)
            begin -= len(rows_U)
            found_F[begin : begin + len(rows_U)] = rows_U
    assert begin < store.ways // 100, "sets are not full"
    return found_F[begin:]


def same_bits(folder: Path, batch: int, frames: int, steps: int) -> None:
    """Check that a small table on the SSD learns what one in memory does, with rows that leave."""
    for format in (fp32.Config(), bf16.Config(rounding="nearest")):
        case = Case(
            rows=200_000,
            frames=frames,
            lookups=2,
            skew=1.05,
            format=format,
            warm=False,
            batch=batch,
        )
        one, other = Side(case, folder), Side(case, None, case.rows)
        for mine, memory in zip(one.steps(steps)[1], other.steps(steps)[1], strict=True):
            assert torch.equal(mine, memory), "the two sides differ"
        assert one.stores[0].left > 0, "no row has left"
        one.stores[0].close()
    print(f"{steps} steps of each format: the same bits as in memory, with rows that left")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a side on the SSD did beside one in memory.

    Args:
        ratio: examples/s over those in memory, the median of turns that follow each other.
        per_s: examples/s of both.
        misses: rows that came from the disk, of an example.
        dirty: rows that left and were written, for each of these.
        apart: our count of the bytes read and written beside the kernel's: the larger difference,
            as a share.
    """

    ratio: float
    per_s: tuple[float, float]
    misses: float
    dirty: float
    apart: float


def compare(mine: Side, memory: Side, turns: int, reads_per_s: float) -> Compared:
    """Print what turns of both took, and what was read and written."""
    print(f"\n{mine.case}", flush=True)
    (store,) = mine.stores
    begun = mine.settle()
    memory.steps(TURN)
    store.arrive()
    before, kernel = store.counters, [of_process(name) for name in ("read_bytes", "write_bytes")]
    taken = [(mine.steps(TURN, store)[0], memory.steps(TURN)[0]) for _ in range(turns)]
    told = {name: value - before[name] for name, value in store.counters.items()}
    kernel = [
        of_process(name) - was
        for name, was in zip(("read_bytes", "write_bytes"), kernel, strict=True)
    ]
    batch = mine.case.batch
    examples = turns * TURN * batch
    misses, left = (told["used"] - told["hits"]) / examples, told["left"] / examples
    low, middle, high = statistics.quantiles([in_memory / own for own, in_memory in taken], n=4)
    rates = (
        TURN * batch / statistics.median(t[0] for t in taken),
        TURN * batch / statistics.median(t[1] for t in taken),
    )
    allows = reads_per_s / max(misses + 2 * left, 1e-12)
    print(
        f"after {begun:,} examples: examples/s {rates[0]:,.0f}, in memory {rates[1]:,.0f}: "
        f"ratio {middle:.2f} ({low:.2f} to {high:.2f}); the device allows {allows:,.0f}"
    )
    rest = ", ".join(
        f"{name} {value:,}" for name, value in told.items() if name not in ("hits", "used", "left")
    )
    print(
        f"of {told['used']:,} different rows ({told['used'] / examples:.2f} an example)"
        f" {1 - told['hits'] / told['used']:.1%} were out; {told['left']:,} rows left in"
        f" {examples:,} examples; {rest}"
    )
    print(f"bytes by the kernel's count: {kernel[0]:,} read, {kernel[1]:,} written", flush=True)
    assert told["blocks_written"] or not mine.case.steady, (
        "a run that writes nothing counts for nothing"
    )
    ours = (told["bytes_read"], told["bytes_written"])
    return Compared(
        ratio=middle,
        per_s=rates,
        misses=misses,
        dirty=left / max(misses, 1e-12),
        apart=max(abs(own - its) / max(its, 1) for own, its in zip(ours, kernel, strict=True)),
    )


def skew_of_traces(rows: int) -> float:
    """Returns the skew with which ids of so many rows repeat as in FBGEMM's public traces of 856
    tables.

    There a batch of 65,536 examples has 887,017,990 ids, of which 128,435,723 differ within their
    tables.
    """
    ids, share = 887_017_990 / 856, 128_435_723 / 887_017_990
    # of ranges of ranks
    edge_E = torch.logspace(0, math.log10(rows + 1), 20_000, dtype=torch.float64)
    low, high = 0.5, 2.0
    while high - low > 1e-3:
        skew = (low + high) / 2
        width_E, rank_E = edge_E.diff(), (edge_E[1:] * edge_E[:-1]).sqrt()
        weight_E = rank_E**-skew
        unique = (width_E * -torch.expm1(-ids * weight_E / (width_E * weight_E).sum())).sum().item()
        low, high = (skew, high) if unique / ids > share else (low, skew)
    return round(low, 2)


def machines(case: Case, found: Compared, reads_per_s: float) -> None:
    """Print how many machines tables of several memories need, computed from what was measured.

    They are to train as many examples/s as one machine does in memory. In memory as many machines
    are needed as hold the table. On SSDs a machine trains as measured here, or as the device allows
    with the misses of the larger table. These grow with it as those of the best static choice do,
    which has the most frequent rows in memory for ever.
    """
    bytes_row = 2 * DIM + 5  # in bf16, with its state and its bit
    frames, power = case.frames * 4 / 5 / (bytes_row + TAG_BYTES), 1 - case.skew

    def static(rows: float) -> float:
        return max(0.0, 1 - ((frames + 1) ** power - 1) / ((rows + 1) ** power - 1))

    of_lookups = found.misses / case.lookups
    print(
        f"{of_lookups:.1%} of all lookups were reads; of the best static choice they are"
        f" {static(case.rows):.1%}"
    )
    for memories in (1, 4, 16):
        rows = memories * 12 * 2**30 / bytes_row * case.rows / 1e9
        misses = case.lookups * min(1.0, of_lookups * static(rows) / static(case.rows))
        allows = reads_per_s / max(misses * (1 + 2 * found.dirty), 1e-12)
        each = min(found.per_s[0], allows) if memories > 1 else found.per_s[1]
        print(
            f"computed: a table of {memories} memories needs {memories} machines in memory and "
            f"{math.ceil(found.per_s[1] / each)} with SSDs (published: 4 to 8 times fewer)"
        )


def resident() -> float:
    """Returns the bytes of memory that this process has to itself, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * float(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def run(folder: Path, quick: bool, rows: int) -> None:
    """Measure and print, in a group that has 12 GiB for 1e9 rows and what the other side's table
    takes.
    """
    if quick:
        return measure(folder, quick, rows)
    limit = int((12 * 2**30 + 37e8) * rows / 1e9) + 2**30 * (rows < 500_000_000)
    with group("memory", memory__limit_in_bytes=str(limit)) as within:
        print(
            f"in a group with {limit / 2**30:.1f} GiB; the other side's rows are"
            f" {3.7 * rows / 1e9:.1f} GB of them"
        )
        limited([within], measure, folder, quick, rows)


def measure(folder: Path, quick: bool, rows: int) -> None:
    """Measure and print.

    Args:
        folder: on the SSD.
        quick: a small table.
        rows: of the large table; frames have the share of 12 GiB of memory that 8 GiB are for 1e9
            rows.
    """
    rows, turns, batch = (500_000, 2, QUICK) if quick else (rows, 12, BATCH)
    same_bits(folder, batch, 1 << 18 if quick else 2 << 20, 24 if quick else 20)
    rate = probed(folder, quick)
    steep = skew_of_traces(1_000_000_000)
    print(f"ids repeat as in the traces at Zipf {steep}")
    full, few = int(8 * 2**30 * rows / 1e9), max(int(2e6 * 45 * rows / 1e9 * 5 / 4), batch << 10)
    one = Case(
        rows=rows,
        frames=full,
        lookups=1,
        skew=1.05,
        format=bf16.Config(rounding="nearest"),
        batch=batch,
    )
    disk = filled_file(replace(one, frames=2 << 20), folder)
    memory = Side(one, None)
    memory.steps(4)  # so that what steps need beside tables is there
    before = resident()
    mine = Side(one, folder)
    store = disk.under(mine)
    mine.steps(4)
    for held in store._held.values():
        held[len(held) - store.spare.free :].zero_()  # memory that nobody has touched yet
    ours, kernels = (
        store.component.tier.memory_bytes(store.component, rows, DIM),
        resident() - before,
    )
    print(
        f"frames, map and queue have {ours:,} bytes by our count, {kernels:,.0f} more by the"
        " kernel's",
        flush=True,
    )
    if not quick:  # whose few bytes are in memory that the process had already
        apart = abs(ours / kernels - 1)
        print_target("our bytes beside the kernel's", f"{apart:.3f} apart", 0.01, apart <= 0.01)
    ratios, apart = {}, 0.0
    for name, case, goal in (
        ("1 id", one, 0.6),
        (f"4 ids, Zipf {steep}", replace(one, lookups=4, skew=steep), 0.6),
        ("26 ids", replace(one, lookups=26), None),
        ("uniform", replace(one, skew=0.0), None),
    ):
        mine.turn_to(case), memory.turn_to(case)
        found = compare(mine, memory, turns, rate)
        ratios[name], apart = (found.ratio, goal), max(apart, found.apart)
        if case is one:
            machines(one, found, rate)
    store.close()
    del mine, store
    gc.collect()  # 8 GiB of frames
    for name, case, goal in (
        (f"1 id, Zipf {steep}, 2e6 frames of 1e9 rows", replace(one, frames=few, skew=steep), 0.5),
        ("frames empty", replace(one, steady=False), None),
    ):
        mine = Side(replace(case, warm=False), folder)
        memory.turn_to(case)
        store = disk.under(mine)
        found = compare(mine, memory, turns, rate)
        ratios[name], apart = (found.ratio, goal), max(apart, found.apart)
        store.close()
        del mine, store
        gc.collect()
    met = apart <= 0.01
    print_target(
        "bytes read and written by our count beside the kernel's", f"{apart:.3f} apart", "0.01", met
    )
    for name, (ratio, goal) in ratios.items():
        claim, is_met = f"examples/s of in memory, {name}", None if goal is None else ratio >= goal
        print_target(claim, f"{ratio:.2f}", goal, is_met)
