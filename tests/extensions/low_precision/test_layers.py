"""Settings of the layers of any model: of parts of models, then of all models."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.apps.convert import convert
from sparrow.core import UserError
from sparrow.extensions.low_precision.layers import put_layers
from sparrow.extensions.low_precision.precision import put_recipes
from sparrow.extensions.low_precision.recipe import Recipe
from sparrow.interactions.cross import CrossNet
from sparrow.layers.activation import Activation
from sparrow.layers.kinds import Layers
from sparrow.layers.mlp import MLP, Head, Linear
from sparrow.layers.norm import BlockNorm, LayerNorm
from sparrow.layers.precision import Precision, computing
from sparrow.layers.site import named_sites
from sparrow.models import autoint, din, masknet, wukong
from sparrow.serving.export import export
from sparrow.serving.scorer import load
from sparrow.trained.run import Loop
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.models.test_models import FORMAT, MODELS, Watch, batch, build, loss_of, named
from tests.runs import small_run

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "swish": lambda x: x / (1 + torch.exp(-x)),
    "hard-swish": lambda x: x * F.relu6(x + 3) / 6,
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", FORMULAS)
def test_an_mlp_is_its_formula_in_float64(kind: str, bias: bool) -> None:
    """With gradients, where they are taken and where they are not."""
    torch.manual_seed(0)
    mlp, x = MLP(6, (5, 4)), 3 * torch.randn(40, 6)
    put_layers(mlp, Layers(bias=bias, activation=kind))  # type: ignore[arg-type]
    assert [name for name, _ in mlp.named_parameters() if "bias" in name] == [
        "layers.0.bias",
        "layers.1.bias",
    ][: 2 * bias]
    weights = [p.detach().double().requires_grad_() for p in mlp.parameters()]
    given, want = iter(weights), x.double()
    for _ in mlp.layers:
        want = want @ next(given).t()
        want = FORMULAS[kind](want + next(given) if bias else want)
    got = mlp(x)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(want.shape)
    pairs = zip(
        torch.autograd.grad(got, list(mlp.parameters()), upstream),
        torch.autograd.grad(want, weights, upstream.double()),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(
            mlp.requires_grad_(False)(x).double(), want, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("rank", [None, 2])
def test_cross_layers_without_biases(rank: int | None) -> None:
    """As with biases of 0, both ways, and to the bit."""
    torch.manual_seed(0)
    cross, zeros, x = CrossNet(6, 2, rank), CrossNet(6, 2, rank), torch.randn(9, 6)
    put_layers(cross, Layers(bias=False))
    zeros.load_state_dict(cross.state_dict(), strict=False)
    assert len(list(cross.parameters())) == len(cross.weights)
    one, other = cross(x), zeros(x)
    assert torch.equal(one, other)
    for ours, theirs in zip(
        torch.autograd.grad(one.sum(), list(cross.weights)),
        torch.autograd.grad(other.sum(), list(zeros.weights)),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(cross(x), zeros(x))


def test_what_stays_has_the_values_of_before() -> None:
    """So that runs with and without a setting can be compared in pairs."""
    made = []
    for layers in (Layers(), Layers(bias=False, norm="block", activation="swish")):
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {"mlp": MLP(4, (3,)), "norm": LayerNorm(3), "out": Linear(3, 3), "head": Head(3, 1)}
        )
        put_layers(model, layers)
        made.append(model)
    before, after = (model.state_dict() for model in made)
    assert after.keys() == {"mlp.layers.0.weight", "out.weight", "head.weight", "head.bias"}
    assert all(torch.equal(after[name], before[name]) for name in after)
    assert isinstance(made[1]["norm"], BlockNorm) and isinstance(made[0]["norm"], LayerNorm)


def test_a_layer_norm_loses_its_bias_and_keeps_its_gain() -> None:
    model = nn.ModuleDict({"norm": LayerNorm(3)})
    put_layers(model, Layers(bias=False))
    assert [name for name, _ in model.named_parameters()] == ["norm.weight"]
    x = torch.randn(5, 3)
    assert torch.equal(model["norm"](x), F.layer_norm(x, (3,)))


def test_hidden_numbers_are_as_narrow_as_others() -> None:
    mlp = MLP(6, (5, 4))
    put_layers(mlp, Layers(activation="hard-swish"))
    with computing(Precision("bf16"), torch.device("cpu")):
        assert mlp(torch.randn(3, 6)).dtype == torch.bfloat16


def test_what_a_model_has_not_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^layers\.norm: 'block', and this model has no norm; leave it out$"
    ):
        put_layers(MLP(4, (3,)), Layers(norm="block"))
    for model in (MLP(4, ()), Head(4, 1)):
        with pytest.raises(
            UserError,
            match=r"^layers\.activation: 'swish', and this model has no activation; leave",
        ):
            put_layers(model, Layers(activation="swish"))
        put_layers(model, Layers())


# -- all models ------------------------------------------------------------------------------------

LAST = re.compile(r"(^|\.)(head|heads\.\d+|fusion\.linear|machine|members)\.bias(_K?T)?$|^bias_T$")


def all_of(model: nn.Module) -> Layers:
    """Every setting that a model has a use for."""
    found = [type(module) for module in model.modules()]
    has_norm = any(issubclass(one, LayerNorm) for one in found)
    return Layers(
        bias=False,
        norm="block" if has_norm else "layer",
        activation="hard-swish" if Activation in found else "relu",
    )


def changed(config: Any) -> nn.Module:
    model = build(config)
    put_layers(model, all_of(model))
    return model


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_no_bias_but_the_last_layers(config: Any) -> None:
    before, after = (dict(model.named_parameters()) for model in (build(config), changed(config)))
    gone = before.keys() - after.keys()
    biases = {name for name in before if "bias" in name}
    norms = {name for name in gone - biases if re.search(r"norm\w*\.weight$", name)}
    assert gone - norms == {name for name in biases if not LAST.search(name)}
    assert all(torch.equal(after[name], before[name]) for name in after)
    assert not [module for module in changed(config).modules() if isinstance(module, LayerNorm)]


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_every_weight_learns_and_rows_are_apart(config: Any) -> None:
    """And every product is a site still."""
    model, example = changed(config), batch(512)
    loss_of(model, example).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name
    model = changed(config).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            model(example)[5:20], model(example.part(5, 20)), rtol=1e-5, atol=1e-5
        )
    told = Precision("fp32", {"*": Recipe.of(FORMAT)})
    if named_sites(model):
        put_recipes(model, told)
    with computing(told, torch.device("cpu")), Watch() as watch:
        loss_of(model, example).backward()
    assert watch.found == []


LEARN = [
    wukong.Config(dim=4, n_f=3, n_l=2, k=3, mlp=(16,), top=(16,), bottom=(8,)),
    masknet.Config(dim=4, blocks=2, width=8, deep=(16,)),
    autoint.Config(dim=4, width=8, deep=(16,)),
    din.Config(dim=4, attention=(8,), deep=(16,)),
]


@pytest.mark.parametrize("config", LEARN, ids=named)
def test_learns_a_planted_signal(config: Any) -> None:
    model = changed(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(60):
        loss_of(model, batch(seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss_of(model, batch(seed=1000)).item() < 0.4


def test_a_runs_layers_are_evaluated_exported_converted_and_resumed(
    prepared: Path, log: Path, tmp_path: Path
) -> None:
    layers = Layers(bias=False, norm="block", activation="hard-swish")
    settings = {
        "model": wukong.Config(dim=4, n_f=3, n_l=2, k=3, mlp=(8,), top=(8,), bottom=(8,)),
        "layers": layers,
    }
    run = small_run(prepared, tmp_path / "run", loop=Loop(max_steps=6), **settings)
    results = train(run)
    found = restore(tmp_path / "run", which="last")
    assert found.run.layers == layers and results["step"] == 6
    biases = [name for name, _ in found.model.named_parameters() if "bias" in name]
    assert biases == ["model.head.bias"] and any(
        isinstance(one, BlockNorm) for one in found.model.modules()
    )
    export(tmp_path / "run", tmp_path / "model", [log])
    rows, scorer = pq.read_table(log).slice(0, 50), load(tmp_path / "model")
    assert scorer.run.layers == layers
    served = torch.from_numpy(scorer.score(rows.to_pylist()))
    torch.testing.assert_close(
        served, torch.from_numpy(restore(tmp_path / "run").score_rows(rows)), rtol=0, atol=1e-6
    )
    convert(tmp_path / "model", tmp_path / "torch", "torch")  # within 1e-6, or it is refused
    other = dataclasses.replace(
        run, layers=Layers(bias=False, activation="hard-swish"), loop=Loop(max_steps=8)
    )
    with pytest.raises(
        UserError, match=r"layers\.norm is 'block' there and None here; restore the setting"
    ):
        train(other, resume=True)
    assert train(dataclasses.replace(run, loop=Loop(max_steps=8)), resume=True)["step"] == 8
