from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow.core import UserError
from sparrow.core.batch import Jagged
from sparrow.layers import CausalTransformer
from sparrow.models import dlrm
from sparrow.serving.convert.program import Program
from tests.embeddings.test_members import CHOICES
from tests.serving.test_scorer import served


@pytest.mark.parametrize("longest", [1, 3, 9])
def test_a_padded_transformer_is_the_ragged_one(longest: int) -> None:
    torch.manual_seed(0)
    reader = CausalTransformer(8, layers=2, heads=2, longest=longest)
    lengths_B = torch.tensor([0, 1, 4, 2, 7, 0])
    offsets_B1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_B.cumsum(0)])
    values_ND = torch.randn(int(lengths_B.sum()), 8)
    expected = reader(Jagged(values_N=values_ND, offsets_B1=offsets_B1))
    for padding in (0.0, 1e3):  # what is there is not seen
        padded = torch.full((6, 7, 8), padding)
        padded[torch.arange(7) < lengths_B[:, None]] = values_ND
        torch.testing.assert_close(reader.padded(padded, lengths_B), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "says"), [("ids that come and go", "come and go"), ("paths", "an MLP each")])
def test_tables_that_no_program_has_are_refused(
    name: str, says: str, prepared: Path, log: Path, tmp_path: Path
) -> None:
    """Their vectors can still be given to the rest of the model."""
    config = dlrm.Config(dim=8, bottom=(8,), top=(8,))
    scorer: Any = served(prepared, log, tmp_path, tables=CHOICES[name](), model=config)
    with pytest.raises(UserError, match=says):
        Program(scorer.model, scorer.schema, with_tables=True)
    assert "user" in Program(scorer.model, scorer.schema, with_tables=False).inputs
