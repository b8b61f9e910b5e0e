"""Recipes of products: each against the same product written in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core import UserError
from sparrow.extensions.low_precision.precision import MEMBERS, put_recipes
from sparrow.extensions.low_precision.recipe import OPERANDS, Recipe, RecipeWay
from sparrow.interactions.cross import CrossNet
from sparrow.interactions.dot import DotInteraction
from sparrow.layers.attention import Attention
from sparrow.layers.mlp import MLP, Head, Linear
from sparrow.layers.numeric import NumericEmbedding
from sparrow.layers.passes import forward_product, input_gradient, weight_gradient
from sparrow.layers.precision import Precision, computing
from sparrow.layers.product import Product
from sparrow.layers.site import Matmul, named_sites
from sparrow.numerics.blocks import rounded
from sparrow.numerics.formats import FORMATS

CPU = torch.device("cpu")
APART = Recipe(
    forward=("mx6", "mxfp4"), input_gradient=("mxfp8", "mx4"), weight_gradient=("mxfp6", "mxint8")
)


class _Reference(torch.autograd.Function):
    """a b, whose operands and gradients are rounded as `APART` says. b is the weight."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return rounded(a, FORMATS["mx6"], -1) @ rounded(b, FORMATS["mxfp4"], -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        a, b = ctx.saved_tensors
        grad_a = rounded(grad, FORMATS["mxfp8"], -1) @ rounded(b, FORMATS["mx4"], -1).mT
        grad_b = (rounded(grad, FORMATS["mxfp6"], -2).mT @ rounded(a, FORMATS["mxint8"], -2)).mT
        return grad_a, grad_b


