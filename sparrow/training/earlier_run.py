"""The run that another begins with, see `init_from`: its settings, its log and its best
checkpoint.
"""

from __future__ import annotations

from sparrow import checkpoint
from sparrow.core import UserError
from sparrow.distributed import World, check_same, everywhere, run_on_rank0
from sparrow.features.transforms import Transforms
from sparrow.trained.run import Run
from sparrow.training.rundir import RunDir


def read_settings(run_dir: RunDir, world: World) -> tuple[Run, Transforms]:
    """Returns the settings of a run that another begins with, and how its log was prepared.

    Raises:
        UserError: when this is no run's directory, or a rank does not come to see its files.
    """

    def names() -> list[str]:
        if not (run_dir.path / "run.toml").exists():
            remedy = "give that of a `sparrow train` job"
            raise UserError(
                f"init_from: {run_dir.path} is not a run directory (no run.toml); {remedy}"
            )
        folder = run_dir.path
        files = sorted(
            [*folder.glob("*.toml"), *folder.glob("vocabulary/*"), *folder.glob("maps/*")]
        )
        return [str(file.relative_to(folder)) for file in files]

    on_rank0 = run_on_rank0(world, "init_from", names)

    def look() -> None:  # ranks may see it later than rank 0
        for name in on_rank0:
            run_dir.await_file(run_dir.path / name, world)

    everywhere(world, "init_from", look)
    return Run.load(run_dir.path / "run.toml"), Transforms.load(run_dir.path)


def best_checkpoint(run_dir: RunDir, world: World) -> checkpoint.Checkpoint:
    """Returns the best checkpoint, else the last, as rank 0 sees it.

    Raises:
        UserError: when there is none, or ranks have others.
    """

    def look() -> int:
        return checkpoint.load(
            run_dir.checkpoints, checkpoint.latest(run_dir.checkpoints, best=True)
        ).step

    step = run_on_rank0(world, "init_from", look)
    saved = run_dir.see_checkpoint(step, world)
    check_same(world, "init_from", {"init_from": saved.fingerprint[:12]})
    return saved
