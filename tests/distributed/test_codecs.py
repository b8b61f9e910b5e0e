from __future__ import annotations

import pytest
import torch

from sparrow.core.config import Family
from sparrow.distributed.codecs import cast
from sparrow.sharding import messages
from tests.equivalence.cases import Sparse

CODECS = {dtype: cast.Config(dtype=dtype) for dtype in ("fp32", "fp16", "bf16")}  # type: ignore[arg-type]


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
        assert torch.equal(CODECS[name].decode(CODECS[name].encode(block, 0, True), rows, 1), torch.ones(rows, 1))


def test_fp16_keeps_large_numbers_and_infinite_ones() -> None:
    block = torch.tensor([[2.0**120, -(2.0**100), float("inf"), -float("inf"), float("nan"), 0.0]])
    found = CODECS["fp16"].decode(CODECS["fp16"].encode(block, 0, True), 1, 6)
    assert torch.equal(found.nan_to_num(1.0), block.nan_to_num(1.0))
    assert found[0, 4].isnan() and found[0, 2] == float("inf")


@pytest.mark.parametrize("scale", [1e-7, 1e-8, 1e-9, 1e-20, 2.0**-149, 1e30])
def test_fp16_keeps_gradients_of_any_size(scale: float) -> None:
    """Those of a large batch, say: without a scale all below 3e-8 would be 0. Scaling itself changes no bit."""
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
    """To three members; whether a codec takes each block by itself, all together, or does not know their bytes."""
    shapes: list[list[messages.Shape]] = [
        [(3, 7, (2, 5)), (0, 4, (4,)), (2, 0, ())],
        [],
        [(1, 1, (1,)), (2, 6, (1, 5))],
    ]
    random = torch.Generator().manual_seed(0)
    matrices = [torch.randn(rows, columns, generator=random) for of in shapes for rows, columns, _ in of]
    form, flat_N = messages.Form(shapes), messages.flat(matrices, torch.device("cpu"))
    for codec in (*CODECS.values(), Sparse()):
        data, counts = messages.pack(codec, flat_N, form, 0, True)
        assert sum(counts) == data.numel()
        if messages.is_fixed(codec):
            assert counts == messages.sizes(codec, form)
        found = form.matrices(messages.unpack(codec, data, counts, form))
        for one, other in zip(matrices, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0.01, atol=1e-6)


def test_codecs_are_a_family() -> None:
    assert Family("sparrow.distributed.codecs").names() == ["cast"]
