from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparrow.core import UserError
from sparrow.core.config import Family, from_dict
from sparrow.distributed.codecs import Codec, Unit, cast, mx
from sparrow.numerics import blocks
from sparrow.numerics.formats import FORMATS
from sparrow.sharding import messages
from sparrow.trained.run import Sharding
from tests.equivalence.cases import Sparse

CAST = {dtype: cast.Config(dtype=dtype) for dtype in ("fp32", "fp16", "bf16")}  # type: ignore[arg-type]
MX = {name: mx.Config(format=name) for name in ("mxint8", "mxfp8", "mxfp6", "mxfp4")}  # type: ignore[arg-type]
CODECS: dict[str, Codec] = {**CAST, **MX}


@pytest.mark.parametrize("name", CODECS)
def test_what_arrives_is_within_the_bound(name: str) -> None:
    codec, random = CODECS[name], torch.Generator().manual_seed(0)
    for scale in (1e-30, 1e-7, 1e-3, 1.0, 1e4, 1e6, 1e30):
        block = torch.randn(50, 7, generator=random) * scale
        data = codec.encode(block, 0, True)
        assert data.dtype == torch.uint8
        assert data.numel() == codec.size(50, 7)
        assert ((codec.decode(data, 50, 7) - block).abs() <= codec.error(block)).all()


@pytest.mark.parametrize("name", CODECS)
def test_a_gradient_that_was_broadcast(name: str) -> None:
    """Of a sum, say: one number for all rows, whose sides have a stride of 0."""
    for rows in (1, 5):
        block = torch.ones(()).expand(rows, 1)
        assert torch.equal(
            CODECS[name].decode(CODECS[name].encode(block, 0, True), rows, 1), torch.ones(rows, 1)
        )


def test_fp16_keeps_large_numbers_and_infinite_ones() -> None:
    block = torch.tensor([[2.0**120, -(2.0**100), float("inf"), -float("inf"), float("nan"), 0.0]])
    found = CODECS["fp16"].decode(CODECS["fp16"].encode(block, 0, True), 1, 6)
    assert torch.equal(found.nan_to_num(1.0), block.nan_to_num(1.0))
    assert found[0, 4].isnan() and found[0, 2] == float("inf")


@pytest.mark.parametrize("scale", [1e-7, 1e-8, 1e-9, 1e-20, 2.0**-149, 1e30])
def test_fp16_keeps_gradients_of_any_size(scale: float) -> None:
    """Those of a large batch, say: without a scale all below 3e-8 would be 0. Scaling itself
    changes no bit.
    """
    codec = CODECS["fp16"]
    block = torch.randn(500, 16, generator=torch.Generator().manual_seed(0)) * scale
    found = codec.decode(codec.encode(block, 0, False), 500, 16)
    assert torch.equal(found == 0, block == 0)
    if scale > 1e-30:
        assert ((found - block).abs() <= block.abs() * 2.0**-11).all()
    plain = torch.randn(500, 16, generator=torch.Generator().manual_seed(1)).half().float()
    for power in (-110, -30, 0, 30, 100):
        same = plain * 2.0**power
        assert torch.equal(codec.decode(codec.encode(same, 0, False), 500, 16), same)


def test_fp16_keeps_a_range_of_ten_to_the_eight() -> None:
    """In one message: all 11 bits down to 2**-29 of the largest, and no zero down to 2**-38."""
    codec, sizes = CODECS["fp16"], 2.0 ** -torch.arange(0, 38.0)[:, None]
    block = sizes * (1 + torch.rand(38, 50, generator=torch.Generator().manual_seed(0))) * 1e-5
    found = codec.decode(codec.encode(block, 0, False), 38, 50)
    relative = (found - block).abs() / block
    assert (relative[:28] <= 2.0**-11).all()
    assert (found != 0).all()


