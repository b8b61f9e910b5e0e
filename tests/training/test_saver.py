from __future__ import annotations

from pathlib import Path

from sparrow import checkpoint
from sparrow.trained.run import Checkpoints
from sparrow.training import train
from tests.runs import small_run
from tests.training.test_loop import same, tensors


def test_checkpoints_in_the_background_are_the_same(prepared: Path, tmp_path: Path) -> None:
    for place, background in (("now", False), ("beside", True)):
        train(
            small_run(
                prepared, tmp_path / place, checkpoint=Checkpoints(every=3, background=background)
            )
        )
    assert same(tensors(tmp_path / "now"), tensors(tmp_path / "beside"))
    now, beside = (
        checkpoint.steps(tmp_path / place / "checkpoints") for place in ("now", "beside")
    )
    assert now == beside
    for step in now:
        one, other = (
            checkpoint.load(tmp_path / place / "checkpoints", step) for place in ("now", "beside")
        )
        assert one.files == other.files
