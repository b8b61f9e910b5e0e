from __future__ import annotations

import pytest
import torch

from sparrow.interactions.dot import DotInteraction


@pytest.mark.parametrize(("vectors", "dim"), [(1, 3), (2, 1), (5, 4), (27, 16)])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_pairs_and_their_gradient_are_those_of_the_definition(
    rows: int, vectors: int, dim: int
) -> None:
    x = torch.randn(rows, vectors, dim, dtype=torch.float64, requires_grad=True)
    want = [[x[b, i] @ x[b, j] for i in range(vectors) for j in range(i)] for b in range(rows)]
    got = DotInteraction()(x)
    assert got.shape == (rows, DotInteraction.out_features(vectors))
    grad = torch.randn_like(got)
    (found,) = torch.autograd.grad(got, x, grad)
    if got.numel():
        wanted = torch.stack([torch.stack(row) for row in want])
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(found, torch.autograd.grad(wanted, x, grad)[0])
    else:
        assert not found.any()
