from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.extensions.low_precision.precision import MEMBERS, put_recipes
from sparrow.extensions.low_precision.recipe import Recipe
from sparrow.layers.precision import Precision, mixing
from sparrow.layers.site import named_sites
from sparrow.losses import probabilities
from sparrow.models import dcnv2
from sparrow.optimizers import sgd
from sparrow.serving.export import export
from sparrow.serving.scorer import load
from sparrow.trained.build import scoring
from sparrow.trained.run import Checkpoints, Loop
from sparrow.trained.scorer import restore
from sparrow.training import Trainer, train
from tests.runs import small_run


def test_restored_model_scores_as_trained(prepared: Path, tmp_path: Path) -> None:
    trainer = Trainer(small_run(prepared, tmp_path / "run"))
    trainer.fit()
    found = restore(tmp_path / "run", which="last")
    for batch in data.open(prepared).loader(300, split="valid"):
        assert torch.equal(
            probabilities(found.model(batch)), probabilities(trainer.job.model(batch))
        )


def test_another_runs_checkpoint_is_refused(prepared: Path, log: Path, tmp_path: Path) -> None:
    """The same model with the same sizes of tables, trained on other rows: its numbers mean
    something else.
    """
    rows = pq.read_table(log)
    at = rows.column_names.index("num_1")
    other = rows.set_column(at, "num_1", pc.multiply(rows["num_1"], 2))
    pq.write_table(other, tmp_path / "other.parquet")
    data.prepare([tmp_path / "other.parquet"], tmp_path / "other")
    loop = Loop(max_steps=4)
    train(small_run(prepared, tmp_path / "one", loop=loop))
    train(small_run(tmp_path / "other", tmp_path / "two", loop=loop))
    taken = tmp_path / "one" / "checkpoints" / "step-000000004"
    shutil.rmtree(taken)
    shutil.copytree(tmp_path / "two" / "checkpoints" / "step-000000004", taken)
    with pytest.raises(
        UserError,
        match=r"step-000000004: checkpoint of another run: its features have \S+ .*delete",
    ):
        restore(tmp_path / "one")


def test_the_best_stays_where_nothing_but_manifests_names_it(
    prepared: Path, tmp_path: Path
) -> None:
    """The learning rate is far too high, so that the first evaluation is the best one."""
    settings = {
        "loop": Loop(max_steps=8, evaluate_every=2),
        "checkpoint": Checkpoints(every=2, keep=1),
    }
    run = small_run(prepared, tmp_path / "run", dense=sgd.Config(lr=3.0), **settings)
    results = train(dataclasses.replace(run, loop=Loop(max_steps=6, evaluate_every=2)))
    (tmp_path / "run" / "checkpoints" / "best.json").write_text("[")
    assert results["best_step"] == 2
    assert train(run, resume=True)["best_step"] == 2
    assert restore(tmp_path / "run").step == 2 and restore(tmp_path / "run", which="last").step == 8


def test_a_row_is_scored_alone_as_among_others_unless_activations_share_a_scale(
    prepared: Path, tmp_path: Path
) -> None:
    """fp8 has a scale for the tensor, which the docs and the run's own words tell; mxfp8 has those
    of 32 numbers.
    """
    train(
        small_run(
            prepared, tmp_path / "run", model=dcnv2.Config(dim=4, deep=(8,)), loop=Loop(max_steps=8)
        )
    )
    found, batch = restore(tmp_path / "run"), data.open(prepared).first(200, "valid")
    apart = {}
    for name in ("fp32", "mxfp8", "fp8-rowwise", "fp8"):
        scored = dataclasses.replace(
            found, run=dataclasses.replace(found.run, precision=Precision(name))
        )
        alone = torch.cat([scored.scores(batch.part(row, row + 1)) for row in range(20)])
        apart[name] = float((alone - scored.scores(batch)[:20]).abs().max())
    assert max(apart["fp32"], apart["mxfp8"], apart["fp8-rowwise"]) < 1e-5  # a sum in another order
    assert apart["fp8"] > 1e-3
    assert [name for name in MEMBERS if mixing(found.model, Precision(name))] == ["fp8"]
    page = (Path(__file__).parents[2] / "docs" / "precision.md").read_text()
    assert "a row's score depends on the rows" in " ".join(page.split())


