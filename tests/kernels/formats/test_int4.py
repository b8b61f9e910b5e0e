from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow.embeddings import Direct, TableSpec
from sparrow.kernels.formats import RowFormat, int4
from tests.kernels.embedding_bag.cases import IMPLS, built
from tests.kernels.formats import fbgemm

NEAREST = int4.Config(rounding="nearest")
GREEDY = int4.Config(rounding="nearest", search="greedy")
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
    found, expected = (
        fbgemm.written(int4.Config(), values_RD, impl) for impl in ("cpp", "reference")
    )
    assert torch.equal(found, expected)


@each_dim
def test_rows_are_read_as_fbgemm_reads_them(dim: int) -> None:
    """To the bit: a code of four bits times a float16 is exact. A bias beyond float16 makes NaN of
    both.
    """
    found_RD = NEAREST.decode({"weight": fbgemm.record()[f"{dim} int4"]}, dim)
    assert torch.allclose(
        found_RD, fbgemm.record()[f"{dim} int4 read"], rtol=0, atol=0, equal_nan=True
    )


# -- greedy search ---------------------------------------------------------------------------------


def errors(format: RowFormat, values_RD: Tensor) -> Tensor:
    """The squared error of each row, infinity where it is not finite."""
    read_RD = format.decode(format.encode(values_RD, None), values_RD.shape[1])
    return (read_RD.double() - values_RD.double()).square().sum(1).nan_to_num(torch.inf)


def kinds(dim: int) -> dict[str, Tensor]:
    """Rows [500, dim] of many kinds."""
    random = torch.Generator().manual_seed(dim)
    plain = torch.randn(500, dim, generator=random)
    outliers = plain.clone()
    outliers[:, 0] *= 20.0
    sizes = 10.0 ** torch.arange(-45, 5).repeat(10)[:, None]
    same = torch.randn(500, 1, generator=random).expand(-1, dim)
    beyond_half = plain * 10.0 ** torch.linspace(3, 7, 500)[:, None]
    found = {
        "plain": plain,
        "outliers": outliers,
        "sizes": plain * sizes,
        "same": same,
        "beyond fp16": beyond_half,
    }
    return found | {"zeros": torch.zeros(500, dim), "far from 0": plain * 1e-3 + 100.0}


@pytest.mark.parametrize("dim", [1, 2, 3, 16, 33, 64])
def test_a_greedy_row_is_never_worse(dim: int) -> None:
    for kind, values_RD in kinds(dim).items():
        greedy_R, plain_R = errors(GREEDY, values_RD), errors(NEAREST, values_RD)
        assert (greedy_R <= plain_R).all(), kind
        if kind == "beyond fp16":
            assert greedy_R.isfinite().sum() >= plain_R.isfinite().sum()
        else:
            assert greedy_R.isfinite().all(), kind
    if dim >= 16:
        plain, greedy = (errors(format, kinds(dim)["plain"]).mean() for format in (NEAREST, GREEDY))
        assert greedy < 0.95 * plain


@pytest.mark.parametrize("dim", [4, 16, 64])
def test_a_greedy_row_is_as_good_as_that_of_torch(dim: int) -> None:
    """Torch keeps the first local minimum of the same search, and we the least error of all that it
    passes.
    """
    for kind in ("plain", "outliers"):  # where a step is lost in rounding, torch searches for ever
        some = kinds(dim)[kind][::5]
        ends = [torch.choose_qparams_optimized(row, dim, int4.BINS, 0.16, 4) for row in some]
        high_R1, low_R1 = (torch.stack([pair[i] for pair in ends]).view(-1, 1) for i in (0, 1))
        codes_RD, scale_R1, bias_R1 = int4._to_nearest(some, low_R1, high_R1)
        theirs_RD = codes_RD.clamp(0, 15) * scale_R1.float() + bias_R1.float()
        theirs_R = (theirs_RD.double() - some.double()).square().sum(1)
        assert (errors(GREEDY, some) <= theirs_R * (1 + 1e-5)).all(), kind


def test_a_greedy_row_has_the_same_layout() -> None:
    values_RD = torch.randn(7, 5)
    rows = GREEDY.encode(values_RD, None)
    assert rows["weight"].shape == (7, 3 + 4)
    assert torch.equal(GREEDY.decode(rows, 5), NEAREST.decode(rows, 5))
    assert GREEDY.fields(5) == NEAREST.fields(5)
    assert GREEDY.cpp() == NEAREST.cpp()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_greedy_rows_that_are_not_finite_stay_so_and_touch_no_others(wrong: float) -> None:
    values_RD = torch.randn(9, 16)
    alone = GREEDY.encode(values_RD, None)["weight"]
    values_RD[4, 3] = wrong
    rows = GREEDY.encode(values_RD, None)["weight"]
    assert torch.equal(rows[[0, 1, 2, 3, 5, 6, 7, 8]], alone[[0, 1, 2, 3, 5, 6, 7, 8]])
    assert not GREEDY.decode({"weight": rows}, 16)[4].isfinite().any()


def test_greedy_search_is_for_rows_that_learn_no_more() -> None:
    with pytest.raises(ValueError, match="give rounding = 'nearest'"):
        int4.Config(search="greedy")
    with pytest.raises(ValueError, match="table 'ads'.*'min-max', the same layout"):
        TableSpec(name="ads", dim=4, addressing=Direct(5), format=GREEDY)
