"""Distributions against those of the whole data, and draws against the distributions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparrow.extensions.low_precision.learned import MatrixNormal, Moments, factor


def rows(count: int, columns: int, seed: int = 0, shift: float = 5.0) -> Tensor:
    """Correlated rows whose means are far from 0 beside their spread."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(columns, columns, generator=random) / columns**0.5
    return torch.randn(count, columns, generator=random) @ mixed + shift * torch.randn(
        columns, generator=random
    )


def covariance(of: Moments) -> Tensor:
    return torch.block_diag(*of.covariance)


@pytest.mark.parametrize("shift", [5.0, 1000.0])
@pytest.mark.parametrize("chunks", [[500], [1] * 500, [3, 200, 0, 297], [499, 1]])
def test_rows_in_any_parts_give_what_all_of_them_give(chunks: list[int], shift: float) -> None:
    x = rows(500, 12, shift=shift)
    found = Moments(12)
    for part in x.split(chunks):
        found.update(part)
    want = torch.cov(x.double().t())
    assert found.count == 500
    torch.testing.assert_close(found.mean, x.double().mean(0), rtol=1e-12, atol=1e-12)
    assert float((covariance(found) - want).norm() / want.norm()) < 1e-5


def test_parts_about_the_mean_of_all_are_those_of_all_rows() -> None:
    """As ranks add theirs up."""
    x = rows(300, 7)
    parts, whole = [Moments(7) for _ in range(3)], Moments(7)
    for one, part in zip(parts, x.split([5, 190, 105]), strict=True):
        one.update(part)
    whole.update(x)
    (together,) = (sum(of) for of in zip(*(one.about(whole.mean) for one in parts), strict=True))
    torch.testing.assert_close(together, whole.scatter[0], rtol=1e-5, atol=1e-3)
    (nothing,) = Moments(7).about(whole.mean)
    assert not nothing.any()


def test_blocks_have_the_covariances_within_them() -> None:
    x = rows(200, 10)
    found, whole = Moments(10, block=4), Moments(10)
    for one in (found, whole):
        one.update(x)
    assert [len(block) for block in found.covariance] == [4, 4, 2]
    for block, span in zip(found.covariance, found.spans, strict=True):
        torch.testing.assert_close(block, covariance(whole)[span, span])
    drawn = found.drawn(20_000, torch.Generator().manual_seed(1))
    assert float((torch.cov(drawn.t())[:4, 4:8]).abs().max()) < 0.05
    again = Moments.from_tensors(found.tensors())
    assert torch.equal(again.drawn(20_000, torch.Generator().manual_seed(1)), drawn)


def test_draws_have_the_mean_and_covariance() -> None:
    found = Moments(12)
    found.update(rows(400, 12))
    drawn = found.drawn(200_000, torch.Generator().manual_seed(1)).double()
    want = covariance(found).double()
    assert float((torch.cov(drawn.t()) - want).norm() / want.norm()) < 0.02
    assert float((drawn.mean(0) - found.mean).abs().max()) < 0.02


@pytest.mark.parametrize("count", [6, 30, 300])
def test_the_error_of_a_covariance_is_what_is_said(count: int) -> None:
    """On average over many samples, of columns that vary together and of columns that do not."""
    random = torch.Generator().manual_seed(2)
    for mixed in (
        torch.eye(16),
        torch.randn(2, 16, generator=random),
        torch.randn(16, 16, generator=random),
    ):
        want, errors, said = (mixed.t() @ mixed).double(), list[float](), list[float]()
        for _ in range(200):
            found = Moments(16, block=16)
            found.update(torch.randn(count, len(mixed), generator=random) @ mixed)
            errors.append(float((covariance(found) - want).norm() / want.norm()))
            said.append(found.error)
        real, of_half = sum(e * e for e in errors) ** 0.5 / 200**0.5, sorted(said)[100]
        assert of_half == pytest.approx(real, rel=0.35 if count > 6 else 2.0)
    assert Moments(3).error == float("inf")
    dead = Moments(3)
    dead.update(torch.ones(5, 3))
    assert dead.error == 0.0


def test_columns_that_never_change_never_do() -> None:
    """A dead ReLU is 0, a constant column is what it is, and a copy stays one."""
    x = rows(300, 9)
    x[:, 2], x[:, 5], x[:, 8] = 0.0, 3.5, x[:, 1]
    found = Moments(9)
    for part in x.split(7):
        found.update(part)
    drawn = found.drawn(1000, torch.Generator().manual_seed(0))
    assert bool((drawn[:, 2] == 0).all())
    assert bool((drawn[:, 5] == 3.5).all())
    torch.testing.assert_close(drawn[:, 8], drawn[:, 1], rtol=0, atol=2e-3)


