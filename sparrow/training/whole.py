"""Checkpoints of a run with tables on an SSD get all rows after it has ended."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from sparrow import checkpoint
from sparrow.checkpoint import whole
from sparrow.core import UserError
from sparrow.core.memory import gb
from sparrow.core.progress import Progress
from sparrow.distributed import World
from sparrow.trained.run import Run
from sparrow.training.blocks import BlockFiles
from sparrow.training.rundir import RunDir


def make_whole(run_dir: Path, which: str, told: Progress) -> list[str]:
    """Write all rows of tables on an SSD into a checkpoint of a run. Returns what there is to say about it.

    Files of blocks that no checkpoint needs any more are removed.

    Args:
        run_dir: the run directory.
        which: the checkpoint, see `restore`.
        told: is told how far it is.

    Raises:
        UserError: when there is no such run or checkpoint, when the run trains, and as `checkpoint.whole` says.
    """
    run, dir = Run.load(run_dir / "run.toml"), RunDir(run_dir)
    with dir.locked():
        saved = checkpoint.load(dir.checkpoints, checkpoint.named(dir.checkpoints, which))
        if saved.block_files:
            said = [f"{saved.path}: it has all rows now, {gb(whole.make_whole(saved, told))}, and needs no other file"]
        else:
            said = [f"{saved.path}: it had all rows already"]
            whole.tidy(saved.path, saved.files)
        with BlockFiles(World(), run, dir, []).opened():
            pass  # this removes files
        left = []
        for step in checkpoint.steps(dir.checkpoints):
            with suppress(UserError):  # a damaged one
                left += [step] if checkpoint.load(dir.checkpoints, step).block_files else []
    if left:
        said.append(f"without all rows: step {', '.join(map(str, left))}; --whole {left[-1]} gives them to one more")
    return said
