"""Torch's counter against products that are written out by hand."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import sparrow.kernels
from sparrow.apps.bits.calibrate import observe
from sparrow.apps.scaling import flops as flops_of_example
from sparrow.core import Batch, KeyedJagged, repeated
from sparrow.core.repeated import Repeated, Users
from sparrow.embeddings import TableChoices
from sparrow.embeddings.choices import Override
from sparrow.extensions.low_precision.candidates import candidates
from sparrow.features.schema import Column, Schema
from sparrow.kernels import flops, missing, project
from sparrow.kernels.flops import count_flops, product_flops
from sparrow.layers import packed
from sparrow.layers.dropout import drawing
from sparrow.layers.mlp import MLP
from sparrow.layers.precision import Precision, computing
from sparrow.layers.product import Product, sites
from sparrow.losses import loss_and_probabilities
from sparrow.models import dcnv2, dlrm, masknet
from sparrow.serving.products import format_of
from tests.models import closed_forms
from tests.models.test_models import EACH, HISTORY, SCHEMA, SOME, batch, build, named

CPU = torch.device("cpu")
# vectors, which no gradient reaches, and two labels
WIDE = replace(
    SCHEMA,
    columns={
        "embedding": Column(kind="vector", size=5),
        **SCHEMA.columns,
        "buy": Column(kind="label"),
    },
)


@pytest.fixture(params=["kernels", "reference", "onednn"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How products run: as here, without compiled kernels, or all in oneDNN, as large ones on
    AMD.
    """
    if request.param != "reference" and missing():
        pytest.skip(f"{missing()}: run `make setup`")
    if request.param == "reference":
        monkeypatch.setattr(sparrow.kernels, "_problem", "the compiled kernels are not built")
        monkeypatch.setattr(sparrow.kernels, "_say", lambda problem: None)
    if request.param == "onednn":
        if not torch.backends.mkldnn.is_available():
            pytest.skip("this torch has no oneDNN")
        from sparrow.kernels.dense import cpp

        monkeypatch.setattr(cpp, "_has_slow_mm", lambda: True)
        monkeypatch.setattr(cpp, "ONEDNN", 1)
        monkeypatch.setattr(packed, "LEAST", 1)
    return str(request.param)


def example_of(schema: Schema, size: int = 16) -> Batch:
    """Rows with numbers for all columns and labels."""
    found, random = batch(size, schema=schema), torch.Generator().manual_seed(0)
    dense_BC = torch.randn(size, len(schema.numbers), generator=random)
    labels_BT = torch.randint(2, (size, len(schema.labels)), generator=random).float()
    return replace(found, dense_BC=dense_BC, labels_BT=labels_BT)


def train(model: torch.nn.Module, example: Batch, precision: str = "fp32") -> None:
    """A step, without the optimizer's part."""
    with computing(Precision(precision), CPU), drawing(0, example.row_B):
        loss = loss_and_probabilities(model.train()(example), example)[0]
    loss.backward()


@torch.inference_mode()
def score(model: torch.nn.Module, example: Batch) -> torch.Tensor:
    """As a service does it."""
    logits: torch.Tensor = model.eval().requires_grad_(False)(example)
    return logits


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", EACH, ids=named)
def test_the_count_is_the_closed_form(config: Any, way: str) -> None:
    model, example = build(config, WIDE), example_of(WIDE)
    counted = count_flops(lambda: train(model, example))
    assert counted == closed_forms.flops_of_training(config, WIDE, example)
    for size in (16, 1):  # one row goes another way
        few = example_of(WIDE, size)
        counted = count_flops(partial(score, model, few))
        assert counted == closed_forms.flops(config, WIDE, few)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("config", SOME, ids=named)
def test_fewer_bits_are_as_many_operations(config: Any, precision: str) -> None:
    model, example = build(config, WIDE), example_of(WIDE)
    counted = count_flops(lambda: train(model, example, precision))
    assert counted == closed_forms.flops_of_training(config, WIDE, example)


@pytest.mark.parametrize("config", SOME, ids=named)
def test_a_served_model_in_fewer_bits_too(config: Any, way: str) -> None:
    model, example = build(config, WIDE).requires_grad_(False).eval(), example_of(WIDE)
    seen = observe(model, lambda few: score(model, few), [example])
    expected = closed_forms.flops(config, WIDE, example)
    for name in ("int8", "bf16"):
        form = format_of(name)
        for site, product in sites(model).items():
            fields = form.encode(seen[site].weight_OI, (-4.0, 4.0))
            product.instead = form.Product(fields)
        assert count_flops(lambda: score(model, example)) == expected


