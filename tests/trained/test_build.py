from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from sparrow import data
from sparrow.models import dlrm
from sparrow.trained.build import build, scoring
from tests.runs import small_run


def test_fewer_negatives_are_corrected_for(prepared: Path, tmp_path: Path) -> None:
    """A model whose training log lacks negatives still says the click rate of the whole log."""
    log = data.open(prepared)
    schema = dataclasses.replace(
        log.schema, split=dataclasses.replace(log.schema.split, negatives=0.25)
    )
    model = build(small_run(prepared, tmp_path, model=dlrm.Config(dim=4)), log.schema)
    batch = next(iter(log.loader(64)))
    raw, corrected = (
        scoring(model, small_run(prepared, tmp_path), s)(batch) for s in (log.schema, schema)
    )
    odds = raw / (1 - raw)
    # the odds that He et al. restore
    torch.testing.assert_close(corrected / (1 - corrected), odds * 0.25)
