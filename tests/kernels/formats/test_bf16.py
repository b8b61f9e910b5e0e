"""bf16 rows and bf16 state: the row is torch's bfloat16, and sums of small numbers grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparrow.kernels import embedding_bag
from sparrow.kernels.embedding_bag import Rows, Table, Tables
from sparrow.kernels.formats import fp32
from sparrow.kernels.formats.bf16 import Config
from sparrow.kernels.rules import adagrad
from sparrow.numerics.rounding import noise
from tests.kernels.embedding_bag.cases import IMPLS
from tests.kernels.formats.draws import KEY, stored


def test_fields_and_bytes() -> None:
    assert {name: (f.width, f.dtype, f.across) for name, f in Config().fields(5).items()} == {
        "weight": (5, torch.bfloat16, "cut")
    }


def test_to_nearest_it_is_torch() -> None:
    x_UD = torch.randn(300, 7)
    assert torch.equal(stored(Config(rounding="nearest"), x_UD), x_UD.bfloat16().float())


def test_errors_are_below_a_step() -> None:
    x_UD = torch.randn(2000, 33) * 10.0 ** torch.randint(-20, 20, (2000, 1))
    step_UD = 2.0 ** (x_UD.abs().log2().floor() - 7)
    noise_UD = noise(KEY, 0, torch.arange(2000), (0, 33), 1)
    assert ((stored(Config(), x_UD, noise_UD) - x_UD).abs() < step_UD).all()
    assert ((stored(Config(rounding="nearest"), x_UD) - x_UD).abs() <= step_UD / 2).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_sum_of_small_numbers_grows_in_bf16_state(impl: Any) -> None:
    """AdaGrad adds 1e-4 to sums 170 times. To nearest a sum stalls at 2**-5, from where a step is
    2.4e-4.
    """
    rows, dim, updates, begin = 200, 8, 170, 2**-5 - 2**-10
    grad_UD = torch.full((rows, dim), 1e-2)
    level = Rows(
        format=fp32.Config(),
        payload={"weight": torch.zeros(rows, dim)},
        touched_R=torch.zeros(rows, dtype=torch.uint8),
        state={"sum": torch.full((rows, dim), begin, dtype=torch.bfloat16)},
    )
    tables = Tables([Table(levels=(level,), rule=adagrad.Config(), rows=rows, dim=dim, key=KEY)])
    nearest, all_rows, lr_T = (
        torch.tensor(begin, dtype=torch.bfloat16),
        torch.arange(rows),
        torch.tensor([0.1]),
    )
    for n in range(updates):
        embedding_bag.update_rows(tables, [(all_rows, grad_UD)], lr_T, n, impl=impl)
        nearest = (nearest.float() + 1e-4).bfloat16()
    sums = level.state["sum"].double()
    z = (sums.mean() - begin - updates * 1e-4) / (sums.std() / sums.numel() ** 0.5)
    assert abs(z) < 5
    assert nearest == 2**-5 and sums.min() > 0.04
