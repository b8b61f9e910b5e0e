"""A run with `--device cuda` on a stand-in for a GPU, through all that it calls; see
`tests/standin.py`.
"""

from __future__ import annotations

import multiprocessing as mp
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow.core.config import Family, to_dict
from sparrow.extensions.blend import model as blend
from sparrow.kernels.formats import fp32, int4, int8, split_bf16
from sparrow.sharding import Layout
from tests import standin, standin_cases
from tests.data.grouped import prepared_sessions
from tests.models.test_models import HISTORY, MODELS, named

FAMILY = Family("sparrow.models")
ONE_EACH = list({FAMILY.name_of(config): config for config in reversed(MODELS)}.values())[::-1]
ONE_EACH.append(next(config for config in MODELS if repr(HISTORY) in repr(config)))


@pytest.fixture(scope="module")
def away() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process of its own: autograd must hear of a device before its first
    backward.
    """
    with ProcessPoolExecutor(1, mp.get_context("forkserver"), standin.register) as pool:
        yield lambda function, *given: pool.submit(function, *given).result(120)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Clustered, with groups and weights."""
    return prepared_sessions(tmp_path_factory.mktemp("sessions"))


def settings(config: Any, **more: Any) -> dict[str, Any]:
    model = to_dict(config) | {"name": FAMILY.name_of(config)}
    return {"data.batch_size": 60, "model": model, "loop.max_steps": 2, "log.every": 1, **more}


def alike(cpu: list[dict[str, Any]], cuda: list[dict[str, Any]]) -> bool:
    """Whether two run logs have the same lines, with numbers to 1e-4."""
    kinds = [[line.pop("event") for line in log] for log in (cpu, cuda)]
    return kinds[0] == kinds[1] and all(
        a == pytest.approx(b, rel=1e-4) for a, b in zip(cpu, cuda, strict=True)
    )


@pytest.mark.parametrize(
    "config", [c for c in ONE_EACH if not isinstance(c, blend.Config)], ids=named
)
def test_a_step_waits_once_and_adds_in_order(
    away: Any, sessions: str, tmp_path: Path, config: Any
) -> None:
    """Losses, metrics and scores are those of the CPU; the plain sums of the dense layers add in
    another order.
    """
    found = away(standin_cases.both, sessions, str(tmp_path), settings(config))
    assert found["steps"] == [Counter({"_to_copy to the host": 1})] * 2
    assert not found["unordered"]
    torch.testing.assert_close(*found["scores"], rtol=1e-4, atol=1e-5)
    assert alike(*found["logs"])


