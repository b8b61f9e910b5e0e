from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparrow.core import Batch, KeyedJagged
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.interactions.cross import CrossNet
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.layers.numeric import NumericEmbedding
from sparrow.layers.precision import Precision, computing
from sparrow.losses import binary_cross_entropy
from sparrow.models import dcnv2


def defined(net: CrossNet, x0: Tensor, factors: int) -> Tensor:
    """Equation 1 of the paper, layer by layer."""
    x = x0
    for layer, bias in enumerate(net.biases):
        product = x
        for weight in net.weights[layer * factors : (layer + 1) * factors]:
            product = product @ weight.t()
        x = x0 * (product + bias) + x
    return x


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("rank", [None, 1, 3])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_forward_and_every_gradient_are_the_papers(
    layers: int, rank: int | None, rows: int
) -> None:
    torch.manual_seed(0)
    net = CrossNet(5, layers, rank).double()
    torch.nn.init.normal_(net.biases[0])
    x = torch.randn(rows, 5, dtype=torch.double, requires_grad=True)
    upstream = torch.randn(rows, 5, dtype=torch.double)
    want = defined(net, x, 1 if rank is None else 2)
    got = net(x)
    torch.testing.assert_close(got, want)
    wanted = torch.autograd.grad(want, [x, *net.parameters()], upstream)
    for a, b in zip(
        torch.autograd.grad(got, [x, *net.parameters()], upstream), wanted, strict=True
    ):
        torch.testing.assert_close(a, b)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    net = CrossNet(4, 2).double()
    assert torch.autograd.gradcheck(net, torch.randn(3, 4, dtype=torch.double, requires_grad=True))


def test_the_upstream_gradient_is_left_alone() -> None:
    net, x = CrossNet(4, 2), torch.randn(3, 4, requires_grad=True)
    upstream = torch.ones(3, 4)
    net(x).backward(upstream)
    assert torch.equal(upstream, torch.ones(3, 4))


def test_bf16_rounds_and_hands_fp32_gradients_to_fp32_weights() -> None:
    torch.manual_seed(0)
    net, x = CrossNet(16, 3), torch.randn(64, 16)
    with computing(Precision("bf16"), x.device):
        narrow = net(x)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), net(x), rtol=0.05, atol=0.1)
    narrow.float().square().sum().backward()
    rough = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(x).square().sum().backward()
    for a, p in zip(rough, net.parameters(), strict=True):
        assert a.dtype == torch.float32
        assert (a - p.grad).norm() < 0.05 * p.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize(("columns", "others"), [(1, 3), (13, 7), (17, 0), (0, 5)])
def test_folded_or_not_result_and_gradients_are_the_same(
    layers: int, rank: int | None, columns: int, others: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    numeric, net = (
        NumericEmbedding(columns, 4).to(dtype),
        CrossNet(columns * 4 + others, layers, rank).to(dtype),
    )
    for bias in net.biases:
        torch.nn.init.normal_(bias)
    dense_BC, rest_BR = (
        torch.randn(6, columns, dtype=dtype),
        torch.randn(6, others, dtype=dtype, requires_grad=True),
    )
    of, found = [rest_BR, numeric.weight_CD, *net.parameters()], []
    for folded in (False, True):
        wide, narrow = numeric(dense_BC, rest_BR)
        y = net(wide, narrow, numeric.fold) if folded else net(wide)
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        found.append([y, *torch.autograd.grad(y, of, upstream)])
    close = (
        {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    )
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, **close)


@pytest.mark.parametrize("rank", [None, 2])
def test_gradcheck_folded(rank: int | None) -> None:
    torch.manual_seed(0)
    numeric, net = NumericEmbedding(2, 2).double(), CrossNet(6, 2, rank).double()
    dense_BC = torch.randn(3, 2, dtype=torch.double)

    def call(rest_BR: Tensor, *_: Tensor) -> Tensor:
        wide, narrow = numeric(dense_BC, rest_BR)
        out: Tensor = net(wide, narrow, numeric.fold)
        return out

    rest_BR = torch.randn(3, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(call, (rest_BR, numeric.weight_CD, *net.parameters()))


def model_and_batch(dense: int, sparse: int, config: dcnv2.Config) -> tuple[torch.nn.Module, Batch]:
    columns = {f"n{i}": Column(kind="numeric") for i in range(dense)}
    columns |= {f"c{i}": Column(kind="categorical", table="t") for i in range(sparse)}
    schema = Schema(
        columns=columns | {"click": Column(kind="label")},
        encodings={"t": Encoding(kind="range", rows=20)} if sparse else {},
    )
    random = torch.Generator().manual_seed(0)
    lengths = torch.ones(64 * sparse, dtype=torch.int64)
    values = torch.randint(0, 20, (64 * sparse,), generator=random)
    ids = KeyedJagged(keys=schema.sparse, values_N=values, lengths=lengths)
    dense_BC = torch.randn(64, dense, generator=random)
    first = dense_BC[:, 0] > 0 if dense else values[:64] % 2 == 0
    torch.manual_seed(0)
    batch = Batch(dense_BC=dense_BC, ids=ids, labels_BT=first.float()[:, None])
    return config.build(schema, TableChoices(rule=rowwise_adagrad.Config(lr=0.3))), batch


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("dense", "sparse"), [(3, 2), (0, 2), (3, 0)])
@pytest.mark.parametrize("embed_dense", [True, False])
@pytest.mark.parametrize("deep", [(), (8,)])
@pytest.mark.parametrize("structure", ["stacked", "parallel"])
def test_every_form_of_dcnv2_learns(
    structure: str,
    deep: tuple[int, ...],
    embed_dense: bool,
    dense: int,
    sparse: int,
    precision: str,
) -> None:
    config = dcnv2.Config(
        dim=4, cross_layers=2, deep=deep, structure=structure, embed_dense=embed_dense
    )  # type: ignore[arg-type]
    model, batch = model_and_batch(dense, sparse, config)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.02), []
    for _ in range(30):
        with computing(Precision(precision), torch.device("cpu")):  # type: ignore[arg-type]
            loss = binary_cross_entropy(model(batch), batch)
        loss.backward()
        if not losses:
            assert all(
                p.grad is not None and p.grad.isfinite().all()
                for p in model.parameters()
                if p.requires_grad
            )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("structure", ["stacked", "parallel"])
def test_dcnv2_without_an_mlp_is_its_cross_layers(structure: str) -> None:
    """In parallel the input itself stands beside them."""
    config = dcnv2.Config(dim=4, cross_layers=2, deep=(), structure=structure, embed_dense=False)  # type: ignore[arg-type]
    model, batch = model_and_batch(3, 2, config)
    x = torch.cat([batch.dense_BC, model.ids(batch)], 1)
    crossed = defined(model.cross, x, 1)
    beside = crossed if structure == "stacked" else torch.cat([crossed, x], 1)
    torch.testing.assert_close(model(batch), beside @ model.head.weight.t() + model.head.bias)
