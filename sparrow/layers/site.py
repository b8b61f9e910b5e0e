"""Sites: the matrix products of a model, each with a name, to which a recipe can be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from sparrow import layers
from sparrow.core.functions import applied
from sparrow.layers.precision import to_compute, way
from sparrow.layers.precisions import Way


class Watch(NamedTuple):
    """Is told of products.

    tell: takes x [..., B, in], W [..., out, in] and dy [..., B, out]; and how many rows of x there
        were, if some are left out already. most: rows that it takes; of two activations, examples.
    """

    tell: Callable[..., None]
    most: int


class Site(nn.Module):
    """A matrix product. It has no parameters of its own: the layer around it keeps the weight.

    recipe: what this site was told; None is what `computing` says of all.

    high: whether only a recipe of its own changes it. Else it is computed in the type of its
        operands: so are the last product of a model, in fp32, and products of two activations.

    watch: is told by functions that compute several products, or more than products. Others are
    watched by hooks.
    """

    def __init__(self, *, high: bool = False) -> None:
        super().__init__()
        self.recipe: Any = None
        self.high = high
        self.watch: Watch | None = None

    @property
    def way(self) -> Way | None:
        """How it computes here; None in the type of its operands."""
        return way(self.recipe, self.high)

    def narrowed(self, x: Tensor) -> Tensor:
        """Returns an activation in the type of what stands between products, in which this one
        takes it.
        """
        return x if self.high else to_compute(x)


class Matmul(Site):
    """a b, [..., M, K] x [..., K, N] -> [..., M, N]: a product of two activations, or with several
    weights at once.
    """

    def forward(self, a: Tensor, b: Tensor, *, weights: bool = False) -> Tensor:
        """Returns the product.

        Args:
            a, b: the operands, with the same leading sizes.
            weights: whether b is weights. Of two activations the second one takes their place in
                the recipe.
        """
        a = self.narrowed(a)
        b = b if weights else self.narrowed(b)
        if (how := self.way) is None:
            return a @ b.to(a.dtype)
        out: Tensor = applied(layers.rounded.Rounded, a, b, how, False, a.dtype)
        return out


def named_sites(model: nn.Module) -> dict[str, Site]:
    """Returns the sites of a model by their names.

    One that stands as `product` beside a `weight`, or among `products` beside `weights`, has the
    name of that weight. Any other has its own path.
    """
    site_of = {}
    weights = dict(model.named_parameters()).keys()
    for name, module in model.named_modules():
        if isinstance(module, Site):
            layer, _, number = name.rpartition("product")
            weight = f"{layer}weight{number}"
            site_of[weight if weight in weights else name] = module
    return site_of
