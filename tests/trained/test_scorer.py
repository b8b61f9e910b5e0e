from __future__ import annotations

import dataclasses
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.core import UserError
from sparrow.layers import Precision
from sparrow.layers.recipe import Recipe
from sparrow.losses import probabilities
from sparrow.models import dcnv2
from sparrow.serving.export import export
from sparrow.serving.scorer import load
from sparrow.trained.build import scoring
from sparrow.trained.run import Loop
from sparrow.trained.scorer import restore
from sparrow.training import Trainer, train
from tests.runs import small_run


def test_restored_model_scores_as_trained(prepared: Path, tmp_path: Path) -> None:
    trainer = Trainer(small_run(prepared, tmp_path / "run"))
    trainer.fit()
    found = restore(tmp_path / "run", which="last")
    for batch in data.open(prepared).loader(300, split="valid"):
        assert torch.equal(probabilities(found.model(batch)), probabilities(trainer.model(batch)))


def test_a_row_is_scored_alone_as_among_others_unless_activations_share_a_scale(prepared: Path, tmp_path: Path) -> None:
    """fp8 has a scale for the tensor, which the docs and the run's own words tell; mxfp8 has those of 32 numbers."""
    train(small_run(prepared, tmp_path / "run", model=dcnv2.Config(dim=4, deep=(8,)), loop=Loop(max_steps=8)))
    found, batch = restore(tmp_path / "run"), data.open(prepared).first(200, "valid")
    apart = {}
    for name in ("fp32", "mxfp8", "fp8-rowwise", "fp8"):
        scored = dataclasses.replace(found, run=dataclasses.replace(found.run, precision=Precision(name)))
        alone = torch.cat([scored.scores(batch.part(row, row + 1)) for row in range(20)])
        apart[name] = float((alone - scored.scores(batch)[:20]).abs().max())
    assert max(apart["fp32"], apart["mxfp8"], apart["fp8-rowwise"]) < 1e-5  # a sum in another order
    assert apart["fp8"] > 1e-3
    page = (Path(__file__).parents[2] / "docs" / "precision.md").read_text()
    assert "a row's score depends on the rows" in " ".join(page.split())


def test_a_run_in_few_bits_is_scored_served_and_resumed_in_them(prepared: Path, log: Path, tmp_path: Path) -> None:
    precision = Precision("mxfp4", {"deep.*": Recipe.of("fp8")}, "split")
    settings = {"model": dcnv2.Config(dim=4, deep=(8,)), "loop": Loop(max_steps=8)}
    trainer = Trainer(small_run(prepared, tmp_path / "run", precision=precision, **settings))
    trainer.fit()
    found = restore(tmp_path / "run", which="last")
    assert found.run.precision == precision
    assert not any((p.view(torch.int32) & 0xFFFF).any() for p in found.model.parameters())
    batch = data.open(prepared).first(200, "valid")
    trainer.model.eval()
    with torch.no_grad():
        want_BT = trainer.score(batch)
        plain = scoring(found.model, dataclasses.replace(found.run, precision=Precision()), found.schema)
        apart = (plain(batch) - want_BT).abs().max()
    assert torch.equal(found.scores(batch), want_BT) and apart > 1e-4
    export(tmp_path / "run", tmp_path / "model", [log])
    rows = pq.read_table(log).slice(0, 50)
    scorer = load(tmp_path / "model")
    assert scorer.run.precision == precision
    served = torch.from_numpy(scorer.score(rows.to_pylist()))
    torch.testing.assert_close(served, torch.from_numpy(restore(tmp_path / "run").score_rows(rows)), rtol=0, atol=1e-6)
    with pytest.raises(UserError, match=r"^precision: bf16, weights fp32, and the run began in mxfp4 with 1 patterns"):
        train(small_run(prepared, tmp_path / "run", precision=Precision("bf16"), **settings), resume=True)
    with pytest.raises(UserError, match=r"^precision.sites: 'top\.\*' names no product of \w+"):
        Trainer(
            small_run(
                prepared, tmp_path / "other", precision=Precision("bf16", {"top.*": Recipe.of("fp8")}), **settings
            )
        )
