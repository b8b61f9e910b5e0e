from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparrow.interactions import CrossNet
from sparrow.layers import computing


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
def test_forward_and_every_gradient_are_the_papers(layers: int, rank: int | None, rows: int) -> None:
    torch.manual_seed(0)
    net = CrossNet(5, layers, rank).double()
    torch.nn.init.normal_(net.biases[0])
    x = torch.randn(rows, 5, dtype=torch.double, requires_grad=True)
    upstream = torch.randn(rows, 5, dtype=torch.double)
    want = defined(net, x, 1 if rank is None else 2)
    got = net(x)
    torch.testing.assert_close(got, want)
    wanted = torch.autograd.grad(want, [x, *net.parameters()], upstream)
    for a, b in zip(torch.autograd.grad(got, [x, *net.parameters()], upstream), wanted, strict=True):
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
    with computing("bf16", x.device):
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
