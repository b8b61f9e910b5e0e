"""What the products of a model read, and the gradients that flow back to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparrow.core.plain import plain
from sparrow.layers.product import Product
from sparrow.layers.rows import sample_rows
from sparrow.layers.site import Matmul, Watch, named_sites


class Operands(NamedTuple):
    """Those of a product y = x W^T, fp32, perhaps with leading sizes. Of many rows, some at equal
    distances.

    x: [..., R, in]. weight: W [..., out, in], fitted to x. grad: dy [..., R, out]. rows: how many
    there were, leading sizes of x included. has_examples: whether W is an activation too. Then the
    first size counts examples, each of which has an x and a W of its own; where these are the same,
    so are the tensors.
    """

    x: Tensor
    weight: Tensor
    grad: Tensor
    rows: int
    has_examples: bool = False


See = Callable[[str, Operands], None]
"""Is told the name of a site and its operands."""


@contextmanager
def watched(model: nn.Module, see: See, rows: int) -> Iterator[None]:
    """Within this context `see` is told of each product of a model when its gradient flows back.

    Nothing that the model computes changes by that, not in the last bit. Not told of are products
    through which no gradient flows, and those of addressings of tables.

    Args:
        model: in training.
        see: is told.
        rows: of a product, that are taken at most; of many matrices, so many of these: of two
            activations, examples.
    """
    handles = []
    sites = named_sites(model)
    for name, site in sites.items():
        tell = partial(see, name)
        site.watch = Watch(partial(tell_rows, tell, rows), rows)
        hook = {Product: _hook_product, Matmul: _hook_matmul}.get(type(site))
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


def tell_rows(
    tell: Tell, most: int, x: Tensor, weight: Tensor, grad: Tensor, rows: int | None = None
) -> None:
    """Tell of some rows of a product of matrices [B, in] and [in, out], or of two activations [B,
    ..., R, in].

    rows: how many there were, if some are left out already.
    """
    if not len(x):
        return
    has_examples = weight.dim() > 2
    x_rows, dy = (sample_rows(tensor, most).to(torch.float32, copy=True) for tensor in (x, grad))
    if weight is x:
        w = x_rows
    elif has_examples:
        w = sample_rows(weight, most).to(torch.float32, copy=True)
    else:
        w = weight.detach().float()
    tell(Operands(x_rows, w, dy, rows or grad.shape[:-1].numel(), has_examples))


def _hook_product(
    tell: Tell, most: int, site: nn.Module, args: Any, kwargs: dict[str, Any], y: Tensor
) -> None:
    """Of a product with a weight that has run: tells when the gradient of its result is there."""
    if not y.requires_grad or not y.numel():
        return
    parts = [plain(part) for part in args[0]]
    weight = args[1].detach()
    across = kwargs.get("across")
    if (fold := kwargs.get("fold")) is not None:
        with torch.no_grad():
            weight = fold(weight)
    if across:  # [in, B, ...]
        parts = [parts[0].flatten(1).t()]
    x = torch.cat([sample_rows(part, most).float() for part in parts], 1)
    positive = sample_rows(y, most) > 0 if kwargs.get("relu") else None

    def tell_gradient(grad: Tensor) -> None:
        dy = sample_rows(grad.flatten(1).t() if across else grad, most).float()
        dy = dy.clone() if positive is None else dy * positive
        tell(Operands(x, weight.float(), dy, len(parts[0])))

    y.register_hook(tell_gradient)


def _hook_matmul(
    tell: Tell, most: int, site: nn.Module, args: Any, kwargs: dict[str, Any], y: Tensor
) -> None:
    """Of a product of matrices that has run."""
    if not y.requires_grad or not y.numel():
        return
    x = plain(args[0])
    weight = plain(args[1]).mT
    rows = x.shape[:-1].numel()
    x = sample_rows(x, most).float().clone()
    weight = sample_rows(weight, most).float().clone()
    has_examples = not kwargs.get("weights") and x.dim() > 2

    def tell_gradient(dy: Tensor) -> None:
        tell(Operands(x, weight, sample_rows(dy, most).float().clone(), rows, has_examples))

    y.register_hook(tell_gradient)
