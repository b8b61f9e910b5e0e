"""What a table costs in memory and on an SSD: bytes of memory, and time for each batch (MTrainS,
arXiv 2305.01515).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from sparrow.core.errors import UserError, require
from sparrow.embeddings import Component, Direct, Placement, TableSpec
from sparrow.embeddings.sizes import memory_bytes
from sparrow.embeddings.spec import Tier
from sparrow.extensions.tiers import ssd
from sparrow.extensions.tiers.curves import Curve
from sparrow.extensions.tiers.frames import TAG_BYTES, tier_frames
from sparrow.extensions.tiers.stores.ssd import SsdStore, queue_bytes
from sparrow.kernels.block_io import Blocks, Layout
from sparrow.kernels.formats import Field
from sparrow.kernels.row_cache import WAYS

USUAL = 45_000.0  # random reads/s of an SSD that nobody measured
_FIND_S = 1e-7  # to find the frame of a row
_BESIDE = 24  # bytes beside a record that waits to be written
_STEP = 1.15  # between two sizes of a cache that are tried
_MORE = 4.0  # standard deviations that later batches may have more rows
_PROBED = 1 << 14  # blocks that a probe writes
_BATCHES, _FEW = 40, 64  # batches that fill the frames of a probe, and rows of its small ones


@dataclass(frozen=True, kw_only=True)
class Device:
    """What memory and disk can do.

    Args:
        reads_per_s: blocks of 4 KiB that the disk reads at random, many at a time.
        bytes_per_s: what it reads in sequence, and writes.
        memory_bytes_per_s: rows of memory, at random.
        processor_s: what a thread that reads and writes does for a block of the disk.
        miss_s: what training itself does for a row that comes and the one that leaves.
        batch_s: what it does beside that for a table of which rows are out, once a batch.
    """

    reads_per_s: float = USUAL
    bytes_per_s: float = 5e8
    memory_bytes_per_s: float = 4e9
    processor_s: float = 6e-6
    miss_s: float = 3e-6
    batch_s: float = 3e-4

    def __post_init__(self) -> None:
        require(above=0, **vars(self))


def probe_disk(folder: Path) -> Device:
    """Returns what the disk under a folder does, in some seconds. 96 MiB are written there, and go
    away.

    Raises:
        UserError: when the folder cannot be written.
    """
    layout = Layout(fields={"block": Field(width=1000, across="cut")}, rows=_PROBED)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder_context = TemporaryDirectory(prefix=".probe-", dir=folder)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror or error}; name another folder") from None
    with folder_context as place:
        blocks = Blocks(Path(place) / "probe.blocks", layout, table="probe")
        try:
            fields = {"block": torch.zeros(_PROBED, 1000)}
            blocks.put(torch.arange(_PROBED), fields)
            blocks.sync()
            shuffled_N = torch.randperm(_PROBED, generator=torch.Generator().manual_seed(0))
            rows_N = shuffled_N[: _PROBED // 2]
            # rows of a fetch ascend: parts of a random order jump about the file
            cpu = time.process_time()
            random = _seconds(blocks, fields, [part.sort().values for part in rows_N.split(64)])
            cpu = time.process_time() - cpu
            in_sequence = _seconds(blocks, fields, [torch.arange(_PROBED)])
        finally:
            blocks.close()
        batch_s, miss_s = _training_s(Path(place))
    return Device(
        reads_per_s=len(rows_N) / random,
        bytes_per_s=_PROBED * layout.block / in_sequence,
        processor_s=max(cpu / len(rows_N), 1e-9),
        miss_s=miss_s,
        batch_s=batch_s,
    )


def _training_s(folder: Path) -> tuple[float, float]:
    """Returns what training does for a table in each batch, and for a row that is out.

    They are found with large and small batches, of a table with frames for a tenth of its rows,
    after they are full.
    """
    spec = TableSpec(
        name="probe", dim=16, addressing=Direct(_PROBED * 32), tier=ssd.Config(fraction=0.1)
    )
    (component,) = spec.components
    store = SsdStore(component, component.rows, component.dim, Placement(folder=folder))
    sizes = (_FEW, component.rows // 10 // _BATCHES)
    random = torch.Generator().manual_seed(0)
    took = [0.0, 0.0]
    misses = [0, 0]
    try:
        values = {
            name: torch.ones(field.shape(1), dtype=field.dtype)
            for name, field in component.fields.items()
        }
        store.write(slice(None), values)
        for batch in range(1, 3 * _BATCHES + 1):
            is_large = batch <= _BATCHES or batch % 2
            rows_N = torch.randint(component.rows, (sizes[is_large],), generator=random)
            before = store.counters
            began = time.thread_time()
            store.fetch(rows_N, batch, batch - 1)
            store.arrive()
            if batch > _BATCHES:  # frames are full
                took[is_large] += time.thread_time() - began
                misses[is_large] += (
                    store.counters["used"]
                    - before["used"]
                    - store.counters["hits"]
                    + before["hits"]
                )
    finally:
        store.close()
    miss_s = max((took[1] - took[0]) / (misses[1] - misses[0]), 1e-9)
    return max((took[0] - misses[0] * miss_s) / _BATCHES, 1e-9), miss_s


def _seconds(
    blocks: Blocks, fields: dict[str, torch.Tensor], parts: Sequence[torch.Tensor]
) -> float:
    """Returns how long it takes to read parts of the rows. The next part is asked for before one
    has come.
    """
    began = time.perf_counter()
    before = None
    for rows_U in parts:
        ticket = blocks.fetch(rows_U, fields, rows_U)
        if before is not None:
            blocks.wait(before)
        before = ticket
    assert before is not None
    blocks.wait(before)
    return time.perf_counter() - began


@dataclass(frozen=True, kw_only=True, eq=False)
class Use:
    """How a run uses a component.

    Args:
        component: as the run has it.
        curve: of its rows.
        lookups: of a batch.
        is_whole: whether the curve is of all batches of a run that begins anew, so that it knows
            which rows were never written.
    """

    component: Component
    curve: Curve
    lookups: float
    is_whole: bool

    @property
    def references(self) -> float:
        """Different rows of a batch."""
        return self.curve.references / max(self.curve.batches, 1)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a table costs in one place.

    Args:
        tier: the place.
        bytes: of memory.
        miss_ratio: the share of the different rows of a batch that come from the disk.
        blocks: that the disk reads and writes for each batch.
        ms_processor: of each batch, of training itself.
        ms_disk: of each batch, for these blocks, of the disk or of the thread that reads and
            writes.
    """

    tier: Tier
    bytes: int
    miss_ratio: float
    blocks: tuple[float, float]
    ms_processor: float
    ms_disk: float

    @property
    def ms(self) -> float:
        """Of each batch, if nothing overlaps. The disk works beside the processor, but tables share
        either.
        """
        return self.ms_processor + self.ms_disk


