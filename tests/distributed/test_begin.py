from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow.distributed import World, begin_lobby, begin_world

TRAINS = """
import sys
from sparrow.cli import main

sys.argv = ["sparrow", "train", sys.argv[1], "--run_dir", sys.argv[2], "--loop.max_steps", "2", "--model.dim", "4"]
sys.argv += ["--model.members", "2", "--model.trees", "5"]
try:
    main()
except SystemExit as end:
    assert not end.code
print(*(name for name in sys.modules if name.startswith("sparrow.")), file=sys.__stdout__)
"""
OF_MANY = [
    *(
        f"sparrow.distributed.{name}"
        for name in ("mesh", "watch", "waits", "attempt", "limits", "devices", "sharing")
    ),
    *("sparrow.sharding", "sparrow.training.many_ranks"),
]


def test_one_process_loads_nothing_of_many_ranks(prepared: Path, tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", TRAINS, str(prepared), str(tmp_path / "run")]
    alone = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    done = subprocess.run(arguments, capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = done.stdout.splitlines()[-1].split()
    assert "sparrow.training.loop" in loaded and "sparrow.embeddings.tables" in loaded
    assert [name for name in loaded if name.startswith(tuple(OF_MANY))] == []


def test_a_job_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world, lobby = begin_world(), begin_lobby(1.0)
    assert type(world) is World and world.size == lobby.size == 1
    assert lobby.broadcast("what", {"a": 1}) == world.broadcast("what", {"a": 1}) == {"a": 1}
