from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparrow.kernels import missing
from sparrow.kernels.project import Part, project, project_backward

built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
IMPLS: list[Any] = ["reference", pytest.param("cpp", marks=built)]
Call = tuple[Tensor, list[Tensor], list[Part], int]


def call(rows: int, tables: Sequence[tuple[int, Sequence[int]]], seed: int = 0) -> Call:
    """Tables of D columns, each made of parts of some widths on top of each other; a width of D has
    no matrix.
    """
    random = torch.Generator().manual_seed(seed)
    weights: list[Tensor] = []
    parts: list[Part] = []
    first = to = 0
    for dim, widths in tables:
        for width in widths:
            if width != dim:
                weights.append(torch.randn(dim, width, generator=random))
            parts.append(Part(first, width, to, len(weights) - 1 if width != dim else -1))
            first += width
        to += dim
    return torch.randn(rows, first, generator=random), weights, parts, to


TABLES = st.lists(
    st.tuples(
        st.sampled_from([1, 3, 8, 16, 17, 33, 64]),
        st.lists(st.integers(1, 40), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=5,
)


@given(st.sampled_from([0, 1, 2, 7, 8, 9, 30, 129]), TABLES, st.integers(0, 9))
def test_the_definition_is_autograds(
    rows: int, tables: list[tuple[int, list[int]]], seed: int
) -> None:
    x_BE, weights, parts, columns = call(rows, tables, seed)
    x_BE.requires_grad_()
    for weight in weights:
        weight.requires_grad_()
    made: list[Any] = [None] * columns
    for part in parts:
        x_BD = x_BE[:, part.first : part.first + part.width]
        if part.weight >= 0:
            x_BD = x_BD @ weights[part.weight].t()
        for k in range(x_BD.shape[1]):
            at = part.to + k
            made[at] = x_BD[:, k] if made[at] is None else made[at] + x_BD[:, k]
    want = torch.stack(made, 1)
    grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    (want * grad).sum().backward()
    for impl in ("reference", *(() if missing() else ("cpp",))):
        with torch.no_grad():
            got = project(x_BE, weights, parts, columns, impl=impl)  # type: ignore[arg-type]
            grad_x, grads = project_backward(grad, x_BE, weights, parts, impl=impl)  # type: ignore[arg-type]
        torch.testing.assert_close(got, want.detach(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad_x, x_BE.grad, rtol=1e-4, atol=1e-4)
        for one, weight in zip(grads, weights, strict=True):
            torch.testing.assert_close(one, weight.grad, rtol=1e-4, atol=2e-4)


@built
def test_any_number_of_threads_gives_the_same_bits(threads: Callable[[int], None]) -> None:
    x_BE, weights, parts, columns = call(4099, [(64, [16, 3]), (64, [64]), (20, [5])])
    grad = torch.randn(4099, columns)
    found = []
    for count in (1, 2, 3):
        threads(count)
        grad_x, grads = project_backward(grad, x_BE, weights, parts)
        found.append([project(x_BE, weights, parts, columns), grad_x, *grads])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_weight_of_several_parts_has_all_their_gradients(impl: Any) -> None:
    weight = torch.randn(4, 2)
    x_BE, grad = torch.randn(5, 4), torch.randn(5, 8)
    parts = [Part(0, 2, 0, 0), Part(2, 2, 4, 0)]
    torch.testing.assert_close(
        project(x_BE, [weight], parts, 8, impl=impl), (x_BE.view(5, 2, 2) @ weight.t()).flatten(1)
    )
    _, (found,) = project_backward(grad, x_BE, [weight], parts, impl=impl)
    torch.testing.assert_close(
        found, torch.einsum("bkd,bke->de", grad.view(5, 2, 4), x_BE.view(5, 2, 2))
    )


@built
@pytest.mark.parametrize(
    ("parts", "columns", "told"),
    [
        ([Part(0, 3, 0), Part(3, 9, 3)], 12, "names columns or a weight"),
        ([Part(0, 3, 0, 2), Part(3, 2, 3)], 5, "names columns or a weight"),
        ([Part(0, 3, 0), Part(3, 2, 4)], 5, "goes to columns that are not there"),
        ([Part(0, 3, 0), Part(3, 2, 2)], 5, "goes to columns of which another has some"),
        ([Part(0, 3, 0), Part(2, 3, 3)], 6, "two take the same columns"),
        ([Part(0, 3, 0)], 3, "do not take all columns"),
        ([Part(0, 3, 0), Part(3, 2, 3)], 7, "do not reach all columns"),
        ([Part(0, 3, 0, 0), Part(3, 2, 4)], 6, "weights: expected as many columns"),
    ],
)
def test_what_does_not_fit(parts: list[Part], columns: int, told: str) -> None:
    x_BE, weights = torch.randn(4, 5), [torch.randn(4, 2)]
    with pytest.raises(ValueError, match=told):
        project(x_BE, weights, parts, columns, impl="cpp")
    with pytest.raises(ValueError, match=told):
        project_backward(torch.randn(4, columns), x_BE, weights, parts, impl="cpp")
    with pytest.raises(ValueError, match="contiguous float32"):
        project(x_BE.double(), [], [Part(0, 5, 0)], 5, impl="cpp")