def test_messages_of_any_shapes() -> None:
    """To three members; whether a codec takes each block by itself, all together, or does not know
    their bytes.
    """
    shapes: list[list[messages.Shape]] = [
        [(3, 7, (2, 5)), (0, 4, (4,)), (2, 0, ())],
        [],
        [(1, 1, (1,)), (2, 6, (1, 5))],
    ]
    random = torch.Generator().manual_seed(0)
    matrices = [
        torch.randn(rows, columns, generator=random) for of in shapes for rows, columns, _ in of
    ]
    form, flat_N = messages.Form(shapes), messages.flat(matrices, torch.device("cpu"))
    for codec in (*CAST.values(), Sparse()):
        data, counts = messages.pack(codec, flat_N, form, 0, True)
        assert sum(counts) == data.numel()
        if messages.is_fixed(codec):
            assert counts == messages.sizes(codec, form)
        found = form.matrices(messages.unpack(codec, data, counts, form))
        for one, other in zip(matrices, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0.01, atol=1e-6)


def test_codecs_are_a_family() -> None:
    assert Family("sparrow.distributed.codecs").names() == ["cast", "mx"]


# -- MX --------------------------------------------------------------------------------------------


def rounded(block_ND: Tensor, name: str) -> Tensor:
    """By the definition."""
    return blocks.rounded(block_ND, replace(FORMATS[name], rule="ceil"))


@pytest.mark.parametrize("name", MX)
def test_mx_packs_the_rounded_values(name: str) -> None:
    codec, random = CODECS[name], torch.Generator().manual_seed(0)
    for rows, dim in ((0, 64), (1, 1), (50, 7), (9, 32), (5, 33), (20, 64), (3, 100)):
        block = (
            torch.randn(rows, dim, generator=random)
            * torch.randn(rows, 1, generator=random).mul(9).exp2()
        )
        data = codec.encode(block, 0, True)
        assert data.dtype == torch.uint8 and data.numel() == codec.size(rows, dim)
        assert torch.equal(codec.decode(data, rows, dim), rounded(block, name))
    bytes_row = {"mxint8": 66, "mxfp8": 66, "mxfp6": 50, "mxfp4": 34}[name]  # of 128 in bf16
    assert codec.size(100, 64) == 100 * bytes_row


@pytest.mark.parametrize("name", MX)
def test_mx_spoils_the_block_that_is_not_finite_and_no_other(name: str) -> None:
    codec = CODECS[name]
    for bad in (torch.inf, -torch.inf, torch.nan):
        block = torch.ones(3, 70)
        block[1, 40] = bad
        found = codec.decode(codec.encode(block, 0, False), 3, 70)
        assert found[1, 32:64].isnan().all()
        found[1, 32:64] = 1.0
        assert torch.equal(found, torch.ones(3, 70))


def test_mx_messages_are_joined_where_blocks_fit() -> None:
    """A message is read as it was written, whatever other messages the writer and the reader
    have.
    """
    fits: list[messages.Shape] = [(3, 96, (32, 64)), (0, 32, (32,)), (2, 64, (64,))]
    other: list[messages.Shape] = [(2, 39, (7, 32)), (1, 0, ())]
    codec, random = CODECS["mxfp6"], torch.Generator().manual_seed(0)
    for there, here in (([fits, [], fits], [fits, other]), ([fits, other, []], [fits, fits])):
        form = messages.Form(there)
        matrices = [
            torch.randn(rows, columns, generator=random) for rows, columns, _ in form.shapes
        ]
        flat_N = messages.flat(matrices, torch.device("cpu"))
        data, counts = messages.pack(codec, flat_N, form, 0, True)
        each = FORMATS["mxfp6"].bytes_row
        sizes = [
            sum(rows * each(width) for rows, _, widths in of for width in widths) for of in there
        ]
        assert counts == sizes == messages.sizes(codec, form) and data.numel() == sum(sizes)
        expected = [
            (
                torch.cat([rounded(part, "mxfp6") for part in matrix.split(list(widths), 1)], 1)
                if widths
                else matrix
            )
            for matrix, (_, _, widths) in zip(matrices, form.shapes, strict=True)
        ]
        found = form.matrices(messages.unpack(codec, data, counts, form))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        reader, first = messages.Form(here), data[: counts[0]]
        rest = torch.zeros(sum(messages.sizes(codec, reader)[1:]), dtype=torch.uint8)
        read = reader.matrices(
            messages.unpack(codec, torch.cat([first, rest]), messages.sizes(codec, reader), reader)
        )
        assert all(torch.equal(a, b) for a, b in zip(read[:3], expected[:3], strict=True))


