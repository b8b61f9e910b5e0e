"""Products that are named: what they compute, what they keep, and that every layer's weight has one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparrow.core import repeated
from sparrow.core.repeated import Repeated, Users
from sparrow.interactions import CrossNet
from sparrow.layers import MLP, Head, Linear, NumericEmbedding, Product, sites


class _Doubled:
    """Does a product in another way: twice of it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()

    def __call__(self, parts: Sequence[Tensor], bias: Tensor | None, relu: bool) -> Tensor:
        y = 2 * torch.cat(list(parts), 1) @ self.weight.t()
        y = y if bias is None else y + bias
        return y.relu() if relu else y


def test_sites_have_the_names_of_their_weights() -> None:
    model = nn.ModuleDict({"mlp": MLP(4, (3, 2)), "head": Head(2, 1), "cross": CrossNet(4, 2, rank=1)})
    named = [f"{layer}.weight" for layer in ("mlp.layers.0", "mlp.layers.1", "head")]
    assert list(sites(model)) == [*named, *(f"cross.weights.{i}" for i in range(4))]
    assert sites(model).keys() <= dict(model.named_parameters()).keys()


@torch.no_grad()
def test_a_product_can_be_done_in_another_way() -> None:
    x, mlp, cross, linear = torch.randn(5, 4), MLP(4, (3,)), CrossNet(4, 2), Linear(8, 3)
    for site, weight in ((mlp.layers[0], mlp.layers[0].weight), (linear, linear.weight)):
        site.product.instead = _Doubled(weight)  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(mlp(x), (2 * x @ mlp.layers[0].weight.t() + mlp.layers[0].bias).relu())  # type: ignore[operator, union-attr]
    torch.testing.assert_close(linear(x, x), 2 * torch.cat([x, x], 1) @ linear.weight.t() + linear.bias)
    doubled = CrossNet(4, 2)
    doubled.load_state_dict(cross.state_dict())
    for weight in doubled.weights:
        weight.mul_(2)
    for product, weight in zip(cross.products, cross.weights, strict=True):
        product.instead = _Doubled(weight)  # type: ignore[assignment]
    torch.testing.assert_close(cross(x), doubled(x))


def test_across_is_the_product_of_the_transposed() -> None:
    x, weight, product = torch.randn(5, 4), torch.randn(3, 4), Product()
    torch.testing.assert_close(product((x.t(),), weight, across=True), product((x,), weight).t())
    product.instead = _Doubled(weight)
    torch.testing.assert_close(product((x.t(),), weight, across=True), 2 * weight @ x.t())


@torch.no_grad()
@pytest.mark.parametrize("users", [1, 3])
@pytest.mark.parametrize("shared", [[True, False, True, False], [True] * 4])
def test_across_runs_once_for_what_is_shared(shared: list[bool], users: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors stand before samples, as in Wukong: [in, B, D]."""
    monkeypatch.setattr(repeated, "LEAST", 1)
    monkeypatch.setattr(repeated, "COPYING", 0)
    whose = Users.of(np.arange(6) % users, users)
    x_NBD, weight, product = torch.randn(4, 6, 2), torch.randn(3, 4), Product()
    marks_N1D = torch.tensor(shared)[:, None, None].expand(4, 1, 2).clone()
    x_NBD = torch.where(marks_N1D, x_NBD[:, whose.some_U][:, whose.inverse_B], x_NBD)
    found = product((Repeated.of(x_NBD, whose, marks_N1D),), weight, across=True)
    torch.testing.assert_close(found, torch.einsum("on,nbd->obd", weight, x_NBD))
    assert any("across" in key for key in product._kept)
    torch.testing.assert_close(product((x_NBD,), weight, across=True), found)


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
    assert bool(mlp.layers[0].product._kept) != trains  # type: ignore[union-attr]
