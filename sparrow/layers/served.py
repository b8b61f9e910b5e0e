"""Products with weights that do not train: a form of the weight is made once, and so is what a
user's samples share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sparrow.core.plain import plain
from sparrow.core.repeated import Columns, Repeated
from sparrow.layers.packed import PackedWeight

KEPT = 8  # forms of a weight: a service is asked with few sets of users' columns

Forms = dict[Any, Any]
"""What was made of weights that do not train."""


def make_once(
    forms: Forms, weight: Tensor, purpose: tuple[Any, ...], make: Callable[[], Any]
) -> Any:
    """Returns what `make` makes of a weight, which is kept for the next time.

    Args:
        forms: of the product, to which this one is added.
        weight: when it changes, its forms are made anew.
        purpose: tells this form from others of the same weight.
        make: makes it.
    """
    version = 0 if weight.is_inference() else weight._version  # made in inference mode, it has none
    key = (weight.data_ptr(), version, *purpose)
    form = forms.get(key)
    if form is None:
        if len(forms) >= KEPT:
            forms.clear()
        form = forms[key] = make()
    return form


def multiply(
    forms: Forms,
    parts: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    relu: bool,
    cut: Callable[[list[int]], tuple[Tensor, ...]],
) -> Tensor:
    """Returns x W^T + b [B, out], or max(x W^T + b, 0), as `Product` does.

    Args:
        forms: of the product.
        parts: of x.
        weight: W.
        bias: b [out].
        relu: whether a ReLU follows.
        cut: makes of W the weights of parts with so many columns.
    """
    out = weight.shape[0]
    keys = [part.key() if type(part) is Repeated and part.gains(out) else None for part in parts]
    sizes = [plain(part).shape[1] for part in parts]

    def pack_parts() -> list[list[PackedWeight]]:
        return [_pack(part_weight, key) for part_weight, key in zip(cut(sizes), keys, strict=True)]

    packed = make_once(forms, weight, (*sizes, *keys), pack_parts)
    if len(parts) == 1 and keys[0] is None:
        return packed[0][0](plain(parts[0]), bias, relu=relu)
    if not any(keys):
        return _add_products(
            [(weights[0], part) for weights, part in zip(packed, parts, strict=True)], bias, relu
        )
    user_parts: list[tuple[PackedWeight, Tensor]] = []
    sample_parts: list[tuple[PackedWeight, Tensor]] = []
    for weights, part, key in zip(packed, parts, keys, strict=True):
        if key is None:
            sample_parts.append((weights[0], part))
            continue
        assert isinstance(part, Repeated)
        users = part.users
        shared_US, own_BO = part.halves()
        user_parts.append((weights[0], shared_US))
        if own_BO.shape[1]:
            sample_parts.append((weights[1], own_BO))
    y_UO = _add_products(user_parts, bias, relu and not sample_parts)
    if not sample_parts:
        return Repeated.spread(y_UO, users)
    if y_UO.shape[0] == 1:
        return _add_products(sample_parts, y_UO[0], relu)
    y_BO = y_UO.index_select(0, users.inverse_B).add_(_add_products(sample_parts, None, relu=False))
    return y_BO.relu_() if relu else y_BO


def _pack(weight: Tensor, key: bytes | None) -> list[PackedWeight]:
    """Returns a weight, or that of what samples share and that of what each has."""
    if key is None:
        return [PackedWeight(weight)]
    return [PackedWeight(weight[:, columns]) for columns in Columns.of(key)]


def _add_products(
    products: Sequence[tuple[PackedWeight, Tensor]], bias: Tensor | None, relu: bool
) -> Tensor:
    """Returns the sum of x W^T of each pair of W and x, plus b, or the maximum of it and 0."""
    y: Tensor | None = None
    for weight, x in products:
        product = weight(x, bias, relu=relu and len(products) == 1)
        y = product if y is None else y.add_(product)
        bias = None
    assert y is not None
    return y.relu_() if relu and len(products) > 1 else y
