"""What a run with tables on an SSD will need of disks, found before it needs it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from sparrow.core import UserError
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import Component
from sparrow.kernels.block_io import Layout
from sparrow.trained.run import Run

SPARE_BLOCKS = 1.1  # a block is written elsewhere before its old place is free


def check_disks(run: Run, components: Sequence[Component], dataset: Dataset) -> None:
    """Check that the rows of tables on an SSD find room, and their checkpoints beside the others.

    Blocks that nobody learnt from are never written. Checkpoints share blocks. At worst they share none.
    A checkpoint in the run directory has a map of them, and the rows in frames; of tables in memory it has all rows.

    Args:
        run: its settings.
        components: of all tables.
        dataset: the prepared log.

    Raises:
        UserError: names the disk, what it lacks and the remedy.
    """
    on_ssd = [component for component in components if component.tier.is_on]
    if not on_ssd or run.ssd is None:
        return
    whole, background = run.checkpoint.whole, run.checkpoint.background
    if whole and background:
        why = "checkpoints with all rows of tables on an SSD are not written in the background"
        raise UserError(f"checkpoint.background: {why}; leave it out, or checkpoint.whole")
    batch = dataset.first(min(256, run.data.batch_size))
    used = batch.ids.values_N.numel() / max(batch.batch_size, 1) * dataset.rows("train")
    kept = run.checkpoint.keep + 2 + background  # the best too, and the one that is written
    blocks = (1 if whole else 1 + kept) * sum(_bytes_blocks(component, used) for component in on_ssd)
    kept *= sum(_bytes_saved(component, whole) for component in components)
    remedy = "lower checkpoint.keep, or name another folder with --ssd"
    needs = [(Path(run.ssd), blocks, "rows of tables on an SSD, and their checkpoints,", remedy)]
    needs.append((Path(run.run_dir), kept, "checkpoints", "lower checkpoint.keep, or name another --run_dir"))
    for place, size, what, remedy in needs:
        free = shutil.disk_usage(_there(place)).free
        if size > free:
            raise UserError(
                f"{place}: {what} need up to {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; {remedy}"
            )


def _bytes_blocks(component: Component, used: float) -> int:
    """Returns the bytes of the blocks of a component of which rows may learn. used: lookups of the training part."""
    layout = Layout(fields=component.fields, rows=component.rows)
    return int(SPARE_BLOCKS * layout.block * min(layout.blocks, used))


def _bytes_saved(component: Component, whole: bool) -> int:
    """Returns the bytes of a component in a checkpoint's folder. whole: of those on an SSD it has all rows."""
    above = component.frames(component.rows) * component.frame_bytes(component.dim) if component.cache.is_on else 0
    if whole or not component.tier.is_on:
        return above + component.rows * component.bytes_row
    layout = Layout(fields=component.fields, rows=component.rows)
    newer = sum(component.tier_frames(component.rows)) * (8 + component.bytes_row)
    return above + 8 * layout.blocks + newer + component.tier_queue(component.rows)


def _there(path: Path) -> Path:
    """Returns the nearest folder above that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