VARIANTS: dict[str, dict[str, Any]] = {
    "fused": {"loop.nonfinite": "off"},
    "clipped and accumulated": {"loop.clip_norm": 0.01, "loop.accumulate": 2},
    "shuffled, no dedup": {"data.shuffle": True, "data.dedup": "off"},
    "pairwise": {"loss.name": "pairwise", "loss.weights": {"label": 2.0}, "data.shuffle": True},
    "listwise": {"loss.name": "listwise", "loss.bce": 0.5},
    "dropout": {"model.dropout": 0.4},
    "two epochs": {"data.batch_size": 300, "loop.epochs": 2, "loop.max_steps": None},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_whatever_the_loop(away: Any, sessions: str, tmp_path: Path, name: str) -> None:
    given = settings(MODELS[1], **VARIANTS[name])
    found = away(standin_cases.both, sessions, str(tmp_path), given)
    assert all(sum(step.values()) == 1 for step in found["steps"])
    assert not found["unordered"]
    assert alike(*found["logs"])


def test_batches_arrive_before_they_are_used(away: Any, sessions: str, tmp_path: Path) -> None:
    found = away(standin_cases.both, sessions, str(tmp_path), settings(MODELS[1]))
    assert found["stream"]["waited"] >= 2
    # at least numbers, labels, ids, lengths, offsets and an index of each
    assert found["stream"]["kept"] >= 2 * 6


def test_resumed_is_uninterrupted(away: Any, sessions: str, tmp_path: Path) -> None:
    given = settings(
        MODELS[1],
        **{"data.batch_size": 40, "loop.epochs": 2, "loop.max_steps": 9, "checkpoint.every": 3},
    )
    assert away(standin_cases.resumed, sessions, str(tmp_path), given)


@pytest.mark.parametrize(
    "format", [fp32.Config(), int8.Config(), int4.Config(), split_bf16.Config()], ids=str
)
def test_rows_are_made_on_the_device(away: Any, format: Any) -> None:
    """With the numbers that they have on the host, which never holds more than a block of them."""
    found = away(standin_cases.rows, format, 8)
    assert found["cpu"].keys() == found["cuda"].keys()
    assert all(torch.equal(found["cpu"][name], found["cuda"][name]) for name in found["cpu"])
    assert found["sent"] <= 8 * (9 + 8)  # int8 has 8 bytes more a row


LAYOUTS = {
    "one shard": Layout(ranks=(0,)),
    "rows": Layout(ranks=(0, 0, 0), rows=3),
    "columns": Layout(ranks=(0, 0), columns=2),
    "sums within the host": Layout(ranks=(0,), through_host=True),
    "copied": Layout(),
}


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("mode", ["fused", "deferred"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_exchange_waits_at_most_once(away: Any, name: str, mode: str, unique: bool) -> None:
    """Where rows are cut the host has to know how many ids go where. What ranks find together is
    the second wait.
    """
    found = away(
        standin_cases.sharded,
        LAYOUTS[name],
        ("sum", "mean", "none", "sum"),
        mode,
        unique,
        mode == "fused",
    )
    assert found["waits"] == ({"_to_copy to the host": 1} if name == "rows" else {})
    assert not found["unordered"]
    for cpu, cuda in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(cpu, cuda, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["tables", "a step"])
def test_a_full_device_is_one_line(away: Any, sessions: str, tmp_path: Path, where: str) -> None:
    said = away(standin_cases.full, settings(MODELS[1]), sessions, str(tmp_path / "run"), where)
    expected = {
        "tables": (
            r"table '\w+': its rows take [\d.]+ GB and 68.72 GB of cuda are free; choose a smaller"
            r" --tables"
        ),
        "a step": (
            r"memory of cuda: it is full, and 2.00 GiB more were asked for; the largest table,"
            r" '\w+', takes .* "
            r"lower --data.batch_size from 60, train on more GPUs, or"
        ),
    }
    assert re.match(expected[where], said)
    assert "\n" not in said


@pytest.mark.parametrize(
    "beneath", [None, {"name": "ssd", "fraction": 0.5}], ids=["host", "over an SSD"]
)
def test_rows_of_the_host_beneath_frames(
    away: Any, sessions: str, tmp_path: Path, beneath: Any
) -> None:
    """Frames are on the device, where nothing is added in another order; who is in which is known
    on the host.
    """
    tier = {
        "tables.tier.name": "host",
        "tables.tier.fraction": 0.3,
        "data.batch_size": 20,
        "loop.max_steps": 12,
    }
    tier |= (
        {"tables.tier.beneath": beneath, "tiers.folder": str(tmp_path / "disk")} if beneath else {}
    )
    found = away(standin_cases.both, sessions, str(tmp_path), settings(MODELS[1], **tier))
    assert not found["unordered"]
    torch.testing.assert_close(*found["scores"], rtol=1e-4, atol=1e-5)
    assert alike(*found["logs"])


def test_rows_of_the_host_wait_there_for_checkpoints(
    away: Any, sessions: str, tmp_path: Path
) -> None:
    """In the background all chunks of a table wait at a time, which a device may have no room
    for.
    """
    tier = {
        "tables.tier.name": "host",
        "tables.tier.fraction": 0.3,
        "data.batch_size": 20,
        "loop.max_steps": 6,
    }
    tier |= {"checkpoint.every": 2}
    found, waiting = away(
        standin_cases.in_background, sessions, str(tmp_path), settings(MODELS[1], **tier)
    )
    assert found and waiting["host"] > 0 and not waiting["device"]
