"""Weights in 16 bits, under every optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from sparrow.extensions.low_precision.few_bits import keep_in_few_bits, settle
from sparrow.optimizers import OptimizerConfig, adagrad, adam, sgd
from tests.optimizers.test_optimizers import OPTIMIZERS


def bits(weight: Tensor) -> Tensor:
    return weight.detach().view(torch.int32)


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [
        nn.Parameter(torch.randn(7, 5)),
        nn.Parameter(torch.randn(3) * 1e-40),
        nn.Parameter(torch.randn(())),
    ]


def run(
    config: OptimizerConfig, how: str, steps: int = 30, cut: int | None = None
) -> list[nn.Parameter]:
    """Returns the weights after some steps. cut: a step after which all goes through a
    checkpoint.
    """
    ours = weights()
    optimizer = config.build(ours)
    keep_in_few_bits(optimizer, how, 0)  # type: ignore[arg-type]
    gradients = torch.Generator().manual_seed(1)
    for step in range(steps):
        if step == cut:
            state = copy.deepcopy(optimizer.state_dict())
            ours = [nn.Parameter(weight.detach().clone()) for weight in ours]
            optimizer = config.build(ours)
            keep_in_few_bits(optimizer, how, 0)  # type: ignore[arg-type]
            optimizer.load_state_dict(state)
        for weight in ours:
            weight.grad = torch.randn(weight.shape, generator=gradients)
        optimizer.step()
    if how == "split":
        for weight in ours:
            assert not (bits(weight) & 0xFFFF).any()
            low = optimizer.state[weight]["low"]
            assert low.dtype == torch.int16
            weight.data = (bits(weight) | low.int() & 0xFFFF).view(torch.float32)
    return ours


@pytest.mark.parametrize("config", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("cut", [None, 1, 7])
def test_split_weights_are_those_of_fp32(config: OptimizerConfig, cut: int | None) -> None:
    """Bit for bit, for equal gradients, also of numbers that are subnormal."""
    for ours, plain in zip(run(config, "split", cut=cut), run(config, "fp32"), strict=True):
        assert torch.equal(bits(ours), bits(plain))


@pytest.mark.parametrize("how", ["bf16", "bf16-stochastic"])
@pytest.mark.parametrize("config", OPTIMIZERS, ids=repr)
def test_weights_are_bf16_numbers_and_go_on_as_they_were(config: OptimizerConfig, how: str) -> None:
    whole = run(config, how)
    for one, other in zip(whole, run(config, how, cut=7), strict=True):
        assert torch.equal(one, other) and torch.equal(one, one.bfloat16().float())
    assert not torch.equal(whole[0], run(config, "fp32")[0])


def test_small_steps_are_lost_to_the_nearest_and_not_on_average() -> None:
    """|lr g| is an eighth of what the nearest number would need."""
    found = {}
    for how in ("fp32", "bf16", "bf16-stochastic", "split"):
        x = nn.Parameter(torch.ones(4000))
        optimizer = sgd.Config(lr=2.0**-12).build([x])
        keep_in_few_bits(optimizer, how, 0)  # type: ignore[arg-type]
        for _ in range(256):
            x.grad = torch.ones(4000)
            optimizer.step()
        found[how] = float(x.detach().mean())
    assert found["bf16"] == 1.0  # it stalls
    assert found["fp32"] == 1 - 2.0**-4
    assert found["split"] == pytest.approx(found["fp32"], abs=2.0**-8)
    assert found["bf16-stochastic"] == pytest.approx(found["fp32"], abs=5 * 2.0**-8 / 4000**0.5 * 4)


def test_a_weight_that_is_no_number_stays_none() -> None:
    for how in ("bf16", "bf16-stochastic", "split"):
        x = nn.Parameter(torch.tensor([torch.nan, torch.inf, 1.0]))
        keep_in_few_bits(adam.Config().build([x]), how, 0)  # type: ignore[arg-type]
        assert x.isfinite().tolist() == [False, False, True]


def test_draws_depend_on_seed_place_and_step() -> None:
    def drawn(seed: int) -> list[Tensor]:
        x = [nn.Parameter(torch.full((500,), 1.001)) for _ in range(2)]
        keep_in_few_bits(adagrad.Config().build(x), "bf16-stochastic", seed)
        return [one.detach() for one in x]

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other[0])


def test_split_weights_that_are_settled_twice_keep_both_halves() -> None:
    """A run settles when it is made and when it begins, and somebody may have written a weight
    meanwhile.
    """
    ours, whole = weights(), weights()
    keep_in_few_bits(optimizer := sgd.Config().build(ours), "split", 0)
    with torch.no_grad():
        for of in (ours[0], whole[0]):
            of[0] += 0.1
    settle(optimizer, "split", 0)
    for weight, expected in zip(ours, whole, strict=True):
        low = optimizer.state[weight]["low"].to(torch.int32) & 0xFFFF
        assert not (bits(weight) & 0xFFFF).any()
        if weight is not ours[0]:
            assert torch.equal(bits(weight) | low, bits(expected))