def cost(uses: Sequence[Use], tier: Tier, device: Device) -> Cost:
    """Returns what a table costs. uses: of its components."""
    components = [dataclasses.replace(use.component, tier=tier) for use in uses]
    references = sum(use.references for use in uses)
    flows = (
        [_flow(use, component) for use, component in zip(uses, components, strict=True)]
        if tier.is_on
        else []
    )
    misses = sum(flow.misses for flow in flows)
    blocks = sum(flow.read + flow.reread for flow in flows), sum(flow.written for flow in flows)
    processor = sum(map(_bytes, uses)) / device.memory_bytes_per_s
    is_looked_up = tier.is_on and references > 0
    processor += is_looked_up * (device.batch_s + _FIND_S * references) + device.miss_s * misses
    disk = max(sum(flow.seconds(device) for flow in flows), sum(blocks) * device.processor_s)
    return Cost(
        tier=tier,
        bytes=sum(
            memory_bytes(component, component.rows, component.dim) for component in components
        ),
        miss_ratio=misses / references if references else 0.0,
        blocks=blocks,
        ms_processor=1e3 * processor,
        ms_disk=1e3 * disk,
    )


def speed(costs: Sequence[Cost], batch_size: int) -> float:
    """Returns how many examples/s tables allow at most: the disk works beside the processor, and
    tables share either.

    It is infinity where nothing is looked up.
    """
    ms = max(sum(price.ms_disk for price in costs), sum(price.ms_processor for price in costs))
    return batch_size / ms * 1e3 if ms else math.inf


