"""One matrix for the family: a new model adds a row to MODELS."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sparrow.core import Batch, Jagged, KeyedJagged, UserError
from sparrow.core.config import Family, to_dict
from sparrow.embeddings import EmbeddingTables, TableChoices
from sparrow.embeddings.choices import Override
from sparrow.embeddings.components import ComponentTables
from sparrow.extensions.blend import model as blend
from sparrow.extensions.blend.deep import Members
from sparrow.extensions.low_precision.precision import put_recipes
from sparrow.extensions.low_precision.recipe import Recipe
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.kernels import quantise
from sparrow.kernels.embedding_bag import Bags
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.layers.dropout import drawing, drops
from sparrow.layers.mlp import MLP, Head
from sparrow.layers.precision import Precision, computing
from sparrow.layers.site import named_sites
from sparrow.losses import binary_cross_entropy, loss_and_probabilities, probabilities
from sparrow.models import (
    History,
    autoint,
    dcnv2,
    deepfm,
    din,
    dlrm,
    finalmlp,
    fm,
    gdcn,
    logistic,
    masknet,
    mmoe,
    ple,
    wukong,
)
from sparrow.numerics.formats import FORMATS
from sparrow.trained.build import tables_of


def named(config: object) -> str:
    """`pytest -k NAME` runs a model's rows."""
    return Family("sparrow.models").name_of(config) + repr(config).removeprefix("Config")


HISTORY = History(lists=("history",), layers=1, longest=3)
MODELS = [
    logistic.Config(),
    dlrm.Config(dim=4, bottom=(8,), top=(16,)),
    dlrm.Config(dim=4, bottom=(), top=()),
    dcnv2.Config(dim=4, cross_layers=2, deep=(16,)),
    dcnv2.Config(dim=4, cross_layers=2, rank=3, deep=(16,)),
    dcnv2.Config(dim=4, cross_layers=1, deep=(16,), embed_dense=False),
    dcnv2.Config(dim=4, cross_layers=2, rank=3, deep=(16,), structure="stacked", bottom=(8, 4)),
    dlrm.Config(dim=4, bottom=(8,), top=(16,), history=HISTORY),
    fm.Config(dim=4),
    deepfm.Config(dim=4, deep=(16,)),
    masknet.Config(dim=4, blocks=2, width=8, deep=(16,)),
    masknet.Config(dim=4, blocks=2, width=8, deep=(16,), structure="serial"),
    gdcn.Config(dim=4, layers=2, deep=(16,)),
    gdcn.Config(dim=4, layers=2, deep=(16,), structure="stacked"),
    finalmlp.Config(dim=4, first=(16,), second=(8,), gates=(8,)),
    finalmlp.Config(dim=4, first=(16,), second=(8,), gates=()),
    finalmlp.Config(
        dim=4,
        first=(16,),
        second=(8,),
        gates=(8,),
        first_context=("user",),
        second_context=("item",),
    ),
    autoint.Config(dim=4, width=8, deep=(16,)),
    autoint.Config(dim=4, width=8, deep=()),
    din.Config(dim=4, attention=(8,), deep=(16,)),
    mmoe.Config(dim=4, experts=2, expert=(16,), tower=(8,)),
    ple.Config(dim=4, shared=1, own=1, expert=(16,), tower=(8,)),
    wukong.Config(dim=4, n_f=3, n_l=2, k=3, mlp=(16,), top=(16,), bottom=(8,)),
    wukong.Config(
        dim=4,
        n_f=3,
        n_l=3,
        k=3,
        mlp=(16,),
        top=(16,),
        bottom=(8,),
        projection="linear",
        several={"item": 2},
    ),
    dcnv2.Config(dim=4, cross_layers=2, deep=(16,), history=HISTORY),
    fm.Config(dim=3, history=HISTORY),
    masknet.Config(dim=4, blocks=2, width=8, deep=(16,), history=HISTORY),
    mmoe.Config(dim=4, experts=2, expert=(16,), tower=(8,), history=HISTORY),
    wukong.Config(
        dim=4,
        n_f=3,
        n_l=2,
        k=3,
        mlp=(16,),
        top=(16,),
        bottom=(8,),
        several={"item": 2},
        history=HISTORY,
    ),
    blend.Config(dim=4, number_dim=3, ranges=4, deep=(16,), members=3, logistic=False, trees=0),
    blend.Config(dim=4, number_dim=3, ranges=4, deep=(16,), members=3),
]
# For what does not look into models: one of each, a blend with all its parts, and a model with
# several vectors of an id that reads a list by a transformer.
SOME = [*{type(config): config for config in reversed(MODELS)}.values(), MODELS[-1], MODELS[-3]]
EACH = [pytest.param(config, marks=() if config in SOME else pytest.mark.slow) for config in MODELS]
SCHEMA = Schema(
    columns={
        "price": Column(kind="numeric"),
        "age": Column(kind="numeric"),
        "item": Column(kind="categorical", table="item"),
        "user": Column(kind="categorical", table="user"),
        "history": Column(kind="list", table="item", pooling="mean"),
        "click": Column(kind="label"),
    },
    encodings={"item": Encoding(kind="range", rows=20), "user": Encoding(kind="hash", rows=30)},
)


