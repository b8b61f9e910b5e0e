"""What is told of products: the operands that plain autograd has, and bits that nobody's watching
changes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparrow.extensions.blend import model as blend
from sparrow.extensions.low_precision.watch import Operands, watched
from sparrow.interactions.cross import CrossNet
from sparrow.interactions.dot import DotInteraction
from sparrow.layers import attention as attentions
from sparrow.layers.attention import Attention
from sparrow.layers.dropout import drawing
from sparrow.layers.mlp import MLP, Head, Linear
from sparrow.layers.numeric import NumericEmbedding
from sparrow.layers.product import Product
from sparrow.layers.rows import sample_rows
from sparrow.layers.site import Matmul, named_sites
from sparrow.models import autoint, dcnv2, dlrm, finalmlp, wukong
from tests.models.test_models import batch, build, learn


class Several(nn.Module):
    """Every way in which a product is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = NumericEmbedding(3, 4)
        self.cross = CrossNet(12 + 8, 2, rank=5)
        self.deep = MLP(12 + 8, (7,))
        self.across, self.weight = Product(), nn.Parameter(torch.randn(3, 2))
        self.plain = Linear(20, 6)
        self.several, self.weights = Matmul(), nn.Parameter(torch.randn(2, 3, 4))
        self.head = Head(20 + 7 + 12 + 6 + 8, 1)

    def forward(self, numbers: Tensor, rest: Tensor) -> Tensor:
        wide, narrow = self.numbers(numbers, rest)
        across = self.across(
            (rest.view(-1, 2, 4).transpose(0, 1).contiguous(),), self.weight, across=True
        )
        several = self.several(
            wide[:, :6].unflatten(1, (2, 3)).transpose(0, 1), self.weights, weights=True
        )
        parts = [
            self.cross(wide, narrow, self.numbers.fold),
            self.deep(wide),
            across.transpose(0, 1).flatten(1),
        ]
        out: Tensor = self.head(*parts, self.plain(wide), several.transpose(0, 1).flatten(1))
        return out


def test_every_product_is_told_with_its_operands() -> None:
    """y and both gradients follow from what is told, as they do from a layer written in plain
    torch.
    """
    torch.manual_seed(0)
    model, numbers, rest = Several(), torch.randn(10, 3), torch.randn(10, 8)
    seen: dict[str, Operands] = {}
    with watched(model, lambda name, of: seen.setdefault(name, of) and None, rows=100):
        model(numbers, rest).square().sum().backward()
    assert seen.keys() == named_sites(model).keys()
    weights = dict(model.named_parameters())
    for name, of in seen.items():
        made = of.grad.mT @ of.x  # dW of the weight as it is used
        grad = weights[
            "weight" if name == "across" else "weights" if name == "several" else name
        ].grad
        if name == "cross.weights.0":  # folded: narrower, numbers filled up with columns of 0
            assert made.shape == (5, 16 + 8)
            torch.testing.assert_close(made[:, 16:], grad[:, 12:])
            assert bool((of.x[:, 3:16] == 0).all())
            continue
        torch.testing.assert_close(
            made.mT if name == "several" else made, grad, rtol=1e-4, atol=1e-5
        )
    assert seen["across"].x.shape == (10 * 4, 2)
    assert seen["across"].rows == 40
    assert seen["head.weight"].x.shape == (10, 53)
    for name in ("deep.layers.0.weight", "plain.weight"):
        assert torch.equal(seen[name].weight, weights[name])
    assert all(site.watch is None for site in named_sites(model).values())


def test_some_rows_are_told_of_many() -> None:
    torch.manual_seed(0)
    layer, seen = Linear(4, 3), list[Operands]()
    x = torch.randn(1000, 4)
    with watched(layer, lambda name, of: seen.append(of), rows=10):
        layer(x).sum().backward()
        layer(x[:0]).sum().backward()
        with torch.no_grad():
            layer(x)
    assert len(seen) == 1
    for told, hundred in zip(seen[0].x, x.split(100), strict=True):
        assert (told == hundred).all(1).any(), "one of each hundred"
    assert seen[0].rows == 1000


