"""Dense weights in 16 bits between the steps of any optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparrow.kernels.philox import key_of
from sparrow.layers.precision import Weights
from sparrow.numerics.rounding import noise, to_bf16

LOW = "low"
ROUNDS = "rounds"
HIGH_BITS = ~0xFFFF
LOW_BITS = 0xFFFF


def keep_in_few_bits(optimizer: Optimizer, weights: Weights, seed: int) -> None:
    """Let weights be bf16 numbers whenever no step is under way. Their tensors, of fp32, stay.

    "bf16" rounds them to the nearest after each step, which loses changes below half of a last bit.
    "bf16-stochastic" rounds up or down with the probability that leaves the expectation as it is.
    "split" cuts the low half of the bits off and keeps it in the optimizer's state, as int16; a
    step sees both halves, and so is one of fp32 (Split-SGD; Kalamkar et al., arXiv 2005.04680,
    section VII, here for every optimizer).

    Args:
        optimizer: its `step` is replaced.
        weights: "fp32" changes nothing.
        seed: of the random numbers, which depend on it, on the weight's place and on the number of
            the step alone.
    """
    if weights == "fp32":
        return
    step_in_fp32 = optimizer.step

    @torch.no_grad()
    def step() -> None:
        rounds_of = to_fp32(optimizer)
        step_in_fp32()
        for weight, rounds in rounds_of.items():
            optimizer.state[weight][ROUNDS] = rounds
        settle(optimizer, weights, seed)

    optimizer.step = step  # type: ignore[method-assign, assignment]
    settle(optimizer, weights, seed)


@torch.no_grad()
def settle(optimizer: Optimizer, weights: Weights, seed: int) -> None:
    """Round the weights, which somebody else has written. The arguments are those of
    `keep_in_few_bits`.
    """
    for place, weight in enumerate(_weights(optimizer) if weights != "fp32" else ()):
        state = optimizer.state[weight]
        if weights == "split":
            low = weight.view(torch.int32) & LOW_BITS
            if LOW not in state or low.any():  # else it is cut, and its low half is there
                state[LOW] = low.to(torch.int16)
                weight.copy_((weight.view(torch.int32) & HIGH_BITS).view(torch.float32))
        elif weights == "bf16":
            weight.copy_(weight.bfloat16())
        else:
            rounds = int(state.get(ROUNDS, 0))
            state[ROUNDS] = torch.tensor(float(rounds + 1))  # a checkpoint holds tensors
            weight.copy_(to_bf16(weight, _noise(weight, key_of(seed, f"dense {place}"), rounds)))


@torch.no_grad()
def to_fp32(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Give weights that "split" has cut their low halves back, and take what `settle` keeps out of
    the state.

    A step needs that, because an optimizer takes a weight without state for a new one. So does a
    run that begins with the weights of another one, and may keep them otherwise.

    Returns:
        How often each weight was rounded, of "bf16-stochastic".
    """
    rounds = {}
    for weight in _weights(optimizer):
        state = optimizer.state.get(weight, {})
        if (count := state.pop(ROUNDS, None)) is not None:
            rounds[weight] = count
        if (low := state.pop(LOW, None)) is not None:
            high = weight.view(torch.int32) & HIGH_BITS
            weight.copy_((high | low.to(torch.int32) & LOW_BITS).view(torch.float32))
    return rounds


def _weights(optimizer: Optimizer) -> Iterator[Tensor]:
    return (weight for group in optimizer.param_groups for weight in group["params"])


def _noise(weight: Tensor, key: int, rounds: int) -> Tensor:
    rows_R = torch.arange(1 if weight.dim() < 2 else len(weight), device=weight.device)
    columns = weight.numel() // max(len(rows_R), 1)
    return noise(key, 0, rows_R, (0, columns), rounds).view(weight.shape)
