from __future__ import annotations

from typing import Any

import pytest
import torch

from sparrow.kernels.formats import int8
from tests.kernels.embedding_bag.cases import IMPLS, built
from tests.kernels.formats import fbgemm

NEAREST = int8.Config(rounding="nearest")
each_dim = pytest.mark.parametrize("dim", fbgemm.dims("int8"))


@each_dim
def test_rounded_to_nearest_rows_have_the_bytes_of_fbgemm(dim: int) -> None:
    record = fbgemm.record()
    assert torch.equal(NEAREST.encode(record[f"{dim} rows"], None)["weight"], record[f"{dim} int8"])


@pytest.mark.parametrize("impl", IMPLS)
@each_dim
def test_updated_rows_have_the_bytes_of_fbgemm(dim: int, impl: Any) -> None:
    record = fbgemm.record()
    assert torch.equal(fbgemm.written(NEAREST, record[f"{dim} rows"], impl), record[f"{dim} int8"])


@built
@each_dim
def test_rounded_stochastically_both_kernels_write_the_same(dim: int) -> None:
    values_RD = fbgemm.record()[f"{dim} rows"]
    found, expected = (
        fbgemm.written(int8.Config(), values_RD, impl) for impl in ("cpp", "reference")
    )
    assert torch.equal(found, expected)


@each_dim
def test_rows_are_read_as_fbgemm_reads_them(dim: int) -> None:
    """It rounds code * scale + bias once, and we the product too: a unit in the last place of the
    largest of them.
    """
    rows, read = fbgemm.record()[f"{dim} int8"], fbgemm.record()[f"{dim} int8 read"]
    scale_R1, bias_R1 = rows[:, dim:].clone().view(torch.float32).double().split(1, 1)
    product_RD = rows[:, :dim] * scale_R1
    assert torch.equal((product_RD + bias_R1).float(), read)
    largest_RD = torch.maximum(torch.maximum(product_RD, bias_R1.abs()), read.abs())
    found_RD = NEAREST.decode({"weight": rows}, dim)
    assert ((found_RD.double() - read).abs() <= torch.finfo(torch.float32).eps * largest_RD).all()
