"""What a run with tables on an SSD will need of disks, found before it needs it."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from sparrow.core import UserError
from sparrow.core.memory import gb
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import Component
from sparrow.extensions.tiers import pieces
from sparrow.extensions.tiers.claims import folders_of
from sparrow.extensions.tiers.frames import exact_bytes, exact_frames, tier_frames
from sparrow.extensions.tiers.settings import Config
from sparrow.extensions.tiers.stores.ssd import queue_bytes
from sparrow.kernels.block_io import Layout
from sparrow.kernels.row_cache.policies import policy_of
from sparrow.trained.run import Run

SAVED_ROW = 14  # bytes for each frame, see `SsdStore.save`
SAVED_PIECES = 3 * pieces.WRITERS * pieces.PIECE  # bytes: as gathered, as one, and as written
# bytes for each block: its place and generation, as they are and twice on their way to a file
SAVED_BLOCK = 24
KEPT_BLOCK = 4  # bytes for each block of a checkpoint that is there


def check_disks(
    run: Run, components: Sequence[Component], dataset: Dataset, hosts: int = 1
) -> None:
    """Check that rows of tables on an SSD, and checkpoints beside the others, find a folder and
    room there.

    Blocks that nobody learnt from are never written. Checkpoints share the blocks that did not
    change between them. The best one may be so old that it shares none. What the run has already,
    if it goes on or is overwritten, counts as free. A checkpoint in the run directory has a map of
    them, and the rows in frames; of tables in memory it has all rows.

    Args:
        run: its settings.
        components: of all tables.
        dataset: the prepared log.
        hosts: among how many the rows are divided.

    Raises:
        UserError: names the folder, what is wrong with it or lacks on its disk, and the remedy.
    """
    settings = run.settings_of(Config)
    on_ssd = [c for c in components if c.tier.has_folder]
    named = [] if settings.full_checkpoints else [c for c in on_ssd if c.tier.has_blocks]
    if not on_ssd or settings.folder is None:
        return
    if len(named) < len(on_ssd) and run.checkpoint.background:
        why = "checkpoints with all rows of tables on an SSD are not written in the background"
        tables = "all in memory or in the tier ssd, without tiers.full_checkpoints"
        raise UserError(f"checkpoint.background: {why}; leave it out, or have {tables}")
    batch = dataset.first(min(256, run.data.batch_size))
    ids = batch.ids.values_N.numel() / max(batch.batch_size, 1) / hosts
    steps = (
        run.loop.max_steps
        or math.ceil(dataset.rows("train") / run.data.batch_size) * run.loop.epochs
    )
    between = min(run.checkpoint.every or steps, steps) * run.loop.accumulate * run.data.batch_size
    # the best too, and the one that is written
    copies = run.checkpoint.keep + 2 + run.checkpoint.background
    used = ids * dataset.rows("train")
    blocks = sum(c.tier.disk_bytes(c, used, hosts) for c in on_ssd)
    once = sum(c.tier.disk_bytes(c, used, hosts) for c in named)
    changed = sum(c.tier.disk_bytes(c, ids * between, hosts) for c in named)
    blocks += min(once, changed) * (copies - 1) + once
    has_all = settings.full_checkpoints
    saved = copies * sum(_bytes_saved(component, has_all) for component in components)
    run_dir = Path(run.run_dir)
    ssd = Path(settings.folder)
    own_blocks: list[Path] = []
    for folder in folders_of(run_dir):
        if folder.parent == ssd.resolve():
            own_blocks.extend(folder.glob("*"))
    contents = "rows of tables on an SSD, and their checkpoints,"
    _check_room(ssd, blocks, own_blocks, contents, "name another folder with --tiers.folder")
    own_files = list(run_dir.glob("checkpoints/*/*"))
    _check_room(run_dir, saved, own_files, "checkpoints", "name another --run_dir")


def _check_room(
    place: Path, size: int, own_files: Sequence[Path], contents: str, remedy: str
) -> None:
    """Check that a folder can be made, and that there is room; that of `own_files` counts as
    free.
    """
    nearest = _nearest_folder(place)
    try:
        with TemporaryDirectory(prefix=".sparrow-", dir=nearest):
            free = shutil.disk_usage(nearest).free + sum(map(_allocated, own_files))
    except OSError as error:
        message = f"no folder can be made in {nearest} ({error.strerror or error})"
        raise UserError(f"{place}: {message}; {remedy}") from None
    if size > free:
        message = f"{contents} need up to {gb(size)}, and {gb(free)} are free or have the run"
        raise UserError(f"{place}: {message}; lower checkpoint.keep, or {remedy}")


def bytes_of_kept_blocks(components: Iterable[Component], keep: int) -> int:
    """Returns the bytes of memory that say which blocks of tables on an SSD are of checkpoints.

    Args:
        components: of all tables.
        keep: see `Checkpoints`.
    """
    blocks = sum(_layout(component).blocks for component in components if component.tier.has_blocks)
    return KEPT_BLOCK * (keep + 1) * blocks


def bytes_of_saving(components: Iterable[Component]) -> int:
    """Returns the bytes of memory that it takes to write a checkpoint of tables on an SSD beside
    the tables.

    While one table is written, the next one is prepared.
    """
    on_ssd = [component for component in components if component.tier.has_blocks]
    return sum(sorted(map(_bytes_saving, on_ssd))[-2:]) + (SAVED_PIECES if on_ssd else 0)


def _bytes_saving(component: Component) -> int:
    """Returns the bytes of memory that a component takes while it is written to a checkpoint.

    They are which frames have rows, places of rows in frames, and the map as it is and as a file.
    """
    frames = sum(tier_frames(component, component.rows))
    return SAVED_ROW * frames + SAVED_BLOCK * _layout(component).blocks


def _layout(component: Component) -> Layout:
    return Layout(fields=component.fields, rows=component.rows)


def _bytes_saved(component: Component, all_rows: bool) -> int:
    """Returns the bytes of a component in a checkpoint's folder. all_rows: also of those on an
    SSD.
    """
    above = 0
    if component.cache.is_on:
        above = exact_frames(component, component.rows) * exact_bytes(component, component.dim)
    if all_rows or not component.tier.has_blocks:
        return above + component.rows * component.bytes_row
    newer = sum(tier_frames(component, component.rows)) * (8 + component.bytes_row)
    newer += component.rows * policy_of(component.tier.policy).bytes_row
    return above + 8 * _layout(component).blocks + newer + queue_bytes(component, component.rows)


def _allocated(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_blocks * 512
    return 0


def _nearest_folder(path: Path) -> Path:
    """Returns the path, or the nearest above it that is there."""
    path = path.absolute()
    while not os.path.exists(path):  # nor is one with a file in it, or that may not be looked at
        path = path.parent
    return path
