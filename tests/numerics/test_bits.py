"""Exponents, powers and packing, bit by bit."""

from __future__ import annotations

import math

import pytest
import torch

from sparrow.numerics.bits import exponents, pack, power, unpack


def test_exponents_are_those_of_bits_just_below_powers_of_two() -> None:
    powers = torch.tensor([math.ldexp(1.0, e) for e in range(-126, 128)])
    expected = torch.arange(-126, 128, dtype=torch.int32)
    assert torch.equal(exponents(powers), expected)
    below = torch.nextafter(powers, torch.tensor(0.0))
    assert torch.equal(exponents(-below), expected - 1)  # log2 rounds many of these up
    assert below.log2().floor().int().ne(expected - 1).any()
    odd = torch.tensor([0.0, -0.0, 2.0**-149, torch.inf, torch.nan])
    assert exponents(odd).tolist() == [-127, -127, -127, 128, 128]


def test_powers_are_exact_down_to_the_least_subnormal_number() -> None:
    exponent = torch.arange(-149, 128, dtype=torch.int32)
    assert torch.equal(
        power(exponent).double(),
        torch.tensor([math.ldexp(1.0, e) for e in exponent.tolist()]).double(),
    )


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("count", [0, 1, 7, 8, 33])
def test_what_is_packed_is_unpacked(bits: int, count: int) -> None:
    random = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (3, 2, count), generator=random).int()
    data = pack(codes, bits)
    assert data.shape == (3, 2, math.ceil(count * bits / 8))
    assert torch.equal(unpack(data, bits, count), codes)


def test_the_first_code_is_in_the_low_bits() -> None:
    assert pack(torch.tensor([1, 2, 3]), 4).tolist() == [0x21, 0x03]
    assert pack(torch.tensor([0x1FF, 1]), 9).tolist() == [0xFF, 0x03, 0x00]
