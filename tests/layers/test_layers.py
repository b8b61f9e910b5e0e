from __future__ import annotations

import torch

from sparrow.layers import MLP, NumericEmbedding, computing, to_compute


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
        torch.testing.assert_close(out[:, 4 * c : 4 * c + 4], dense_BC[:, c : c + 1] * layer.weight_CD[c])


def test_mlp_is_its_layers() -> None:
    mlp, x = MLP(6, (5, 4)), torch.randn(3, 6)
    want = x
    for layer in mlp.layers:
        want = torch.relu(want @ layer.weight.t() + layer.bias)
    torch.testing.assert_close(mlp(x), want)
    assert torch.equal(MLP(6, ())(x), x)


def test_computing_changes_products_only_within() -> None:
    x, device = torch.randn(4, 6), torch.device("cpu")
    with computing("bf16", device):
        assert MLP(6, (5,))(x).dtype == torch.bfloat16
        assert to_compute(x).dtype == torch.bfloat16
    with computing("fp32", device):
        assert MLP(6, (5,))(x).dtype == torch.float32
        assert to_compute(x) is x
    assert to_compute(x) is x