def test_mx_is_chosen_by_name() -> None:
    sharding = from_dict(
        Sharding, {"forward": {"name": "mx", "format": "mxfp4"}, "backward": {"name": "mx"}}
    )
    assert sharding.forward == mx.Config(format="mxfp4") and sharding.backward == mx.Config(
        format="mxfp8"
    )
    with pytest.raises(UserError, match="forward.format: 'e4m3' is not one of 'mxint8', 'mxfp8'"):
        from_dict(Sharding, {"forward": {"name": "mx", "format": "e4m3"}})


class Steps:
    """Numbers rounded to the nearest multiple of two bounds, so that none errs by more than the
    bound.
    """

    unit: Unit = 1
    bound = 1e-3

    def encode(self, block_ND: Tensor, step: int, forward: bool) -> Tensor:
        return (block_ND / (2 * self.bound)).round().contiguous().view(torch.uint8).flatten()

    def decode(self, data: Tensor, rows: int, dim: int) -> Tensor:
        return data.view(torch.float32).view(rows, dim) * (2 * self.bound)

    def size(self, rows: int, dim: int) -> int:
        return 4 * rows * dim

    def error(self, block_ND: Tensor) -> Tensor:
        # float32 rounds the number and its steps
        return torch.full_like(block_ND, self.bound * (1 + 1e-4))


def pooled_error(codec: Codec, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bags of 32 ids whose rows are on so many ranks, and each rank's sum encoded.

    Returns:
        The error of the sum of all, the sum of the bounds of the ranks' sums, and the bound of the
        whole sum, [N, D].
    """
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(2048, 32, 32, generator=random, dtype=torch.float64) / 10
    owner = torch.randint(0, ranks, (2048, 32, 1), generator=random)
    error, bounds, whole = torch.zeros(3, 2048, 32, dtype=torch.float64)
    for rank in range(ranks):
        exact = torch.where(owner == rank, rows, 0.0).sum(1)
        part = exact.float()
        error = error + codec.decode(codec.encode(part, 0, True), 2048, 32).double() - part.double()
        bounds = bounds + codec.error(part)
        whole = whole + exact
    return error.abs(), bounds, codec.error(whole.float()).expand_as(whole).double()


@pytest.mark.parametrize("ranks", [1, 3, 4, 5, 16])
@pytest.mark.parametrize("name", CODECS)
def test_sums_of_ranks_are_within_the_sum_of_their_bounds(name: str, ranks: int) -> None:
    """And as the bounds go with the numbers, many ranks err no more than one: docs/distributed.md
    says so.
    """
    error, bounds, whole = pooled_error(CODECS[name], ranks)
    assert (error <= bounds * (1 + 1e-6)).all()
    assert error.max() <= whole.max()


@pytest.mark.parametrize(("ranks", "times"), [(1, 1.0), (4, 3.8), (16, 8.8)])
def test_errors_of_one_size_add_up(ranks: int, times: float) -> None:
    """Under a bound that is the same for every number: docs/distributed.md has the figures."""
    error, bounds, whole = pooled_error(Steps(), ranks)
    assert (error <= bounds).all()
    assert float((error / whole).max()) == pytest.approx(times, abs=0.1)
