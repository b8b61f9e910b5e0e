"""One matrix for the family: a new optimizer adds a row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparrow.core import UserError
from sparrow.core.config import Family
from sparrow.optimizers import OptimizerConfig, adagrad, adam, sgd

FAMILY = Family("sparrow.optimizers")
OPTIMIZERS = [
    adam.Config(lr=0.1),
    adagrad.Config(lr=0.5),
    sgd.Config(lr=0.2),
    sgd.Config(lr=0.1, momentum=0.5),
]


def test_every_optimizer_has_a_row() -> None:
    assert {FAMILY.name_of(config) for config in OPTIMIZERS} == set(FAMILY.names())


@pytest.mark.parametrize("config", OPTIMIZERS, ids=repr)
def test_finds_the_minimum(config: OptimizerConfig) -> None:
    x = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = config.build([x])
    assert optimizer.param_groups[0]["lr"] == config.lr
    for _ in range(200):
        ((x - 1) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(x.detach(), torch.ones(2), atol=0.02, rtol=0)


@pytest.mark.parametrize("config", OPTIMIZERS, ids=repr)
def test_state_is_tensors(config: OptimizerConfig) -> None:
    """What a checkpoint can hold."""
    x = nn.Parameter(torch.ones(2))
    optimizer = config.build([x])
    x.sum().backward()
    optimizer.step()
    for values in optimizer.state_dict()["state"].values():
        assert all(value is None or isinstance(value, torch.Tensor) for value in values.values())


@pytest.mark.parametrize("name", FAMILY.names())
def test_a_negative_rate_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="lr: -1"):
        FAMILY.config(name)(lr=-1.0)
