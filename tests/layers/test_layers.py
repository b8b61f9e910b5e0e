from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparrow.core import Jagged
from sparrow.layers.attention import Attention
from sparrow.layers.mlp import MLP, Linear
from sparrow.layers.numeric import NumericEmbedding
from sparrow.layers.precision import Precision, computing, to_compute
from sparrow.layers.transformer import CausalTransformer


def gradients(y: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a sum with a weight for each number of y."""
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return torch.autograd.grad(y, of, upstream, retain_graph=True)


def test_a_number_scales_its_columns_vector() -> None:
    layer = NumericEmbedding(3, 4)
    dense_BC = torch.randn(5, 3)
    rest_BR = torch.randn(5, 2)
    out, narrow = layer(dense_BC, rest_BR)
    assert out.shape == (5, layer.out_features + 2)
    assert torch.equal(out[:, 12:], rest_BR)
    weight = torch.randn(7, 14)
    torch.testing.assert_close(narrow @ layer.fold(weight).t(), out @ weight.t())
    for c in range(3):
        torch.testing.assert_close(
            out[:, 4 * c : 4 * c + 4], dense_BC[:, c : c + 1] * layer.weight_CD[c]
        )


def test_mlp_is_its_layers() -> None:
    mlp, x = MLP(6, (5, 4)), torch.randn(3, 6)
    want = x
    for layer in mlp.layers:
        want = torch.relu(want @ layer.weight.t() + layer.bias)
    torch.testing.assert_close(mlp(x), want)
    assert torch.equal(MLP(6, ())(x), x)


def test_computing_changes_products_only_within() -> None:
    x, device = torch.randn(4, 6), torch.device("cpu")
    with computing(Precision("bf16"), device):
        assert MLP(6, (5,))(x).dtype == torch.bfloat16
        assert to_compute(x).dtype == torch.bfloat16
    with computing(Precision("fp32"), device):
        assert MLP(6, (5,))(x).dtype == torch.float32
        assert to_compute(x) is x
    assert to_compute(x) is x


def numeric_case(
    columns: int, others: int, dtype: torch.dtype, rows: int = 5
) -> tuple[NumericEmbedding, Tensor, Tensor]:
    torch.manual_seed(columns + others)
    rest_BR = torch.randn(rows, others, dtype=dtype, requires_grad=True)
    return NumericEmbedding(columns, 4).to(dtype), torch.randn(rows, columns, dtype=dtype), rest_BR


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("columns", "others"), [(1, 3), (13, 26), (16, 1), (17, 0), (0, 5)])
@pytest.mark.parametrize("rows", [0, 1, 130])
def test_folded_or_not_mlp_and_gradients_are_the_same(
    rows: int, columns: int, others: int, dtype: torch.dtype
) -> None:
    layer, dense_BC, rest_BR = numeric_case(columns, others, dtype, rows)
    mlp = MLP(columns * 4 + others, (6, 3)).to(dtype)
    wide, narrow = layer(dense_BC, rest_BR)
    assert wide.shape == (rows, columns * 4 + others)
    assert narrow.shape == (rows, -(-columns // 16) * 16 + others)
    of = [rest_BR, layer.weight_CD, *mlp.parameters()]
    want, got = mlp(wide), mlp(narrow, layer.fold)
    close = (
        {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    )
    torch.testing.assert_close(got, want, **close)
    for a, b in zip(gradients(got, of), gradients(want, of), strict=True):
        torch.testing.assert_close(a, b, **close)


def test_gradients_are_those_of_finite_differences() -> None:
    layer, dense_BC, rest_BR = numeric_case(3, 2, torch.float64)
    assert torch.autograd.gradcheck(
        lambda w, rest: layer_call(layer, w, dense_BC, rest), (layer.weight_CD, rest_BR)
    )
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    mlp, linear = MLP(6, (5, 4)).double(), Linear(6, 3).double()
    assert torch.autograd.gradcheck(lambda x, *_: mlp(x), (x, *mlp.parameters()))
    assert torch.autograd.gradcheck(
        lambda x, *_: linear(x[:, :2], x[:, 2:]), (x, *linear.parameters())
    )


def layer_call(
    layer: NumericEmbedding, weight: Tensor, dense_BC: Tensor, rest_BR: Tensor
) -> tuple[Tensor, ...]:
    assert weight is layer.weight_CD
    return layer(dense_BC, rest_BR)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_linear_over_parts_is_linear_over_them_side_by_side(precision: str) -> None:
    torch.manual_seed(0)
    linear = Linear(12, 3)
    parts = [torch.randn(7, n, requires_grad=True) for n in (5, 0, 1, 6)]
    of = [*parts, linear.weight, linear.bias]
    with computing(Precision(precision), torch.device("cpu")):  # type: ignore[arg-type]
        apart, together = linear(*parts), linear(torch.cat(parts, 1))
    close = {"rtol": 1e-5, "atol": 1e-5} if precision == "fp32" else {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(apart, together, **close)
    torch.testing.assert_close(
        together, torch.cat(parts, 1) @ linear.weight.t() + linear.bias, **close
    )
    for a, b in zip(gradients(apart, of), gradients(together, of), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, **close)


def test_linear_refuses_parts_that_are_not_its_input() -> None:
    with pytest.raises(RuntimeError):
        Linear(6, 2)(torch.randn(3, 4), torch.randn(3, 1))


def test_bf16_is_near_fp32_forward_and_backward() -> None:
    torch.manual_seed(0)
    layer, dense_BC, rest_BR = numeric_case(13, 40, torch.float32, 300)
    mlp = MLP(92, (64, 32))
    of = [rest_BR, layer.weight_CD, *mlp.parameters()]

    def run() -> Tensor:
        _, narrow = layer(dense_BC, rest_BR)
        return mlp(narrow, layer.fold)

    with computing(Precision("bf16"), dense_BC.device):
        rough = run()
    exact = run()
    assert (rough.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    assert (rough.float() - exact).norm() < 0.02 * exact.norm()
    for a, b in zip(gradients(rough.float(), of), gradients(exact, of), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.05 * b.norm()


def test_a_nan_stays_one() -> None:
    """A step that diverged is seen: a ReLU does not hide it."""
    assert MLP(2, (3, 3))(torch.tensor([[float("nan"), 1.0]])).isnan().all()


def test_the_upstream_gradient_is_left_alone() -> None:
    mlp, x = MLP(4, (3,)), torch.randn(5, 4, requires_grad=True)
    upstream = torch.ones(5, 3)
    mlp(x).backward(upstream)
    assert torch.equal(upstream, torch.ones(5, 3))
    mlp(x).sum().backward()  # a gradient that is one number, expanded
    want = torch.autograd.grad(mlp(x), x, upstream)[0]
    torch.testing.assert_close(x.grad, 2 * want)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_a_softmax_over_the_keys(causal: bool) -> None:
    query, key, value = torch.randn(3, 2, 5, 4).unbind(0)
    weights = query @ key.transpose(1, 2) * 0.3
    if causal:
        weights = weights.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(
        Attention()(query, key, value, causal=causal, scale=0.3), weights.softmax(2) @ value
    )


@pytest.mark.parametrize("longest", [1, 3, 9])
def test_a_padded_transformer_is_the_ragged_one(longest: int) -> None:
    torch.manual_seed(0)
    reader = CausalTransformer(8, layers=2, heads=2, longest=longest)
    lengths_B = torch.tensor([0, 1, 4, 2, 7, 0])
    offsets_B1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_B.cumsum(0)])
    values_ND = torch.randn(int(lengths_B.sum()), 8)
    expected = reader(Jagged(values_N=values_ND, offsets_B1=offsets_B1))
    for padding in (0.0, 1e3):  # what is there is not seen
        padded = torch.full((6, 7, 8), padding)
        padded[torch.arange(7) < lengths_B[:, None]] = values_ND
        torch.testing.assert_close(reader.padded(padded, lengths_B), expected, rtol=1e-5, atol=1e-6)
