"""x W^T, named: every product of a model with a weight is a module, and so has a path that settings can name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sparrow.core.functions import applied
from sparrow.core.repeated import Columns, Repeated, plain
from sparrow.kernels import dense
from sparrow.layers.packed import PackedWeight
from sparrow.layers.passes import forward_product, input_gradient, weight_gradient
from sparrow.layers.recipe import Way
from sparrow.layers.site import Rounded, Site, named_sites

Fold = Callable[[Tensor], Tensor]
"""Makes of a weight one for narrower inputs, with the same product. Of one that does not train it does so once."""

KEPT = 8  # forms of a weight: a service is asked with few sets of users' columns


class Instead(Protocol):
    """Does a product in another way, without gradients: x W^T + b, then perhaps a ReLU."""

    def __call__(self, parts: Sequence[Tensor], bias: Tensor | None, relu: bool) -> Tensor:
        """Returns [B, out]. parts: x, as for `Product`; those that are `Repeated` tell which columns are a user's."""
        ...


class Product(Site):
    """The product of inputs with one weight, [B, in] x [out, in] -> [B, out].

    The name of that weight in the model is also the name of this *site*.

    instead: does the product where a model that was trained is served in fewer bits.
    """

    def __init__(self, *, high: bool = False) -> None:
        super().__init__(high=high)
        self.instead: Instead | None = None
        self._kept: dict[Any, Any] = {}  # what was made of weights that do not train

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}  # a copy makes it anew: oneDNN's weights cannot be copied

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
            across: whether the one part is x^T [in, B], or [in, B, D], and the result is W x^T [out, B, D]. Then there
                is no bias.
        """
        if across:
            return self._across(self.narrowed(parts[0]), weight)
        if self.instead is not None:
            return self.instead(parts, bias, relu)
        parts, how = [self.narrowed(part) for part in parts], self.way
        first = plain(parts[0])
        if how is None and not trains(weight) and first.device.type == "cpu" and first.dtype == torch.float32:
            return self._served(parts, weight, bias, relu, fold)
        parts = parts if how is None else [plain(part) for part in parts]
        weights = self.weights(weight, parts, fold, how)
        how = how if how is None or trains(weight) else how.with_weight(first.dtype)
        if relu:
            bias = weight.new_zeros(len(weight)) if bias is None else bias
            out: Tensor = applied(_ReluLinear, *parts, *weights, bias, how)
            return out
        y = bias
        for part, one in zip(parts, weights, strict=True):
            product: Tensor = applied(_Product, part, one, how)
            y = product if y is None else y + product
        assert y is not None
        return y

    def weights(
        self, weight: Tensor, parts: Sequence[Tensor], fold: Fold | None = None, how: Way | None = None
    ) -> tuple[Tensor, ...]:
        """Returns the weight of each part, as products take it. Of weights that do not train it is made once.

        how: products are computed. A weight that trains is rounded in each of them, another one here.
        """
        sizes, dtype = [part.shape[1] for part in parts], parts[0].dtype

        def make() -> tuple[Tensor, ...]:
            cut = _cut(weight, sizes, dtype if how is None else weight.dtype, fold)
            return cut if how is None or trains(weight) else tuple(how.weight(one, dtype) for one in cut)

        found: tuple[Tensor, ...] = make() if trains(weight) else self._once(weight, (*sizes, dtype, how), make)
        return found

    def _once(self, weight: Tensor, what: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Returns what `make` makes of a weight, which is kept for the next time. what: says what it is."""
        version = 0 if weight.is_inference() else weight._version  # made in inference mode, it has none
        key = (weight.data_ptr(), version, *what)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            found = self._kept[key] = make()
        return found

    def _served(
        self, parts: Sequence[Tensor], weight: Tensor, bias: Tensor | None, relu: bool, fold: Fold | None
    ) -> Tensor:
        """Returns what `forward` does, for a weight that does not train."""
        out = weight.shape[0]
        keys = [part.key() if type(part) is Repeated and part.gains(out) else None for part in parts]
        sizes = [plain(part).shape[1] for part in parts]

        def make() -> list[list[PackedWeight]]:
            cut = _cut(weight, sizes, parts[0].dtype, fold)
            return [_packed(one, key) for one, key in zip(cut, keys, strict=True)]

        packed = self._once(weight, (*sizes, *keys), make)
        if len(parts) == 1 and keys[0] is None:
            return packed[0][0](plain(parts[0]), bias, relu=relu)
        if not any(keys):
            return _summed([(one[0], part) for one, part in zip(packed, parts, strict=True)], bias, relu)
        once, each = [], []  # what runs for each user, and what runs for each sample
        for ones, part, key in zip(packed, parts, keys, strict=True):
            if key is None:
                each.append((ones[0], part))
                continue
            assert isinstance(part, Repeated)
            users, (shared_US, own_BO) = part.users, part.halves()
            once.append((ones[0], shared_US))
            each += [(ones[1], own_BO)] if own_BO.shape[1] else []
        y_UO = _summed(once, bias, relu and not each)
        if not each:
            return Repeated.spread(y_UO, users)
        if y_UO.shape[0] == 1:
            return _summed(each, y_UO[0], relu)
        y = y_UO.index_select(0, users.inverse_B).add_(_summed(each, None, relu=False))
        return y.relu_() if relu else y

    def _across(self, x_IBD: Tensor, weight: Tensor) -> Tensor:
        """Returns W x^T."""
        whole = plain(x_IBD)
        flat = whole.flatten(1)
        if self.instead is not None:
            return self.instead([flat.t()], None, False).t().unflatten(1, whole.shape[1:])
        if (how := self.way) is not None:
            (of_x,) = self.weights(weight, [flat.t()], None, how)
            how = how if trains(weight) else how.with_weight(flat.dtype)
            found: Tensor = applied(Rounded, of_x, flat, how, True, flat.dtype)
            return found.unflatten(1, whole.shape[1:])
        if trains(weight) or type(x_IBD) is not Repeated or not x_IBD.gains(weight.shape[0]):
            (weight,) = self.weights(weight, [flat.t()])
            return (weight @ flat).unflatten(1, whole.shape[1:])
        key, users, (once_SUD, own_OBD) = x_IBD.key(), x_IBD.users, x_IBD.halves()

        def make() -> list[Tensor]:
            return [weight[:, at].to(whole.dtype) for at in Columns.of(key)]

        of_shared, of_own = self._once(weight, ("across", key, whole.dtype), make)
        y_IUD = (of_shared @ once_SUD.flatten(1)).unflatten(1, once_SUD.shape[1:])
        y_IBD: Tensor = (of_own @ own_OBD.flatten(1)).unflatten(1, own_OBD.shape[1:])
        return y_IBD.add_(y_IUD if y_IUD.shape[1] == 1 else y_IUD.index_select(1, users.inverse_B))


