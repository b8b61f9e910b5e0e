"""`sparrow numerics` on a small run: its figures against plain torch, its page, its recipe, what it
refuses.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.apps.numerics import measure
from sparrow.apps.numerics.report import describe_learned_inputs, numerics
from sparrow.apps.numerics.results import LEARNED, SAMPLED, Numerics
from sparrow.cli import main
from sparrow.core.config import from_dict
from sparrow.extensions.blend import model as blend
from sparrow.extensions.low_precision import probe
from sparrow.extensions.low_precision.precision import recipe_file
from sparrow.features.schema import Split
from sparrow.layers.precision import Precision
from sparrow.layers.site import named_sites
from sparrow.models import autoint, dcnv2, dlrm
from sparrow.numerics.blocks import rounded
from sparrow.numerics.errors import errors, qsnr
from sparrow.numerics.formats import FORMATS
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.analysis.pages import page
from tests.apps.fewer.test_search import quiet
from tests.runs import small_run

MODEL = dcnv2.Config(dim=4, deep=(16, 8), cross_layers=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> Path:
    run_dir = tmp_path_factory.mktemp("numerics") / "run"
    train(small_run(prepared, run_dir, model=MODEL))
    return run_dir


@pytest.fixture(scope="module")
def found(trained: Path) -> Numerics:
    return numerics(trained, rows=400)


@pytest.fixture
def one_precision(undrawn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is quicker than all, and pictures are not drawn."""
    for module in ("results", "page", "report"):
        monkeypatch.setattr(f"sparrow.apps.numerics.{module}.SHOWN", ("mxfp8",))


def test_figures_are_those_of_plain_torch(found: Numerics) -> None:
    f = FORMATS["mxfp8"]
    for site in found.sites:
        x, w, dy = site.operands[:3]
        ways = {
            "forward": (x, w, 1, 1, lambda a, b: a @ b.t()),
            "input_gradient": (dy, w, 1, 0, lambda a, b: a @ b),
            "weight_gradient": (dy, x, 0, 0, lambda a, b: a.t() @ b),
        }
        for which, (a, b, axis_a, axis_b, multiply) in ways.items():
            near_a, near_b = rounded(a, f, axis_a), rounded(b, f, axis_b)
            want = errors(
                multiply(near_a, near_b).bfloat16().float(), multiply(a.double(), b.double())
            )
            got, decibels = found.errors[site.name, which, "real", "mxfp8"]
            assert got.mere == pytest.approx(want.mere, rel=1e-3)
            assert got.relative == pytest.approx(want.relative, rel=1e-3)
            assert decibels == pytest.approx(min(qsnr(a, near_a), qsnr(b, near_b)), abs=0.01)
    names = {site.name for site in found.sites}
    assert names | set(found.unseen) == set(named_sites(restore(found.run_dir).model.model))


def test_drawn_rows_look_like_those_that_were_seen(found: Numerics) -> None:
    """Their second moments, and how much the sizes of gradients vary, up to what 1,600 rows can
    tell.
    """
    for site in found.sites:
        assert site.learned is not None
        of = measure.draw_operands(site.learned, site.operands.weight, seed=3)
        want, got = site.learned.x.covariance[0], torch.cov(of.x.t())
        assert float((got.view_as(want) - want).norm()) < 0.25 * float(want.norm())
        if site.shape[0] >= 8:  # a normal number by itself has sizes that vary more
            sizes = [rows.norm(dim=1) for rows in (of.grad, site.operands.grad)]
            drawn, seen = (float(one[one > 0].log().var()) for one in sizes)
            assert drawn == pytest.approx(seen, rel=0.35)
        assert float(of.grad.mean(0).norm()) < 0.2 * float(of.grad.norm(dim=1).mean())
        several = measure.draw_operands(site.learned, None, seed=3)
        assert several.weight.shape == (measure.DRAWS, *site.shape)


def test_flops_are_those_of_the_weights(found: Numerics) -> None:
    for site in found.sites:
        assert site.rows_per_example == 1.0
        assert site.flops == 2 * site.shape[0] * site.shape[1]