def test_what_is_said_of_rows_that_share_a_scale_is_so(prepared: Path, tmp_path: Path) -> None:
    """Of a weight the second operand is the same in each batch, and of two activations both are the
    rows'.
    """
    train(small_run(prepared, tmp_path / "run", loop=Loop(max_steps=18)))
    trained, batch = restore(tmp_path / "run"), data.open(prepared).first(200, "valid")
    for site in ("interaction", "bottom.layers.0.weight", "head.*"):
        for forward in (
            ("fp8", "fp32"),
            ("fp32", "fp8"),
            ("fp8-e5m2", "fp8-rowwise"),
            ("fp8-rowwise", "mxfp8"),
        ):
            precision = Precision(
                "fp32", {site: dataclasses.replace(Recipe.of("fp32"), forward=forward)}
            )
            for other in named_sites(trained.model).values():
                other.recipe = None
            put_recipes(trained.model.model, precision)
            found = dataclasses.replace(
                trained, run=dataclasses.replace(trained.run, precision=precision)
            )
            alone = torch.cat([found.scores(batch.part(row, row + 1)) for row in range(40)])
            apart = float((alone - found.scores(batch)[:40]).abs().max())
            assert (apart > 1e-5) == bool(found.mixing), (site, forward, apart)
            if found.mixing:
                assert "so a row's score depends on the rows it is scored with" in found.mixing
    assert restore(tmp_path / "run").mixing == ""


def test_commands_say_that_scores_depend_on_the_rows_beside(
    prepared: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"model": dcnv2.Config(dim=4, deep=(8,)), "loop": Loop(max_steps=4)}
    for name in ("mxfp8", "fp8"):
        notes: list[str] = []
        listener = lambda event, values: notes.append(values["text"]) if event == "note" else None  # noqa: E731, B023
        train(
            small_run(prepared, tmp_path / name, precision=Precision(name), **settings),
            listener=listener,
        )
        said = "share a scale, so a row's score depends on the rows it is scored with"
        assert any(said in note for note in notes) == (name == "fp8")
        for command, text in (
            (["evaluate", str(tmp_path / name)], f"{said}, 256 at a time"),
            (
                ["predict", str(tmp_path / name), str(log), "--out", str(tmp_path / "s.parquet")],
                f"{said}, 8,192 at",
            ),
            (
                ["export", str(tmp_path / name), str(tmp_path / f"m-{name}"), "--log", str(log)],
                f"{said}; a service",
            ),
        ):
            assert main(command) == 0
            assert (text in " ".join(capsys.readouterr().out.split())) == (name == "fp8"), command
        (tmp_path / "s.parquet").unlink()
        card = json.loads((tmp_path / f"m-{name}" / "card.json").read_text())
        assert [note.endswith("a service scores each request alone") for note in card["notes"]] == [
            True
        ] * (name == "fp8")


def test_a_run_in_few_bits_is_scored_served_and_resumed_in_them(
    prepared: Path, log: Path, tmp_path: Path
) -> None:
    precision = Precision("mxfp4", {"deep.*": Recipe.of("fp8")}, "split")
    settings = {"model": dcnv2.Config(dim=4, deep=(8,)), "loop": Loop(max_steps=8)}
    trainer = Trainer(small_run(prepared, tmp_path / "run", precision=precision, **settings))
    trainer.fit()
    found = restore(tmp_path / "run", which="last")
    assert found.run.precision == precision
    assert not any((p.view(torch.int32) & 0xFFFF).any() for p in found.model.parameters())
    batch = data.open(prepared).first(200, "valid")
    trainer.job.model.eval()
    with torch.no_grad():
        want_BT = trainer.evaluator.score(batch)
        plain = scoring(
            found.model, dataclasses.replace(found.run, precision=Precision()), found.schema
        )
        apart = (plain(batch) - want_BT).abs().max()
    assert torch.equal(found.scores(batch), want_BT) and apart > 1e-4
    export(tmp_path / "run", tmp_path / "model", [log])
    with pytest.raises(UserError, match="model: a model folder, not a run directory; give the run"):
        restore(tmp_path / "model")
    rows = pq.read_table(log).slice(0, 50)
    scorer = load(tmp_path / "model")
    assert scorer.run.precision == precision
    served = torch.from_numpy(scorer.score(rows.to_pylist()))
    torch.testing.assert_close(
        served, torch.from_numpy(restore(tmp_path / "run").score_rows(rows)), rtol=0, atol=1e-6
    )
    with pytest.raises(
        UserError,
        match=r"^precision: bf16, weights fp32, and the run began in mxfp4 with 1 patterns",
    ):
        train(
            small_run(prepared, tmp_path / "run", precision=Precision("bf16"), **settings),
            resume=True,
        )
    with pytest.raises(UserError, match=r"^precision.sites: 'top\.\*' names no product of \w+"):
        Trainer(
            small_run(
                prepared,
                tmp_path / "other",
                precision=Precision("bf16", {"top.*": Recipe.of("fp8")}),
                **settings,
            )
        )