@pytest.mark.parametrize("config", [dcnv2.Config(dim=4, deep=(16,)), masknet.Config(dim=4)])
def test_sites_alone_sum_up_to_the_count(config: Any) -> None:
    """All products of these models are sites with a weight."""
    model, example = build(config, WIDE), example_of(WIDE)
    seen = observe(model, lambda few: score(model, few), [example])
    total = 16 * sum(site.flops for site in seen.values())
    assert total == pytest.approx(closed_forms.flops(config, WIDE, example), rel=1e-12)


def test_a_list_that_is_stored_once_counts_once() -> None:
    config = dlrm.Config(dim=4, history=HISTORY)
    inverse_B = torch.arange(16) % 3
    one = torch.ones(16, dtype=torch.int64)
    lengths = torch.cat([one, one, torch.tensor([3, 1, 2])])
    values_N = torch.arange(int(lengths.sum())) % 20
    keys = ("item", "user", "history")
    ids = KeyedJagged(
        keys=keys,
        values_N=values_N,
        lengths=lengths,
        rows=(16, 16, 3),
        inverse_B={("history",): inverse_B},
    )
    grouped = replace(example_of(SCHEMA), ids=ids)
    expanded = replace(grouped, ids=ids.expanded())
    counts = []
    for example in (grouped, expanded):
        step = partial(train, build(config), example)
        counts.append(count_flops(step))
        assert counts[-1] == closed_forms.flops_of_training(config, SCHEMA, example)
    assert counts[0] < counts[1]


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_what_samples_share_counts_once(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparrow.serving.products import int8

    for module in (repeated, int8):
        monkeypatch.setattr(module, "LEAST", 1)
        monkeypatch.setattr(module, "COPYING", 0)
    whose = Users.of(np.arange(6) % 2, 2)
    marks_1I = torch.tensor([[True] * 5 + [False] * 3])
    x_BI = torch.randn(6, 8)
    x_BI[:, :5] = x_BI[whose.sample_U][whose.inverse_B][:, :5]
    mlp = MLP(8, (4,)).requires_grad_(False)
    if name == "int8":
        fields = int8.encode(torch.randn(4, 8), (-4.0, 4.0))
        mlp.layers[0].product.instead = int8.Product(fields)  # type: ignore[union-attr]
    with torch.inference_mode():
        counted = count_flops(lambda: mlp(Repeated.of(x_BI, whose, marks_1I)))
        assert counted == 2 * 4 * (2 * 5 + 6 * 3)
        assert count_flops(lambda: mlp(x_BI)) == 2 * 4 * 6 * 8


@torch.inference_mode()
def test_vectors_that_samples_share_count_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "LEAST", 1)
    monkeypatch.setattr(repeated, "COPYING", 0)
    whose, product, weight = Users.of(np.arange(6) % 2, 2), Product(), torch.randn(3, 4)
    marks_N1D = torch.tensor([True, False, True, True])[:, None, None].expand(4, 1, 5)
    shared = Repeated.of(torch.zeros(4, 6, 5), whose, marks_N1D.clone())
    counted = count_flops(lambda: product((shared,), weight, across=True))
    assert counted == 2 * 3 * 5 * (2 * 3 + 6 * 1)


def test_tables_with_a_projection(way: str) -> None:
    narrow = {"name": "mixed_dimension", "dims": [2]}
    choices = TableChoices(overrides=(Override(names=("item",), addressing=narrow),))
    config, example = dlrm.Config(dim=4), example_of(SCHEMA)
    model = config.build(SCHEMA, choices)
    projected = 2 * (2 * 16 * 2 * 4)  # pooled vectors of 2 numbers to 4, of `item` and `history`
    counted = count_flops(lambda: train(model, example))
    assert counted == 3 * projected + closed_forms.flops_of_training(config, SCHEMA, example)
    counted = count_flops(lambda: score(model, example))
    assert counted == projected + closed_forms.flops(config, SCHEMA, example)


def test_scale_counts_what_large_products_do(way: str) -> None:
    """On an AMD processor a DCNv2 once counted its last layer alone."""
    config, example = dcnv2.Config(), example_of(SCHEMA)
    counted = flops_of_example(build(config), example)
    assert counted == closed_forms.flops(config, SCHEMA, example) / 16


# -- operators -------------------------------------------------------------------------------------


def shape(*sizes: int) -> torch.Tensor:
    return torch.zeros(*sizes)


