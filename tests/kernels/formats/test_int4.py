from __future__ import annotations

from typing import Any

import pytest
import torch

from sparrow.kernels.formats import int4
from tests.kernels.embedding_bag.cases import IMPLS, built
from tests.kernels.formats import fbgemm

NEAREST = int4.Config(rounding="nearest")
each_dim = pytest.mark.parametrize("dim", fbgemm.dims("int4"))  # FBGEMM has dims that 4 divides


@each_dim
def test_rounded_to_nearest_rows_have_the_bytes_of_fbgemm(dim: int) -> None:
    record = fbgemm.record()
    assert torch.equal(NEAREST.encode(record[f"{dim} rows"], None)["weight"], record[f"{dim} int4"])


@pytest.mark.parametrize("impl", IMPLS)
@each_dim
def test_updated_rows_have_the_bytes_of_fbgemm(dim: int, impl: Any) -> None:
    record = fbgemm.record()
    assert torch.equal(fbgemm.written(NEAREST, record[f"{dim} rows"], impl), record[f"{dim} int4"])


@built
@each_dim
def test_rounded_stochastically_both_kernels_write_the_same(dim: int) -> None:
    values_RD = fbgemm.record()[f"{dim} rows"]
    found, expected = (fbgemm.written(int4.Config(), values_RD, impl) for impl in ("cpp", "reference"))
    assert torch.equal(found, expected)


@each_dim
def test_rows_are_read_as_fbgemm_reads_them(dim: int) -> None:
    """To the bit: a code of four bits times a float16 is exact. A bias beyond float16 makes NaN of both."""
    found_RD = NEAREST.decode({"weight": fbgemm.record()[f"{dim} int4"]}, dim)
    assert torch.allclose(found_RD, fbgemm.record()[f"{dim} int4 read"], rtol=0, atol=0, equal_nan=True)