def smallest(uses: Sequence[Use]) -> int:
    """Returns the fewest bytes of frames with which a table can be on an SSD: all batches under way
    have their rows.

    Batches that were not looked at may have more rows than those that were, by some standard
    deviations of a count.
    """

    def frames(use: Use) -> int:
        more = 0 if use.is_whole else math.ceil(_MORE * math.sqrt(use.curve.most))
        return min(use.curve.most + more, use.component.rows)

    return max(_bytes_of(use.component, frames(use)) for use in uses)


def largest(uses: Sequence[Use]) -> int:
    """Returns the bytes of frames with which each row of a table has one."""
    return max(_bytes_of(use.component, use.component.rows) for use in uses)


def sizes(uses: Sequence[Use]) -> list[int]:
    """Returns the bytes of frames that are worth trying, from `smallest` to `largest`."""
    first = smallest(uses)
    last = largest(uses)
    steps = max(math.ceil(math.log(last / first, _STEP)), 0)
    return sorted({*(min(int(first * _STEP**n), last) for n in range(steps)), last})


def _bytes_of(component: Component, frames: int) -> int:
    """Returns the bytes of `Tier` for so many frames, or for a few more, and for those that stand
    by.
    """
    sets = -(-frames // WAYS)
    return -(-sets * WAYS * (component.bytes_row + TAG_BYTES) * 5 // 4)


def _bytes(use: Use) -> float:
    """Returns BW_t for a batch: bytes of rows that are looked up, and that the rule reads and
    writes.
    """
    component = use.component
    return (
        use.lookups * component.bytes_values / component.rows
        + 2 * use.references * component.bytes_row
    )


@dataclass(frozen=True, kw_only=True)
class _Flow:
    """What a batch moves between frames and disk.

    Args:
        misses: rows that come.
        read: blocks that are read, one by one.
        block: bytes of each.
        written: blocks that are written, side by side.
        reread: how many of these are read before, since some of their records stay.
    """

    misses: float
    read: float
    block: int
    written: float
    reread: float

    def seconds(self, device: Device) -> float:
        """Returns how long the disk takes."""
        random = self.read + self.reread
        return max(random / device.reads_per_s, random * self.block / device.bytes_per_s) + (
            self.written * self.block / device.bytes_per_s
        )


def _flow(use: Use, component: Component) -> _Flow:
    """Returns what a batch moves of a component on an SSD.

    Rows that wait to be written are at hand. Rows that leave are written together with those of the
    same block that have left since the writer was there last. It passes over all blocks in turn,
    and half of the queue is full. In a run that begins anew, blocks are empty at first, and an
    empty block is not read.
    """
    curve = use.curve
    rows = component.rows
    layout = Layout(fields=component.fields, rows=rows)
    frames, _ = tier_frames(component, rows)
    waiting = queue_bytes(component, rows) / (component.bytes_row + _BESIDE) / 2
    misses = curve.miss_ratio(frames) * use.references
    if frames >= rows:  # a row begins in its frame and stays there
        return _Flow(misses=misses, read=0.0, block=layout.block, written=0.0, reread=0.0)
    leave = misses
    empty = 0.0
    new = 0.0
    if use.is_whole and curve.batches:
        leave = max(misses - frames / curve.batches, 0.0)
        full = leave * curve.batches / layout.blocks
        empty = _share(full)  # of all blocks, on average over the run
        new = -math.expm1(-full) * layout.blocks / curve.batches
    read = max(curve.miss_ratio(frames + waiting) - empty * curve.cold, 0.0) * use.references
    written = leave * _share(2 * waiting / layout.blocks)
    return _Flow(
        misses=misses,
        read=layout.blocks * -math.expm1(-read / layout.blocks),  # some rows share a block
        block=layout.block,
        written=written,
        reread=max(written - new, 0.0),
    )


def _share(rows: float) -> float:
    """Returns the share of blocks among their rows, where rows come to blocks by chance and a block
    has `rows`.
    """
    return -math.expm1(-rows) / rows if rows else 1.0
