"""Rows in OCP's MX formats: their bytes, their numbers, and that compiled kernels write and read
the same.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.core import UserError
from sparrow.core.config import from_dict
from sparrow.embeddings import Component
from sparrow.embeddings.choices import TableChoices
from sparrow.kernels import Impl
from sparrow.kernels.embedding_bag import Rows, Table, Tables, bags_of, lookup, replace_rows
from sparrow.kernels.formats import RowFormat, fp32, mxfp4, mxfp6, mxfp8, mxint8
from sparrow.kernels.rules import sgd
from sparrow.numerics.blocks import encode
from sparrow.numerics.formats import FORMATS
from sparrow.numerics.rounding import noise
from tests.kernels.embedding_bag.cases import TRITON, built
from tests.kernels.formats.draws import KEY, stored

MEMBERS: dict[str, Any] = {"mxint8": mxint8, "mxfp8": mxfp8, "mxfp6": mxfp6, "mxfp4": mxfp4}
each_member = pytest.mark.parametrize("name", MEMBERS)
HOW: dict[str, dict[str, str]] = {
    "stochastic": {},
    "nearest": {"rounding": "nearest"},
    "floor": {"rounding": "nearest", "scale": "floor"},
}


def drawn(rows: int, dim: int) -> Tensor:
    """Rows of many sizes; zeros of both signs, subnormal numbers, and the largest; a block that is
    not finite.
    """
    random = torch.Generator().manual_seed(dim)
    x_RD = (
        torch.randn(rows, dim, generator=random)
        * torch.randn(rows, 1, generator=random).mul(8).exp2()
    )
    x_RD[1], x_RD[2] = 0.0, -0.0
    x_RD[3] *= 2.0**-140 / x_RD[3].abs().amax()
    x_RD[4, ::2] = 2.0**-149
    x_RD[5, -1] = 3.4028234e38
    x_RD[6, dim // 2] = torch.nan
    x_RD[7, -1] = -torch.inf
    x_RD[8] = 1.9
    return x_RD


@pytest.mark.parametrize(("name", "of_16", "of_64"), [("mxint8", 17, 66), ("mxfp8", 17, 66), ("mxfp6", 13, 50),
                                                      ("mxfp4", 9, 34)])  # fmt: skip
def test_bytes_of_rows(name: str, of_16: int, of_64: int) -> None:
    format = MEMBERS[name].Config()
    for dim, expected in ((16, of_16), (64, of_64)):
        row = format.encode(torch.randn(3, dim), None)["weight"]
        assert row.shape == (3, expected) and format.fields(dim)["weight"].bytes_row == expected


@each_member
@pytest.mark.parametrize("how", ["nearest", "floor"])
def test_numbers_are_the_nearest_of_the_block(name: str, how: str) -> None:
    """Each number apart, in exact arithmetic: the scale by its definition, then the nearest element
    of all.
    """
    format, dim = MEMBERS[name].Config(**HOW[how]), 37
    element = format.format.element
    x_RD = torch.randn(20, dim, generator=torch.Generator().manual_seed(1)).mul(3) ** 3
    found_RD = stored(format, x_RD)
    elements = sorted({abs(n) for n in element.numbers().tolist() if abs(n) <= element.largest})
    for row, got in zip(x_RD.tolist(), found_RD.tolist(), strict=True):
        for first in range(0, dim, 32):
            most = max(abs(x) for x in row[first : first + 32])
            scale = 2.0 ** (math.floor(math.log2(most)) - math.floor(math.log2(element.largest)))
            if how == "nearest" and most > element.largest * scale:
                scale *= 2
            for x, value in zip(row[first : first + 32], got[first : first + 32], strict=True):
                near = min(abs(abs(x) / scale - n) for n in elements)
                assert abs(abs(x) / scale - abs(value) / scale) == near
                assert value == 0 or math.copysign(1, value) == math.copysign(1, x)


@each_member
def test_rows_are_ocps_codes_and_scales(name: str) -> None:
    """Under "floor", to nearest: those of `numerics`, which are compared with other implementations
    there.
    """
    x_RD = drawn(30, 70)
    codes, scales, _ = encode(x_RD, FORMATS[name])
    row = MEMBERS[name].Config(**HOW["floor"]).encode(x_RD, None)["weight"]
    assert scales is not None and torch.equal(row, torch.cat([codes, scales], 1))


@each_member
@pytest.mark.parametrize("how", HOW)
def test_what_a_row_has_is_stored_as_it_is(name: str, how: str) -> None:
    """Numbers that the format has, written again: with noise too, nothing moves."""
    format = MEMBERS[name].Config(**HOW[how])
    rows_U, x_UD = (
        torch.arange(500),
        torch.randn(500, 45, generator=torch.Generator().manual_seed(2)),
    )
    noise_UD = noise(KEY, 0, rows_U, (0, 45), 1) if how == "stochastic" else None
    once_UD = stored(format, x_UD, noise_UD)
    assert torch.equal(stored(format, once_UD, noise_UD), once_UD)
    for power in (-30, 7):
        moved_UD = stored(format, x_UD * 2.0**power, noise_UD)
        assert torch.equal(moved_UD, once_UD * 2.0**power)


@each_member
def test_errors_are_below_a_step_and_nothing_is_cut_off(name: str) -> None:
    format = MEMBERS[name].Config()
    element, x_UD = (
        format.format.element,
        torch.randn(500, 64, generator=torch.Generator().manual_seed(3)),
    )
    most_UD = x_UD.abs().view(500, 2, 32).amax(2).repeat_interleave(32, 1)
    least_UD = (
        most_UD / element.largest * 2 * 2.0 ** (element.least_exponent - element.mantissa_bits)
    )
    for n in range(10):
        error_UD = stored(format, x_UD, noise(KEY, 0, torch.arange(500), (0, 64), n)) - x_UD
        assert (
            error_UD.abs() <= torch.maximum(x_UD.abs() * 2.0**-element.mantissa_bits, least_UD)
        ).all()


def test_stochastic_rounding_under_floor_is_refused() -> None:
    for name in MEMBERS:
        with pytest.raises(
            UserError, match="scale: 'floor' cuts off large numbers, .* give rounding = 'nearest'"
        ):
            MEMBERS[name].Config(scale="floor")
    with pytest.raises(UserError, match=r"^format\.scale: 'floor' cuts off") as told:
        from_dict(TableChoices, {"format": {"name": "mxfp8", "scale": "floor"}})
    assert "\n" not in str(told.value)


@each_member
def test_columns_are_cut_between_blocks(name: str) -> None:
    component = Component(name="t", rows=9, dim=65, format=MEMBERS[name].Config())
    for columns in ((0, 65), (0, 32), (32, 64), (32, 65), (64, 65)):
        component.check_columns(columns)
    for first, last in ((0, 33), (16, 64), (33, 65), (0, 8)):
        with pytest.raises(UserError) as refused:
            component.check_columns((first, last))
        why = (
            f"'weight' has blocks of 32 columns, not whole in {first}:{last}; cut it by rows, or"
            " leave it whole"
        )
        assert str(refused.value) == f"plan: table 't' is cut by columns, and {why}"


@each_member
@pytest.mark.parametrize("how", HOW)
def test_a_part_has_the_bytes_that_its_columns_have_alone(name: str, how: str) -> None:
    """They are taken out of rows, and put into others."""
    format: RowFormat = MEMBERS[name].Config(**HOW[how])
    for edges in ((0, 32, 64), (0, 32, 65), (0, 64, 96, 130)):
        dim, rows_U = edges[-1], torch.arange(30)
        x_UD, noise_UD = drawn(30, dim), noise(KEY, 0, rows_U, (0, dim), 1)
        whole = format.encode(x_UD, noise_UD if how == "stochastic" else None)["weight"]
        field, again = format.fields(dim)["weight"], torch.zeros_like(whole)
        for first, last in pairwise(edges):
            own_UD = noise(KEY, 0, rows_U, (first, last), 1) if how == "stochastic" else None
            part = format.encode(x_UD[:, first:last], own_UD)["weight"]
            assert part.shape[1] == format.fields(last - first)["weight"].width
            assert torch.equal(field.part(whole, slice(first, last), dim), part)
            field.put(again, rows_U.flip(0), part.flip(0), slice(first, last), dim)
        assert torch.equal(again, whole)


# -- compiled kernels ------------------------------------------------------------------------------


def left(format: RowFormat, values_RD: Tensor, impl: Impl, device: str = "cpu") -> Tensor:
    """The bytes of rows that leave frames of fp32 with these values, rounded with numbers of their
    own.
    """
    rows, dim = values_RD.shape
    with torch.device(device):
        numbers_R = torch.arange(rows, dtype=torch.int32) + 1
        touched_R = torch.ones(rows, dtype=torch.uint8)
        frames = Rows(
            format=fp32.Config(),
            payload={"weight": values_RD.to(device, copy=True)},
            touched_R=touched_R.clone(),
            changed_R=numbers_R,
        )
        beneath = Rows(
            format=format,
            payload=format.encode(torch.zeros(2 * rows, dim), None),
            touched_R=touched_R.repeat(2),
        )
        table = Table(
            levels=(frames, beneath),
            rule=sgd.Config(),
            rows=2 * rows,
            dim=dim,
            key=KEY,
            place=(100, 5),
        )
        replace_rows(
            Tables([table]),
            torch.arange(rows),
            torch.arange(rows) + rows,
            torch.arange(rows),
            impl=impl,
        )
    return beneath.payload["weight"][:rows].cpu()


def looked_up(
    format: RowFormat, bytes_RB: Tensor, dim: int, impl: Impl, device: str = "cpu"
) -> Tensor:
    """The numbers of rows with these bytes."""
    rows = len(bytes_RB)
    with torch.device(device):
        payload = {"weight": bytes_RB.to(device)}
        level = Rows(format=format, payload=payload, touched_R=torch.zeros(rows, dtype=torch.uint8))
        tables = Tables([Table(levels=(level,), rule=sgd.Config(), rows=rows, dim=dim)])
        return lookup(
            tables, bags_of(torch.arange(rows), torch.arange(rows + 1), "none"), impl=impl
        )[0].cpu()


def check(format: RowFormat, dim: int, impl: Impl, device: str = "cpu") -> None:
    """Rows of values of all kinds have the reference's bytes and numbers. NaN is one of many; GPUs
    add rows to 0.0.
    """
    bytes_RB = left(format, drawn(30, dim), impl, device)
    assert torch.equal(bytes_RB, left(format, drawn(30, dim), "reference")), dim
    found, expected = (
        looked_up(format, bytes_RB, dim, impl, device),
        looked_up(format, bytes_RB, dim, "reference"),
    )
    zero = 0.0 if impl == "triton" else -0.0  # x + -0.0 is x
    assert torch.equal(
        *(torch.where(v.isnan(), 7.0, v + zero).view(torch.int32) for v in (found, expected))
    ), dim
    assert found[6:8].isnan().any() and found[[*range(6), *range(8, 30)]].isfinite().all()


@built
@each_member
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("processor", ["best", "avx2", "portable"])
def test_compiled_kernels_write_and_read_the_same(name: str, how: str, processor: str) -> None:
    """Dims below a vector, of short last blocks, and whose last vector lies in two blocks."""
    from sparrow.kernels.embedding_bag import cpp

    try:
        cpp.processor(processor)
    except ValueError:
        pytest.skip(f"no {processor} here")
    try:
        for dim in (
            1,
            2,
            3,
            5,
            7,
            8,
            15,
            16,
            17,
            31,
            32,
            33,
            35,
            40,
            47,
            63,
            64,
            65,
            100,
            130,
            257,
        ):
            check(MEMBERS[name].Config(**HOW[how]), dim, "cpp")
    finally:
        cpp.processor("best")


GPU_DIMS = {"stochastic": (65,), "nearest": (2,), "floor": (33,)}


@pytest.mark.parametrize("dims", ["few", pytest.param("many", marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", TRITON)
@each_member
@pytest.mark.parametrize("how", HOW)
def test_kernels_for_gpus_write_and_read_the_same(
    name: str, how: str, device: str, dims: str
) -> None:
    """Dims below a block of codes, of a short last byte, of short last blocks, and of several."""
    for dim in GPU_DIMS[how] if dims == "few" else (1, 2, 3, 7, 16, 33, 64, 130):
        check(MEMBERS[name].Config(**HOW[how]), dim, "triton", device)
