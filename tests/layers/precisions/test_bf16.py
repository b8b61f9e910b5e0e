"""bf16 alone gives the bits of the recipe of an extension, with units for it and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sparrow.extensions.low_precision.precision import put_recipes
from sparrow.extensions.low_precision.recipe import Recipe
from sparrow.interactions.cross import CrossNet
from sparrow.interactions.dot import DotInteraction
from sparrow.layers.mlp import MLP, Head, Linear
from sparrow.layers.precision import Precision, computed, computing, native
from sparrow.layers.site import Matmul, named_sites

CPU = torch.device("cpu")
LAYERS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "linear": (lambda: Linear(40, 20), [(33, 40)]),
    "parts": (lambda: Linear(40, 20), [(33, 10), (33, 30)]),
    "mlp": (lambda: MLP(40, (20, 10)), [(33, 40)]),
    "head": (lambda: Head(40, 3), [(33, 40)]),
    "cross": (lambda: CrossNet(40, 2), [(33, 40)]),
    "low rank": (lambda: CrossNet(40, 2, rank=8), [(33, 40)]),
    "matmul": (Matmul, [(33, 7, 40), (33, 40, 5)]),
    "dots": (DotInteraction, [(33, 5, 40)]),
}


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("what", LAYERS)
def test_it_has_the_bits_of_its_recipe(
    monkeypatch: pytest.MonkeyPatch, what: str, units: bool
) -> None:
    """A pattern that only repeats bf16 lets the extension compute; two activations and the head
    stay as they are.
    """
    monkeypatch.setattr(
        "sparrow.layers.precisions.bf16.missing", lambda device: "" if units else "none"
    )
    torch.manual_seed(0)
    make, shapes = LAYERS[what]
    layer, inputs = nn.ModuleDict({"it": make()}), [torch.randn(shape) for shape in shapes]
    patterns = [name for name, site in named_sites(layer).items() if not site.high]
    alone, general = (
        Precision("bf16"),
        Precision("bf16", dict.fromkeys(patterns, Recipe.of("bf16"))),
    )
    plain = bits(layer, inputs, Precision())
    ours = bits(layer, inputs, alone)
    put_recipes(layer, general)
    theirs = bits(layer, inputs, general)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert any(not torch.equal(one, other) for one, other in zip(ours, plain, strict=True)) == bool(
        patterns
    )
    assert computed(alone, CPU) == computed(general, CPU) and native(alone, CPU) == native(
        general, CPU
    )


def bits(layer: nn.ModuleDict, inputs: list[Tensor], precision: Precision) -> list[Tensor]:
    """What a layer gives in training, all of its gradients, and what it gives when it is served,
    twice.
    """
    given = [x.clone().requires_grad_() for x in inputs]
    layer.requires_grad_(True)
    with computing(precision, CPU):
        out = layer["it"](*given)
    gradients = torch.autograd.grad(out.float().square().sum(), [*given, *layer.parameters()])
    layer.requires_grad_(False)
    with torch.no_grad(), computing(precision, CPU):
        return [out.detach(), *gradients, layer["it"](*inputs), layer["it"](*inputs)]


def test_a_site_with_a_recipe_of_its_own_needs_a_precision_that_names_it() -> None:
    layer = Linear(4, 2)
    named_sites(layer)["weight"].recipe = Recipe.of("mx4")
    with (
        computing(Precision("bf16"), CPU),
        pytest.raises(AssertionError, match="a precision that names them"),
    ):
        layer(torch.ones(3, 4))
