"""C++ has the reference's results on every kind of processor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.embedding_bag.cases import (
    DIMS,
    RULES,
    SHAPES,
    assert_close,
    assert_same,
    built,
    cell,
    looked_up,
    updated,
)


def test_uninitialised_memory_is_poisoned() -> None:
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.ops.aten.empty.memory_format([64], device="cpu").isnan().all()


def check_cell(shape: str, dim: int, rule: str, processors: list[str]) -> None:
    call, what, n = cell(shape, dim, rule)
    exact, close = looked_up(call, "reference"), updated(call, "reference")
    assert all(tensor.isfinite().all() for tensor in (*exact.values(), *close.values())), what
    first: dict[str, Tensor] = {}
    for i, name in enumerate(processors):
        assert torch.ops.sparrow.processor(name) == name
        assert_same(looked_up(call, "cpp"), exact, what)
        after = updated(call, "cpp")
        first = first or after
        assert_same(after, first, f"{what}, {name}")
        if i == n % len(processors):
            assert_same(updated(call, "cpp", fused=False), first, f"{what}, {name}, not fused")
    assert_close(first, close, what)


@built
@pytest.mark.parametrize("rule", RULES)
def test_cpp_is_the_reference(rule: str, processors: list[str]) -> None:
    for i, dim in enumerate(DIMS):  # every pair of rule, dim and shape: see below
        check_cell(list(SHAPES)[(i + list(RULES).index(rule)) % len(SHAPES)], dim, rule, processors)


def test_the_matrix_has_every_pair() -> None:
    cells = {(r, d, (d + r) % len(SHAPES)) for r in range(len(RULES)) for d in range(len(DIMS))}
    assert len({(d, s) for _, d, s in cells}) == len(DIMS) * len(SHAPES)
    assert len({(r, s) for r, _, s in cells}) == len(RULES) * len(SHAPES)


@pytest.mark.slow
@built
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cpp_is_the_reference_in_every_cell(shape: str, rule: str, processors: list[str]) -> None:
    for dim in DIMS:
        check_cell(shape, dim, rule, processors)


@built
def test_a_processor_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="processor: abacus cannot run here"):
        torch.ops.sparrow.processor("abacus")
