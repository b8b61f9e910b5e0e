"""Formats: what other libraries make of the same numbers, and what is true of all formats."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sparrow.numerics.bits import unpack
from sparrow.numerics.blocks import NAN_SCALE, decode, encode, rounded
from sparrow.numerics.elements import ELEMENTS, whole
from sparrow.numerics.formats import FORMATS, Format
from sparrow.numerics.rounding import noise

SCALED = {name: format for name, format in FORMATS.items() if format.block is not None}
POWERS = {name: format for name, format in SCALED.items() if format.scale == "power"}
OCP = [name for name in POWERS if name.startswith("mxfp")]
each = pytest.mark.parametrize("name", FORMATS)


@functools.cache
def record() -> dict[str, Tensor]:
    """See record_oracles.py for the names, and for what is left out of comparisons."""
    return load_file(Path(__file__).with_name("oracles.safetensors"))


def ceil(format: Format) -> Format:
    return dataclasses.replace(format, rule="ceil")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=random)
        * torch.randn(shape[0], *(1 for _ in shape[1:]), generator=random).exp()
    )


# -- other libraries -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OCP)
def test_codes_and_scales_are_those_of_torchao(name: str) -> None:
    packed, scales, codes = (
        encode(record()["numbers"], FORMATS[name]),
        *(record()[f"{name} {what}"] for what in ("scales", "codes")),
    )
    assert torch.equal(packed.scales, scales)
    ours = (
        packed.codes
        if FORMATS[name].element.bits != 6
        else unpack(packed.codes, 6, 64).to(torch.uint8)
    )
    counts = (scales > 0).repeat_interleave(codes.shape[1] // 2, 1)
    assert counts.float().mean() > 0.9
    assert torch.equal(ours[counts], codes[counts])


@pytest.mark.parametrize("name", [*OCP, "mxint8"])
def test_values_are_those_of_microxcaling(name: str) -> None:
    x = record()["numbers"]
    counts = torch.arange(len(x)) % 4 != 1
    assert torch.equal(rounded(x, FORMATS[name])[counts], record()[f"{name} values"][counts])


@pytest.mark.parametrize("name", ["mx9", "mx6"])
def test_values_are_those_of_quark(name: str) -> None:
    x = record()["numbers"]
    counts = x.abs() >= 2.0**-126
    assert counts.float().mean() > 0.8
    assert torch.equal(rounded(x, FORMATS[name])[counts], record()[f"{name} values"][counts])


# -- what is true of all ---------------------------------------------------------------------------


@each
def test_packed_is_unpacked(name: str) -> None:
    format = FORMATS[name]
    for shape in ((5, 77), (32,), (1, 1), (2, 3, 33), (0, 5), (4, 0)):
        for axis in range(len(shape)):
            x = drawn(*shape) if 0 not in shape else torch.zeros(shape)
            packed = encode(x, format, axis)
            expected = rounded(x, format, axis)
            found = decode(packed, format, shape[axis], axis)
            assert found.shape == x.shape
            assert torch.equal(found.view(torch.int32), expected.contiguous().view(torch.int32))
            others = math.prod(shape) // max(shape[axis], 1)
            tensors = [t for t in packed if t is not None]
            if others and shape[axis]:
                of_tensor = 4 if format.block == "tensor" else 0
                assert (
                    sum(t.nbytes for t in tensors)
                    == others * format.bytes_row(shape[axis]) + of_tensor
                )


def test_bytes_of_a_block() -> None:
    assert [FORMATS[name].bytes_row(16) for name in ("mx9", "mx6", "mx4")] == [18, 12, 8]
    assert [FORMATS[name].bytes_row(32) for name in ("mxfp8", "mxint8", "mxfp6", "mxfp4")] == [
        33,
        33,
        25,
        17,
    ]
    assert [FORMATS[name].bytes_row(16) for name in ("mxint8", "mxfp4")] == [17, 9]
    assert [FORMATS[name].bits for name in ("mx9", "mx6", "mx4", "mxfp8")] == [9, 6, 4, 8.25]


@pytest.mark.parametrize("name", SCALED)
def test_scaled_by_a_power_of_two(name: str) -> None:
    """Q(2^k x) = 2^k Q(x)."""
    x = drawn(20, 100)
    for format in (FORMATS[name], ceil(FORMATS[name])):
        for k in (-60, -1, 3, 60):
            for axis in (0, 1):
                assert torch.equal(
                    rounded(x * 2.0**k, format, axis), rounded(x, format, axis) * 2.0**k
                ), (k, axis)


@each
def test_what_is_rounded_stays(name: str) -> None:
    """Q(Q(x)) = Q(x), for scales in fp32 too."""
    x = torch.cat(
        [
            drawn(200, 64),
            drawn(200, 64, seed=1).bfloat16().float(),
            torch.zeros(1, 64),
            -torch.zeros(1, 64),
        ]
    )
    x[7, 3] = 2.0**-149
    for format in {FORMATS[name], dataclasses.replace(FORMATS[name], rule="ceil")}:
        once = rounded(x, format)
        assert torch.equal(rounded(once, format), once)
        assert (once != x).any()


@pytest.mark.parametrize("name", [name for name in SCALED if FORMATS[name].block != "tensor"])
def test_a_matrix_and_its_transpose_are_rounded_apart(name: str) -> None:
    """Q(W^T) is not Q(W)^T, but along the other axis it is."""
    x = drawn(64, 96)
    format = FORMATS[name]
    assert not torch.equal(rounded(x.t(), format), rounded(x, format).t())
    assert torch.equal(rounded(x.t(), format), rounded(x, format, 0).t())


@pytest.mark.parametrize("name", POWERS)
def test_short_last_blocks_are_as_if_they_were_alone(name: str) -> None:
    format = FORMATS[name]
    x = drawn(6, 3 * format.block + 5)
    cut = 3 * format.block
    both = torch.cat([rounded(x[:, :cut], format), rounded(x[:, cut:], format)], 1)
    assert torch.equal(rounded(x, format), both)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_is_nan_and_no_other(name: str, bad: float) -> None:
    format = FORMATS[name]
    x = drawn(4, 100)
    clean = rounded(x, format)
    x[2, 40] = bad
    found = rounded(x, format)
    block = format.block if isinstance(format.block, int) else 100
    expected = torch.zeros(4, 100, dtype=torch.bool)
    expected[2, 40 // block * block : (40 // block + 1) * block] = True
    expected |= format.block == "tensor"
    assert torch.equal(found.isnan(), expected)
    assert torch.equal(found[~expected], clean[~expected])
    packed = encode(x, format)
    if format.scale == "power":
        assert packed.scales[2, 40 // block] == NAN_SCALE
        assert (packed.scales == NAN_SCALE).sum() == 1
    assert torch.equal(decode(packed, format, 100).isnan(), expected)


def test_without_a_scale_overflow_is_what_the_element_has() -> None:
    x = torch.tensor([1e30, -1e30, torch.inf, torch.nan, 1.0])
    assert rounded(x, FORMATS["e5m2"]).tolist()[:3] == [torch.inf, -torch.inf, torch.inf]
    assert rounded(x, FORMATS["e4m3"]).isnan().tolist() == [True, True, True, True, False]
    assert rounded(x, FORMATS["e5m2"], rounding="zero").tolist()[:3] == [
        57344.0,
        -57344.0,
        torch.inf,
    ]
    bf16 = torch.randint(-(1 << 31), 1 << 31, (100_000,)).int().view(torch.float32)
    found, expected = rounded(bf16, FORMATS["bf16"]), bf16.bfloat16().float()
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    zero = rounded(bf16, FORMATS["bf16"], rounding="zero")
    cut = (bf16.view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert torch.equal(zero[~bf16.isnan()], cut[~bf16.isnan()])


# -- scales ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "cut"), [("mxfp8", 1.75), ("mxfp4", 1.5)])
def test_floor_cuts_the_largest_and_ceil_does_not(name: str, cut: float) -> None:
    x = torch.full((1, 32), 1.99)
    assert (rounded(x, FORMATS[name]) == cut).all()
    above = rounded(x, ceil(FORMATS[name]))
    assert (above == 2.0).all()


@pytest.mark.parametrize("name", POWERS)
def test_ceil_is_the_least_power_of_two_that_fits(name: str) -> None:
    format = ceil(dataclasses.replace(FORMATS[name], pair=1, shift_bits=0))
    largest = format.element.largest
    most = torch.tensor(
        [
            largest,
            math.nextafter(largest, 0),
            largest * 1.0001,
            largest / 2,
            1.0,
            3.0,
            1e-38,
            2.0**-140,
        ]
    )
    x = torch.zeros(len(most), format.block)
    x[:, 3] = most
    scale = 2.0 ** (encode(x, format).scales[:, 0].double() - 127)
    assert (most <= scale * largest).all()
    assert ((most > scale / 2 * largest) | (scale == 2.0**-127)).all()


def test_the_least_scale_is_a_subnormal_number() -> None:
    x = torch.full((1, 32), 2.0**-127)
    x[0, 1] = 2.0**-128
    for name in ("mxfp8", "mxint8", "mx9", "mxfp4"):
        packed = encode(x, FORMATS[name])
        assert (packed.scales == 0).all(), name
        assert torch.equal(decode(packed, FORMATS[name], 32), x), name
    assert torch.equal(
        rounded(torch.full((1, 32), 2.0**-149), FORMATS["mxfp8"]), torch.zeros(1, 32)
    )


@pytest.mark.parametrize("name", SCALED)
def test_the_largest_numbers_stay_finite(name: str) -> None:
    most = torch.finfo(torch.float32).max
    for format in (FORMATS[name], ceil(FORMATS[name])):
        found = rounded(torch.full((1, 64), most), format)
        assert found.isfinite().all()
        assert (found > most / 2).all()


@pytest.mark.parametrize(
    "name", [name for name, format in FORMATS.items() if format.is_exact_in_bf16]
)
def test_values_are_bf16_numbers(name: str) -> None:
    found = rounded(drawn(50, 64), FORMATS[name])
    assert torch.equal(found.bfloat16().float(), found)


# -- errors ----------------------------------------------------------------------------------------


def qsnr(x: Tensor, found: Tensor, of: int | tuple[int, int] = (0, 1)) -> Tensor:
    """Decibels, of all or of each row."""
    return -10 * torch.log10((found - x).double().square().sum(of) / x.double().square().sum(of))


@pytest.mark.parametrize(
    ("name", "bits", "bound"), [("mx9", 7, 34.74), ("mx6", 4, 16.68), ("mx4", 2, 4.64)]
)
def test_adversarial_blocks_are_above_the_bound(name: str, bits: int, bound: float) -> None:
    """Theorem 1 of arXiv 2302.08007. The worst block has its signal in one number, and all others
    halfway.
    """
    step = 2.0 ** (1 - bits)
    worst = torch.full((1, 16), step / 4)
    worst[0, 0], worst[0, 1] = 1 + step / 2, step / 2
    blocks = torch.cat(
        [worst, worst * (1 - 2.0**-20), worst * -1.7, drawn(2000, 16) ** 3, drawn(2000, 16).exp2()]
    )
    found = qsnr(blocks, rounded(blocks, FORMATS[name]), 1)
    assert found.min() >= bound
    # it is nearly reached, the more bits the nearer
    assert found[0] < bound + 12 * 2.0**-bits + 0.1


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mx9", 46.6), ("mx6", 28.4), ("mx4", 15.8), ("fp8", 31.5), ("fp8-e5m2", 25.6)],
)
def test_qsnr_of_normal_numbers(name: str, expected: float) -> None:
    """Of N(0, |N(0, 1)|), a variance for each row."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 1024, generator=random) * torch.randn(2000, 1, generator=random).abs()
    assert abs(qsnr(x, rounded(x, FORMATS[name])) - expected) < 0.3


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("bf16", "fp16")])
def test_the_mean_of_stochastic_rounding_is_the_number(name: str) -> None:
    """Under `ceil`, or where the scale is fp32: nothing is cut off."""
    format = ceil(FORMATS[name]) if FORMATS[name].scale == "power" else FORMATS[name]
    draws, x = 20_000, drawn(1, 64)[0] / 3
    x[:4] = torch.tensor([1.9, 1e-3, -1e-4, 0.0])
    each_format = format if format.block != "tensor" else dataclasses.replace(format, block="row")
    found = rounded(
        x.expand(draws, -1),
        each_format,
        -1,
        "stochastic",
        noise(1, 0, torch.arange(draws), (0, 64), 0),
    )
    deviation = found.double().std(0) / math.sqrt(draws)
    error = (found.double().mean(0) - x).abs()
    assert (error <= 5 * deviation + 1e-6 * x.abs()).all()
    assert (deviation > 0).float().mean() > 0.8


