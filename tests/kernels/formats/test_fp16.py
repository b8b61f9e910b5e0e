"""fp16 rows: the row is torch's float16, and updates smaller than a step are not lost."""

from __future__ import annotations

import torch

from sparrow.kernels.formats.fp16 import Config
from sparrow.numerics.rounding import noise
from tests.kernels.formats.draws import KEY, stored, z_scores


def test_fields_and_bytes() -> None:
    assert {name: (f.width, f.dtype, f.across) for name, f in Config().fields(5).items()} == {
        "weight": (5, torch.float16, "cut")
    }


def test_to_nearest_it_is_torch() -> None:
    x_UD = torch.randn(300, 7)
    assert torch.equal(stored(Config(rounding="nearest"), x_UD), x_UD.half().float())


def test_means_across_the_least_normal_number() -> None:
    """A row that has normal and subnormal numbers, and numbers between the two."""
    x_D = torch.tensor(
        [1e-5, 1e-7, 3e-8, 2.0**-14 - 2.0**-26, 2.0**-14 + 2.0**-26, -1e-5, 3e4 + 0.5, 0.1]
    )
    assert z_scores(Config(), x_D).abs().max() < 5


def test_errors_are_below_a_step() -> None:
    x_UD = torch.randn(2000, 33) * 10.0 ** torch.randint(-8, 4, (2000, 1))
    step_UD = 2.0 ** (x_UD.abs().log2().floor().clamp(min=-14) - 10)
    noise_UD = noise(KEY, 0, torch.arange(2000), (0, 33), 1)
    assert ((stored(Config(), x_UD, noise_UD) - x_UD).abs() < step_UD).all()
    assert ((stored(Config(rounding="nearest"), x_UD) - x_UD).abs() <= step_UD / 2).all()
