"""What the products of a model read, and the gradients that flow back to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparrow.core.repeated import plain
from sparrow.layers.product import Product
from sparrow.layers.site import Matmul, Watch, named_sites


class Operands(NamedTuple):
    """Those of a product y = x W^T, fp32, perhaps with leading sizes. Of many rows, some at equal distances.

    x: [..., R, in]. weight: W [..., out, in], fitted to x. grad: dy [..., R, out]. rows: how many there were, leading
    sizes of x included. of_examples: whether W is an activation too. Then the first size counts examples, each of which
    has an x and a W of its own; where these are the same, so are the tensors.
    """

    x: Tensor
    weight: Tensor
    grad: Tensor
    rows: int
    of_examples: bool = False


See = Callable[[str, Operands], None]
"""Is told the name of a site and its operands."""


@contextmanager
def watched(model: nn.Module, see: See, rows: int) -> Iterator[None]:
    """Within this context `see` is told of each product of a model when its gradient flows back.

    Nothing that the model computes changes by that, not in the last bit. Not told of are products through which no
    gradient flows, and those of addressings of tables.

    Args:
        model: in training.
        see: is told.
        rows: of a product, that are taken at most; of many matrices, so many of these: of two activations, examples.
    """
    handles, sites = [], named_sites(model)
    for name, site in sites.items():
        tell = partial(see, name)
        site.watch = Watch(partial(_told, tell, rows), rows)
        hook = {Product: _of_product, Matmul: _of_matmul}.get(type(site))
        if hook is not None:
            handles.append(site.register_forward_hook(partial(hook, tell, rows), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for site in sites.values():
            site.watch = None


Tell = Callable[[Operands], None]
_SCATTER = 0x9E3779B9  # odd, so that remainders by a power of two take all values in turn


def _told(tell: Tell, most: int, x: Tensor, weight: Tensor, grad: Tensor, rows: int | None = None) -> None:
    """Tell of some rows of a product of matrices [B, in] and [in, out], or of two activations [B, ..., R, in].

    rows: how many there were, if some are left out already.
    """
    if not len(x):
        return
    of_examples = weight.dim() > 2
    of_x, dy = (some(of, most).to(torch.float32, copy=True) for of in (x, grad))
    if weight is x:
        w = of_x
    else:
        w = some(weight, most).to(torch.float32, copy=True) if of_examples else weight.detach().float()
    tell(Operands(of_x, w, dy, rows or grad.shape[:-1].numel(), of_examples))


def some(x: Tensor, most: int) -> Tensor:
    """Returns so many rows of a matrix at most, or so many matrices, one of each of as many parts of equal lengths.

    Where rows are features of examples in turn, rows at equal distances could be of one feature alone.
    """
    step, at = max(1, len(x) // most), torch.arange(min(len(x), most), device=x.device)
    return x.detach()[at * step + at * _SCATTER % step]


def _of_product(tell: Tell, most: int, site: nn.Module, args: Any, kwargs: dict[str, Any], y: Tensor) -> None:
    """Of a product with a weight that has run: tells when the gradient of its result is there."""
    if not y.requires_grad or not y.numel():
        return
    parts, weight, across = [plain(part) for part in args[0]], args[1].detach(), kwargs.get("across")
    if (fold := kwargs.get("fold")) is not None:
        with torch.no_grad():
            weight = fold(weight)
    if across:  # [in, B, ...]
        parts = [parts[0].flatten(1).t()]
    x = torch.cat([some(part, most).float() for part in parts], 1)
    positive = some(y, most) > 0 if kwargs.get("relu") else None

    def told(grad: Tensor) -> None:
        dy = some(grad.flatten(1).t() if across else grad, most).float()
        tell(Operands(x, weight.float(), dy.clone() if positive is None else dy * positive, len(parts[0])))

    y.register_hook(told)


def _of_matmul(tell: Tell, most: int, site: nn.Module, args: Any, kwargs: dict[str, Any], y: Tensor) -> None:
    """Of a product of matrices that has run."""
    if not y.requires_grad or not y.numel():
        return
    x, weight = plain(args[0]), plain(args[1]).mT
    rows = x.shape[:-1].numel()
    x, weight = some(x, most).float().clone(), some(weight, most).float().clone()

    def told(dy: Tensor) -> None:
        tell(Operands(x, weight, some(dy, most).float().clone(), rows, not kwargs.get("weights") and x.dim() > 2))

    y.register_hook(told)
