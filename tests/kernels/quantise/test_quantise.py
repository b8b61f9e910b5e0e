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
from sparrow.kernels.quantise import decode as decode_rows
from sparrow.numerics.blocks import Packed, decode
from sparrow.numerics.elements import ELEMENTS, whole
from sparrow.numerics.formats import FORMATS, Format

pytestmark = pytest.mark.usefixtures("poison")
built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
ROUNDINGS: Any = ("nearest", "zero", "stochastic")
DRAW = Draw(key=(1 << 64) - 12345, number=7)
SHAPES = [
    (1, 1),
    (3, 5),
    (7, 32),
    (64, 48),
    (33, 77),
    (5, 300),
    (129, 17),
    (2, 40, 30),
    (50,),
    (5, 1),
    (0, 3),
    (3, 0),
]


def formats() -> Iterator[tuple[str, Format]]:
    """Those with a name and a scale, under both rules, and some of other blocks."""
    for name, format in FORMATS.items():
        if format.block is not None:
            yield name, format
            if format.scale == "power":
                yield f"{name} ceil", dataclasses.replace(format, rule="ceil")
                yield f"{name} row", dataclasses.replace(format, block="row", pair=1, shift_bits=0)
                yield (
                    f"{name} tensor",
                    dataclasses.replace(format, block="tensor", pair=1, shift_bits=0),
                )
    for block, pair, shift_bits in (
        (8, 1, 0),
        (8, 4, 2),
        (24, 8, 1),
        (40, 2, 3),
        (128, 4, 2),
        (16, 16, 3),
        (64, 1, 1),
    ):
        yield (
            f"{block, pair, shift_bits}",
            Format(element=whole(5), block=block, pair=pair, shift_bits=shift_bits),
        )
    yield "fp16", Format(element=ELEMENTS["fp16"], block=32)
    yield "fp32 scales of blocks", Format(element=ELEMENTS["e4m3"], block=32, scale="fp32")
    yield "fp32 scales of other blocks", Format(element=ELEMENTS["e2m1"], block=24, scale="fp32")


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Numbers of all sizes, zeros of both signs, subnormal ones, the largest ones; where rows are
    many, NaN and Inf.
    """
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=random) * torch.randn(shape, generator=random).exp2()
    flat = x.flatten()
    for first, value in (
        (1, 0.0),
        (2, -0.0),
        (3, 2.0**-149),
        (5, -(2.0**-126)),
        (8, 3.4028234e38),
        (13, 1.99),
    ):
        flat[first::97] = value
    if len(flat) > 1000:
        flat[:200] *= 2.0**-140  # whole blocks beside the least scale
        flat[200:400] = -1e-45
        flat[500] = torch.nan
        flat[700:900:90] = -torch.inf
    return flat.view(shape)


def same(one: Tensor, other: Tensor) -> bool:
    """Bitwise, but any NaN is like any other."""
    if (
        one.dtype != other.dtype
        or one.shape != other.shape
        or not torch.equal(one.isnan(), other.isnan())
    ):
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    bits = [torch.where(t.isnan(), 0, t).contiguous().view(kind) for t in (one, other)]
    return torch.equal(*bits)


@built
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpp_is_the_definition(dtype: torch.dtype, every: bool) -> None:
    """Every shape, format and rounding; or of these each two together, with the roundings in
    turn.
    """
    from sparrow.kernels.quantise import cpp

    covered = 0
    for i, shape in enumerate(SHAPES):
        x = drawn(shape).to(dtype)
        for j, (name, format) in enumerate(formats()):
            for axis in range(len(shape)):
                for how in ROUNDINGS if every else [ROUNDINGS[(i + j + axis) % 3]]:
                    what = (shape, name, axis, how)
                    outs = [torch.float32] + [torch.bfloat16] * format.is_exact_in_bf16
                    for out in outs if cpp.covers(x, format, axis, how, False) else ():
                        ours, theirs = (
                            rounded(x, format, axis, how, draw=DRAW, dtype=out, impl=impl)
                            for impl in ("cpp", "reference")
                        )
                        assert same(ours, theirs), (what, out)
                        covered += 1
                    if cpp.covers(x, format, axis, how, True):
                        packed = [
                            encode(x, format, axis, how, draw=DRAW, impl=impl)
                            for impl in ("cpp", "reference")
                        ]
                        for one, other in zip(*packed, strict=True):
                            assert (one is None) == (other is None), what
                            assert one is None or same(one, other), what
                        covered += 1
    assert covered > (2500 if every else 2500 / 3)  # most of them are not left to the reference


@built
def test_any_number_of_threads_gives_the_same_bits(threads) -> None:  # type: ignore[no-untyped-def]
    x = drawn((700, 600))
    for name in ("mxfp8", "mxfp4", "mx9", "fp8", "fp8-rowwise"):
        for axis in (0, 1):
            found = []
            for count in (1, 2, 5):
                threads(count)
                values = rounded(x, FORMATS[name], axis, "stochastic", draw=DRAW, impl="cpp")
                found.append((values, *encode(x, FORMATS[name], axis, impl="cpp")))
            for other in found[1:]:
                assert all(a is b or same(a, b) for a, b in zip(found[0], other, strict=True)), (
                    name,
                    axis,
                )


@built
@pytest.mark.parametrize("axis", [0, 1])
def test_packed_is_rounded(axis: int) -> None:
    x = drawn((300, 257))
    for name, format in FORMATS.items():
        packed = encode(x, format, axis, impl="cpp")
        assert same(
            decode(packed, format, x.shape[axis], axis), rounded(x, format, axis, impl="cpp")
        ), name


def test_other_layouts_are_read_as_they_are() -> None:
    x = drawn((96, 64))
    for given in (x.t(), x[:, ::2], x[3].expand(5, -1)):
        assert same(
            rounded(given, FORMATS["mxfp6"]),
            rounded(given.clone(), FORMATS["mxfp6"], impl="reference"),
        )


def test_another_step_draws_other_numbers() -> None:
    x = drawn((40, 64))
    one, other, again = (
        rounded(x, FORMATS["mxfp4"], how="stochastic", draw=Draw(key=3, number=n))
        for n in (0, 1, 0)
    )
    assert (one != other).any()
    assert same(one, again)


def test_what_cannot_be_is_one_line() -> None:
    with pytest.raises(UserError, match=r"x: torch\.float64"):
        rounded(torch.zeros(3, dtype=torch.float64), FORMATS["mxfp8"])
    with pytest.raises(UserError, match="x: .*0 dimensions"):
        encode(torch.tensor(1.0), FORMATS["mxfp8"])
    with pytest.raises(UserError, match="cannot hold the values"):
        rounded(torch.zeros(3, 3), FORMATS["fp8"], dtype=torch.bfloat16)


@built
def test_shapes_without_numbers() -> None:
    with FakeTensorMode():
        out = rounded(torch.empty(5, 40), FORMATS["mxfp8"], 0, dtype=torch.bfloat16, impl="cpp")
    assert out.shape == (5, 40)
    assert out.dtype == torch.bfloat16


@built
def test_arguments_that_the_operator_cannot_take() -> None:
    from sparrow.kernels.quantise import cpp

    arguments = list(cpp._arguments(torch.zeros(4, 64), FORMATS["mx9"], 1, "nearest", Draw()))
    for at, bad, told in (
        (0, torch.zeros(4, 64, dtype=torch.float64), "float32 or bfloat16"),
        (0, torch.zeros(64, 8).t()[:4], "contiguous"),
        (1, [4, 65, 1], "shape"),
        (2, [6, 0, 8, 0, 127, 0, 8, 2, 1, 0, 0], "block"),
        (2, [6, 0, 8, 0, 127, 0, 32, 3, 1, 0, 0], "pair"),
        (2, [6, 0, 8, 0, 127, 0, 16, 4, 1, 0, 0], "shifts"),
        (2, [7, -126, 16, 127, 127, 0, 16, 2, 1, 0, 0], "element"),
        (4, 3, "rounding"),
    ):
        given = [*arguments]
        given[at] = bad
        with pytest.raises(ValueError, match=told):
            torch.ops.sparrow.quantise_codes(*given)


@built
def test_large_tensors_are_stored_past_the_caches() -> None:
    """Those are other instructions, which want aligned memory."""
    x = drawn((2064, 4128))
    wide = {block: Format(element=whole(7), block=block) for block in (17, 24, 64)}
    for format in (*wide.values(), FORMATS["mxfp8"], FORMATS["mxfp4"], FORMATS["fp8-rowwise"]):
        for axis in (0, 1):
            part = x[:192] if axis == 1 else x[:, :192]
            rows = (slice(192), slice(None)) if axis == 1 else (slice(None), slice(192))
            for dtype in [torch.float32] + [torch.bfloat16] * format.is_exact_in_bf16:
                found = rounded(x, format, axis, dtype=dtype, impl="cpp")[rows]
                assert same(found, rounded(part, format, axis, dtype=dtype, impl="reference"))
            if format.block != 17:
                codes = encode(x, format, axis, impl="cpp").codes[:192]
                assert same(codes, encode(part, format, axis, impl="reference").codes)


@built
def test_cpp_decodes_as_the_definition() -> None:
    """Every byte as code and as scale; rows that lie apart; short last blocks."""
    from sparrow.kernels.quantise import cpp

    random, decoded = torch.Generator().manual_seed(0), 0
    for name, format in formats():
        for rows, length in ((0, 40), (1, 1), (3, 7), (20, 33), (256, 64), (5, 300)):
            bytes_codes = -(-length * format.element.bits // 8)
            if not cpp.decodes(format):
                continue
            assert isinstance(format.block, int)
            wide = torch.randint(
                0, 256, (rows, bytes_codes + -(-length // format.block) + 3), generator=random
            )
            wide = wide.to(torch.uint8)
            wide[:, bytes_codes] = torch.arange(rows)
            packed = Packed(wide[:, :bytes_codes], wide[:, bytes_codes:-3], None)
            found, expected = (
                decode_rows(packed, format, length, impl=impl) for impl in ("cpp", "reference")
            )
            assert same(found, expected), (name, rows, length)
            decoded += 1
    assert decoded > 60
    packed = encode(drawn((2, 40, 30)), FORMATS["mxfp6"])
    assert same(decode_rows(packed, FORMATS["mxfp6"], 30), decode(packed, FORMATS["mxfp6"], 30))
    with pytest.raises(ValueError, match="not as many as the numbers have"):
        decode_rows(packed, FORMATS["mxfp6"], 40)
