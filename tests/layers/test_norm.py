from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparrow.layers.norm import BLOCK, BlockNorm, LayerNorm


def formula(x: Tensor) -> Tensor:
    """The definition, block by block."""
    return torch.cat(
        [b * (b.square().mean(-1, keepdim=True) + 1e-5).rsqrt() for b in x.split(BLOCK, -1)], -1
    )


@pytest.mark.parametrize("width", [1, 16, 255, 256])
def test_one_block_is_an_rms_norm(width: int) -> None:
    x = torch.randn(7, width)
    theirs = nn.RMSNorm(width, eps=1e-5, elementwise_affine=False)
    assert torch.equal(BlockNorm()(x), theirs(x))


@pytest.mark.parametrize("shape", [(5, 257), (3, 512), (2, 4, 600), (0, 300)], ids=str)
def test_each_block_is_by_itself(shape: tuple[int, ...]) -> None:
    """The last one is short, and what is beside a block does not count."""
    x, norm = torch.randn(shape), BlockNorm()
    y = norm(x)
    torch.testing.assert_close(y, formula(x))
    assert torch.equal(y[..., :256], norm(x[..., :256])) and torch.equal(
        y[..., 256:512], norm(x[..., 256:512])
    )
    assert torch.equal(norm.train()(x), norm.eval()(x)) and not list(norm.parameters())


@pytest.mark.parametrize("width", [16, 256, 300])
def test_gradients_are_those_of_the_formula_in_float64(width: int) -> None:
    x = torch.randn(4, width, requires_grad=True)
    upstream, exact = torch.randn(4, width), x.detach().double().requires_grad_()
    (got,) = torch.autograd.grad(BlockNorm()(x), x, upstream)
    (want,) = torch.autograd.grad(formula(exact), exact, upstream.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    (zero,) = torch.autograd.grad(BlockNorm()(x * 0), x, upstream)
    assert not zero.any() and zero.isfinite().all()


@pytest.mark.parametrize("width", [100, 384])  # neither divides 256, nor 256 them
def test_an_example_does_not_depend_on_its_neighbours(width: int) -> None:
    x, norm = torch.randn(8, width), BlockNorm()
    others = torch.cat([x[:3], 1e3 * torch.randn(5, width)])
    assert torch.equal(norm(x)[:3], norm(others)[:3])


@pytest.mark.parametrize("ratio", [1.0, 10.0, 100.0])
def test_a_mean_that_is_subtracted_makes_errors_larger(ratio: float) -> None:
    """By c / s, for numbers with a mean of c and a spread of s; without a mean they stay as large
    as they were.
    """
    random = torch.Generator().manual_seed(0)
    x = ratio + torch.randn(500, 256, generator=random, dtype=torch.float64)
    error = 1e-6 * torch.randn(x.shape, generator=random, dtype=torch.float64)

    def larger(norm: nn.Module) -> float:
        exact, found = norm(x).detach(), norm(x * (1 + error)).detach()
        return float((found - exact).norm() / exact.norm()) / 1e-6

    assert larger(LayerNorm(256).double()) == pytest.approx((1 + ratio**2) ** 0.5, rel=0.05)
    assert larger(BlockNorm()) == pytest.approx(1, rel=0.05)


def test_bf16_is_normed_in_fp32() -> None:
    x = torch.randn(6, 300).bfloat16()
    assert torch.equal(BlockNorm()(x), formula(x.float()).bfloat16()) or torch.allclose(
        BlockNorm()(x).float(), formula(x.float()), rtol=2**-8
    )
    assert BlockNorm()(x).dtype == torch.bfloat16