def trains(weight: Tensor) -> bool:
    """Returns whether a weight may change at any time, or autograd or a compiler follow what is made of it."""
    return weight.requires_grad or torch.is_grad_enabled() or torch.compiler.is_compiling()


def _packed(weight: Tensor, key: bytes | None) -> list[PackedWeight]:
    """Returns a weight, or that of what samples share and that of what each has."""
    return [PackedWeight(weight)] if key is None else [PackedWeight(weight[:, at]) for at in Columns.of(key)]


def _summed(products: Sequence[tuple[PackedWeight, Tensor]], bias: Tensor | None, relu: bool) -> Tensor:
    """Returns the sum of x W^T of each pair of W and x, plus b, or the maximum of it and 0."""
    y: Tensor | None = None
    for weight, x in products:
        found = weight(x, bias, relu=relu and len(products) == 1)
        y, bias = found if y is None else y.add_(found), None
    assert y is not None
    return y.relu_() if relu and len(products) > 1 else y


def _cut(weight: Tensor, sizes: list[int], dtype: torch.dtype, fold: Fold | None) -> tuple[Tensor, ...]:
    weight = weight if fold is None else fold(weight)
    if len(sizes) == 1:
        return (weight.to(dtype),)
    return tuple(one.to(dtype) for one in weight.split(sizes, 1))


def sites(model: nn.Module) -> dict[str, Product]:
    """Returns the products of a model with one weight, by the names that their weights have in it."""
    return {name: one for name, one in named_sites(model).items() if isinstance(one, Product)}


class _Product(torch.autograd.Function):
    """x W^T. The gradient of x is in memory that the next step uses again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Way | None) -> Tensor:
        ctx.how, ctx.dtype = how, weight.dtype
        y, kept = forward_product(x, weight, how)
        ctx.save_for_backward(x, kept)
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
        ctx.how, ctx.dtype = how, weight.dtype
        y, kept = forward_product(x, weight, how)
        dense.bias_relu_(y, bias)
        ctx.save_for_backward(x, kept, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        flowing, grad_bias = dense.relu_backward(grad, y)
        grad_x = input_gradient(flowing, weight, ctx.how) if ctx.needs_input_grad[0] else None
        return grad_x, weight_gradient(flowing, x, ctx.how, ctx.dtype), grad_bias, None
