"""What the products of a model read and give on rows of a log: ranges of inputs, shapes, errors of a format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.layers import Instead, Product, sites
from sparrow.serving.products import Range, joined

BINS = 2048
ENDS = 32  # ends of a range that are tried on each side
CODES = 255  # steps between the least and the largest input of 8 bits

See = Callable[[str, Sequence[Tensor], Tensor], None]
"""(site, the parts of its inputs, its output), see `Product`."""


@dataclass(kw_only=True, eq=False)
class Seen:
    """What a product does with some rows.

    weight_OI: as it is used, fitted to the inputs. examples: rows of the log. inputs: rows of the product, which are
    more where each id of a list has one. low, high: the least and the largest input. counts_H: of inputs, in BINS equal
    parts of that range.
    """

    weight_OI: Tensor
    bias: Tensor | None = None
    relu: bool = False
    examples: int = 0
    inputs: int = 0
    low: float = 0.0
    high: float = 0.0
    counts_H: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.float64))

    @property
    def flops(self) -> float:
        """Floating-point operations an example; a multiply-add counts as two."""
        return 2.0 * self.weight_OI.numel() * self.inputs / max(self.examples, 1)

    @cached_property
    def range(self) -> Range:
        """The range whose 8-bit codes are nearest to the inputs, see `least_squares`."""
        return least_squares(self.counts_H, self.low, self.high)


@contextmanager
def watched(model: nn.Module, see: See) -> Iterator[None]:
    """Every product within this context is told to `see`."""

    def told(site: str, product: Product, args: Any, kwargs: dict[str, Any], y: Tensor) -> None:
        parts = args[0]
        if kwargs.get("across"):
            parts, y = [_upright(part) for part in parts], _upright(y)
        see(site, parts, y)

    with _hooked(model, told):
        yield


@contextmanager
def _hooked(model: nn.Module, told: Callable[..., None]) -> Iterator[None]:
    """Within this context `told` is told of every product: site, product, arguments, named ones, output."""
    handles = [one.register_forward_hook(partial(told, site), with_kwargs=True) for site, one in sites(model).items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def observed(model: nn.Module, score: Callable[[Batch], Tensor], batches: Sequence[Batch]) -> dict[str, Seen]:
    """Returns what each product does with some batches. A product that these rows do not reach is left out.

    Args:
        model: in fp32.
        score: runs it.
        batches: of the log.
    """
    found = _weights(model, score, batches[0])
    examples = sum(batch.batch_size for batch in batches)

    def measure(site: str, parts: Sequence[Tensor], y: Tensor) -> None:
        x = joined(parts)
        seen = found[site]
        if x.numel():
            seen.low, seen.high = min(seen.low, float(x.min())), max(seen.high, float(x.max()))
        seen.inputs += len(x)

    def count(site: str, parts: Sequence[Tensor], y: Tensor) -> None:
        seen = found[site]
        if seen.high > seen.low:
            seen.counts_H += torch.histc(joined(parts), BINS, seen.low, seen.high).double()

    for see in (measure, count):
        with watched(model, see):
            for batch in batches:
                score(batch)
    for seen in found.values():
        seen.examples = examples
    return {site: seen for site, seen in found.items() if seen.inputs}


def _weights(model: nn.Module, score: Callable[[Batch], Tensor], batch: Batch) -> dict[str, Seen]:
    """Returns the weight of each product as it is used."""
    found: dict[str, Seen] = {}

    def told(site: str, product: Product, args: Any, kwargs: dict[str, Any], y: Tensor) -> None:
        parts, weight, *bias = args
        if kwargs.get("across"):
            parts = [_upright(part) for part in parts]
        weights = product.weights(weight, [joined([part]) for part in parts], kwargs.get("fold"))
        found[site] = Seen(
            weight_OI=joined(weights).contiguous(),
            bias=bias[0] if bias else None,
            relu=bool(kwargs.get("relu")),
        )

    with _hooked(model, told):
        score(batch)
    return found


def _upright(x: Tensor) -> Tensor:
    """Returns what a product across reads or gives, [n, B, D], as the rows of a matrix, [B * D, n]."""
    return x.flatten(1).t()


def least_squares(counts_H: Tensor, low: float, high: float) -> Range:
    """Returns the range, within low and high and around 0, whose 8-bit codes have the least squared error.

    Inputs beyond the range get its end (arXiv 2105.12676: calibration that minimises L2).

    Args:
        counts_H: how many inputs lie in each of equal parts of low to high, float64.
        low: the least input, or 0.
        high: the largest, or 0.
    """
    if not high > low:
        return low, high
    middle_H = low + (torch.arange(len(counts_H), dtype=torch.float64) + 0.5) * (high - low) / len(counts_H)
    shares = 1 - torch.arange(ENDS, dtype=torch.float64) / ENDS
    best, found = float("inf"), (low, high)
    for end in (high * shares).tolist() if high else [0.0]:
        for begin in (low * shares).tolist() if low else [0.0]:
            step = (end - begin) / CODES
            if step <= 0:
                continue
            read_H = ((middle_H - begin) / step).round().clamp(0, CODES) * step + begin
            error = float(counts_H @ (read_H - middle_H).square())
            if error < best:
                best, found = error, (begin, end)
    return found


def output_errors(
    model: nn.Module, score: Callable[[Batch], Tensor], batch: Batch, seen: dict[str, Seen], made: dict[str, Instead]
) -> dict[str, float]:
    """Returns site -> the relative error of its outputs, |y' - y| / |y|, when it alone is done in another way.

    Args:
        model: in fp32.
        score: runs it.
        batch: rows of the log.
        seen: see `observed`.
        made: site -> the other way.
    """
    sums: dict[str, tuple[float, float]] = {}

    def see(site: str, parts: Sequence[Tensor], y: Tensor) -> None:
        if site not in made:
            return
        of, (wrong, all_) = seen[site], sums.get(site, (0.0, 0.0))
        other = made[site]([part.float() for part in parts], of.bias, of.relu)
        sums[site] = wrong + float((other - y).square().sum()), all_ + float(y.square().sum())

    with watched(model, see):
        score(batch)
    return {site: (wrong / whole) ** 0.5 if whole else 0.0 for site, (wrong, whole) in sums.items()}
