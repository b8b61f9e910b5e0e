"""What the products of a model read and give on rows of a log: ranges of inputs, shapes, errors of
a format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.kernels.flops import product_flops
from sparrow.layers.product import Instead, Product, sites
from sparrow.serving.products import Range, join_inputs

BINS = 2048
ENDS = 32  # ends of a range that are tried on each side
CODES = 255  # steps between the least and the largest input of 8 bits

See = Callable[[str, Sequence[Tensor], Tensor], None]
"""(site, the parts of its inputs, its output), see `Product`."""


@dataclass(kw_only=True, eq=False)
class ProductStats:
    """What a product does with some rows.

    weight_OI: as it is used, fitted to the inputs. examples: rows of the log. inputs: rows of the
    product, which are more where each id of a list has one. low, high: the least and the largest
    input. counts_H: of inputs, in BINS equal parts of that range.
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
        """Floating-point operations an example, see `product_flops`."""
        outputs, inputs = self.weight_OI.shape
        return product_flops(self.inputs, inputs, outputs) / max(self.examples, 1)

    @cached_property
    def range(self) -> Range:
        """The range whose 8-bit codes are nearest to the inputs, see `least_squares`."""
        return least_squares(self.counts_H, self.low, self.high)


@contextmanager
def watched(model: nn.Module, see: See) -> Iterator[None]:
    """Every product within this context is told to `see`."""

    def hook(site: str, product: Product, args: Any, kwargs: dict[str, Any], y: Tensor) -> None:
        parts = args[0]
        if kwargs.get("across"):
            parts = [_upright(part) for part in parts]
            y = _upright(y)
        see(site, parts, y)

    with _hooked(model, hook):
        yield


@contextmanager
def _hooked(model: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    """Within this context `hook` is called for every product: site, product, arguments, named ones,
    output.
    """
    handles = []
    for site, product in sites(model).items():
        handles.append(product.register_forward_hook(partial(hook, site), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def observe(
    model: nn.Module, score: Callable[[Batch], Tensor], batches: Sequence[Batch]
) -> dict[str, ProductStats]:
    """Observe what each product does with some batches. A product that these rows do not reach is
    left out.

    Args:
        model: in fp32.
        score: runs it.
        batches: of the log.
    """
    by_site = _weights(model, score, batches[0])
    examples = sum(batch.batch_size for batch in batches)

    def measure(site: str, parts: Sequence[Tensor], y: Tensor) -> None:
        x = join_inputs(parts)
        stats = by_site[site]
        if x.numel():
            stats.low, stats.high = min(stats.low, float(x.min())), max(stats.high, float(x.max()))
        stats.inputs += len(x)

    def count(site: str, parts: Sequence[Tensor], y: Tensor) -> None:
        stats = by_site[site]
        if stats.high > stats.low:
            stats.counts_H += torch.histc(join_inputs(parts), BINS, stats.low, stats.high).double()

    for see in (measure, count):
        with watched(model, see):
            for batch in batches:
                score(batch)
    for stats in by_site.values():
        stats.examples = examples
    return {site: stats for site, stats in by_site.items() if stats.inputs}


def _weights(
    model: nn.Module, score: Callable[[Batch], Tensor], batch: Batch
) -> dict[str, ProductStats]:
    """Returns the weight of each product as it is used."""
    by_site: dict[str, ProductStats] = {}

    def hook(site: str, product: Product, args: Any, kwargs: dict[str, Any], y: Tensor) -> None:
        parts, weight, *bias = args
        if kwargs.get("across"):
            parts = [_upright(part) for part in parts]
        weights = product.weights(
            weight, [join_inputs([part]) for part in parts], kwargs.get("fold")
        )
        by_site[site] = ProductStats(
            weight_OI=join_inputs(weights).contiguous(),
            bias=bias[0] if bias else None,
            relu=bool(kwargs.get("relu")),
        )

    with _hooked(model, hook):
        score(batch)
    return by_site


def _upright(x: Tensor) -> Tensor:
    """Returns what a product across reads or gives, [n, B, D], as the rows of a matrix, [B * D,
    n].
    """
    return x.flatten(1).t()


def least_squares(counts_H: Tensor, low: float, high: float) -> Range:
    """Returns the range, within low and high and around 0, whose 8-bit codes have the least squared
    error.

    Inputs beyond the range get its end (arXiv 2105.12676: calibration that minimises L2).

    Args:
        counts_H: how many inputs lie in each of equal parts of low to high, float64.
        low: the least input, or 0.
        high: the largest, or 0.
    """
    if not high > low:
        return low, high
    middle_H = low + (torch.arange(len(counts_H), dtype=torch.float64) + 0.5) * (high - low) / len(
        counts_H
    )
    shares = 1 - torch.arange(ENDS, dtype=torch.float64) / ENDS
    best = float("inf")
    best_range = (low, high)
    for end in (high * shares).tolist() if high else [0.0]:
        for begin in (low * shares).tolist() if low else [0.0]:
            step = (end - begin) / CODES
            if step <= 0:
                continue
            read_H = ((middle_H - begin) / step).round().clamp(0, CODES) * step + begin
            error = float(counts_H @ (read_H - middle_H).square())
            if error < best:
                best = error
                best_range = (begin, end)
    return best_range


def output_errors(
    model: nn.Module,
    score: Callable[[Batch], Tensor],
    batch: Batch,
    stats: dict[str, ProductStats],
    substitutes: dict[str, Instead],
) -> dict[str, float]:
    """Returns site -> the relative error of its outputs, |y' - y| / |y|, when it alone is done in
    another way.

    Args:
        model: in fp32.
        score: runs it.
        batch: rows of the log.
        stats: see `observe`.
        substitutes: site -> the other way.
    """
    sums: dict[str, tuple[float, float]] = {}

    def see(site: str, parts: Sequence[Tensor], y: Tensor) -> None:
        if site not in substitutes:
            return
        product = stats[site]
        wrong, total = sums.get(site, (0.0, 0.0))
        changed = substitutes[site]([part.float() for part in parts], product.bias, product.relu)
        sums[site] = wrong + float((changed - y).square().sum()), total + float(y.square().sum())

    with watched(model, see):
        score(batch)
    return {site: (wrong / total) ** 0.5 if total else 0.0 for site, (wrong, total) in sums.items()}
