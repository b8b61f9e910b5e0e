from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparrow.kernels import missing
from sparrow.kernels.trees import Trees, sum_of_leaves

built = pytest.mark.skipif(bool(missing()), reason=f"{missing()}: run `make setup`")
IMPLS: list[Any] = ["reference", pytest.param("cpp", marks=built)]


def forest(trees: int, depth: int, tasks: int, seed: int) -> tuple[Trees, Tensor]:
    """Returns trees of up to `depth` branches over two numbers and an id, and rows with equal and
    missing numbers.
    """
    random = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(most, (1,), generator=random))

    nodes: list[list[float]] = []
    roots = []

    def grow(left: int) -> int:
        number = len(nodes)
        nodes.append([])
        if not left or draw(5) == 0:
            nodes[number] = [0, 0, number, number, -1]
            return number
        of = draw(3)
        branches = [grow(left - 1), grow(left - 1)]
        nodes[number] = [of, draw(5) - 2, *branches, draw(4) if of == 2 else -1]
        return number

    roots = [grow(depth) for _ in range(trees)]
    columns = torch.tensor(nodes, dtype=torch.float64).view(-1, 5).t().contiguous()
    made = Trees(
        input_M=columns[0].long(),
        threshold_M=columns[1],
        left_M=columns[2].long(),
        right_M=columns[3].long(),
        value_MT=torch.randn(len(nodes), tasks, generator=random),
        set_M=columns[4].long(),
        sets_SW=torch.randint(2, (4, 6), generator=random, dtype=torch.uint8),
        root_G=torch.tensor(roots, dtype=torch.long),
    )
    x_BX = torch.randint(-3, 4, (37, 3), generator=random).double()
    x_BX[:, 2] = torch.randint(9, (37,), generator=random)  # ids beyond the sets too
    x_BX[3, 0] = x_BX[5, 2] = float("nan")
    return made, x_BX


def one_by_one(trees: Trees, x_X: Tensor) -> Tensor:
    """Returns what one row gets, [T]."""
    total = torch.zeros(trees.value_MT.shape[1], dtype=torch.float64)
    for root in trees.root_G.tolist():
        at = root
        while int(trees.left_M[at]) != at:
            value, of = float(x_X[trees.input_M[at]]), int(trees.set_M[at])
            if of < 0:
                is_left = value <= float(trees.threshold_M[at])
            else:
                is_left = bool(trees.sets_SW[of, min(int(value), 5) if value == value else 0])
            at = int(trees.left_M[at] if is_left else trees.right_M[at])
        total += trees.value_MT[at].double()
    return total.float()


@pytest.mark.parametrize("impl", IMPLS)
@given(st.integers(0, 9), st.integers(0, 5), st.integers(1, 3), st.integers(0, 1000))
def test_rows_fall_into_their_leaves(
    impl: Any, trees: int, depth: int, tasks: int, seed: int
) -> None:
    made, x_BX = forest(trees, depth, tasks, seed)
    found = sum_of_leaves(made, x_BX, depth, impl=impl)
    want = torch.stack([one_by_one(made, x_X) for x_X in x_BX])
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    assert sum_of_leaves(made, x_BX[:0], depth, impl=impl).shape == (0, tasks)


@built
@pytest.mark.parametrize(
    ("field", "wrong"), [("left_M", 10**6), ("right_M", -1), ("input_M", 3), ("set_M", 4)]
)
def test_nodes_of_a_damaged_file_are_refused(field: str, wrong: int) -> None:
    made, x_BX = forest(3, 4, 1, 0)
    getattr(made, field)[0] = wrong
    with pytest.raises(ValueError, match="node 0"):
        sum_of_leaves(made, x_BX, 4, impl="cpp")


@built
def test_a_circle_of_nodes_ends() -> None:
    made, x_BX = forest(1, 4, 1, 0)
    assert int(made.left_M[0]) != 0
    made.left_M[1:], made.right_M[1:] = 0, 0
    assert sum_of_leaves(made, x_BX, 4, impl="cpp").shape == (37, 1)
