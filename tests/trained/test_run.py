from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sparrow.core import UserError
from sparrow.core.config import write_toml
from sparrow.optimizers import adam
from sparrow.trained.run import Run, Schedule
from sparrow.training import train
from tests.runs import small_run


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        (Schedule(decay="constant"), [1, 1, 1, 1, 1]),
        (Schedule(), [1, 1, 1, 1, 0.6667]),
        (Schedule(warmup_steps=2, decay="constant"), [0.5, 1, 1, 1, 1]),
        (Schedule(warmup_steps=1, decay="linear", hold=0.0, final=0.2), [1, 1, 0.8, 0.6, 0.4]),
        (Schedule(decay="cosine", hold=0.0), [1, 0.9045, 0.6545, 0.3455, 0.0955]),
    ],
)
def test_schedules(schedule: Schedule, wanted: list[float]) -> None:
    assert [schedule.factor(s, 5) for s in range(5)] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"loop": {"accumulate": 2, "update_mode": "fused"}}, "use 'deferred' or 'auto'"),
        ({"loop": {"epochs": 0}}, "epochs: 0 is out of range"),
        ({"device": "gpu"}, "'gpu' is not one to train on"),
        ({"data": {"path": "x", "batch_size": -1}}, "batch_size: -1"),
        ({"model": {"name": "dlmr"}}, "model.name: there is no 'dlmr'; did you mean 'dlrm'"),
        ({"modle": {}}, "modle: unknown key; did you mean 'model'"),
    ],
)
def test_impossible_runs(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    good = {"run_dir": "r", "data": {"path": "x"}, "model": {"name": "dlrm"}}
    (tmp_path / "run.toml").write_text(write_toml(good | change))
    with pytest.raises(UserError, match=f"run.toml: .*{says}"):
        Run.load(tmp_path / "run.toml")


def test_configs_read_back_to_the_last_bit(tmp_path: Path) -> None:
    pick = random.Random(0)
    for _ in range(20):
        run = small_run(Path("p"), Path("r"), seed=pick.randrange(99), dense=adam.Config(lr=pick.random() * 1e-3))
        run.save(tmp_path / "run.toml")
        assert Run.load(tmp_path / "run.toml") == run


def test_a_run_of_defaults(prepared: Path, tmp_path: Path) -> None:
    run = Run.of(prepared, {"run_dir": str(tmp_path / "run"), "log.tensorboard": False, "loop.max_steps": 2})
    train(run)
    chosen = Run.load(tmp_path / "run" / "run.toml")
    assert chosen.data.batch_size == 64
    assert Run.of(prepared).run_dir == f"runs/{prepared.name}"