def test_under_floor_the_mean_is_cut() -> None:
    x = torch.full((1000, 32), 1.9)
    found = rounded(
        x, FORMATS["mxfp8"], -1, "stochastic", noise(1, 0, torch.arange(1000), (0, 32), 0)
    )
    assert (found == 1.75).all()


def test_bdr_in_its_own_words() -> None:
    """The formula of arXiv 2302.08007 in float64, for points beside MX9, MX6 and MX4."""
    x = drawn(40, 128, seed=2)
    for bits, block, pair, shift_bits in (
        (7, 16, 2, 1),
        (3, 32, 4, 2),
        (5, 8, 1, 3),
        (2, 64, 8, 1),
        (8, 128, 1, 0),
    ):
        blocks = x.double().unflatten(1, (-1, block))
        of_block = torch.frexp(blocks.abs().amax(2, keepdim=True))[1] - 1
        of_pair = torch.frexp(blocks.unflatten(2, (-1, pair)).abs().amax(3))[1] - 1
        shift = (of_block - of_pair).clamp(max=2**shift_bits - 1).repeat_interleave(pair, 2)
        step = 2.0 ** (of_block - shift - bits + 1).double()
        expected = ((blocks / step).round().clamp(1 - 2**bits, 2**bits - 1) * step).flatten(1)
        format = Format(element=whole(bits), block=block, pair=pair, shift_bits=shift_bits)
        assert torch.equal(rounded(x, format).double(), expected), (bits, block, pair, shift_bits)


def test_elements_of_16_bits_take_scales_too() -> None:
    x = drawn(3, 40) * 2.0**30
    found = rounded(x, Format(element=ELEMENTS["fp16"], block=32))
    assert qsnr(x, found) > 70
