"""What every format promises: no rounding moves a mean, and none is wider than a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparrow.core.config import Family
from sparrow.kernels.formats import (
    BLOCK,
    bf16,
    converted,
    fp16,
    fp32,
    int4,
    int8,
    mxfp4,
    mxfp6,
    mxfp8,
    mxint8,
    split_bf16,
)
from sparrow.numerics.rounding import noise
from tests.kernels.formats import fbgemm
from tests.kernels.formats.draws import KEY, stored, z_scores

LOSSY: dict[str, Any] = {"fp16": fp16, "bf16": bf16, "int8": int8, "int4": int4}
LOSSY |= {"mxint8": mxint8, "mxfp8": mxfp8, "mxfp6": mxfp6, "mxfp4": mxfp4}
each_lossy = pytest.mark.parametrize("name", LOSSY)


def values(size: float, shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * size


@each_lossy
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-5, 1e-6, 1e-7, 3e-8])
def test_the_mean_of_many_roundings_is_the_number(name: str, size: float) -> None:
    """fp16 is subnormal below 6e-5, and so are scale and bias of int4."""
    z_D = z_scores(LOSSY[name].Config(), values(size, (48,)))
    assert z_D.abs().max() < 5
    assert (z_D**2).mean() < 2


@each_lossy
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_to_nearest_the_mean_is_another(name: str, size: float) -> None:
    z_D = z_scores(LOSSY[name].Config(rounding="nearest"), values(size, (48,)), updates=1 << 14)
    assert (z_D.abs() > 5).double().mean() > 0.9


def test_every_lossy_format_is_tested_here() -> None:
    family = Family("sparrow.kernels.formats")
    assert {
        name for name in family.names() if family.config(name)().rounding == "stochastic"
    } == set(LOSSY)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("member", [int8, int4])
def test_rows_of_one_number(member: Any, rounding: str) -> None:
    """Rows of zeros, and of a number that bias can hold, are exact; in int4 others differ by less
    than fp16's step.
    """
    rows_U, shape = torch.arange(2000), (2000, 7)
    noise_UD = noise(KEY, 0, rows_U, (0, 7), 1) if rounding == "stochastic" else None
    for numbers in (
        torch.zeros(2000, 1),
        values(0.7, (2000, 1)),
        values(1e-6, (2000, 1)),
        values(1e4, (2000, 1)),
    ):
        x_UD = numbers.expand(shape)
        if member is int8:
            assert torch.equal(stored(int8.Config(rounding=rounding), x_UD, noise_UD), x_UD)
            continue
        format = int4.Config(rounding=rounding)
        held_UD = x_UD.half().float()
        assert torch.equal(stored(format, held_UD, noise_UD), held_UD)
        step_UD = (x_UD.abs() * 2.0**-10).clamp(min=2.0**-24)
        assert ((stored(format, x_UD, noise_UD) - x_UD).abs() <= step_UD).all()


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-6, 1e4])
def test_errors_of_a_row_are_below_its_step(size: float) -> None:
    """A step is 1/255 or 1/15 of the row's range; int4's scale is fp16, rounded up."""
    x_UD = values(size, (500, 33))
    range_U1 = x_UD.amax(1, keepdim=True) - x_UD.amin(1, keepdim=True)
    half_step_U1 = x_UD.abs().amax(1, keepdim=True).clamp(min=2.0**-14) * 2.0**-10  # of the bias
    for n in range(20):
        noise_UD = noise(KEY, 0, torch.arange(500), (0, 33), n)
        for member, step_U1 in (
            (int8, range_U1 / 255),
            (int4, (range_U1 + half_step_U1) / 15 * (1 + 2.0**-9) + 2.0**-23),
        ):
            error_UD = stored(member.Config(), x_UD, noise_UD) - x_UD
            assert (error_UD.abs() <= step_U1 * (1 + 1e-5) + x_UD.abs() * 2.0**-22).all()


def test_stochastic_int4_cuts_off_no_end() -> None:
    """Scale and bias are rounded outwards. To nearest, as in FBGEMM, an end of most rows is cut
    off.
    """
    x_UD = values(1.0, (5000, 16))
    outside = {}
    for rounding in ("nearest", "stochastic"):
        noise_UD = (
            noise(KEY, 0, torch.arange(5000), (0, 16), 1) if rounding == "stochastic" else None
        )
        meta = int4.Config(rounding=rounding).encode(x_UD, noise_UD)["weight"][:, 8:].contiguous()
        scale_U1, bias_U1 = meta.view(torch.float16).double().split(1, 1)
        high_U1 = bias_U1 + 15 * scale_U1
        outside[rounding] = (
            ((x_UD < bias_U1) | (x_UD > high_U1 * (1 + 2.0**-23))).any(1).double().mean()
        )
    assert outside["stochastic"] == 0
    assert outside["nearest"] > 0.4


# -- rows that are converted -----------------------------------------------------------------------

NEAREST: dict[str, Any] = {
    name: member.Config(rounding="nearest") for name, member in LOSSY.items()
}
ALL = NEAREST | {"fp32": fp32.Config(), "split_bf16": split_bf16.Config()}
ALL |= {"greedy": int4.Config(rounding="nearest", search="greedy")}


@pytest.mark.parametrize("name", ALL)
def test_converted_rows_are_those_of_one_block(name: str) -> None:
    """Blocks of rows, whole ones and a rest, and no rows at all."""
    dim, format = 33, ALL[name]
    for rows in (0, 1, BLOCK // dim, 2 * (BLOCK // dim) + 5):
        x_RD = values(1.0, (rows, dim))
        found = converted(x_RD, format)
        assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
            n: (f.shape(rows), f.dtype) for n, f in format.fields(dim).items()
        }
        if rows:
            assert all(torch.equal(found[n], t) for n, t in format.encode(x_RD, None).items())
    assert all(torch.equal(t, converted(x_RD.double(), format)[n]) for n, t in found.items())


@pytest.mark.parametrize("name", LOSSY)
def test_conversion_rounds_to_nearest_whatever_the_table_did(name: str) -> None:
    x_RD = values(1.0, (300, 16))
    one, other = (converted(x_RD, format) for format in (LOSSY[name].Config(), NEAREST[name]))
    assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_converted_rows_have_the_bytes_of_fbgemm(name: str) -> None:
    for dim in fbgemm.dims(name):
        rows = fbgemm.record()[f"{dim} rows"]
        made = converted(rows, NEAREST[name])["weight"]
        assert torch.equal(made, fbgemm.record()[f"{dim} {name}"])
        assert made.shape[1] == (dim + 8 if name == "int8" else (dim + 1) // 2 + 4)
