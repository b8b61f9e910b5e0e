"""Rounding to fewer bits, bit by bit, and the random numbers it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.kernels.philox import key_of
from sparrow.numerics.rounding import noise, to_bf16, to_fp16, to_whole

KEY = key_of(0, "table")
MOST = (1 << 32) - 1
ROUND = {"fp16": to_fp16, "bf16": to_bf16}
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
each = pytest.mark.parametrize("name", ROUND)


def every(name: str) -> Tensor:
    """Every number of 16 bits, infinities and NaN among them."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(TYPES[name])


def some_noise(count: int, n: int = 0) -> Tensor:
    return noise(KEY, 0, torch.arange(1), (0, count), n)[0]


def same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit, but that every NaN is one."""
    bits = one.view(torch.int16) == other.view(torch.int16)
    return bool((bits | (one.isnan() & other.isnan())).all())


@each
def test_to_nearest_is_what_torch_does(name: str) -> None:
    bits = torch.randint(
        -(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(1)
    )
    x = torch.cat(
        [
            bits.to(torch.int32).view(torch.float32),
            torch.randn(1 << 16),
            torch.randn(1 << 16) * 1e-6,
        ]
    )
    assert same(ROUND[name](x, None), x.to(TYPES[name]))


@each
@pytest.mark.parametrize("u", [None, 0, 1 << 31, MOST, "some"])
def test_numbers_that_have_few_bits_never_move(name: str, u: Any) -> None:
    """Zeros of both signs, the largest, infinities and NaN too."""
    x = every(name)
    random = u if u is None else some_noise(len(x)) if u == "some" else torch.full(x.shape, u)
    assert same(ROUND[name](x.float(), random), x)


@each
def test_others_go_to_a_neighbour(name: str) -> None:
    """To the one below in size, or to the one above, as often as they are near to it."""
    below = every(name)
    below = below[below.abs() < torch.finfo(TYPES[name]).max]
    above = (below.view(torch.int16) + 1).view(TYPES[name])  # away from zero
    part = torch.rand(len(below), generator=torch.Generator().manual_seed(1))
    x = (below.double() + (above.double() - below.double()) * part).float()
    found = ROUND[name](x, some_noise(len(x)))
    up = found.view(torch.int16) == above.view(torch.int16)
    assert (up | (found.view(torch.int16) == below.view(torch.int16))).all()
    for low, high in ((0.0, 0.2), (0.2, 0.8), (0.8, 1.0)):
        here = (part > low) & (part < high)
        assert abs(up[here].double().mean() - (low + high) / 2) < 0.02


def test_beyond_the_largest() -> None:
    """Stochastically finite numbers stay finite; to nearest those beyond half a step become
    infinite.
    """
    for u in (0, 1 << 31, MOST):
        x = torch.tensor([65504.5, 65519.0, 65520.0, 1e30, torch.inf, -65520.0, -torch.inf])
        found = to_fp16(x, torch.full(x.shape, u))
        assert found.tolist() == [65504.0] * 4 + [torch.inf, -65504.0, -torch.inf]
        most = torch.finfo(torch.bfloat16).max
        x = torch.tensor(
            [most, torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, torch.inf]
        )
        assert to_bf16(x, torch.full(x.shape, u)).tolist() == [most, most, -most, torch.inf]
    x = torch.tensor([65504.5, 65519.0, 65520.0, -65520.0])
    assert to_fp16(x, None).tolist() == [65504.0, 65504.0, torch.inf, -torch.inf]
    assert to_bf16(torch.tensor([torch.finfo(torch.float32).max]), None).tolist() == [torch.inf]


@each
def test_nan_and_the_sign_of_zero_stay(name: str) -> None:
    for u in (0, 1 << 31, MOST):
        x = torch.tensor([torch.nan, -0.0, 0.0])
        found = ROUND[name](x, torch.full(x.shape, u))
        assert found[0].isnan()
        assert found[1:].view(torch.int16).tolist() == [-(1 << 15), 0]


def test_whole_numbers() -> None:
    """They stay, and others go up as often as they are near to the one above."""
    u = some_noise(1 << 16)
    assert torch.equal(to_whole(torch.full(u.shape, 7.0), u), torch.full(u.shape, 7.0))
    for x in (0.001, 0.25, 3.5, 254.9):
        found = to_whole(torch.full(u.shape, x), u)
        assert set(found.tolist()) == {float(int(x)), float(int(x) + 1)}
        z = (found.double().mean() - x) / (found.double().std() / len(u) ** 0.5)
        assert abs(z) < 5


# -- the random numbers ----------------------------------------------------------------------------


def numbers(**place: Any) -> Tensor:
    """Those of 4096 rows and 64 columns, or of others, from 0 to 1."""
    at: dict[str, Any] = {
        "key": KEY,
        "field": 0,
        "rows": torch.arange(4096),
        "columns": (0, 64),
        "n": 1,
        **place,
    }
    return noise(at["key"], at["field"], at["rows"], at["columns"], at["n"]).double() / 2**32


def correlation(one: Tensor, other: Tensor) -> float:
    """Of pairs, in standard deviations of what independent ones have."""
    return (
        float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])
        * one.numel() ** 0.5
    )


OTHERS: dict[str, dict[str, Any]] = {
    "the next row": {"rows": torch.arange(1, 4097)},
    "a far row": {"rows": torch.arange(4096) + (1 << 33)},
    "the next column": {"columns": (1, 65)},
    "a far column": {"columns": (64, 128)},
    "the next update": {"n": 2},
    "update 17": {"n": 17},
    "a far update": {"n": 1 + (1 << 40)},
    "the next field": {"field": 1},
    "another seed": {"key": key_of(1, "table")},
    "another table": {"key": key_of(0, "tables")},
    "a key of one other bit": {"key": KEY ^ 1 << 63},
}


@pytest.mark.parametrize("name", OTHERS)
def test_numbers_of_other_places_do_not_correlate(name: str) -> None:
    here, there = numbers(), numbers(**OTHERS[name])
    assert not torch.equal(here, there)
    assert abs(correlation(here, there)) < 5
    assert abs(correlation((here * 2**16) % 1, (there * 2**16) % 1)) < 5  # the low bits


@pytest.mark.parametrize("axis", ["columns", "rows", "updates"])
def test_numbers_along_an_axis_do_not_correlate(axis: str) -> None:
    if axis == "updates":
        found = numbers(rows=torch.full((4096,), 5), n=torch.arange(4096))
    else:
        found = numbers() if axis == "columns" else numbers().t()
    found = found if axis == "columns" else found.reshape(64, -1) if axis == "rows" else found.t()
    for lag in range(1, 33):
        assert abs(correlation(found[:, lag:], found[:, :-lag])) < 5


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"columns": (0, 1), "rows": torch.arange(1 << 18)},
        {"rows": torch.full((4096,), 9), "n": torch.arange(4096)},
    ],
)
def test_numbers_are_uniform(place: dict[str, Any]) -> None:
    """Each byte of them, by a chi-square test."""
    whole = (numbers(**place) * 2**32).long()
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((whole >> shift & 255).flatten(), minlength=256).double()
        expected = whole.numel() / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5


def test_a_number_depends_on_its_place_alone() -> None:
    whole = noise(KEY, 2, torch.arange(100), (0, 40), 7)
    assert torch.equal(noise(KEY, 2, torch.arange(30, 50), (8, 24), 7), whole[30:50, 8:24])
    assert torch.equal(
        noise(KEY, 2, torch.tensor([99, 3]), (0, 40), torch.tensor([7, 7])), whole[[99, 3]]
    )
    assert int(whole.min()) >= 0
    assert int(whole.max()) <= MOST