def test_fewer_rows_than_columns_have_no_variance_elsewhere() -> None:
    x = rows(10, 40)
    found = Moments(40)
    found.update(x)
    drawn = found.drawn(500, torch.Generator().manual_seed(0)).double() - found.mean
    within, _ = torch.linalg.qr((x.double() - found.mean).t())
    outside = drawn - drawn @ within[:, :9] @ within[:, :9].t()
    assert float(outside.norm() / drawn.norm()) < 0.01
    assert factor(found.covariance[0]).shape[1] <= 10
    assert factor(torch.zeros(4, 4)).shape == (4, 0)


def matrices(count: int, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draws of a matrix-normal distribution, and its covariances."""
    random = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(n, n, generator=random) / n**0.5 + torch.eye(n) for n in (rows, columns))
    mean = torch.randn(rows, columns, generator=random)
    return (
        mean + a @ torch.randn(count, rows, columns, generator=random) @ b.t(),
        a @ a.t(),
        b @ b.t(),
    )


def kron_apart(found: MatrixNormal, u: Tensor, v: Tensor) -> float:
    """The relative distance of V kron U, whatever the scale between both."""
    ours = torch.kron(torch.block_diag(*found.columns), torch.block_diag(*found.rows))
    theirs = torch.kron(v, u).double()
    return float((ours - theirs).norm() / theirs.norm())


def test_flip_flop_finds_both_covariances() -> None:
    draws, u, v = matrices(600, 24, 40)
    found = MatrixNormal((24, 40), momentum=0.99)
    for draw in draws:
        found.update(draw)
    assert kron_apart(found, u, v) < 0.15
    assert float(torch.block_diag(*found.rows).trace()) / 24 == pytest.approx(1.0, abs=0.01)
    again = MatrixNormal.from_tensors(found.tensors())
    assert kron_apart(again, u, v) == kron_apart(found, u, v)
    drawn = again.drawn(20_000, torch.Generator().manual_seed(1)) - found.mean
    mine = torch.einsum("nij,nkj->ik", drawn, drawn) / len(drawn)
    want = torch.block_diag(*found.rows).float() * float(torch.block_diag(*found.columns).trace())
    assert float((mine - want).norm() / want.norm()) < 0.03


@pytest.mark.parametrize("shape", [(3, 50), (50, 3), (1, 8)])
def test_thin_matrices_and_few_draws_are_finite(shape: tuple[int, int]) -> None:
    """The inverse of a covariance of rank 3 in 50 dimensions must not blow the other one up."""
    draws, u, v = matrices(40, *shape, seed=2)
    found = MatrixNormal(shape)
    for number, draw in enumerate(draws):
        found.update(draw)
        both = float(
            torch.block_diag(*found.rows).trace() * torch.block_diag(*found.columns).trace()
        )
        if number > 1:
            assert 0.05 < both / float(u.trace() * v.trace()) < 20


def test_weights_that_do_not_change_are_drawn_as_they_are() -> None:
    found, w = MatrixNormal((4, 6)), torch.randn(4, 6)
    for _ in range(3):
        found.update(w)
    assert torch.equal(found.drawn(2, torch.Generator()), found.mean.expand(2, 4, 6))
    moving = w.clone()
    for number in range(5):
        moving[:, :5] = w[:, :5] * (1 + number)
        moving[1] = w[1]
        found.update(moving)
    drawn = found.drawn(3, torch.Generator().manual_seed(0))
    assert torch.equal(drawn[:, 1], found.mean[1].expand(3, 6))
    assert torch.equal(drawn[:, :, 5], found.mean[:, 5].expand(3, 4))
    assert not torch.equal(drawn[:, 0, :5], found.mean[0, :5].expand(3, 5))


def test_blocks_of_weights() -> None:
    draws, _, _ = matrices(20, 7, 9)
    found = MatrixNormal((7, 9), block=4)
    for draw in draws:
        found.update(draw)
    assert [len(block) for block in found.rows] == [4, 3]
    assert [len(block) for block in found.columns] == [4, 4, 1]
    assert found.drawn(2, torch.Generator()).isfinite().all()
    assert MatrixNormal.from_tensors(found.tensors()).spans == found.spans


@pytest.mark.parametrize("spoilt", ["mean", "scatter0"])
def test_tensors_that_do_not_fit(spoilt: str) -> None:
    found = Moments(3).tensors()
    with pytest.raises(ValueError, match="fit"):
        Moments.from_tensors({**found, spoilt: torch.zeros(2, 2)})
    with pytest.raises(KeyError):
        Moments.from_tensors({"count": torch.tensor(1)})
