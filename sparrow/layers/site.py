"""Sites: the matrix products of a model, each with a name, to which a recipe can be given."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparrow.core.errors import UserError
from sparrow.core.functions import applied
from sparrow.layers.precision import Precision, to_compute, way
from sparrow.layers.recipe import Pass, Recipe, Way


class Watch(NamedTuple):
    """Is told of products.

    told: takes x [..., B, in], W [..., out, in] and dy [..., B, out]; and how many rows of x there were, if some are
        left out already. most: rows that it takes; of two activations, examples.
    """

    told: Callable[..., None]
    most: int


class Site(nn.Module):
    """A matrix product. It has no parameters of its own: the layer around it keeps the weight.

    recipe: what this site was told; None is what `computing` says of all.

    high: whether only a recipe of its own changes it. Else it is computed in the type of its operands: so are the last
        product of a model, in fp32, and products of two activations.

    watch: is told by functions that compute several products, or more than products, see `watch.watched`. Others are
        watched by hooks.
    """

    def __init__(self, *, high: bool = False) -> None:
        super().__init__()
        self.recipe: Recipe | None = None
        self.high = high
        self.watch: Watch | None = None

    @property
    def way(self) -> Way | None:
        """How it computes here; None in the type of its operands."""
        return way(self.recipe, self.high)

    def narrowed(self, x: Tensor) -> Tensor:
        """Returns an activation in the type of what stands between products, in which this one takes it."""
        return x if self.high else to_compute(x)


class Matmul(Site):
    """a b, [..., M, K] x [..., K, N] -> [..., M, N]: a product of two activations, or with several weights at once."""

    def forward(self, a: Tensor, b: Tensor, *, weights: bool = False) -> Tensor:
        """Returns the product.

        Args:
            a, b: the operands, with the same leading sizes.
            weights: whether b is weights. Of two activations the second one takes their place in the recipe.
        """
        a, b = self.narrowed(a), b if weights else self.narrowed(b)
        if (how := self.way) is None:
            return a @ b.to(a.dtype)
        out: Tensor = applied(Rounded, a, b, how, False, a.dtype)
        return out


class Rounded(torch.autograd.Function):
    """a b by a recipe: each operand of the three products is rounded from the original. Leading sizes are the same."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, how: Way, weight_first: bool, dtype: torch.dtype) -> Tensor:
        """See `multiplied`. weight_first: whether a is the weight. dtype: of the result."""
        ctx.save_for_backward(a, b)
        ctx.how, ctx.weight_first, ctx.dtype = how, weight_first, dtype
        formats = how.recipe.forward
        return multiplied(a, b, formats[::-1] if weight_first else formats, how, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of both operands, in their types."""
        (a, b), how, dtype = ctx.saved_tensors, ctx.how, ctx.dtype
        of_x, of_weight = how.recipe.input_gradient, how.recipe.weight_gradient
        of_a, of_b = (of_weight, of_x) if ctx.weight_first else (of_x, of_weight)
        grad_a = multiplied(grad, b.mT, of_a, how, dtype).to(a.dtype) if ctx.needs_input_grad[0] else None
        grad_b = multiplied(a.mT, grad, of_b[::-1], how, dtype).to(b.dtype) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None, None, None


def multiplied(a: Tensor, b: Tensor, formats: Pass | None, how: Way | None, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a b, [..., M, K] x [..., K, N] -> [..., M, N], in `dtype` or in the type of a.

    formats, how: in which the operands are; None takes them as they are.
    """
    if formats is None or how is None:
        return a @ b
    dtype = dtype or a.dtype
    if (found := how.by_units(formats, a, b)) is not None:
        return found.to(dtype)
    left, right = how.operands(formats, a, b, (-1, -2), dtype)
    return (left @ right).to(dtype)


def named_sites(model: nn.Module) -> dict[str, Site]:
    """Returns the sites of a model by their names.

    One that stands as `product` beside a `weight`, or among `products` beside `weights`, has the name of that weight.
    Any other has its own path.
    """
    found, weights = {}, dict(model.named_parameters()).keys()
    for name, module in model.named_modules():
        if isinstance(module, Site):
            layer, _, number = name.rpartition("product")
            weight = f"{layer}weight{number}"
            found[weight if weight in weights else name] = module
    return found


def put_recipes(model: nn.Module, precision: Precision) -> None:
    """Let the sites of a model have the recipes that a precision has for them.

    Raises:
        UserError: for a pattern that names no site.
    """
    sites = named_sites(model)
    for pattern, recipe in precision.sites.items():
        matching = [site for name, site in sites.items() if fnmatchcase(name, pattern)]
        if not matching:
            told = f"precision.sites: {pattern!r} names no product of {type(model).__module__.rpartition('.')[2]}"
            raise UserError(f"{told}; it has {', '.join(sites) or 'none'}")
        for site in matching:
            site.recipe = recipe
