from __future__ import annotations

from pathlib import Path

import pytest

from sparrow.apps.convert import convert
from sparrow.apps.convert.program import Program
from sparrow.core import UserError
from sparrow.models import dlrm
from tests.embeddings.test_members import CHOICES
from tests.serving.test_scorer import served


@pytest.mark.parametrize(
    ("name", "says"), [("ids that come and go", "come and go"), ("paths", "an MLP each")]
)
def test_tables_that_no_program_has_are_refused(
    name: str, says: str, prepared: Path, log: Path, tmp_path: Path
) -> None:
    """Their vectors can still be given to the rest of the model."""
    config = dlrm.Config(dim=8, bottom=(8,), top=(8,))
    scorer = served(prepared, log, tmp_path, tables=CHOICES[name](), model=config)
    with pytest.raises(UserError, match=f"'user'.* {says}"):
        Program(scorer.model, scorer.schema, with_tables=True)
    convert(tmp_path / "model", tmp_path / "out", "torch")
