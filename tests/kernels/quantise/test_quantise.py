"""Casts in C++ against their definition in `sparrow.numerics`, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sparrow.core.errors import UserError
from sparrow.kernels import missing
from sparrow.kernels.quantise import Draw, encode, rounded
from sparrow.numerics import ELEMENTS, FORMATS, Format, decode, whole

pytestmark = pytest.mark.usefixtures("poison")
built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
ROUNDINGS: Any = ("nearest", "zero", "stochastic")
DRAW = Draw(key=(1 << 64) - 12345, number=7)
SHAPES = [(1, 1), (3, 5), (7, 32), (64, 48), (33, 77), (5, 300), (129, 17), (2, 40, 30), (50,), (5, 1), (0, 3), (3, 0)]


def formats() -> Iterator[tuple[str, Format]]:
    """Those with a name and a scale, under both rules, and some of other blocks."""
    for name, format in FORMATS.items():
        if format.block is not None:
            yield name, format
            if format.scale == "power":
                yield f"{name} ceil", dataclasses.replace(format, rule="ceil")
                yield f"{name} row", dataclasses.replace(format, block="row", pair=1, shift_bits=0)
                yield f"{name} tensor", dataclasses.replace(format, block="tensor", pair=1, shift_bits=0)
    for block, pair, shift_bits in ((8, 1, 0), (8, 4, 2), (24, 8, 1), (40, 2, 3), (128, 4, 2), (16, 16, 3), (64, 1, 1)):
        yield f"{block, pair, shift_bits}", Format(element=whole(5), block=block, pair=pair, shift_bits=shift_bits)
    yield "fp16", Format(element=ELEMENTS["fp16"], block=32)


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Numbers of all sizes, zeros of both signs, subnormal ones, the largest ones; where rows are many, NaN and Inf."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=random) * torch.randn(shape, generator=random).exp2()
    flat = x.flatten()
    for first, value in ((1, 0.0), (2, -0.0), (3, 2.0**-149), (5, -(2.0**-126)), (8, 3.4028234e38), (13, 1.99)):
        flat[first::97] = value
    if len(flat) > 1000:
        flat[:200] *= 2.0**-140  # whole blocks beside the least scale
        flat[200:400] = -1e-45
        flat[500] = torch.nan
        flat[700:900:90] = -torch.inf
    return flat.view(shape)


def same(one: Tensor, other: Tensor) -> bool:
    """Bitwise, but any NaN is like any other."""
    if one.dtype != other.dtype or one.shape != other.shape or not torch.equal(one.isnan(), other.isnan()):
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    bits = [torch.where(t.isnan(), 0, t).contiguous().view(kind) for t in (one, other)]
    return torch.equal(*bits)


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpp_is_the_definition(dtype: torch.dtype) -> None:
    from sparrow.kernels.quantise import cpp

    covered = 0
    for shape in SHAPES:
        x = drawn(shape).to(dtype)
        for name, format in formats():
            for axis in range(len(shape)):
                for how in ROUNDINGS:
                    what = (shape, name, axis, how)
                    outs = [torch.float32] + [torch.bfloat16] * format.is_exact_in_bf16
                    for out in outs if cpp.covers(x, format, axis, how, False) else ():
                        ours, theirs = (
                            rounded(x, format, axis, how, draw=DRAW, dtype=out, impl=impl) for impl in ("cpp", "reference")
                        )
                        assert same(ours, theirs), (what, out)
                        covered += 1
                    if cpp.covers(x, format, axis, how, True):
                        packed = [encode(x, format, axis, how, draw=DRAW, impl=impl) for impl in ("cpp", "reference")]
                        for one, other in zip(*packed, strict=True):
                            assert (one is None) == (other is None), what
                            assert one is None or same(one, other), what
                        covered += 1
    assert covered > 2500  # most of them are not left to the reference
