"""Runs on a GPU; `test_standin.py` looks at the same where there is none."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow.layers.precision import Precision
from sparrow.models import dcnv2
from sparrow.trained.run import Loop, Run
from sparrow.training import Trainer, train
from tests.runs import learn, small_run
from tests.training.test_loop import Kill, dies_at, same, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once
VARIANTS: dict[str, dict[str, Any]] = {
    "deferred": {},
    "fused": {"loop": Loop(nonfinite="off")},
    "clipped, accumulated": {"loop": Loop(accumulate=2, clip_norm=0.5, epochs=2)},
    "bf16": {"precision": Precision("bf16"), "model": dcnv2.Config(dim=4, deep=(8,))},
}


def run_on(prepared: Path, folder: Path, name: str, device: str = "cuda") -> Run:
    return small_run(prepared, folder, device=device, **VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_learns_as_on_the_cpu_and_twice_alike(prepared: Path, tmp_path: Path, name: str) -> None:
    cpu = train(run_on(prepared, tmp_path / "cpu", name, "cpu"))
    found = [train(run_on(prepared, tmp_path / place, name)) for place in ("one", "other")]
    for metric in ("ne", "auc", "calibration"):
        assert found[0]["valid"][metric] == pytest.approx(
            cpu["valid"][metric], rel=0.02 if name == "bf16" else 1e-3
        )
    assert found[0]["valid"] == found[1]["valid"]
    assert same(tensors(tmp_path / "one"), tensors(tmp_path / "other"))


@pytest.mark.parametrize("name", VARIANTS)
def test_resumed_is_uninterrupted(prepared: Path, tmp_path: Path, name: str) -> None:
    train(run_on(prepared, tmp_path / "whole", name))
    with pytest.raises(Kill):
        train(run_on(prepared, tmp_path / "cut", name), listener=dies_at(6))
    train(run_on(prepared, tmp_path / "cut", name), resume=True)
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "cut"))


def test_torch_finds_it_deterministic(prepared: Path, tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        train(run_on(prepared, tmp_path / "run", "deferred"))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "most"), [("deferred", 2), ("fused", 1)])
def test_a_step_waits_at_most_twice(prepared: Path, tmp_path: Path, name: str, most: int) -> None:
    """As torch sees it; the first steps compile kernels and fill the allocators."""
    trainer = Trainer(run_on(prepared, tmp_path / "run", name))
    for step in range(6):
        micro = trainer.job.feed.take()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                learn(trainer, micro)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [
            str(one.message) for one in seen if "synchronizing CUDA operation" in str(one.message)
        ]
        assert step < 3 or len(waits) <= most, waits


@pytest.mark.multi
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("plan", ["row_wise", "table_wise", "data_parallel"])
def test_two_gpus_learn_as_one(prepared: Path, tmp_path: Path, plan: str) -> None:
    train(run_on(prepared, tmp_path / "one", "deferred"))
    run = run_on(prepared, tmp_path / "two", "deferred")
    run = dataclasses.replace(run, sharding=dataclasses.replace(run.sharding, plan=plan))
    run.save(tmp_path / "run.toml")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    subprocess.run(
        [*command, "-m", "sparrow", "train", str(tmp_path / "run.toml")], check=True, timeout=300
    )
    weights = tensors(tmp_path / "two")
    for name, value in tensors(tmp_path / "one").items():
        if name.startswith("dense."):
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)
