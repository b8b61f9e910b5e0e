"""Products that are named: what they compute, what they keep, and that every layer's weight has
one.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from sparrow.interactions.cross import CrossNet
from sparrow.layers.mlp import MLP, Head, Linear
from sparrow.layers.numeric import NumericEmbedding
from sparrow.layers.product import sites


class _Doubled:
    """Does a product in another way: twice of it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()

    def __call__(self, parts: Sequence[Tensor], bias: Tensor | None, relu: bool) -> Tensor:
        y = 2 * torch.cat(list(parts), 1) @ self.weight.t()
        y = y if bias is None else y + bias
        return y.relu() if relu else y


def test_sites_have_the_names_of_their_weights() -> None:
    model = nn.ModuleDict(
        {"mlp": MLP(4, (3, 2)), "head": Head(2, 1), "cross": CrossNet(4, 2, rank=1)}
    )
    named = [f"{layer}.weight" for layer in ("mlp.layers.0", "mlp.layers.1", "head")]
    assert list(sites(model)) == [*named, *(f"cross.weights.{i}" for i in range(4))]
    assert sites(model).keys() <= dict(model.named_parameters()).keys()


@torch.no_grad()
def test_a_product_can_be_done_in_another_way() -> None:
    x, mlp, cross, linear = torch.randn(5, 4), MLP(4, (3,)), CrossNet(4, 2), Linear(8, 3)
    for site, weight in ((mlp.layers[0], mlp.layers[0].weight), (linear, linear.weight)):
        site.product.instead = _Doubled(weight)  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(
        mlp(x), (2 * x @ mlp.layers[0].weight.t() + mlp.layers[0].bias).relu()
    )  # type: ignore[operator, union-attr]
    torch.testing.assert_close(
        linear(x, x), 2 * torch.cat([x, x], 1) @ linear.weight.t() + linear.bias
    )
    doubled = CrossNet(4, 2)
    doubled.load_state_dict(cross.state_dict())
    for weight in doubled.weights:
        weight.mul_(2)
    for product, weight in zip(cross.products, cross.weights, strict=True):
        product.instead = _Doubled(weight)  # type: ignore[assignment]
    torch.testing.assert_close(cross(x), doubled(x))


@torch.inference_mode()
def test_a_weight_may_be_made_in_inference_mode() -> None:
    mlp, x = MLP(3, (4,)).requires_grad_(False), torch.randn(2, 3)
    torch.testing.assert_close(mlp(x), (x @ mlp.layers[0].weight.t() + mlp.layers[0].bias).relu())  # type: ignore[operator, union-attr]


@torch.no_grad()
@pytest.mark.parametrize("trains", [True, False])
def test_a_kept_weight_is_made_anew_when_the_weight_changes(trains: bool) -> None:
    """Also when it does not train: another state may be loaded."""
    numeric, mlp = NumericEmbedding(2, 3), MLP(7, (4,))
    mlp.requires_grad_(trains)
    x = torch.randn(5, 2), torch.randn(5, 1)
    wide, narrow = numeric(*x)
    for _ in range(2):
        torch.testing.assert_close(mlp(narrow, numeric.fold), mlp(wide))
        mlp.load_state_dict({name: torch.randn_like(of) for name, of in mlp.state_dict().items()})
    assert bool(mlp.layers[0].product.forms) != trains  # type: ignore[union-attr]
