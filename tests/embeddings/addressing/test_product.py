"""Products of table rows are sites: a recipe can name them, and without one they are what they
were.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.embeddings import TableChoices
from sparrow.embeddings.addressing._product import TableLinear, TableProduct
from sparrow.embeddings.addressing.path import Paths
from sparrow.embeddings.choices import Override
from sparrow.extensions.low_precision.precision import put_recipes
from sparrow.extensions.low_precision.recipe import Recipe
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.layers.precision import Precision, computing
from sparrow.layers.site import named_sites
from sparrow.models import dcnv2, din
from sparrow.trained.build import tables_of
from tests.layers.test_site import APART, CPU, check, matmul, told
from tests.models.test_models import FORMAT, HISTORY, SCHEMA, Watch, batch, loss_of

CHOICES = TableChoices(
    rule=rowwise_adagrad.Config(lr=0.3),
    seed=0,
    overrides=(
        Override(names=("item",), addressing={"name": "path", "rows": 7, "hidden": 5}),
        Override(names=("user",), addressing={"name": "mixed_dimension", "dims": [2]}),
    ),
)
NARROW = TableChoices(
    rule=rowwise_adagrad.Config(lr=0.3),
    seed=0,
    overrides=(
        Override(names=("item", "user"), addressing={"name": "mixed_dimension", "dims": [2]}),
    ),
)


def built(config: Any, tables: TableChoices) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = config.build(SCHEMA, tables)
    for paths in (module for module in model.modules() if isinstance(module, Paths)):
        nn.init.normal_(paths.out_KDH)  # else it begins at 0
    return model


def test_each_operand_is_rounded_from_the_original() -> None:
    torch.manual_seed(0)
    linear = TableLinear(50, 40)
    check(linear, lambda x: matmul(x, linear.weight.t()), torch.randn(90, 50))
    paths, place_N = Paths(40, 35, 2, 45), torch.arange(90)
    nn.init.normal_(paths.out_KDH)

    def by_hand(x: Tensor) -> Tensor:
        parts = []
        for k, part in enumerate(x.split(45)):
            h = torch.relu(matmul(part, paths.into_KHD[k].t()) + paths.bias_KH[k])
            parts.append(part + matmul(h, paths.out_KDH[k].t()))
        return torch.cat(parts)

    class _Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.paths = paths

        def forward(self, x: Tensor) -> Tensor:
            return self.paths((x,), place_N)  # type: ignore[no-any-return]

    check(_Given(), by_hand, torch.randn(90, 40))


@pytest.mark.parametrize("name", ["fp32", "mxfp8", "fp8"])
def test_without_a_recipe_of_its_own_it_has_the_bits_of_before(name: str) -> None:
    linear, x = TableLinear(50, 40), torch.randn(90, 50)
    with computing(Precision(name), CPU):
        assert torch.equal(linear(x), F.linear(x, linear.weight))


def test_a_bucket_without_ids() -> None:
    paths = Paths(4, 3, 5, 10)
    nn.init.normal_(paths.out_KDH)
    # none of the third
    x, ids_N = torch.randn(6, 4, requires_grad=True), torch.tensor([41, 3, 3, 12, 0, 45])
    with computing(told(paths, APART), CPU):
        paths((x,), ids_N).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert all(
        p.grad is not None and not p.grad[2].any() and p.grad[4].any() for p in paths.parameters()
    )


@pytest.mark.parametrize(
    "config",
    [
        dcnv2.Config(dim=4, cross_layers=1, deep=(8,)),
        din.Config(dim=4),
        dcnv2.Config(dim=4, cross_layers=1, deep=(8,), history=HISTORY),
    ],
)
def test_all_products_of_a_model_with_its_tables_are_sites(config: Any) -> None:
    model = built(config, CHOICES)
    names = {
        name.rpartition("combines.")[2]
        for name, site in named_sites(model).items()
        if isinstance(site, TableProduct)
    }
    assert names == {"0.into", "0.out", "1.blocks.0.weight"}
    precision = Precision("fp32", {"*": Recipe.of(FORMAT)})
    put_recipes(model, precision)
    with computing(precision, CPU), Watch() as watch:
        loss_of(model, batch()).backward()
    assert watch.found == []


def test_a_pattern_names_those_of_tables_alone() -> None:
    """The call for all tables gives way to a product each, of the same pooled vectors."""
    config = dcnv2.Config(dim=4, cross_layers=1, deep=(8,))
    model, example = built(config, NARROW), batch()
    (tables,) = tables_of(model)
    plain = tables.pooled(example.ids).detach()
    precision = Precision("fp32", {"*combines*": Recipe.of("mxfp4")})
    put_recipes(model, precision)
    assert tables._combined.columns.fits(False) and torch.equal(tables.pooled(example.ids), plain)
    with computing(precision, CPU):
        assert not tables._combined.columns.fits(False)
        found = tables.pooled(example.ids).detach()
        apart = {name: site.way is not None for name, site in named_sites(model).items()}
    assert {name for name, is_told in apart.items() if is_told} == {
        name for name in apart if "combines" in name
    }
    assert len({name for name in apart if "combines" in name}) == 2
    assert 0.01 < float((found - plain).norm() / plain.norm()) < 0.3