def batch(size: int = 64, seed: int = 0, schema: Schema = SCHEMA) -> Batch:
    random = torch.Generator().manual_seed(seed)
    one = torch.ones(size, dtype=torch.int64)
    lengths = {"item": one, "user": one, "history": torch.randint(0, 4, (size,), generator=random)}
    lengths = torch.cat([lengths[name] for name in schema.sparse])
    values = torch.randint(0, 20, (int(lengths.sum()),), generator=random)
    ids = KeyedJagged(keys=schema.sparse, values_N=values, lengths=lengths)
    label = (ids["item"].values_N % 2 == 0).float()[:, None]  # what there is to learn
    dense_BC, row_B = torch.randn(size, len(schema.dense), generator=random), torch.arange(size)
    return Batch(dense_BC=dense_BC, ids=ids, labels_BT=label, row_B=row_B)


def learn(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    with drawing(0, batch.row_B):
        return loss_and_probabilities(model(batch), batch)


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return learn(model, batch)[0]


def score(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return probabilities(model(batch))


def build(config: object, schema: Schema = SCHEMA, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return config.build(schema, TableChoices(rule=rowwise_adagrad.Config(lr=0.3), seed=seed))


def test_every_model_with_an_mlp_has_dropout() -> None:
    """And a blend, whose members have it by themselves."""
    with_it = {type(config) for config in MODELS if "dropout" in to_dict(config)}
    assert {type(config) for config in MODELS} - with_it == {logistic.Config, fm.Config}


@pytest.mark.parametrize("config", [one for one in MODELS if "dropout" in to_dict(one)], ids=named)
def test_dropout_is_of_training_alone(config: Any) -> None:
    example = batch()
    model, plain = (
        build(dataclasses.replace(config, dropout=0.5)),
        build(dataclasses.replace(config, dropout=0.0)),
    )

    def trained(of: torch.nn.Module, seed: int = 0) -> torch.Tensor:
        torch.manual_seed(1)
        with drawing(seed, example.row_B):
            return of.train()(example).detach()

    assert not drops(plain)
    hidden = [
        module
        for module in model.modules()
        if isinstance(module, MLP | Members) and len(module.layers)
    ]
    if not any(module.dropout.share for module in hidden):
        assert torch.equal(trained(model), trained(plain))  # it has no hidden layer
        return
    assert drops(model)
    assert not torch.equal(trained(model), trained(plain)) and torch.equal(
        trained(model), trained(model)
    )
    assert torch.equal(model.eval()(example), plain.eval()(example))
    assert not torch.equal(trained(model), trained(model, seed=1))
    part = example.part(5, 20)
    with drawing(0, part.row_B):  # as another rank would
        mine = model.train()(part)
    torch.testing.assert_close(mine, trained(model)[5:20], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_a_table_has_a_dim_and_a_rate_of_its_own(config: Any) -> None:
    """A matrix makes vectors of the model's dim of narrower rows."""
    narrow = {"name": "mixed_dimension", "dims": [2]}
    changes = (Override(names=("item",), addressing=narrow, rule={"lr": 0.0}),)
    dim = getattr(config, "dim", 1)
    if dim < 2:
        changes = (Override(names=("item",), rule={"lr": 0.0}),)  # a row has one number
    model = config.build(
        SCHEMA, TableChoices(rule=rowwise_adagrad.Config(lr=0.3), overrides=changes)
    )
    records = {
        record.component.name: record
        for tables in tables_of(model)
        for record in tables.all_records()
    }
    assert (
        records["item"].component.dim == (2 if dim > 1 else 1)
        and records["user"].component.dim >= dim
    )
    before = {name: record.weight.detach().clone() for name, record in records.items()}
    loss_of(model, batch()).backward()
    assert torch.equal(records["item"].weight, before["item"])
    assert not torch.equal(records["user"].weight, before["user"])


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_all_tables_are_looked_up_at_once(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So rows of a request that are on an SSD are read together: those of a second lookup would
    wait for the first.
    """
    found = []
    lookup = ComponentTables.run_lookup

    def noted(self: ComponentTables, bags: Bags) -> list[torch.Tensor]:
        found.append({of.table for of in bags.lookups} | {of.by for of in bags.lookups} - {-1})
        return lookup(self, bags)

    monkeypatch.setattr(ComponentTables, "run_lookup", noted)
    model = build(config)
    for is_training in (True, False):
        model.train(is_training)(batch())
    (tables,) = tables_of(model)
    assert found == 2 * [set(range(len(list(tables.all_records()))))]


def test_every_model_has_a_row() -> None:
    family = Family("sparrow.models")
    assert {family.name_of(config) for config in MODELS} == set(family.names())


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_learns_a_planted_signal(config: object) -> None:
    model = build(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = loss_of(model, batch()).item()
    for step in range(60):
        loss_of(model, batch(seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss_of(model, batch(seed=1000)).item() < 0.4 < first


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_scores_are_the_probabilities_that_loss_judges(config: object) -> None:
    # in training, each member of a blend is judged by itself
    model, example = build(config).eval(), batch()
    loss, scores = learn(model, example)
    assert scores.shape == (64, 1) and not scores.requires_grad
    assert ((scores > 0) & (scores < 1)).all()
    torch.testing.assert_close(scores, score(model, example).detach())
    torch.testing.assert_close(
        loss, F.binary_cross_entropy(scores, example.labels_BT), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("config", [wukong.Config(), masknet.Config()], ids=named)
def test_first_predictions_are_no_chance(config: object) -> None:
    """Behind a norm, weights of the usual size make logits of the size of 1, each seed others."""
    scores = score(build(config), batch()).detach()
    assert float((scores - 0.5).abs().max()) < 0.1


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_bf16_is_close_and_learns(config: object) -> None:
    """What it learned in bf16 tells rows apart, nearly as in fp32."""
    model, example = build(config), batch(2000, seed=1000)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(40):
        with computing(Precision("bf16"), torch.device("cpu")):
            loss, scores = learn(model, batch(seed=step))
        loss.backward()
        assert scores.dtype == loss.dtype == torch.float32
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        with drawing(0, example.row_B):
            exact_BT = model(example)
        with computing(Precision("bf16"), torch.device("cpu")), drawing(0, example.row_B):
            found_BT = model(example)
    assert binary_cross_entropy(found_BT, example) < 0.6  # a constant has 0.69
    assert exact_BT.std() > 0.5
    assert (found_BT - exact_BT).std() < 0.1 * exact_BT.std()


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_the_last_product_is_in_fp32(config: object) -> None:
    """Else there would be some hundred different scores."""
    model, seen = build(config), []
    for module in model.modules():
        if isinstance(module, Head):
            module.register_forward_hook(
                lambda head, parts, found: seen.append((head, parts, found))
            )
    with computing(Precision("bf16"), torch.device("cpu")), torch.no_grad():
        assert model(batch()).dtype == torch.float32
    for head, parts, found_BT in seen:
        bias_T = 0 if head.bias is None else head.bias.double()
        exact_BT = torch.cat(parts, 1).double() @ head.weight.double().T + bias_T
        torch.testing.assert_close(found_BT.double(), exact_BT, rtol=1e-5, atol=1e-5)
    # which end in no product, or in many
    assert seen or isinstance(config, logistic.Config | fm.Config | blend.Config)


class Watch(TorchDispatchMode):
    """Collects the products whose operands are not all numbers of `FORMAT`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(
            word in name
            for word in (
                "mm",
                "matmul",
                "dot_product",
                "linear",
                "weight_gradient",
                "project",
                "mv",
            )
        ):
            operands = args[1:3] if "addmm" in name else args[:2]
            operands = args[:3] if "dot_product" in name else operands
            rounded = [quantise.rounded(of.float(), FORMATS[FORMAT]) for of in operands]
            self.seen += 1
            if not all(
                torch.equal(of.float(), one) for of, one in zip(operands, rounded, strict=True)
            ):
                self.found.append(f"{name}: {[tuple(of.shape) for of in operands]}")
        return func(*args, **(kwargs or {}))


FORMAT = "e5m2"  # so few numbers that others' products have operands that are none of them


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_every_product_both_ways_is_a_site(config: object) -> None:
    """A recipe that all sites are told rounds both operands of every product of a model."""
    model = build(config)
    told = Precision("fp32", {"*": Recipe.of(FORMAT)})
    if named_sites(model):
        put_recipes(model, told)
    for train in (True, False):
        model.train(train)
        with computing(told, torch.device("cpu")), Watch() as watch:
            loss, _ = learn(model, batch())
            loss.backward()
        assert watch.found == []
        assert (watch.seen > 0) == bool(named_sites(model))
    with computing(told, torch.device("cpu")), Watch() as watch, torch.no_grad():
        model(batch())
    assert watch.found == []
    for site in named_sites(model).values():
        site.recipe = None
    with computing(told, torch.device("cpu")), Watch() as watch:
        learn(model, batch())[0].backward()
    # the same products, each with an operand that was left as it is
    assert len(watch.found) == watch.seen


@pytest.mark.parametrize("config", MODELS, ids=named)
@pytest.mark.parametrize("name", ["mxfp8", "fp8-rowwise-gw"])
def test_products_of_two_activations_and_the_last_stay_high(config: object, name: str) -> None:
    model = build(config)
    high = [site for site in named_sites(model).values() if site.high]
    others = [site for site in named_sites(model).values() if not site.high]
    with computing(Precision(name), torch.device("cpu")):
        assert all(site.way is None for site in high)
        assert all(site.way is not None for site in others)
        loss, scores = learn(model, batch())
    loss.backward()
    assert scores.dtype == torch.float32
    # whose weights begin at 0
    assert len(scores.unique()) > 40 or isinstance(config, logistic.Config)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_scores_in_bf16_are_as_many_as_rows() -> None:
    with computing(Precision("bf16"), torch.device("cpu")), torch.no_grad():
        assert len(score(build(dcnv2.Config()), batch(5000)).unique()) > 4000


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_several_labels_have_a_logit_each(config: object) -> None:
    schema = dataclasses.replace(SCHEMA, columns={**SCHEMA.columns, "buy": Column(kind="label")})
    model, example = build(config, schema), batch()
    both = dataclasses.replace(
        example, labels_BT=torch.cat([example.labels_BT, 1 - example.labels_BT], 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        loss, scores = learn(model, both)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert scores.shape == (64, 2)
    assert loss.item() < 0.4
    assert ((scores[:, 0] > 0.5) == (scores[:, 1] < 0.5)).float().mean() > 0.9


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_every_weight_and_table_gets_a_gradient(config: object) -> None:
    model = build(config)
    tables = next(m for m in model.modules() if isinstance(m, EmbeddingTables))
    tables.mode = "deferred"
    loss_of(model, batch(512)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name
    assert set(tables.gradients()) == {"item", "user"}


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_seeds_decide(config: object) -> None:
    one, two, other = (score(build(config, seed=seed), batch()) for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert torch.equal(one, other) == isinstance(config, logistic.Config)  # which begins at zero


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_without_dense_columns(config: object) -> None:
    columns = {k: v for k, v in SCHEMA.columns.items() if v.kind != "numeric"}
    schema = dataclasses.replace(SCHEMA, columns=columns)
    loss = loss_of(build(config, schema), batch(schema=schema))
    assert torch.isfinite(loss)


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_a_batch_without_rows(config: object) -> None:
    """What a rank may get of a log's last batch."""
    loss = loss_of(build(config), batch(0))
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_sample_weights(config: object) -> None:
    model, whole = build(config).eval(), batch(64)
    weights_B = torch.zeros(64)
    weights_B[:3] = torch.tensor([1.0, 2.0, 3.0])
    each = F.binary_cross_entropy(score(model, whole), whole.labels_BT, reduction="none")[:3, 0]
    weighted = loss_of(model, dataclasses.replace(whole, weights_B=weights_B))
    torch.testing.assert_close(weighted, (each * weights_B[:3]).sum() / 6)


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_partitions_are_features(config: Any) -> None:
    """Each component of "item" is a vector more for the two columns that look it up, wherever
    vectors are counted.
    """
    item = Override(
        names=("item",), addressing={"name": "coprime", "sizes": [5, 4], "operation": "features"}
    )
    choices = TableChoices(rule=rowwise_adagrad.Config(lr=0.3), overrides=(item,), seed=0)
    if isinstance(config, din.Config):
        with pytest.raises(UserError, match="model: din reads one vector of an id"):
            config.build(SCHEMA, choices)
        return
    model, plain = config.build(SCHEMA, choices), build(config)
    losses = []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(30):
        losses.append(loss_of(model, batch(seed=step)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    for one, other in zip(tables_of(model), tables_of(plain), strict=True):
        assert {c.name for s in one.specs for c in s.components} == {
            "item.mod5",
            "item.mod4",
            "user",
        }
        sizes = [{spec.name: spec.dim for spec in tables.specs} for tables in (one, other)]
        assert sizes[0] == {"item": 2 * sizes[1]["item"], "user": sizes[1]["user"]}


def test_a_batch_without_labels() -> None:
    with pytest.raises(UserError, match="no labels"):
        loss_of(build(MODELS[0]), dataclasses.replace(batch(), labels_BT=None))


def test_a_sequence_column_is_refused() -> None:
    columns = {**SCHEMA.columns, "history": Column(kind="list", table="item", pooling="none")}
    schema = dataclasses.replace(SCHEMA, columns=columns)
    with pytest.raises(
        UserError, match=r"columns\.history\.pooling: .* 'history' in model\.history\.lists"
    ):
        build(MODELS[1], schema)
    assert torch.isfinite(loss_of(build(dlrm.Config(dim=4, history=HISTORY), schema), batch()))


@pytest.mark.parametrize("name", Family("sparrow.models").names())
def test_a_log_without_features_is_refused(name: str) -> None:
    schema = Schema(columns={"click": Column(kind="label")}, encodings={})
    with pytest.raises(UserError, match="this log has no feature; make some"):
        build(Family("sparrow.models").config(name)(), schema)


def test_dlrm_needs_two_vectors() -> None:
    columns = {
        name: column
        for name, column in SCHEMA.columns.items()
        if column.kind in ("numeric", "label")
    }
    with pytest.raises(
        UserError,
        match="this log has one: each id column has one, all numeric columns together one",
    ):
        build(dlrm.Config(), dataclasses.replace(SCHEMA, columns=columns))


def test_histories_are_lists_that_heads_divide() -> None:
    with pytest.raises(
        UserError, match=r"model\.history\.lists: no list 'histori'; did you mean 'history'"
    ):
        build(dcnv2.Config(history=History(lists=("histori",))))
    with pytest.raises(
        UserError, match=r"model\.history\.heads: 2 do not divide the 17 numbers of a vector"
    ):
        build(fm.Config(dim=16, history=HISTORY))
    with pytest.raises(
        UserError, match=r"model\.pairs\.history: model\.history\.lists names it too"
    ):
        build(din.Config(dim=4, pairs={"history": "item"}, history=HISTORY))
    with pytest.raises(UserError, match="a list is named twice"):
        History(lists=("history", "history"))


@pytest.mark.parametrize("dim", [4, 8], ids=["one vector", "two"])
def test_a_transformer_reads_each_sample_of_a_history(dim: int) -> None:
    """In its place among the columns, with the vectors that a table of several has."""
    model = build(wukong.Config(dim=4, several={"item": dim // 4}, history=HISTORY))
    example = batch(9)
    found = dict(zip(SCHEMA.sparse, model.ids(example).split([dim, 4, dim], 1), strict=True))
    looked_up = model.ids.tables(example.ids)
    for name in ("item", "user"):
        assert torch.equal(found[name], looked_up[name])
    lists, (reader,) = looked_up["history"], model.ids.readers
    for i, (low, high) in enumerate(itertools.pairwise(lists.offsets_B1.tolist())):
        alone = reader(
            Jagged(values_N=lists.values_N[low:high], offsets_B1=torch.tensor([0, high - low]))
        )[0]
        torch.testing.assert_close(found["history"][i], alone)


def test_din_weighs_some_lists_and_reads_others() -> None:
    columns = {**SCHEMA.columns, "seen": Column(kind="list", table="item")}
    schema = dataclasses.replace(SCHEMA, columns=columns)
    example = batch()
    seen = torch.arange(64) % 3
    ids = [*(example.ids[name].lengths_B for name in SCHEMA.sparse), seen]
    values = torch.cat([example.ids.values_N, torch.arange(int(seen.sum())) % 20])
    keys = (*SCHEMA.sparse, "seen")
    example = dataclasses.replace(
        example, ids=KeyedJagged(keys=keys, values_N=values, lengths=torch.cat(ids))
    )
    model = build(din.Config(dim=4, attention=(8,), deep=(16,), history=HISTORY), schema)
    assert model.pairs == {"seen": "item"}
    loss_of(model, example).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_a_step_is_deterministic(config: object) -> None:
    """As far as a CPU can tell; `tests/training/test_standin.py` looks at what a GPU would do."""
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            torch.manual_seed(0)
            model = build(config)
            loss_of(model, batch()).backward()
            rows = [
                r.weight
                for m in model.modules()
                if isinstance(m, EmbeddingTables)
                for r in m.all_records()
            ]
            found.append([*(p.grad for p in model.parameters()), *rows])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
