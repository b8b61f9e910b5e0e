from __future__ import annotations

import pytest
import torch

from sparrow.core import UserError
from sparrow.distributed import World, begin_world


def test_a_job_of_one_needs_nobody() -> None:
    world, parts = World(), [torch.arange(3)]
    assert torch.equal(world.all_to_all("x", parts).wait()[0], parts[0])
    assert world.all_gather("x", parts[0])[0] is parts[0]
    assert world.all_sum("x", torch.ones(1)).item() == 1
    assert world.meter.bytes == {("x, sizes", "self"): 8, ("x", "self"): 24}


def test_hosts_must_be_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="4 ranks do not divide into hosts of 3"):
        begin_world(local_size=3)
