"""Elements against ml_dtypes: every code, and numbers at, between and beside all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparrow.numerics.elements import ELEMENTS, whole

TYPES = {  # ml_dtypes' and numpy's names
    "bf16": "bfloat16",
    "fp16": "float16",
    "e5m2": "float8_e5m2",
    "e4m3": "float8_e4m3fn",
    "e3m2": "float6_e3m2fn",
    "e2m3": "float6_e2m3fn",
    "e2m1": "float4_e2m1fn",
}
each = pytest.mark.parametrize("name", TYPES)
NO_NAN = {"e3m2", "e2m3", "e2m1"}


def oracle(name: str) -> Any:
    if name == "fp16":
        return np.float16
    return getattr(pytest.importorskip("ml_dtypes", reason="pip install ml_dtypes"), TYPES[name])


def codes_by_oracle(x: Tensor, name: str) -> Tensor:
    with np.errstate(all="ignore"):
        found = x.numpy().astype(oracle(name))
    return torch.from_numpy(
        found.view(np.uint16 if found.itemsize == 2 else np.uint8).astype(np.int32)
    )


def numbers_by_oracle(codes: Tensor, name: str) -> Tensor:
    kind = np.uint16 if np.dtype(oracle(name)).itemsize == 2 else np.uint8
    return torch.from_numpy(codes.numpy().astype(kind).view(oracle(name)).astype(np.float32))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def assert_codes(x: Tensor, name: str) -> None:
    """To nearest: the oracle's codes, overflow to infinity or NaN among them; NaN is any code that
    is not a number.

    Elements without NaN saturate here and there.
    """
    element = ELEMENTS[name]
    if name in NO_NAN:
        x = x[x.isfinite()]
    found, expected = element.codes(x, "nearest", saturate=name in NO_NAN), codes_by_oracle(x, name)
    nan = element.numbers()[found].isnan()
    assert torch.equal(nan, element.numbers()[expected].isnan())
    wrong = ~nan & (found != expected)
    assert not wrong.any(), x[wrong][:5]


@each
def test_codes_are_the_numbers_of_ml_dtypes(name: str) -> None:
    codes = torch.arange(1 << ELEMENTS[name].bits, dtype=torch.int32)
    found, expected = ELEMENTS[name].numbers(), numbers_by_oracle(codes, name)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(bits(found.nan_to_num(0)), bits(expected.nan_to_num(0)))


@each
def test_every_number_of_16_bits_is_encoded_as_in_ml_dtypes(name: str) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        assert_codes(patterns.view(dtype).float(), name)


@each
def test_midpoints_and_their_neighbours_are_encoded_as_in_ml_dtypes(name: str) -> None:
    numbers = ELEMENTS[name].numbers()
    numbers = numbers[numbers.isfinite()].double().unique()
    step = float(numbers[-1] - numbers[-2])
    ends = torch.tensor([numbers[-1] + step, numbers[-1] + 2 * step], dtype=torch.float64)
    numbers = torch.cat([-ends.flip(0), numbers, ends])
    at = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2]).float()
    at = at[at.isfinite()]
    beside = [torch.nextafter(at, torch.tensor(way * torch.inf)) for way in (-1, 1)]
    assert_codes(torch.cat([at, *beside]), name)


@each
def test_patterns_of_fp32_are_encoded_as_in_ml_dtypes(name: str) -> None:
    random = torch.Generator().manual_seed(3)
    assert_codes(
        torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=random).int().view(torch.float32),
        name,
    )


@pytest.mark.slow
@each
def test_many_patterns_of_fp32_are_encoded_as_in_ml_dtypes(name: str) -> None:
    random = torch.Generator().manual_seed(4)
    for _ in range(10):
        assert_codes(
            torch.randint(-(1 << 31), 1 << 31, (1_000_000,), generator=random)
            .int()
            .view(torch.float32),
            name,
        )


@pytest.mark.parametrize("name", ELEMENTS)
def test_saturation_keeps_finite_numbers_finite(name: str) -> None:
    element = ELEMENTS[name]
    x = torch.tensor([3.4e38, -3.4e38, element.largest, 0.0, -0.0])
    numbers = element.numbers()[element.codes(x, "nearest")]
    assert torch.equal(numbers, torch.tensor([1.0, -1.0, 1.0, 0.0, 0.0]) * element.largest)
    assert bool(numbers[4].signbit()) is not element.twos_complement


def test_toward_zero_never_grows_and_keeps_what_fits() -> None:
    x = torch.randn(10_000) * 3
    for name, element in ELEMENTS.items():
        found = element.numbers()[element.codes(x, "zero")]
        assert (found.abs() <= x.abs()).all(), name
        assert torch.equal(element.numbers()[element.codes(found, "zero")], found), name


def test_whole_numbers_are_evenly_spaced() -> None:
    for size in range(1, 9):
        numbers = whole(size).numbers()
        most = (1 << size) - 1
        expected = torch.arange(most + 1) / 2 ** (size - 1)
        assert torch.equal(numbers, torch.cat([expected, -expected])), size
    assert torch.equal(ELEMENTS["int8"].numbers()[:128], whole(7).numbers()[:128])
    assert torch.equal(ELEMENTS["int8"].numbers()[129:], -torch.arange(127, 0, -1) / 64)