@pytest.mark.parametrize(
    "config",
    [of.Config() for of in (dcnv2, dlrm, wukong, finalmlp, autoint, blend)],
    ids=lambda c: type(c).__module__,
)
def test_models_have_the_same_bits_when_they_are_watched(config: object) -> None:
    found = []
    for rows in (0, 8):
        model, told = build(config), set[str]()
        model.train()
        with drawing(0, torch.arange(batch().batch_size)):
            if rows:
                with watched(model, lambda name, of, told=told: told.add(name), rows):
                    loss, scores = learn(model, batch())
                    loss.backward()
                assert told
            else:
                loss, scores = learn(model, batch())
                loss.backward()
        found.append([scores, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_products_of_two_activations_are_told_example_by_example(causal: bool) -> None:
    """All gradients follow from what is told; those whose two operands are the same say so."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"dots": DotInteraction(), "attention": Attention(), "plain": Matmul()})
    x, q, k, v, a, b = (
        torch.randn(shape, requires_grad=True)
        for shape in ((9, 4, 5), *[(9, 2, 3, 5)] * 3, (9, 3, 6), (9, 6, 2))
    )  # fmt: skip
    seen: dict[str, Operands] = {}
    with watched(model, lambda name, of: seen.setdefault(name, of) and None, rows=100):
        out = (
            model["dots"](x).square().sum()
            + model["attention"](q, k, v, causal=causal).square().sum()
        )
        (out + model["plain"](a, b).square().sum()).backward()
    assert seen.keys() == named_sites(model).keys()
    assert all(of.has_examples for of in seen.values())
    dots, scores, mixed, plain = (
        seen[of] for of in ("dots", "attention.scores", "attention.mixed", "plain")
    )
    assert dots.weight is dots.x
    assert (dots.rows, scores.rows, plain.rows) == (9 * 4, 9 * 2 * 3, 9 * 3)
    for made, grad in (
        (dots.grad @ dots.weight, x.grad), (scores.grad @ scores.weight, q.grad),
        (scores.grad.mT @ scores.x, k.grad), (mixed.x.mT @ mixed.grad, v.grad),
        (plain.grad @ plain.weight, a.grad), (plain.grad.mT @ plain.x, b.grad.mT),
    ):  # fmt: skip
        torch.testing.assert_close(made, grad, rtol=1e-4, atol=1e-5)
    assert bool((mixed.x.triu(1) == 0).all()) == causal
    with watched(model, lambda name, of: seen.__setitem__(name, of), rows=4):
        (model["dots"](x).sum() + model["attention"](q, k, v).sum()).backward()
    # one of each two and len(seen["attention.mixed"].grad) == 4
    assert torch.equal(seen["dots"].x, x[[0, 3, 4, 7]])


def test_attention_is_computed_again_for_the_examples_that_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And for no other, also where each example has a mask of its own; their gradients follow from
    what is told.
    """
    torch.manual_seed(0)
    layer, sizes, told = Attention(), list[int](), dict[str, Operands]()
    shares = attentions._shares

    def counted(scores: Tensor, **how: object) -> Tensor:
        sizes.append(len(scores))
        return shares(scores, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(attentions, "_shares", counted)
    q, k, v = (torch.randn(9, 2, 3, 5, requires_grad=True) for _ in range(3))
    mask = (torch.rand(9, 1, 3, 3) > 0.4) | torch.eye(3, dtype=torch.bool)
    with watched(layer, told.__setitem__, rows=4):
        layer(q, k, v, mask=mask).square().sum().backward()
    at = sample_rows(torch.arange(9)[:, None], 4)[:, 0]
    scores, mixed = told["scores"], told["mixed"]
    assert sizes == [4] == [len(at)]
    assert torch.equal(mixed.x == 0, ~mask[at].expand_as(mixed.x))
    for made, grad in (
        (scores.grad @ scores.weight, q.grad),
        (scores.grad.mT @ scores.x, k.grad),
        (mixed.x.mT @ mixed.grad, v.grad),
    ):
        assert grad is not None
        torch.testing.assert_close(made, grad[at], rtol=1e-4, atol=1e-5)
    assert scores.rows == mixed.rows == 9 * 2 * 3


@pytest.mark.parametrize(
    ("features", "most", "batch"), [(16, 128, 4096), (26, 64, 1024), (2, 32, 256), (4, 128, 100)]
)
def test_rows_of_all_features_are_told(features: int, most: int, batch: int) -> None:
    """Where rows are the features of examples in turn: rows at equal distances would be of one
    feature alone.
    """
    feature_N = torch.arange(batch * features) % features
    told_N = sample_rows(feature_N[:, None], most)[:, 0]
    counts = told_N.bincount(minlength=features)
    assert len(told_N) == most and counts.min() >= 1 and counts.max() <= 3 * most // features
