from __future__ import annotations

import pytest
import torch

from sparrow.core import Chunk, UserError


def test_chunk_rows_must_agree() -> None:
    with pytest.raises(UserError, match="field 'sum': 3 rows"):
        Chunk(table="t", rows=(0, 2), columns=(0, 1), fields={"sum": torch.zeros(3)})
