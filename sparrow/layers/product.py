"""x W^T, named: every product of a model with a weight is a module, and so has a path that settings
can name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparrow import layers
from sparrow.core.functions import applied
from sparrow.core.plain import plain
from sparrow.kernels import dense
from sparrow.layers.passes import forward_product, input_gradient, weight_gradient
from sparrow.layers.precisions import Way
from sparrow.layers.site import Site, named_sites

Fold = Callable[[Tensor], Tensor]
"""Makes of a weight one for narrower inputs, with the same product. Of one that does not train it
does so once.
"""


class Instead(Protocol):
    """Does a product in another way, without gradients: x W^T + b, then perhaps a ReLU."""

    def __call__(self, parts: Sequence[Tensor], bias: Tensor | None, relu: bool) -> Tensor:
        """Returns [B, out]. parts: x, as for `Product`; those that are `Repeated` tell which
        columns are a user's.
        """
        ...


class Product(Site):
    """The product of inputs with one weight, [B, in] x [out, in] -> [B, out].

    The name of that weight in the model is also the name of this *site*.

    instead: does the product where a model that was trained is served in fewer bits.
    """

    def __init__(self, *, high: bool = False) -> None:
        super().__init__(high=high)
        self.instead: Instead | None = None
        self.forms: dict[Any, Any] = {}  # what was made of weights that do not train

    def __getstate__(self) -> dict[str, Any]:
        # a copy makes it anew: oneDNN's weights cannot be copied
        return {**self.__dict__, "forms": {}}

    def forward(
        self,
        parts: Sequence[Tensor],
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        relu: bool = False,
        fold: Fold | None = None,
        across: bool = False,
    ) -> Tensor:
        """Returns x W^T + b [B, out], or max(x W^T + b, 0).

        Args:
            parts: x [B, in], or several matrices that are x when they stand side by side.
            weight: W [out, in].
            bias: b [out].
            relu: whether a ReLU follows. Then there is one part.
            fold: fits the weight to x (see `NumericEmbedding.fold`).
            across: whether the one part is x^T [in, B], or [in, B, D], and the result is W x^T
                [out, B, D]. Then there is no bias.
        """
        if across:
            return layers.across.multiply(self, self.narrowed(parts[0]), weight, trains(weight))
        if self.instead is not None:
            return self.instead(parts, bias, relu)
        parts = [self.narrowed(part) for part in parts]
        how = self.way
        first = plain(parts[0])
        if (
            how is None
            and not trains(weight)
            and first.device.type == "cpu"
            and first.dtype == torch.float32
        ):
            return layers.served.multiply(
                self.forms, parts, weight, bias, relu, partial(_cut, weight, first.dtype, fold)
            )
        parts = parts if how is None else [plain(part) for part in parts]
        weights = self.weights(weight, parts, fold, how)
        how = how if how is None or trains(weight) else how.with_weight(first.dtype)
        if relu:
            bias = weight.new_zeros(len(weight)) if bias is None else bias
            out: Tensor = applied(_ReluLinear, *parts, *weights, bias, how)
            return out
        y = bias
        for part, part_weight in zip(parts, weights, strict=True):
            product: Tensor = applied(_Product, part, part_weight, how)
            y = product if y is None else y + product
        assert y is not None
        return y

    def weights(
        self,
        weight: Tensor,
        parts: Sequence[Tensor],
        fold: Fold | None = None,
        how: Way | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns the weight of each part, as products take it. Of weights that do not train it is
        made once.

        how: products are computed. A weight that trains is rounded in each of them, another one
        here.
        """
        sizes = [part.shape[1] for part in parts]
        dtype = parts[0].dtype

        def make() -> tuple[Tensor, ...]:
            cut = _cut(weight, dtype if how is None else weight.dtype, fold, sizes)
            if how is None or trains(weight):
                return cut
            return tuple(how.weight(part, dtype) for part in cut)

        if trains(weight):
            return make()
        weights: tuple[Tensor, ...] = layers.served.make_once(
            self.forms, weight, (*sizes, dtype, how), make
        )
        return weights


def trains(weight: Tensor) -> bool:
    """Returns whether a weight may change at any time, or autograd or a compiler follow what is
    made of it.
    """
    return weight.requires_grad or torch.is_grad_enabled() or torch.compiler.is_compiling()


def _cut(
    weight: Tensor, dtype: torch.dtype, fold: Fold | None, sizes: list[int]
) -> tuple[Tensor, ...]:
    weight = weight if fold is None else fold(weight)
    if len(sizes) == 1:
        return (weight.to(dtype),)
    return tuple(part.to(dtype) for part in weight.split(sizes, 1))


def sites(model: nn.Module) -> dict[str, Product]:
    """Returns the products of a model with one weight, by the names that their weights have in
    it.
    """
    return {name: site for name, site in named_sites(model).items() if isinstance(site, Product)}


class _Product(torch.autograd.Function):
    """x W^T. The gradient of x is in memory that the next step uses again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Way | None) -> Tensor:
        ctx.how = how
        ctx.dtype = weight.dtype
        y, weight_kept = forward_product(x, weight, how)
        ctx.save_for_backward(x, weight_kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = input_gradient(grad, weight, ctx.how) if ctx.needs_input_grad[0] else None
        return grad_x, weight_gradient(grad, x, ctx.how, ctx.dtype), None


class _ReluLinear(torch.autograd.Function):
    """max(x W^T + b, 0). The bias and the ReLU take one pass, and so do their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, how: Way | None) -> Tensor:
        ctx.how = how
        ctx.dtype = weight.dtype
        y, weight_kept = forward_product(x, weight, how)
        dense.bias_relu_(y, bias)
        ctx.save_for_backward(x, weight_kept, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        flowing, grad_bias = dense.relu_backward(grad, y)
        grad_x = input_gradient(flowing, weight, ctx.how) if ctx.needs_input_grad[0] else None
        return grad_x, weight_gradient(flowing, x, ctx.how, ctx.dtype), grad_bias, None
