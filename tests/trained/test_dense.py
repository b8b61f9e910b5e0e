from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from sparrow import checkpoint
from sparrow.distributed import World
from sparrow.trained.dense import optimizer_state, optimizer_to_save
from sparrow.trained.optimizer_state import read_optimizer


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    # not in the model's order
    optimizer = torch.optim.Adam(reversed(list(model.parameters())), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_state_of_an_optimizer_that_an_earlier_sparrow_saved_by_number_is_read(
    tmp_path: Path,
) -> None:
    model, optimizer = stepped()
    numbers = optimizer.state_dict()["state"]
    by_number = {
        f"{n}.{key}": value for n, values in numbers.items() for key, value in values.items()
    }
    by_name = optimizer_to_save(model, optimizer, World())
    assert set(by_name) >= {"0.weight:exp_avg", "1.bias:step"}
    for step, part in enumerate((by_number, by_name)):
        checkpoint.save(tmp_path, step, identity={}, state={}, parts={"optimizer": part}, chunks=[])
        other, fresh = stepped()
        for values in fresh.state.values():
            for value in values.values():
                value.zero_()
        read_optimizer(other, fresh, checkpoint.load(tmp_path, step))
        got, want = optimizer_state(other, fresh), optimizer_state(model, optimizer)
        assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in got)