def test_damage_is_what_a_run_in_that_precision_has(found: Numerics, prepared: Path) -> None:
    """A site told by `found` against the same told by a recipe, and no damage by a format that
    changes nothing.
    """
    restored, ((judge, _), _) = restore(found.run_dir), measure.judges_of(data.open(prepared), 400)
    name = found.sites[0].name
    before = judge.ne_of(restored.scores)[0].value
    recipe = Precision("fp32", {name: measure.MEMBERS["mx4"].recipe})
    after = judge.ne_of(measure.put_precision(restored, recipe))[0].value
    assert after != before
    assert found.ne == before
    assert found.rises[name]["mx4"].value == pytest.approx((after - before) / before)
    assert found.rises[name]["mx4"].error > 0
    assert abs(found.rises[name]["bf16"].value) < abs(found.rises[name]["mx4"].value)


def test_page_results_and_recipe(found: Numerics, trained: Path) -> None:
    got = page(trained / "numerics.html")
    assert {"What this stands on", "Products and precisions", "Recipe"} < set(got.headings)
    assert got.pictures == 2
    assert {site.name for site in found.sites} < set(got.cells)
    told = json.loads((trained / "numerics.json").read_text())
    assert [site["name"] for site in told["sites"]] == [site.name for site in found.sites]
    first = told["sites"][0]
    assert first["errors"]["forward"]["learned"]["mxfp8"]["numbers"] > 0
    assert all(one["verdict" if "verdict" in one else "name"] for one in told["sites"])
    assert any("64 batches" in note for note in found.notes)
    assert any("never run on a GPU" in note for note in found.notes)
    again = Run.load(trained / "run.toml", {"precision": str(trained / "recipe.toml")})
    assert again.precision == found.precision
    recipe_file(trained / "recipe.toml")
    assert set(found.verdicts) == {site.name for site in found.sites if not site.high}


