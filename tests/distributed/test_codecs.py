from __future__ import annotations

import pytest
import torch

from sparrow.core import UserError
from sparrow.core.config import Family
from sparrow.distributed import World
from sparrow.distributed.codecs import cast
from sparrow.sharding import messages

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


def test_fp16_cuts_finite_numbers_and_keeps_infinite_ones() -> None:
    block = torch.tensor([[1e5, -1e38, float("inf"), -float("inf"), float("nan"), 0.0]])
    found = CODECS["fp16"].decode(CODECS["fp16"].encode(block, 0, True), 1, 6)
    assert found[0, :4].tolist() == [65504.0, -65504.0, float("inf"), -float("inf")]
    assert found[0, 4].isnan()


def test_messages_of_any_shapes() -> None:
    shapes = [(3, (2, 5)), (0, (4,)), (2, ()), (1, (1,))]
    matrices = [torch.randn(rows, sum(widths)) for rows, widths in shapes]
    for codec in CODECS.values():
        data = messages.pack(codec, matrices, shapes, 0, True)
        assert data.numel() == messages.size(codec, shapes)
        for one, other in zip(matrices, messages.unpack(codec, data, shapes), strict=True):
            torch.testing.assert_close(one, other, rtol=0.01, atol=1e-6)


def test_codecs_are_a_family() -> None:
    assert Family("sparrow.distributed.codecs").names() == ["cast"]


def test_a_job_of_one_needs_nobody() -> None:
    world, parts = World(), [torch.arange(3)]
    assert world.all_to_all("x", parts).wait()[0] is parts[0]
    assert world.all_gather("x", parts[0])[0] is parts[0]
    assert world.all_sum("x", torch.ones(1)).item() == 1
    assert world.meter.bytes == {("x, sizes", "self"): 8, ("x", "self"): 24}


def test_hosts_must_be_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="4 ranks do not divide into hosts of 3"):
        World.begin(local_size=3)
