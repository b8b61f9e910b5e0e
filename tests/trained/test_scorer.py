from __future__ import annotations

from pathlib import Path

import torch

from sparrow import data
from sparrow.losses import probabilities
from sparrow.trained.scorer import restore
from sparrow.training import Trainer
from tests.runs import small_run


def test_restored_model_scores_as_trained(prepared: Path, tmp_path: Path) -> None:
    trainer = Trainer(small_run(prepared, tmp_path / "run"))
    trainer.fit()
    found = restore(tmp_path / "run", which="last")
    for batch in data.open(prepared).loader(300, split="valid"):
        assert torch.equal(probabilities(found.model(batch)), probabilities(trainer.model(batch)))