@pytest.mark.usefixtures("one_precision")
def test_the_page_has_what_the_recipe_has(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no budget forwards fall back, and gradients with the last of them."""
    times = lambda of, which, there: {name: 2.0 if name == "fp32" else 1.0 for name in there}  # noqa: E731
    monkeypatch.setattr("sparrow.apps.numerics.dispatch.milliseconds", times)
    monkeypatch.setattr("sparrow.layers.precisions.bf16.missing", lambda device: "")
    shutil.copytree(trained, tmp_path / "run")
    done = numerics(tmp_path / "run", rows=400, budget=0.0)
    recipe = from_dict(Precision, recipe_file(tmp_path / "run" / "recipe.toml"))
    told = json.loads((tmp_path / "run" / "numerics.json").read_text())
    low, back = 0, 0
    for site in told["sites"]:
        own = recipe.sites.get(site["name"])
        for which, verdict in site["verdicts"].items():
            formats = ("fp32", "fp32") if own is None else getattr(own, which)
            assert formats == (verdict["chosen"], verdict["chosen"])
            low += verdict["chosen"] != "fp32"
            assert verdict["allowed"] == ["bf16"]  # alone, all are faster in it
            if verdict["chosen"] == "fp32":
                back += 1
                why = (
                    "the budget of NE leaves bf16 out"
                    if which == "forward"
                    else "all forwards are fp32"
                )
                assert verdict["why"].startswith(f"{why}; 2.00 times as fast as fp32")
    assert back and low + back == 3 * len(done.verdicts)
    cells = page(tmp_path / "run" / "numerics.html").cells
    shown = [cells[at + 1] for at, cell in enumerate(cells) if cell == "bf16 1.00, fp32 2.00"]
    assert shown == [
        verdict["chosen"] for site in told["sites"] for verdict in site["verdicts"].values()
    ]
    assert f"{low} of {len(shown)}" in (tmp_path / "run" / "numerics.html").read_text()


@pytest.mark.usefixtures("one_precision")
def test_a_probe_of_the_run_is_read(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparrow.extensions.low_precision.probe import Probe

    init = Probe.__init__
    monkeypatch.setattr(
        Probe, "__init__", lambda self, *args, **how: init(self, *args, **{"interval": 3, **how})
    )
    train(small_run(prepared, tmp_path / "run", model=MODEL), options={"probe"})
    found = numerics(tmp_path / "run", rows=400)
    assert found.notes[0].startswith("learned inputs: by the probe of the run")
    assert not any("too few rows" in note for note in found.notes)
    changed = [
        site for site in found.sites if site.learned is not None and site.learned.weight.steps
    ]
    assert len(changed) >= 3
    # its weights changed from snapshot to snapshot, so that they are drawn too
    for site in changed:
        for which in measure.PASSES[:-1]:
            drawn, learned = (
                found.errors[site.name, which, of, "mxfp8"][0].mere for of in (SAMPLED, LEARNED)
            )
            assert 0.5 < drawn / learned < 2
            assert found.mere(site.name, which, "mxfp8") >= drawn
        assert (site.name, "weight_gradient", SAMPLED, "mxfp8") not in found.errors
    (tmp_path / "run" / "probe.safetensors").write_bytes(b"no")
    assert main(["numerics", str(tmp_path / "run")]) == 2


@pytest.mark.usefixtures("undrawn")
def test_the_command(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("results", "page", "report"):
        monkeypatch.setattr(f"sparrow.apps.numerics.{module}.SHOWN", ("mxfp8", "mx6"))
    assert main(["numerics", str(trained), "--rows", "400", "--precision", "mx6"]) == 0
    told = capsys.readouterr().out
    assert (
        "products in mx6" in told
        and "QSNR, MERE and NE alone are those of mx6; --precision shows another" in told
    )
    assert "cross.weights.0" in told
    assert "numerics.html" in told
    assert main(["numerics", "--formats"]) == 0
    told = capsys.readouterr().out
    assert "mx9" in told and "34.74" in told and "16.68" in told and "4.64" in told
    for bad, says in (
        ([], "RUN is missing"),
        ([str(trained / "none")], "not a run directory"),
        ([str(trained), "--precision", "mx7"], "'mx7' is not one"),
        ([str(trained), "--rows", "3"], "rows: 3"),
        ([str(trained), "--ne-budget", "x"], "no share of NE"),
    ):
        assert main(["numerics", *bad]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert len(error.splitlines()) == 1


def test_a_log_without_training_rows_is_one_line(
    trained: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log that the run names may have been prepared again since."""
    shutil.copytree(prepared, tmp_path / "log")
    manifest = json.loads((prepared / "manifest.json").read_text())
    manifest["rows"]["train"] = 0
    (tmp_path / "log" / "manifest.json").write_text(json.dumps(manifest))
    shutil.copytree(trained, tmp_path / "run")
    settings = (trained / "run.toml").read_text()
    assert str(prepared) in settings
    (tmp_path / "run" / "run.toml").write_text(
        settings.replace(str(prepared), str(tmp_path / "log"))
    )
    assert main(["numerics", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert (
        f"{tmp_path / 'log'}: no training rows; give the log that the model was trained on" in error
    )
    assert len(error.splitlines()) == 1


MODELS: dict[str, Any] = {
    "pairs": dlrm.Config(dim=4, bottom=(8,), top=(8,)),
    "attention": autoint.Config(dim=4, width=8, deep=(8,)),
    "blend": blend.Config(),
}


@pytest.mark.parametrize(
    "name",
    ["pairs", *(pytest.param(name, marks=pytest.mark.slow) for name in ("attention", "blend"))],
)
@pytest.mark.usefixtures("one_precision")
def test_models_with_products_of_activations_and_of_several_weights(
    prepared: Path, tmp_path: Path, name: str
) -> None:
    train(small_run(prepared, tmp_path / "run", model=MODELS[name]))
    found = numerics(tmp_path / "run", rows=200)
    got = page(tmp_path / "run" / "numerics.html")
    assert got.pictures == 2
    of_examples = [site for site in found.sites if site.operands.has_examples]
    assert bool(of_examples) == (name != "blend")
    for site in of_examples:
        assert site.learned is not None
        for which in measure.PASSES:
            real, learned = (
                found.errors[site.name, which, of, "mxfp8"][0].mere for of in ("real", "learned")
            )
            assert 0.5 < learned / real < 2
    assert ("none" in got.cells) == (name == "blend")  # of several weights at once
    assert not found.unseen or name == "blend"


def test_a_stream_is_judged_by_its_last_rows(log: Path, tmp_path: Path) -> None:
    """Half of them choose, and the others check."""
    dataset = data.open(
        data.prepare([log], tmp_path / "p", split=Split(by="time", valid=0, test=0)).out
    )
    judges, what = measure.judges_of(dataset, 350)
    assert "last rows" in what
    sizes = [judge.batch.batch_size for judge in judges]
    assert 700 <= sum(sizes) < 1400 and abs(sizes[0] - sizes[1]) <= 1
    labels = torch.cat([batch.labels_BT for batch in dataset.loader(1000)])
    assert torch.equal(
        torch.cat([judge.batch.labels_BT for judge in judges]), labels[-sum(sizes) :]
    )
    assert pq.read_table(log).num_rows == len(labels)


@pytest.mark.usefixtures("one_precision")
def test_a_probe_of_another_run_is_refused_in_a_line(
    trained: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same shape. What the error says to do helps."""
    train(small_run(prepared, tmp_path / "other", model=MODEL, seed=1), options={"probe"})
    shutil.copytree(trained, tmp_path / "run")
    shutil.copy(tmp_path / "other" / probe.FILE, tmp_path / "run")
    assert main(["numerics", str(tmp_path / "run"), "--rows", "400"]) == 2
    error = capsys.readouterr().err
    assert (
        "probe.safetensors: changed since the run wrote it with a checkpoint, or another run's;"
        " delete it" in error
    )
    assert len(error.splitlines()) == 1
    (tmp_path / "run" / probe.FILE).unlink()
    assert main(["numerics", str(tmp_path / "run"), "--rows", "400"]) == 0


TAKEN = (
    "of 64 batches of training that were taken now; the probe looks at every 100th step, and saw"
    " too few rows of"
)


@pytest.mark.usefixtures("one_precision")
def test_a_probe_that_saw_too_little_is_told(
    prepared: Path, tmp_path: Path, found: Numerics
) -> None:
    """Of no step, where the run was shorter than the time between two; and of too few rows for a
    covariance.
    """
    train(small_run(prepared, tmp_path / "run", model=MODEL), options={"probe"})
    learned, step = probe.load_of_run(tmp_path / "run")
    assert not learned
    told = describe_learned_inputs(found.sites, learned, step)
    assert told == [f"learned inputs: {TAKEN} them until step 19"]
    few = probe.Learned.empty((16, 12))
    torch.manual_seed(0)
    few.x.update(torch.randn(8, 12))
    few.grad.update(torch.randn(8, 16))
    one, other, *_ = found.sites
    told = describe_learned_inputs(
        [replace(one, name="few", learned=few), other], {"few": few}, 100
    )
    assert told[0] == "learned inputs: by the probe of the run, until step 100, from 8 rows"
    assert told[1] == f"learned inputs, of {other.name}: {TAKEN} them until step 100"
    assert told[2].startswith(
        "learned inputs: too few rows were seen: covariances of few are likely to be off by half"
    )
    assert len(told) == 3


@pytest.mark.usefixtures("one_precision")
def test_of_a_poor_snapshot_and_batches_taken_now_the_better_is_used(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One snapshot of a few rows: where it is off by half or more, the page is the one that it is
    without a probe.
    """
    init = probe.Probe.__init__

    def once(self: Any, *args: Any, **how: Any) -> None:
        init(self, *args, **({"interval": 19, "rows": 4} | how))

    monkeypatch.setattr(probe.Probe, "__init__", once)
    train(small_run(prepared, tmp_path / "run", model=MODEL), options={"probe"})
    run_dir = tmp_path / "run"
    learned, _ = probe.load_of_run(run_dir)
    found, dataset = restore(run_dir), data.open(prepared)
    with_it = {site.name: site for site in measure.gather_sites(found, dataset, learned, quiet)}
    without = {site.name: site for site in measure.gather_sites(found, dataset, {}, quiet)}
    poor = [name for name in learned if learned[name].error > measure.MOST_OFF]
    assert len(poor) >= 3
    for name, site in with_it.items():
        assert site.learned is not None
        if name not in poor:
            assert site.learned.x.count == 4
            continue
        assert site.learned.error < learned[name].error
        theirs = without[name].learned
        assert theirs is not None and torch.equal(site.learned.x.scatter[0], theirs.x.scatter[0])
    notes = numerics(run_dir, rows=400).notes
    assert any(
        note.startswith("learned inputs, of ") or note.startswith("learned inputs: of 64")
        for note in notes
    )
    assert not any("too few rows were seen:" in note for note in notes)


def test_which_of_two_is_better() -> None:
    def seen(rows: int) -> probe.Learned:
        learned = probe.Learned.empty((16, 12))
        learned.x.update(torch.randn(rows, 12))
        learned.grad.update(torch.randn(rows, 16))
        return learned

    torch.manual_seed(0)
    poor, poorer, good, many = (seen(rows) for rows in (20, 8, 100, 4000))
    assert measure.better(good, many) is good  # it is of all of training
    assert measure.better(poor, many) is many and measure.better(poorer, poor) is poor
    assert measure.better(poor, poorer) is poor
    assert (
        measure.better(None, many) is many
        and measure.better(poor, None) is poor
        and measure.better(None, None) is None
    )
