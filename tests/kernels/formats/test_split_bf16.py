"""split_bf16 rows: float32 in two halves."""

from __future__ import annotations

import torch

from sparrow.kernels.formats.split_bf16 import Config


def test_both_halves_are_the_number_and_the_high_one_is_truncated() -> None:
    bits_UD = torch.randint(
        -(1 << 31), 1 << 31, (5000, 16), generator=torch.Generator().manual_seed(1)
    ).int()
    special = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 1e-45, 3.4e38, 65504.0, torch.nan])
    bits_UD[0, :8] = special.view(torch.int32)
    fields = Config().encode(bits_UD.view(torch.float32), None)
    assert torch.equal(Config().exact(fields, 16).view(torch.int32), bits_UD)
    assert torch.equal(Config().decode(fields, 16).view(torch.int32), bits_UD & ~0xFFFF)
    assert {name: tensor.dtype for name, tensor in fields.items()} == {
        "weight": torch.bfloat16,
        "low": torch.int16,
    }


def test_it_takes_the_bytes_of_fp32_and_can_be_cut() -> None:
    fields = Config().fields(7)
    assert sum(field.bytes_row for field in fields.values()) == 28
    assert {field.across for field in fields.values()} == {"cut"}


def test_a_matrix_whose_rows_do_not_lie_together() -> None:
    x_UD = torch.randn(16, 40).t()
    assert torch.equal(Config().exact(Config().encode(x_UD, None), 16), x_UD)
