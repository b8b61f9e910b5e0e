"""Dense weights in 16 bits between the steps of any optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparrow.kernels.philox import key_of
from sparrow.layers.precision import Weights
from sparrow.numerics.rounding import noise, to_bf16

LOW, ROUNDS = "low", "rounds"
HIGH_BITS, LOW_BITS = ~0xFFFF, 0xFFFF


class FewBits:
    """Lets weights be bf16 numbers whenever no step is under way. Their tensors, of fp32, stay.

    "bf16" rounds them to the nearest after each step, which loses changes below half of a last bit. "bf16-stochastic"
    rounds up or down with the probability that leaves the expectation as it is. "split" cuts the low half of the bits
    off and keeps it in the optimizer's state, as int16; a step sees both halves, and so is one of fp32 (Split-SGD;
    Kalamkar et al., arXiv 2005.04680, section VII, here for every optimizer).

    Args:
        optimizer: its `step` is replaced.
        weights: "fp32" changes nothing.
        seed: of the random numbers, which depend on it, on the weight's place and on the number of the step alone.
    """

    def __init__(self, optimizer: Optimizer, weights: Weights, seed: int) -> None:
        self._optimizer = optimizer
        self._weights = weights
        self._seed = seed
        self._whole_step = optimizer.step
        if weights != "fp32":
            optimizer.step = self._step  # type: ignore[method-assign, assignment]
            self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        """Round the weights, which somebody else has written."""
        for place, weight in enumerate(self._all() if self._weights != "fp32" else ()):
            state = self._optimizer.state[weight]
            if self._weights == "split":
                low = weight.view(torch.int32) & LOW_BITS
                if LOW not in state or low.any():  # else it is cut, and its low half is there
                    state[LOW] = low.to(torch.int16)
                    weight.copy_((weight.view(torch.int32) & HIGH_BITS).view(torch.float32))
            elif self._weights == "bf16":
                weight.copy_(weight.bfloat16())
            else:
                rounds = int(state.get(ROUNDS, 0))
                state[ROUNDS] = torch.tensor(float(rounds + 1))  # a checkpoint holds tensors
                weight.copy_(to_bf16(weight, self._noise(weight, place, rounds)))

    @torch.no_grad()
    def _step(self) -> None:
        kept = to_fp32(self._optimizer)
        self._whole_step()
        for weight, rounds in kept.items():
            self._optimizer.state[weight][ROUNDS] = rounds
        self.settle()

    def _all(self) -> Iterator[Tensor]:
        return _weights(self._optimizer)

    def _noise(self, weight: Tensor, place: int, rounds: int) -> Tensor:
        rows_R = torch.arange(1 if weight.dim() < 2 else len(weight), device=weight.device)
        columns = weight.numel() // max(len(rows_R), 1)
        return noise(key_of(self._seed, f"dense {place}"), 0, rows_R, (0, columns), rounds).view(weight.shape)


@torch.no_grad()
def to_fp32(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """Give weights that "split" has cut their low halves back, and take what `FewBits` keeps out of the state.

    A step needs that, because an optimizer takes a weight without state for a new one. So does a run that begins with
    the weights of another one, and may keep them otherwise.

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
