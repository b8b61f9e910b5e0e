"""What a run with tables on an SSD will need of disks, found before it needs it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from sparrow.checkpoint import pieces
from sparrow.core import UserError
from sparrow.core.memory import gb
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import Component
from sparrow.embeddings.stores.ssd import queue_bytes
from sparrow.kernels.block_io import Layout
from sparrow.kernels.row_cache.policies import policy_of
from sparrow.trained.run import Run

NOTE = ".ssd.json"  # in a run's directory: where it has files of blocks
SAVED_ROW = 14  # bytes for each frame, see `SsdStore.save`
SAVED_PIECES = 3 * pieces.WRITERS * pieces.PIECE  # bytes: as gathered, as one, and as written
SAVED_BLOCK = 24  # bytes for each block: its place and generation, as they are and twice on their way to a file
KEPT_BLOCK = 4  # bytes for each block of a checkpoint that is there


def check_disks(run: Run, components: Sequence[Component], dataset: Dataset, hosts: int = 1) -> None:
    """Check that rows of tables on an SSD, and checkpoints beside the others, find a folder and room there.

    Blocks that nobody learnt from are never written. Checkpoints share the blocks that did not change between them. The
    best one may be so old that it shares none. What the run has already, if it goes on or is overwritten, counts as
    free. A checkpoint in the run directory has a map of them, and the rows in frames; of tables in memory it has all
    rows.

    Args:
        run: its settings.
        components: of all tables.
        dataset: the prepared log.
        hosts: among how many the rows are divided.

    Raises:
        UserError: names the folder, what is wrong with it or lacks on its disk, and the remedy.
    """
    on_ssd = [c for c in components if c.tier.has_folder]
    named = [] if run.checkpoint.whole else [c for c in on_ssd if c.tier.has_blocks]
    if not on_ssd or run.ssd is None:
        return
    if len(named) < len(on_ssd) and run.checkpoint.background:
        why = "checkpoints with all rows of tables on an SSD are not written in the background"
        remedy = "leave it out, or have all in memory or in the tier ssd, without checkpoint.whole"
        raise UserError(f"checkpoint.background: {why}; {remedy}")
    batch = dataset.first(min(256, run.data.batch_size))
    ids = batch.ids.values_N.numel() / max(batch.batch_size, 1) / hosts
    steps = run.loop.max_steps or math.ceil(dataset.rows("train") / run.data.batch_size) * run.loop.epochs
    between = min(run.checkpoint.every or steps, steps) * run.loop.accumulate * run.data.batch_size
    kept = run.checkpoint.keep + 2 + run.checkpoint.background  # the best too, and the one that is written
    used = ids * dataset.rows("train")
    blocks, once = (sum(c.tier.disk_bytes(c, used, hosts) for c in some) for some in (on_ssd, named))
    changed = sum(c.tier.disk_bytes(c, ids * between, hosts) for c in named)
    blocks += min(once, changed) * (kept - 1) + once
    kept *= sum(_bytes_saved(component, run.checkpoint.whole) for component in components)
    place, ssd = Path(run.run_dir), Path(run.ssd)
    mine = [path for folder in folders_of(place) if folder.parent == ssd.resolve() for path in folder.glob("*")]
    needs = [(ssd, blocks, mine, "rows of tables on an SSD, and their checkpoints,", "name another folder with --ssd")]
    needs.append((place, kept, list(place.glob("checkpoints/*/*")), "checkpoints", "name another --run_dir"))
    for place, size, has, what, remedy in needs:
        there = _there(place)
        try:
            with TemporaryDirectory(prefix=".sparrow-", dir=there):
                free = shutil.disk_usage(there).free + sum(map(_allocated, has))
        except OSError as error:
            told = f"no folder can be made in {there} ({error.strerror or error})"
            raise UserError(f"{place}: {told}; {remedy}") from None
        if size > free:
            told = f"{what} need up to {gb(size)}, and {gb(free)} are free or have the run"
            raise UserError(f"{place}: {told}; lower checkpoint.keep, or {remedy}")


def bytes_of_checkpoints(components: Iterable[Component], keep: int) -> int:
    """Returns the bytes of memory that checkpoints of tables on an SSD take beside the tables.

    While one table is written, the next one is prepared. And memory says which blocks are of checkpoints.

    Args:
        components: of all tables.
        keep: see `Checkpoints`.
    """
    on_ssd = [component for component in components if component.tier.has_blocks]
    kept = KEPT_BLOCK * (keep + 1) * sum(_layout(component).blocks for component in on_ssd)
    return kept + sum(sorted(map(_bytes_saving, on_ssd))[-2:])


def _bytes_saving(component: Component) -> int:
    """Returns the bytes of memory that a component takes while it is written to a checkpoint.

    They are which frames have rows, places of rows in frames, pieces of the rows, and the map as it is and as a file.
    """
    frames = sum(component.tier_frames(component.rows))
    return SAVED_ROW * frames + SAVED_PIECES + SAVED_BLOCK * _layout(component).blocks


def folders_of(run_dir: Path) -> list[Path]:
    """Returns the folders in which a run has files of blocks."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return [Path(folder) for folder in json.loads((run_dir / NOTE).read_text(encoding="utf-8"))["folders"]]
    return []


def _layout(component: Component) -> Layout:
    return Layout(fields=component.fields, rows=component.rows)


def _bytes_saved(component: Component, whole: bool) -> int:
    """Returns the bytes of a component in a checkpoint's folder. whole: of those on an SSD it has all rows."""
    above = component.frames(component.rows) * component.frame_bytes(component.dim) if component.cache.is_on else 0
    if whole or not component.tier.has_blocks:
        return above + component.rows * component.bytes_row
    newer = sum(component.tier_frames(component.rows)) * (8 + component.bytes_row)
    newer += component.rows * policy_of(component.tier.policy).bytes_row
    return above + 8 * _layout(component).blocks + newer + queue_bytes(component, component.rows)


def _allocated(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_blocks * 512
    return 0


def _there(path: Path) -> Path:
    """Returns the path, or the nearest above it that is there."""
    path = path.absolute()
    while not os.path.exists(path):  # nor is one with a file in it, or that may not be looked at
        path = path.parent
    return path
