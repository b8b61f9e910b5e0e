from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparrow.core import Jagged
from sparrow.kernels import expand as package
from sparrow.kernels.expand import expand, expand_jagged, reference, sum_rows

CASES = {  # (values, sums, how many of them are used)
    "odd": (1237, 97, 97),
    "one hot row": (2000, 5, 1),
    "few of many": (50, 1000, 1000),
    "one": (1, 1, 1),
    "no values": (0, 7, 7),
    "no sums": (0, 0, 1),
}


def case(name: str, dim: int = 3) -> tuple[Tensor, Tensor, int]:
    size, count, used = CASES[name]
    random = torch.Generator().manual_seed(size)
    index_N = torch.randint(0, max(used, 1), (size,), generator=random)
    return torch.randn(size, dim, generator=random), index_N, count


def loop(values_ND: Tensor, index_N: Tensor, count: int, block: int) -> Tensor:
    """Sums of each `block` values in order, and of these in order."""
    out = torch.zeros(count, values_ND.shape[1])
    for u in range(count):
        total = torch.zeros(values_ND.shape[1])
        for part in values_ND[index_N == u].split(block):
            of_part = torch.zeros(values_ND.shape[1])
            for value in part:
                of_part += value
            total += of_part
        out[u] = total
    return out


@pytest.fixture
def poisoned() -> object:
    """Memory that was not written is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("block", [1, 4, 256, 5000])
@pytest.mark.parametrize("name", CASES)
def test_sums_in_blocks(name: str, block: int, poisoned: object) -> None:
    """To the bit."""
    values_ND, index_N, count = case(name)
    got = reference.sum_in_blocks(values_ND, index_N, count, block)
    assert torch.equal(got, loop(values_ND, index_N, count, block))


@pytest.mark.parametrize("name", CASES)
def test_sums_in_order(name: str, poisoned: object) -> None:
    """To the bit, and so is one block."""
    values_ND, index_N, count = case(name)
    want = loop(values_ND, index_N, count, 1 << 20)
    assert torch.equal(sum_rows(values_ND, index_N, count), want)
    assert torch.equal(reference.sum_in_blocks(values_ND, index_N, count, 1 << 20), want)


@pytest.mark.parametrize("on_gpus", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_torchs(name: str, on_gpus: bool) -> None:
    """On a CPU, and by what GPUs run."""
    copies, sums = (
        (package._Expand.apply, package._SumRows.apply) if on_gpus else (expand, sum_rows)
    )
    values_ND, index_N, count = case(name)
    rows_UD = torch.randn(count, 3)
    for ours, torchs, given in [
        (lambda x: copies(x, index_N), lambda x: x.index_select(0, index_N), rows_UD),
        (
            lambda x: sums(x, index_N, count),
            lambda x: x.new_zeros(count, 3).index_add(0, index_N, x),
            values_ND,
        ),
    ]:
        found = []
        for function in (ours, torchs):
            x = given.clone().requires_grad_()
            out = function(x)
            out.backward(torch.arange(out.numel(), dtype=torch.float32).view_as(out) / 7)
            found.append((out, x.grad))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def test_the_gradient_on_the_cpu_has_the_bits_of_index_select() -> None:
    values_ND, index_N, count = case("odd")
    found = []
    for function in (expand, lambda x, i: x.index_select(0, i)):
        x = torch.zeros(count, 3, requires_grad=True)
        function(x, index_N).backward(values_ND)
        found.append(x.grad)
    assert torch.equal(*found)


def test_a_jagged_is_expanded() -> None:
    listed = Jagged(
        values_N=torch.randn(5, 2, requires_grad=True),
        offsets_B1=torch.tensor([0, 2, 2, 5]),
        weights_N=torch.arange(5.0),
        inverse_B=torch.tensor([2, 0, 1, 2]),
    )
    got, want = expand_jagged(listed), listed.expanded()
    assert got.inverse_B is None
    for name in ("values_N", "offsets_B1", "weights_N"):
        assert torch.equal(getattr(got, name), getattr(want, name))
    assert expand_jagged(got) is got
    got.values_N.sum().backward()
    assert torch.equal(
        listed.values_N.grad, torch.tensor([[1.0], [1.0], [2.0], [2.0], [2.0]]).expand(5, 2)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_sums_in_blocks(name: str) -> None:
    """Twice the same bits, and those of the blocks on the CPU."""
    values_ND, index_N, count = case(name, dim=130)
    want = reference.sum_in_blocks(values_ND, index_N, count)
    for _ in range(2):
        assert torch.equal(package.sum_rows(values_ND.cuda(), index_N.cuda(), count).cpu(), want)
