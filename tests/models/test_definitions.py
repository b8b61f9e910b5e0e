"""Models against their papers' definitions, written out in the plainest way, and against published
numbers.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.kernels.rules import sgd
from sparrow.losses import probabilities
from sparrow.models import (
    autoint,
    dcnv2,
    deepfm,
    din,
    dlrm,
    finalmlp,
    fm,
    gdcn,
    masknet,
    mmoe,
    ple,
    wukong,
)
from tests.models.test_models import SCHEMA, batch, build

BOTH = replace(SCHEMA, columns={**SCHEMA.columns, "buy": Column(kind="label")})


def vectors_of(model: Any, example: Batch) -> torch.Tensor:
    """A vector for each feature, [B, F, D], one by one."""
    tables = model.vectors.ids.tables(example.ids)
    numeric = [
        example.dense_BC[:, c : c + 1] * weight
        for c, weight in enumerate(model.vectors.numeric.weight_CD)
    ]
    return torch.stack([*numeric, *tables.values()], 1)


def dense(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = F.relu(x @ layer.weight.T + layer.bias)
    return x


@pytest.mark.parametrize("schema", [SCHEMA, BOTH], ids=["one label", "two"])
def test_factorization_machine_pair_by_pair(schema: Schema) -> None:
    example, labels = batch(7), len(schema.labels)
    for config in (fm.Config(dim=3), deepfm.Config(dim=3, deep=(5,))):
        model: Any = build(config, schema)
        nn.init.normal_(model.machine.bias_T)
        each = vectors_of(model, example)
        want = []
        for task in range(labels):
            v, w = each[..., 4 * task : 4 * task + 3], each[..., 4 * task + 3]
            pairs = sum(
                (v[:, i] * v[:, j]).sum(1) for i, j in itertools.combinations(range(v.shape[1]), 2)
            )
            want.append(
                model.machine.bias_T[task] + w.sum(1) / 3**0.5 + pairs / (v.shape[1] - 1) ** 0.5
            )
        logits = torch.stack(want, 1)
        if isinstance(config, deepfm.Config):
            read = each.unflatten(2, (labels, 4))[..., :3].flatten(1)  # all but the weights
            logits = logits + dense(model.deep.layers, read) @ model.head.weight.T
        torch.testing.assert_close(model(example), logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("structure", ["parallel", "serial"])
def test_masknet_by_hand(structure: Any) -> None:
    model: Any = build(
        masknet.Config(dim=4, blocks=2, width=8, reduction=0.5, deep=(6,), structure=structure)
    )
    nn.init.normal_(model.norm.weight)
    nn.init.normal_(model.norm.bias)
    example = batch(5)
    each = vectors_of(model, example)
    norms = [
        F.layer_norm(x, (4,), *own)
        for x, *own in zip(each.unbind(1), model.norm.weight, model.norm.bias, strict=True)
    ]
    features, x = each.flatten(1), torch.cat(norms, 1)
    found = []
    for block in model.blocks:
        mask = dense(block.aggregate.layers, features) @ block.project.weight.T + block.project.bias
        given = x if structure == "parallel" or not found else found[-1]
        found.append(F.relu(F.layer_norm((given * mask) @ block.hidden.weight.T, (8,))))
    x = torch.cat(found, 1) if structure == "parallel" else found[-1]
    want = dense(model.deep.layers, x) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(example), want, rtol=1e-5, atol=1e-5)


def test_autoint_by_hand() -> None:
    model: Any = build(autoint.Config(dim=4, layers=2, width=6, heads=2, deep=()))
    example = batch(5)
    x = vectors_of(model, example)
    for layer in model.attention:
        query, key, value, rest = (x @ weight.T for weight in layer.qkvr.weight.chunk(4))
        heads = []
        for h in range(2):
            q, k, v = (one[..., 3 * h : 3 * h + 3] for one in (query, key, value))
            heads.append(torch.softmax(q @ k.transpose(1, 2), -1) @ v)
        x = F.relu(torch.cat(heads, -1) + rest)
    want = x.flatten(1) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(example), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("schema", [SCHEMA, BOTH], ids=["one label", "two"])
def test_finalmlp_by_hand(schema: Schema) -> None:
    # the second: a learned vector
    contexts = {"first_context": ("user", "price"), "second_context": ()}
    model: Any = build(
        finalmlp.Config(dim=4, first=(8,), second=(6,), heads=2, gates=(5,), **contexts), schema
    )
    example = batch(5)
    each = vectors_of(model, example)  # price, age, item, user, history
    x = each.flatten(1)
    first, second = (
        dense(
            stream.layers,
            x
            * 2
            * torch.sigmoid(dense(gate.hidden.layers, context) @ gate.out.weight.T + gate.out.bias),
        )
        for stream, gate, context in zip(
            model.streams,
            model.gates,
            (each[:, [3, 0]].flatten(1), model.gates[1].context),
            strict=True,
        )
    )
    fusion = model.fusion
    for task in range(len(schema.labels)):
        want = torch.cat([first, second], 1) @ fusion.linear.weight[task] + fusion.linear.bias[task]
        for h in range(2):
            weight = fusion.weight[h, :, 3 * task : 3 * task + 3]
            want = want + torch.einsum(
                "bx,xy,by->b", first[:, 4 * h : 4 * h + 4], weight, second[:, 3 * h : 3 * h + 3]
            )
        torch.testing.assert_close(model(example)[:, task], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("structure", ["parallel", "stacked"])
def test_gdcn_by_hand(structure: Any) -> None:
    model: Any = build(gdcn.Config(dim=4, layers=2, deep=(6,), structure=structure))
    example = batch(5)
    x0 = x = vectors_of(model, example).flatten(1)
    for layer in model.layers:
        nn.init.normal_(layer.cross.bias)
        x = (
            x0
            * (x @ layer.cross.weight.T + layer.cross.bias)
            * torch.sigmoid(x @ layer.gate.weight.T)
            + x
        )
    deep = dense(model.deep.layers, x0 if structure == "parallel" else x)
    read = torch.cat([x, deep], 1) if structure == "parallel" else deep
    want = read @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(example), want, rtol=1e-5, atol=1e-5)


def test_finalmlps_contexts_are_features() -> None:
    with pytest.raises(
        UserError, match="model.first_context: no feature 'usr'; did you mean 'user'"
    ):
        build(finalmlp.Config(first_context=("usr",)))
    with pytest.raises(UserError, match="nothing reads them without gates"):
        build(finalmlp.Config(first_context=("user",), gates=()))


def test_din_id_by_id() -> None:
    model: Any = build(din.Config(dim=4, attention=(8,), deep=(6,)))
    assert model.weights[0].bias.item() == 1  # ids count alike at first
    example = batch(9)
    assert model.pairs == {"history": "item"}
    item, user = (model.ids.tables(example.ids)[name] for name in ("item", "user"))
    listed = model.ids.tables(example.ids)["history"]
    want = []
    for b in range(9):
        total = torch.zeros(4)
        for vector in listed.values_N[listed.offsets_B1[b] : listed.offsets_B1[b + 1]]:
            both = torch.cat([vector, item[b], vector - item[b], vector * item[b]])
            hidden = dense(model.attention[0].layers, both[None])
            total = total + (hidden @ model.weights[0].weight.T + model.weights[0].bias)[0] * vector
        numeric = [x * w for x, w in zip(example.dense_BC[b], model.numeric.weight_CD, strict=True)]
        x = torch.cat([*numeric, item[b], user[b], total])
        want.append(dense(model.deep.layers, x[None]) @ model.head.weight.T + model.head.bias)
    torch.testing.assert_close(model(example), torch.cat(want), rtol=1e-5, atol=1e-5)


def test_din_needs_a_list_and_its_candidate() -> None:
    with pytest.raises(UserError, match="no list 'histori'; did you mean 'history'"):
        build(din.Config(pairs={"histori": "item"}))
    with pytest.raises(UserError, match="no id column 'itm'; did you mean 'item'"):
        build(din.Config(pairs={"history": "itm"}))
    for absent, says in (
        ("item", "no list shares its table with an id column"),
        ("history", "the log has no list"),
    ):
        columns = {name: column for name, column in SCHEMA.columns.items() if name != absent}
        with pytest.raises(UserError, match=says):
            build(din.Config(), replace(SCHEMA, columns=columns))


def test_experts_by_hand() -> None:
    example = batch(5)
    model: Any = build(ple.Config(dim=4, shared=1, own=2, levels=2, expert=(8,), tower=(6,)), BOTH)
    x = vectors_of(model, example).flatten(1)
    streams = [x, x, x]
    for number, level in enumerate(model.levels):
        found = [
            [dense(e.layers, one) for e in experts]
            for experts, one in zip(level.experts, streams, strict=True)
        ]
        mixed = []
        for place, gate in enumerate(level.gates):
            experts = [*found[place], *found[2]] if place < 2 else [*found[0], *found[1], *found[2]]
            shares = torch.softmax(streams[place] @ gate.weight.T, 1)
            mixed.append(sum(shares[:, i : i + 1] * expert for i, expert in enumerate(experts)))
        assert len(mixed) == (3, 2)[number]
        streams = mixed
    want = [
        dense(t.layers, s) @ h.weight.T + h.bias
        for t, h, s in zip(model.towers, model.heads, streams, strict=True)
    ]
    torch.testing.assert_close(model(example), torch.cat(want, 1), rtol=1e-5, atol=1e-5)
    one: Any = build(mmoe.Config(dim=4, experts=3), BOTH)
    assert len(one.levels) == 1 and [len(e) for e in one.levels[0].experts] == [0, 0, 3]
    assert [gate.weight.shape[0] for gate in one.levels[0].gates] == [3, 3]


# -- Wukong ----------------------------------------------------------------------------------------


def wide(layers: int, **changes: Any) -> tuple[Any, Schema]:
    """A Wukong over eight id columns."""
    columns = {f"c{i}": Column(kind="categorical", table="t") for i in range(8)} | {
        "click": Column(kind="label")
    }
    schema = Schema(columns=columns, encodings={"t": Encoding(kind="range", rows=9)})
    config = wukong.Config(**{"dim": 4, "layers": layers, "n_f": 3, "n_l": 3, "k": 2, **changes})
    return build(config, schema), schema


@pytest.mark.parametrize(
    ("projection", "layers", "orders"),
    [
        ("linear", 1, {1, 2}),
        ("linear", 2, {*range(1, 5)}),
        ("linear", 3, {*range(1, 9)}),
        ("attentive", 1, {1, 3}),
    ],
)
def test_wukongs_orders(projection: str, layers: int, orders: set[int]) -> None:
    """Which powers of t f(t X) has without norms, ReLUs and biases: with a linear projection 1 to
    2^layers.

    Where Y is of order 1 itself, X X^T Y has order 3.
    """
    model, _ = wide(layers, projection=projection, mlp=())
    for layer in model.layers:
        layer.norm = layer.fm.norm = nn.Identity()
        nn.init.zeros_(layer.fm.out.bias)
        if projection == "attentive":
            layer.fm.attention = nn.Identity()
            nn.init.zeros_(layer.fm.project.bias)
    model.double()
    x = torch.randn(8, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def f(t: float) -> torch.Tensor:
        y = t * x
        for layer in model.layers:
            y = layer(y)
        return y.flatten()

    count = max(orders) + 4
    t = np.cos(np.pi * (np.arange(count) + 0.5) / count)  # where interpolation is stable
    values = torch.stack([f(float(one)) for one in t]).detach().numpy()
    found = np.linalg.solve(np.vander(t, increasing=True), values)
    size = np.abs(found).max(1) / np.abs(found).max()
    assert {power for power in range(count) if size[power] > 1e-6} == orders
    assert all(size[power] < 1e-9 for power in range(count) if power not in orders)


def test_wukongs_low_rank_product_is_the_factorization_machines() -> None:
    model, _ = wide(1, projection="linear", mlp=())
    block, across, x = model.layers[0].fm, model.layers[0].across, torch.randn(3, 8, 4)
    _, y, _ = across.weight.split(across.sizes)
    want = (x @ x.transpose(1, 2)) @ y.T
    want = F.layer_norm(want.flatten(1), (16,)) @ block.out.weight.T + block.out.bias
    _, projected, _ = across(x.transpose(0, 1))
    found = block(x.transpose(0, 1), projected).transpose(0, 1)
    torch.testing.assert_close(found, want.unflatten(1, (3, 4)), rtol=1e-5, atol=1e-5)


def test_wukong_by_hand() -> None:
    """From the tables to the logits: whose numbers make which vector."""
    config = wukong.Config(
        dim=4, n_f=3, n_l=2, k=3, mlp=(6,), top=(7,), bottom=(8,), several={"item": 2}
    )
    model: Any = build(config, BOTH)
    for parameter in model.parameters():  # norms too, which begin as nothing
        nn.init.normal_(parameter, std=0.5)
    example = batch(7)
    tables = [one.split(4, 1) for one in model.ids.tables(example.ids).values()]
    x = torch.stack([dense(model.bottom.layers, example.dense_BC), *itertools.chain(*tables)], 1)
    for layer in model.layers:
        n, block = x.shape[1], layer.fm
        linear, compress, residual = layer.across.weight.split(layer.across.sizes)
        compressed = torch.einsum("cn,bnd->bcd", compress, x).flatten(1)
        y = dense(block.attention.layers, compressed) @ block.project.weight.T + block.project.bias
        product = torch.einsum("bnd,bmd,bmk->bnk", x, x, y.view(7, n, 3) / n**0.5).flatten(1)
        normed = F.layer_norm(product, (3 * n,), block.norm.weight, block.norm.bias)
        made = dense(block.mlp.layers, normed) @ block.out.weight.T + block.out.bias
        both = torch.cat([made.view(7, 3, 4), torch.einsum("ln,bnd->bld", linear, x)], 1)
        rest = torch.einsum("ln,bnd->bld", residual, x) if n != 5 else x
        x = F.layer_norm(both + rest, (4,), layer.norm.weight, layer.norm.bias)
    want = dense(model.top.layers, x.flatten(1)) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(example), want, rtol=1e-4, atol=1e-4)


def test_wukongs_tables_may_have_several_vectors() -> None:
    model: Any = build(wukong.Config(dim=4, several={"item": 3}))
    assert {
        record.component.name: record.component.dim for record in model.ids.tables.all_records()
    } == {
        "item": 12,
        "user": 4,
    }
    # dense columns, item, user, history
    assert model.layers[0].across.weight.shape[1] == 1 + 3 + 1 + 3
    with pytest.raises(UserError, match="model.several: no table 'itm'; did you mean 'item'"):
        build(wukong.Config(several={"itm": 3}))


# -- published numbers -----------------------------------------------------------------------------


def test_dlrm_has_the_losses_of_its_first_authors() -> None:
    """Their README's debug run (facebookresearch/dlrm): three steps of SGD at 0.01 on squared
    errors.
    """
    tables = [
        [[0.05438, -0.11105], [0.42513, 0.34167], [-0.1426, -0.45641], [-0.19523, -0.10181]],
        [[0.23667, 0.57199], [-0.16638, 0.30316], [0.10759, 0.22136]],
        [[-0.49338, -0.14301], [-0.36649, -0.22139]],
    ]
    layers = [
        (
            [
                [0.51313, 0.66662, 0.10591, 0.13089],
                [0.32198, 0.66156, 0.84651, 0.55326],
                [0.85445, 0.38484, 0.31679, 0.35426],
            ],
            [0.17108, 0.82911, 0.33867],
        ),
        ([[0.55237, 0.57855, 0.52153], [0.00269, 0.98835, 0.90534]], [0.20764, 0.29249]),
        (
            [
                [0.52001, 0.90191, 0.98363, 0.25754, 0.56436, 0.80697, 0.39437, 0.73107],
                [0.16107, 0.6007, 0.86586, 0.98352, 0.07937, 0.42835, 0.20454, 0.45064],
                [0.54776, 0.09333, 0.29686, 0.92758, 0.569, 0.45741, 0.75353, 0.74186],
                [0.04858, 0.7087, 0.83924, 0.16594, 0.781, 0.28654, 0.30647, 0.66526],
            ],
            [0.11139, 0.66487, 0.88786, 0.69631],
        ),
        (
            [[0.44033, 0.43821, 0.7651, 0.56564], [0.0849, 0.58267, 0.81484, 0.33707]],
            [0.92758, 0.75072],
        ),
        ([[0.57406, 0.75164]], [0.07915]),
    ]
    batches = [
        ([[0.69647, 0.28614, 0.22685, 0.55131], [0.71947, 0.42311, 0.98076, 0.68483]],
         [[[1], [0, 1]], [[0], [1]], [[1], [0]]], [0.55679, 0.15896]),
        ([[0.36179, 0.22826, 0.29371, 0.63098], [0.0921, 0.4337, 0.43086, 0.49369]],
         [[[1], [0, 2, 3]], [[1], [1, 2]], [[1], [1]]], [0.15307, 0.69553]),
        ([[0.60306, 0.54507, 0.34276, 0.30412], [0.41702, 0.6813, 0.87546, 0.51042]],
         [[[2], [0, 1, 2]], [[1], [2]], [[1], [1]]], [0.31877, 0.69197]),
    ]  # fmt: skip
    columns = {f"x{i}": Column(kind="numeric") for i in range(4)}
    columns |= {f"c{i}": Column(kind="list", table=f"t{i}", pooling="sum") for i in range(3)}
    schema = Schema(
        columns={**columns, "y": Column(kind="label")},
        encodings={
            f"t{i}": Encoding(kind="range", rows=len(table)) for i, table in enumerate(tables)
        },
    )
    model: Any = dlrm.Config(dim=2, bottom=(3,), top=(4, 2)).build(
        schema, TableChoices(rule=sgd.Config(lr=0.01))
    )
    for i, table in enumerate(tables):
        model.ids.tables.record(f"t{i}").fields["weight"].copy_(torch.tensor(table))
    for layer, (weight, bias) in zip(
        [*model.bottom.layers, *model.top.layers, model.head], layers, strict=True
    ):
        layer.weight.data, layer.bias.data = torch.tensor(weight), torch.tensor(bias)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for numbers, lists, targets in batches:
        ids = KeyedJagged.from_lists({f"c{i}": each for i, each in enumerate(lists)})
        scores = probabilities(model(Batch(dense_BC=torch.tensor(numbers), ids=ids)))
        loss = F.mse_loss(scores[:, 0], torch.tensor(targets))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # weights were printed with five digits
    assert losses == pytest.approx([0.451893, 0.402002, 0.275460], abs=5e-6)


def test_forward_is_torchrecs() -> None:
    """DLRM and MLPerf's DLRM-DCNv2, with its weights."""
    pytest.importorskip("torchrec", reason="torchrec is not installed (see benchmarks/README.md)")
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
    from torchrec.models.dlrm import DLRM, DLRM_DCN
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    example = batch(33)
    names = list(SCHEMA.sparse)
    for is_dcn in (False, True):
        torch.manual_seed(1)
        pooling = {"item": PoolingType.SUM, "user": PoolingType.SUM, "history": PoolingType.MEAN}
        bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=n,
                    embedding_dim=8,
                    num_embeddings=30,
                    feature_names=[n],
                    pooling=pooling[n],
                )
                for n in names
            ]
        )
        columns = {
            **SCHEMA.columns,
            "history": Column(kind="list", table="history", pooling="mean"),
        }
        tables = {name: Encoding(kind="range", rows=30) for name in names}
        schema = replace(SCHEMA, columns=columns, encodings=tables)
        theirs: Any
        ours: Any
        if is_dcn:
            theirs = DLRM_DCN(bags, 2, [16, 8], [32, 16, 1], 3, 5)
            config: Any = dcnv2.Config(
                dim=8, bottom=(16, 8), deep=(32, 16), cross_layers=3, rank=5, structure="stacked"
            )
            ours = build(config, schema)
        else:
            theirs = DLRM(bags, 2, [16, 8], [32, 16, 1])
            ours = build(dlrm.Config(dim=8, bottom=(16,), top=(32, 16)), schema)
        for name in names:
            ours.ids.tables.record(name).fields["weight"].copy_(
                bags.embedding_bags[name].weight.detach()
            )
        layers = [m for m in theirs.dense_arch.modules() if isinstance(m, nn.Linear)]
        layers += [m for m in theirs.over_arch.modules() if isinstance(m, nn.Linear)]
        top = ours.deep if is_dcn else ours.top
        for mine, other in zip([*ours.bottom.layers, *top.layers, ours.head], layers, strict=True):
            mine.weight.data, mine.bias.data = other.weight.data, other.bias.data
        if not is_dcn:  # its pairs are in the order of the upper triangle
            theirs_at = {pair: i for i, pair in enumerate(itertools.combinations(range(4), 2))}
            order = [theirs_at[j, i] for i in range(4) for j in range(i)]
            first = ours.top.layers[0].weight
            first.data = torch.cat([first.data[:, :8], first.data[:, 8:][:, order]], 1)
        else:
            cross = theirs.inter_arch.crossnet
            for i in range(3):
                ours.cross.weights[2 * i].data = cross.V_kernels[i].data
                ours.cross.weights[2 * i + 1].data = cross.W_kernels[i].data
                ours.cross.biases[i].data = nn.init.normal_(cross.bias[i].data).flatten()
        ids = KeyedJaggedTensor(
            keys=names, values=example.ids.values_N, lengths=example.ids.lengths
        )
        torch.testing.assert_close(
            ours(example), theirs(example.dense_BC, ids), rtol=1e-6, atol=1e-6
        )
