from __future__ import annotations

import pytest
import torch

from tests.kernels.embedding_bag.cases import RULES, Shape, build, built, raw


@built
@pytest.mark.parametrize("sizes", [[2**33, 3], [-1, 3], [50, 3, 5]])
def test_row_gradients_of_impossible_sizes(sizes: list[int]) -> None:
    args = list(raw(build(Shape(keys=([1],)), [3], RULES["sgd, plain"]))["row_gradients"])
    args[1] = sizes
    with pytest.raises(ValueError, match="rows|sizes"):
        torch.ops.sparrow.row_gradients(*args)
