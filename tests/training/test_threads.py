"""The threads that a run takes, leaves to others and gives back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparrow.trained.run import Loop, Run
from sparrow.training import preflight, train
from tests.runs import small_run


def written(run_dir: Path) -> int:
    return Run.load(run_dir / "run.toml").threads


def test_a_small_step_has_one_thread(
    prepared: Path, tmp_path: Path, threads: Callable[[int], None]
) -> None:
    threads(2)
    train(small_run(prepared, tmp_path / "auto", loop=Loop(max_steps=2), threads=0))
    assert written(tmp_path / "auto") == 1
    train(small_run(prepared, tmp_path / "told", loop=Loop(max_steps=2), threads=2))
    assert written(tmp_path / "told") == 2


def test_a_large_step_has_all_cores_and_is_gone_on_with_alike(
    prepared: Path, tmp_path: Path, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "SMALL_FLOP", 0)
    monkeypatch.setattr(preflight, "cores", lambda sharers=1: 2 // sharers)
    threads(2)
    train(small_run(prepared, tmp_path, loop=Loop(max_steps=2), threads=0))
    assert written(tmp_path) == 2
    monkeypatch.undo()  # now it would be one
    train(small_run(prepared, tmp_path, loop=Loop(max_steps=4), threads=0), resume=True)
    assert written(tmp_path) == 2


def test_the_choice_is_by_size(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]
) -> None:
    monkeypatch.setattr(preflight, "cores", lambda sharers=1: max(8 // sharers, 1))

    def needs(flop: float, step: int) -> preflight.Needs:
        return preflight.Needs(host={"a step": step}, device={}, largest=("", 0), flop=flop)

    def chosen(flop: float, step: int, ranks: int = 1) -> int:
        return preflight.threads_for(needs(flop, step), ranks)

    threads(4)  # as OMP_NUM_THREADS may say
    assert chosen(5e7, 1_000_000) == 1
    assert chosen(5e9, 1_000_000) == 4
    assert chosen(5e7, 500_000_000) == 4  # few weights, many tokens
    threads(1)  # as torchrun says to every rank
    assert [chosen(5e9, 0, ranks) for ranks in (2, 3, 8, 16)] == [4, 2, 1, 1]


def test_training_gives_the_process_its_threads_back(
    prepared: Path, tmp_path: Path, threads: Callable[[int], None]
) -> None:
    threads(2)
    train(small_run(prepared, tmp_path, loop=Loop(max_steps=2), threads=1))
    assert torch.get_num_threads() == 2


def test_the_command_line_waits_without_spinning_and_keeps_to_its_cores() -> None:
    show = "import os; print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('OMP_NUM_THREADS'))"
    program = f"""
import os, sys
os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])
sys.argv = ["sparrow", "evaluate", "nowhere"]
from sparrow.cli import main
main()
{show}
"""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=clean, check=True
    )
    one = "1" if (os.cpu_count() or 1) > 1 else "None"
    assert done.stdout.split() == ["PASSIVE", one]
    told = {**clean, "OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=told, check=True
    )
    assert done.stdout.split() == ["ACTIVE", "3"]


# -- what runs beside the loop ---------------------------------------------------------------------


def test_threads_end_with_a_run(prepared: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    train(small_run(prepared, tmp_path, loop=Loop(max_steps=3), threads=0))
    gc.collect()
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in left if name.startswith("sparrow")]
