from __future__ import annotations

import torch

from sparrow.core import KeyedJagged
from sparrow.layers.ids import MeanOfIds


def test_columns_have_their_rows_one_after_the_other() -> None:
    """Ids are taken modulo the rows of their column, and a column without ids adds nothing."""
    mean, weights_R1 = MeanOfIds((3, 4)), torch.arange(7.0)[:, None]
    ids = KeyedJagged.from_lists({"one": [[2], [3], [0]], "some": [[0, 5], [], [2**62 + 3]]})
    assert mean.rows_of(ids).tolist() == [2, 0, 0, 3, 4, 3 + (2**62 + 3) % 4]
    assert mean(ids, weights_R1)[:, 0].tolist() == [2 + 3.5, 0, 0 + 3 + (2**62 + 3) % 4]