ATEN = torch.ops.aten
CALLS: dict[str, tuple[Callable[[], object], int]] = {
    "mv": (lambda: ATEN.mv(shape(3, 4), shape(4)), 24),
    "dot": (lambda: ATEN.dot(shape(4), shape(4)), 8),
    "addmv": (lambda: ATEN.addmv(shape(3), shape(3, 4), shape(4)), 24),
    "addmv_": (lambda: ATEN.addmv_(shape(3), shape(3, 4), shape(4)), 24),
    "addmm": (lambda: ATEN.addmm(shape(3, 5), shape(3, 4), shape(4, 5)), 120),
    "addmm_": (lambda: ATEN.addmm_(shape(3, 5), shape(3, 4), shape(4, 5)), 120),
    "baddbmm_": (lambda: ATEN.baddbmm_(shape(2, 3, 5), shape(2, 3, 4), shape(2, 4, 5)), 240),
    "mm out": (lambda: torch.mm(shape(3, 4), shape(4, 5), out=shape(3, 5)), 120),
    "int_mm": (lambda: ATEN._int_mm(shape(32, 32).char(), shape(32, 8).char()), 16384),
    "nothing": (lambda: shape(3, 4) * shape(3, 4), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_of_torch(name: str) -> None:
    call, expected = CALLS[name]
    assert count_flops(call) == expected


def test_whoever_opens_the_counter_gets_the_same() -> None:
    with FlopCounterMode(display=False) as counter:
        CALLS["addmm_"][0]()
    assert counter.get_total_flops() == product_flops(3, 4, 5) == 120


def test_a_formula_of_torchs_own_is_kept() -> None:
    """A later torch may know an operator that this one does not: then there is one formula too."""
    before = dict(flop_registry)
    importlib.reload(flops)
    assert flop_registry == before


@pytest.mark.parametrize("backward", [False, True])
def test_attention(backward: bool) -> None:
    query, key, value = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))

    def attend() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        if backward:
            out.sum().backward()

    one = 2 * 2 * 3 * 5 * 7 * 8
    assert count_flops(attend) == one * (2 + (5 if backward else 0))


def test_project_counts_parts_with_a_weight(way: str) -> None:
    parts = [project.Part(0, 3, 0, 0), project.Part(3, 4, 5), project.Part(7, 3, 9, 0)]
    x, weights = torch.randn(6, 10), [torch.randn(5, 3)]
    each = 2 * 6 * 5 * 3
    assert count_flops(lambda: project.project(x, weights, parts, 14)) == 2 * each
    grad = torch.randn(6, 14)
    assert count_flops(lambda: project.project_backward(grad, x, weights, parts)) == 4 * each


def test_candidates_count_alike() -> None:
    a, b, tried = torch.randn(16, 32), torch.randn(32, 48), set()
    for name, candidate in candidates().items():
        if not candidate.missing(CPU):
            assert count_flops(partial(candidate.multiply, a, b)) == 2 * 16 * 32 * 48
            tried.add(name)
    assert "fp32" in tried


# -- none is forgotten -----------------------------------------------------------------------------

PRODUCT = re.compile(r"mm|mv|dot|linear|matmul|attention|project|int8|gradient")
NO_PRODUCTS = {
    "mkldnn._reorder_linear_weight": "copies a weight",
    "sparrow.int8_processor": "names a processor",
    "sparrow.row_gradients": "adds the gradients of a row",
    "sparrow.weight_gradients": "of an id's weight: like the lookup, which no matrix has a part in",
}


def forgotten(names: set[str]) -> set[str]:
    """Operators that look like matrix products and have no formula."""
    known = {str(operator) for operator in flop_registry}
    return {name for name in names if PRODUCT.search(name.split(".")[1])} - known - {*NO_PRODUCTS}


class Dispatched(TorchDispatchMode):
    """Notes the names of operators, as the counter sees them: those made of others are taken
    apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            found = func.decompose(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", SOME, ids=named)
def test_no_operator_of_a_model_is_forgotten(config: Any, way: str) -> None:
    model, example = build(config, WIDE), example_of(WIDE)
    with Dispatched() as dispatched:
        train(model, example)
        train(model, example, "bf16")
        for size in (16, 1):
            score(model, example_of(WIDE, size))
    assert len(dispatched.names) > 10 and not forgotten(dispatched.names)


@pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
def test_no_operator_of_ours_is_forgotten() -> None:
    """Also those that only other processors run."""
    names = {
        name.replace("::", ".").split(".default")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("sparrow::")
    }
    assert {"sparrow.weight_gradient", "sparrow.lookup"} <= names
    assert not forgotten(names)
    grad, x = shape(6, 3), shape(6, 5)
    formula = flop_registry[torch.ops.sparrow.weight_gradient]
    assert formula(grad, x, out_val=shape(3, 5)) == 2 * 6 * 3 * 5


def test_a_forgotten_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control."""
    assert not forgotten({"aten.addmm_", "aten.mul"})
    monkeypatch.delitem(flop_registry, ATEN.addmm_)
    assert forgotten({"aten.addmm_", "aten.mul"}) == {"aten.addmm_"}
