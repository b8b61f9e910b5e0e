"""Ways to compute a product: those that are available give its numbers, and the others say why they are not."""

from __future__ import annotations

import pytest
import torch

from sparrow.kernels.quantise import rounded
from sparrow.layers.candidates import candidates, fp8_rowwise
from sparrow.layers.passes import add_input_gradient_, forward_product, input_gradient, weight_gradient
from sparrow.layers.precision import MEMBERS
from sparrow.layers.recipe import Recipe, Way
from sparrow.numerics import FORMATS

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", candidates())
def test_each_is_near_or_says_why_it_is_missing(name: str) -> None:
    one = candidates()[name]
    assert one.PRECISION in MEMBERS
    if why := one.missing(CPU):
        assert len(why) > 10
        return
    torch.manual_seed(0)
    a, b = torch.randn(64, 96), torch.randn(96, 32)
    found, exact = one.multiply(a, b), a.double() @ b.double()
    assert found.dtype == torch.float32
    assert float((found - exact).norm() / exact.norm()) < 0.01


def test_fp8_codes_are_those_of_the_format() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 48) * torch.randn(32, 1).exp()
    x[3] = 0.0
    codes, scales = fp8_rowwise.cast(x)
    assert torch.equal(codes.float() * scales, rounded(x, FORMATS["fp8-rowwise"], -1))


def test_fp8_takes_what_its_units_take() -> None:
    assert fp8_rowwise.takes(torch.zeros(16, 32), torch.zeros(32, 48))
    assert not fp8_rowwise.takes(torch.zeros(16, 31), torch.zeros(31, 48))
    assert not fp8_rowwise.takes(torch.zeros(16, 32), torch.zeros(32, 1))
    assert not fp8_rowwise.takes(torch.zeros(2, 16, 32), torch.zeros(2, 32, 16))


def test_fp8_units_give_what_emulation_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for `F.scaled_mm`, which multiplies the decoded codes: which passes ask it, and of what."""
    asked = []

    def stand_in(a, b, scale_a, how_a, scale_b, how_b, output_dtype):  # type: ignore[no-untyped-def]
        asked.append((tuple(a.shape), tuple(b.shape)))
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert b.stride(0) == 1  # column by column
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(output_dtype)

    monkeypatch.setattr("torch.nn.functional.scaled_mm", stand_in)
    torch.manual_seed(0)
    x, w, dy = torch.randn(64, 48), torch.randn(32, 48), torch.randn(64, 32)
    recipe = Recipe.of("fp8-rowwise")
    native, emulated = Way(recipe, True, has_fp8=True), Way(recipe, True)
    out = torch.randn(64, 48)
    pairs = [
        *((forward_product(x, w, how)[0], input_gradient(dy, w, how), input_gradient(dy, w, how, out),
           add_input_gradient_(out.clone(), dy, w, how), weight_gradient(dy, x, how, torch.float32))
          for how in (native, emulated))
    ]  # fmt: skip
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0.05)
    assert asked == [((64, 48), (48, 32)), *[((64, 32), (32, 48))] * 3, ((32, 64), (64, 48))]
    asked.clear()
    odd = Way(Recipe.of("fp8-rowwise", weight_gradient="bf16"), True, has_fp8=True)
    weight_gradient(dy, x, odd, torch.float32)
    forward_product(x[:, :47].contiguous(), w[:, :47].contiguous(), native)
    assert asked == []
