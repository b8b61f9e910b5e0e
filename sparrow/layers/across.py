"""Products whose inputs stand before the samples, W x^T: [out, in] x [in, B, D] -> [out, B, D], as
Wukong has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sparrow import layers
from sparrow.core.functions import applied
from sparrow.core.plain import plain
from sparrow.core.repeated import Columns, Repeated
from sparrow.layers.rounded import Rounded

if TYPE_CHECKING:
    from sparrow.layers.product import Product


def multiply(product: Product, x_IBD: Tensor, weight: Tensor, trains: bool) -> Tensor:
    """Returns W x^T.

    Args:
        product: whose it is.
        x_IBD: x^T, also [in, B].
        weight: W.
        trains: whether W may change at any time.
    """
    plain_IBD = plain(x_IBD)
    flat = plain_IBD.flatten(1)
    if product.instead is not None:
        return product.instead([flat.t()], None, False).t().unflatten(1, plain_IBD.shape[1:])
    if (way := product.way) is not None:
        (rounded,) = product.weights(weight, [flat.t()], None, way)
        way = way if trains else way.with_weight(flat.dtype)
        y: Tensor = applied(Rounded, rounded, flat, way, True, flat.dtype)
        return y.unflatten(1, plain_IBD.shape[1:])
    if trains or type(x_IBD) is not Repeated or not x_IBD.gains(weight.shape[0]):
        (weight,) = product.weights(weight, [flat.t()])
        return (weight @ flat).unflatten(1, plain_IBD.shape[1:])
    key, users, (once_SUD, own_OBD) = x_IBD.key(), x_IBD.users, x_IBD.halves()

    def cut() -> list[Tensor]:
        return [weight[:, columns].to(plain_IBD.dtype) for columns in Columns.of(key)]

    shared_weight, own_weight = layers.served.make_once(
        product.forms, weight, ("across", key, plain_IBD.dtype), cut
    )
    y_IUD = (shared_weight @ once_SUD.flatten(1)).unflatten(1, once_SUD.shape[1:])
    y_IBD: Tensor = (own_weight @ own_OBD.flatten(1)).unflatten(1, own_OBD.shape[1:])
    return y_IBD.add_(y_IUD if y_IUD.shape[1] == 1 else y_IUD.index_select(1, users.inverse_B))
