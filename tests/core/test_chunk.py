from __future__ import annotations

import pytest
import torch

from sparrow.core import Chunk, UserError
from sparrow.core.chunk import as_bytes


def test_chunk_rows_must_agree() -> None:
    with pytest.raises(UserError, match="field 'sum': 3 rows"):
        Chunk(table="t", rows=(0, 2), columns=(0, 1), fields={"sum": torch.zeros(3)})


@pytest.mark.parametrize(
    "tensor", [torch.rand(1, 5)[:, 1], torch.rand(3, 5)[:, 1:3], torch.rand(0, 2), torch.rand(())]
)
def test_bytes_of_a_tensor(tensor: torch.Tensor) -> None:
    assert as_bytes(tensor).numpy().tobytes() == tensor.numpy().tobytes()