def matmul(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = _Reference.apply(a, b)
    return out


def told(module: nn.Module, recipe: Recipe) -> Precision:
    """In fp32 between products, so that nothing else is rounded."""
    precision = Precision("fp32", {"*": recipe})
    put_recipes(nn.ModuleDict({"it": module}), precision)
    return precision


def check(module: nn.Module, reference: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Compare forward and gradients with a reference. Another order of a sum may move a number to
    the next code.
    """
    of = [x.requires_grad_() for x in inputs] + list(module.parameters())
    with computing(told(module, APART), CPU):
        got = module(*inputs)
    want = reference(*inputs)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    plain = module(*inputs)
    assert (plain - want).norm() > 0.05 * want.norm()
    pairs = [
        (got, want),
        *zip(*(torch.autograd.grad(y, of, upstream) for y in (got, want)), strict=True),
    ]
    for ours, theirs in pairs:
        assert (ours - theirs).norm() <= 0.01 * theirs.norm()


def test_linear_mlp_and_head() -> None:
    torch.manual_seed(0)
    for layer in (Linear(100, 70), Head(100, 70)):
        check(
            layer,
            lambda x, layer=layer: matmul(x, layer.weight.t()) + layer.bias,
            torch.randn(90, 100),
        )
    mlp = MLP(100, (70, 33))

    def layers(x: Tensor) -> Tensor:
        for layer in mlp.layers:
            x = torch.relu(matmul(x, layer.weight.t()) + layer.bias)
        return x

    check(mlp, layers, torch.randn(90, 100))


@pytest.mark.parametrize("rank", [None, 20])
def test_cross_layers(rank: int | None) -> None:
    torch.manual_seed(0)
    cross = CrossNet(50, 3, rank)
    factors = len(cross.weights) // 3

    def layers(x0: Tensor) -> Tensor:
        x = x0
        for i, bias in enumerate(cross.biases):
            y = x
            for weight in cross.weights[i * factors : (i + 1) * factors]:
                y = matmul(y, weight.t())
            x = x0 * (y + bias) + x
        return x

    check(cross, layers, torch.randn(90, 50))


def test_products_of_two_activations() -> None:
    torch.manual_seed(0)
    check(Matmul(), matmul, torch.randn(7, 40, 50), torch.randn(7, 50, 33))
    pairs = DotInteraction()
    row_P, column_P = torch.tril_indices(5, 5, offset=-1)

    def dots(x: Tensor) -> Tensor:  # each vector is one operand here and the other one there
        f = {name: FORMATS[name] for name in ("mx6", "mxfp4", "mxfp8", "mx4")}
        return _Dots.apply(x, f)[:, row_P, column_P]  # type: ignore[no-any-return]

    check(pairs, dots, torch.randn(7, 5, 40))


class _Dots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.f = f
        return rounded(x, f["mx6"], -1) @ rounded(x.mT, f["mxfp4"], -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return rounded(grad + grad.mT, ctx.f["mxfp8"], -1) @ rounded(x, ctx.f["mx4"], -2), None


def test_across() -> None:
    torch.manual_seed(0)
    product, weight, x = (
        Product(),
        torch.randn(33, 40, requires_grad=True),
        torch.randn(40, 90, requires_grad=True),
    )
    with computing(told(product, APART), CPU):
        found = product((x,), weight, across=True)
        with torch.no_grad():
            assert torch.equal(found, product((x,), weight, across=True))
    want = matmul(x.t(), weight.t()).t()
    torch.testing.assert_close(found, want)
    for ours, theirs in zip(
        *(torch.autograd.grad(y.sum(), (x, weight)) for y in (found, want)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    torch.manual_seed(0)
    layer, (q, k, v) = Attention(), torch.randn(3, 6, 2, 20, 40)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = matmul(q, k.mT) * 40**-0.5
        if causal:
            scores = scores.masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf)
        return matmul(scores.softmax(-1), v)

    class _Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *qkv: Tensor) -> Tensor:
            return layer(*qkv, causal=causal)

    check(_Causal(), reference, q, k, v)
    layer.scores.recipe = layer.mixed.recipe = Recipe.of("fp32")
    with computing(Precision("mxfp8"), CPU):  # told to leave everything as it is, step by step
        torch.testing.assert_close(
            layer(q, k, v, causal=causal), F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        )


@pytest.mark.parametrize(
    "name", ["mxfp8", "mxfp8-e5m2", "mxfp6", "mxfp4", "mxint8", "mx9", "mx6", "mx4", "fp8-rowwise"]
)
def test_a_linear_layer_has_the_bits_of_three_rounded_products(name: str) -> None:
    """So has microxcaling's Linear, in each of these that it has:
    `tests/numerics/record_oracles.py:check_linear`.
    """
    torch.manual_seed(0)
    layer, format = Linear(100, 70, bias=False), FORMATS[name]
    x, grad, weight = (
        torch.randn(90, 100, requires_grad=True),
        torch.randn(90, 70),
        layer.weight.detach(),
    )
    with computing(told(layer, Recipe.of(name)), CPU):
        y = layer(x)
    y.backward(grad)
    assert torch.equal(y, F.linear(rounded(x.detach(), format), rounded(weight, format)))
    assert torch.equal(x.grad, rounded(grad, format) @ rounded(weight, format, 0))
    assert torch.equal(
        layer.weight.grad, rounded(grad, format, 0).t() @ rounded(x.detach(), format, 0)
    )


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_a_linear_layer_has_the_bits_of_microxcaling(name: str) -> None:
    """y, dX and dW that its own `Linear` computed, see `tests/numerics/record_oracles.py`."""
    record = load_file(Path(__file__).parents[1] / "numerics" / "oracles.safetensors")
    x, weight, grad = (record[f"linear {of}"] for of in ("x", "weight", "grad"))
    layer, format = Linear(weight.shape[1], weight.shape[0], bias=False), FORMATS[name]
    with torch.no_grad():
        layer.weight.copy_(weight)
    x = x.requires_grad_()
    with computing(told(layer, Recipe.of(name)), CPU):
        y = layer(x)
    y.backward(grad)
    for of, found in (("y", y), ("dx", x.grad), ("dw", layer.weight.grad)):
        assert torch.equal(found, record[f"{name} linear {of}"]), of
    exact = rounded(x.detach(), format).double() @ rounded(weight, format).double().t()
    assert torch.equal(y.double(), exact)  # in any order of sums, so on every processor
    assert not torch.equal(y, F.linear(x, weight))


@pytest.mark.parametrize(
    "name", [name for name, member in MEMBERS.items() if member.between == torch.bfloat16]
)
def test_emulated_through_bf16_is_emulated_through_fp32(name: str) -> None:
    """But for the order of sums, whose last bit of bf16 may differ."""
    torch.manual_seed(0)
    recipe = MEMBERS[name].recipe
    assert recipe is not None
    x, grad = torch.randn(90, 100).bfloat16(), torch.randn(90, 70).bfloat16()
    weight = torch.randn(70, 100)
    for pair in zip(*(
        (
            forward_product(x, weight, way)[0],
            input_gradient(grad, weight, way),
            input_gradient(grad, weight, way, plus=x),
            weight_gradient(grad, x, way, torch.float32),
        )
        for way in (RecipeWay(recipe, True), RecipeWay(recipe, False))
    ), strict=True):  # fmt: skip
        torch.testing.assert_close(*(one.float() for one in pair), rtol=2**-7, atol=0.02)


def test_blocks_begin_anew_at_each_part_and_weights_are_rounded_folded() -> None:
    torch.manual_seed(0)
    layer, format = Linear(60, 70), FORMATS["mxfp4"]
    parts = [torch.randn(9, 20), torch.randn(9, 40)]
    with computing(told(layer, Recipe.of("mxfp4")), CPU):
        apart, together = layer(*parts), layer(torch.cat(parts, 1))
    first, second = layer.weight.split([20, 40], 1)
    want = layer.bias + F.linear(rounded(parts[0], format), rounded(first, format))
    torch.testing.assert_close(
        apart, want + F.linear(rounded(parts[1], format), rounded(second, format))
    )
    assert not torch.allclose(apart, together, atol=1e-2)
    numeric, mlp = NumericEmbedding(3, 4), MLP(32, (16,))
    _, narrow = numeric(torch.randn(9, 3), torch.randn(9, 20))
    with computing(told(mlp, Recipe.of("mxfp4")), CPU):
        found = mlp(narrow, numeric.fold)
    folded = rounded(numeric.fold(mlp.layers[0].weight), format)
    torch.testing.assert_close(
        found, (F.linear(rounded(narrow, format), folded) + mlp.layers[0].bias).relu()
    )


class _Folded(nn.Module):
    """An MLP or a CrossNet whose first weight is fitted to numbers, 3 of them beside 20 other
    inputs.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.numbers = inner, NumericEmbedding(3, 4)

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self.inner(*inputs, self.numbers.fold)
        return out


def test_gradients_flow_through_weights_that_are_rounded_folded() -> None:
    """To the weight and to the vectors of the numbers. The reference folds, and rounds what comes
    out.
    """
    torch.manual_seed(0)
    mlp, cross = _Folded(MLP(32, (70,))), _Folded(CrossNet(32, 2))
    narrow, x0 = torch.randn(90, 36), torch.randn(90, 32)

    def layer(x: Tensor) -> Tensor:
        one = mlp.inner.layers[0]  # type: ignore[union-attr, index]
        return torch.relu(matmul(x, mlp.numbers.fold(one.weight).t()) + one.bias)

    check(mlp, layer, narrow)

    def layers(x0: Tensor, narrow: Tensor) -> Tensor:
        (first, second), (b, c) = cross.inner.weights, cross.inner.biases  # type: ignore[misc]
        x = x0 * (matmul(narrow, cross.numbers.fold(first).t()) + b) + x0
        return x0 * (matmul(x, second.t()) + c) + x

    check(cross, layers, x0, narrow)


@pytest.mark.parametrize("name", MEMBERS)
def test_a_step_without_rows(name: str) -> None:
    """Its gradients are 0, and nothing divides by the number of rows."""
    layers = {
        "linear": (Linear(40, 20), [(0, 40)]),
        "parts": (Linear(40, 20), [(0, 10), (0, 30)]),
        "mlp": (MLP(40, (20, 10)), [(0, 40)]),
        "cross": (CrossNet(40, 2), [(0, 40)]),
        "matmul": (Matmul(), [(0, 7, 40), (0, 40, 5)]),
        "dots": (DotInteraction(), [(0, 5, 40)]),
        "attention": (Attention(), [(0, 2, 7, 40)] * 3),
    }
    for what, (layer, shapes) in layers.items():
        precision = Precision(name, {"*": MEMBERS[name].recipe or Recipe.of("fp32")})
        put_recipes(nn.ModuleDict({"it": layer}), precision)
        inputs = [torch.zeros(shape, requires_grad=True) for shape in shapes]
        with computing(precision, CPU):
            out = layer(*inputs)
        assert len(out) == 0, what
        of = [*inputs, *layer.parameters()]
        for x, gradient in zip(of, torch.autograd.grad(out.float().sum(), of), strict=True):
            assert gradient.shape == x.shape and not gradient.any(), what


@pytest.mark.parametrize("name", ["bf16", "bf16-truncate", "fp8", "fp8-rowwise", "mxfp8", "mx4"])
def test_a_served_product_has_the_bits_of_training(name: str) -> None:
    """Though its weight is rounded once, and kept."""
    torch.manual_seed(0)
    layer, mlp, x = Linear(100, 70), MLP(100, (70,)), torch.randn(90, 100)
    for module in (layer, mlp):
        with computing(Precision(name), CPU):
            trained = module(x)
            module.requires_grad_(False)
            with torch.no_grad():
                served = module(x), module(x)
        assert all(torch.equal(one, trained) for one in served)
    with torch.no_grad(), computing(Precision(name), CPU):
        before = layer(x)
        assert len(layer.product.forms) == 1
        layer.weight.mul_(2)
        assert not torch.equal(layer(x), before) and len(layer.product.forms) == 2


def test_a_site_has_its_recipe_only_while_computing() -> None:
    model = nn.ModuleDict(
        {
            "deep": MLP(8, (6, 4)),
            "cross": CrossNet(8, 2),
            "head": Head(4, 1),
            "dots": DotInteraction(),
        }
    )
    names = [
        "deep.layers.0.weight",
        "deep.layers.1.weight",
        "cross.weights.0",
        "cross.weights.1",
        "head.weight",
        "dots",
    ]
    assert list(named_sites(model)) == names
    fine = Recipe.of("mx9")
    precision = Precision("mx4", {"deep.*": Recipe.of("bf16"), "*.1.weight": fine, "dots": fine})
    put_recipes(model, precision)
    sites = named_sites(model)
    assert all(site.way is None for site in sites.values())
    with computing(precision, CPU):
        ways = {name: site.way and site.way.recipe for name, site in sites.items()}
    coarse = Recipe.of("mx4")
    assert list(ways.values()) == [Recipe.of("bf16"), fine, coarse, coarse, None, fine]
    with computing(precision, CPU), computing(Precision(), CPU):
        assert all(site.way is None for site in sites.values())
    with pytest.raises(
        UserError, match=r"'deap\.\*' names no product of .*deep\.layers\.0\.weight"
    ):
        put_recipes(model, Precision("mx4", {"deap.*": fine}))


def test_truncation_cuts_bits_off_and_keeps_what_is_no_number() -> None:
    from sparrow.extensions.low_precision.recipe import rounded as operand

    x = torch.randn(1000)
    x[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    # a NaN whose upper half is infinity
    x[4:5] = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    found = operand(x[:, None], "bf16-truncate", -1, torch.float32)[:, 0]
    want = rounded(x, FORMATS["bf16"], rounding="zero")
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    assert found[4].isnan() and bool((found[5:].abs() <= x[5:].abs()).all())
    assert OPERANDS["bf16-truncate"].is_exact_in_bf16
