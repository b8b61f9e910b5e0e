from __future__ import annotations

import math

import pytest
import torch

from sparrow.numerics.errors import errors, qsnr


def pairs(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """References from N(0, 1), and outputs with errors of a tenth of that."""
    random = torch.Generator().manual_seed(seed)
    exact = torch.randn(count, generator=random, dtype=torch.float64)
    return exact + 0.1 * torch.randn(count, generator=random, dtype=torch.float64), exact


def test_the_bound_gives_the_mean_an_expectation_and_the_raw_one_has_none() -> None:
    """E[0.1 |n| / |r|] grows by 0.1 * 2 / pi for each factor e of numbers; above 0.01 of the RMS it
    stands still.
    """
    few = [errors(*pairs(10_000, seed)) for seed in range(20)]
    many = errors(*pairs(1_000_000, 99))
    means = torch.tensor([one.mere for one in few])
    assert float(means.mean()) == pytest.approx(many.mere, rel=0.03)
    assert float(means.std()) < 0.06 * many.mere
    raw = torch.tensor([one.raw for one in few])
    assert many.raw > 1.2 * float(raw.median())
    assert float(raw.std()) > 5 * float(means.std())
    assert many.numbers == 1_000_000


def test_against_a_loop() -> None:
    out, exact = pairs(50)
    exact[3] = 0.0
    rms = math.sqrt(sum(r * r for r in exact.tolist()) / 50)
    each = [
        abs(o - r) / max(abs(r), 0.01 * rms)
        for o, r in zip(out.tolist(), exact.tolist(), strict=True)
    ]
    raw = [abs(o - r) / abs(r) for o, r in zip(out.tolist(), exact.tolist(), strict=True) if r]
    found = errors(out, exact)
    assert found.mere == pytest.approx(sum(each) / 50)
    assert found.raw == pytest.approx(sum(raw) / 49)
    assert found.numbers == 49
    assert found.relative == pytest.approx(float((out - exact).norm() / exact.norm()))


def test_equal_outputs_and_references_of_0() -> None:
    out, _ = pairs(100)
    assert errors(out, out)[:2] == (0.0, 0.0)
    zero = torch.zeros(4)
    assert errors(zero, zero) == (0.0, 0.0, 0, 0.0)
    assert errors(torch.ones(4), zero).mere == math.inf
    assert math.isnan(errors(torch.tensor([math.nan, 1.0]), torch.ones(2)).mere)


def test_decibels() -> None:
    x = torch.tensor([3.0, 4.0])
    assert qsnr(x, x + torch.tensor([0.3, 0.4])) == pytest.approx(20.0, abs=1e-5)
    assert qsnr(x, x) == math.inf
    assert qsnr(torch.zeros(2), torch.ones(2)) == -math.inf
