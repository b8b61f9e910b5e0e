from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

import sparrow.extensions
from sparrow import data
from sparrow.cli import main
from sparrow.core import UserError
from sparrow.core.config import Family, read_toml, to_dict
from sparrow.core.extensions import callback_modules, extensions, modules_elsewhere, settings_names
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import Trainer, preflight, remedies, search, train
from sparrow.training.look_ahead import LookAhead
from sparrow.training.rundir import RunDir, forget
from tests.runs import run_of

SOURCES = {
    "__init__.py": (
        """
from sparrow.core.extensions import Extension

EXTENSION = Extension(
    members={"sparrow.optimizers": {"still": "optimizer"}},
    applies=lambda run, options: type(run.dense).__module__.endswith("counting.optimizer") or "elsewhere" in options,
    settings=True,
    earlier_names={"loop.counts": "by"},
    may_differ=("notebook",),
    elsewhere={"counting.txt": "away"},
    files=("counted.json",),
    tries={"gdcn": ({}, {"dense.name": "still"}, {"model.dim": 4})},
    adapts=lambda run: type(run.dense).__module__.endswith("counting.optimizer"),
    plans=True,
)
"""
    ),
    "optimizer.py": (
        """
import dataclasses
import torch

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    lr: float = 0.0

    def build(self, parameters):
        return torch.optim.SGD(parameters, lr=self.lr)
"""
    ),
    "settings.py": (
        """
import dataclasses
from typing import Annotated
from sparrow.core.config import Family
from sparrow.core.errors import require
from sparrow.optimizers import adam
from sparrow.trained.run import ExtensionSettings

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ExtensionSettings):
    \"\"\"Steps are counted.

    by: what a step counts. notebook: where a rank writes it down. pencil: that it writes with.
    \"\"\"

    by: int = 1
    notebook: str | None = None
    pencil: Annotated[object, Family("sparrow.optimizers")] = adam.Config()

    def __post_init__(self):
        require(least=1, by=self.by)
"""
    ),
    "adaptation.py": (
        """
def adapt_model(model, run):
    model.adapted = run.dense.lr

def adapt_optimizer(optimizer, run):
    optimizer.adapted = run.dense.lr
"""
    ),
    "plan.py": (
        """
from dataclasses import replace
from sparrow.core import UserError
from sparrow.training.plan import Need, PlanHooks

class Hooks(PlanHooks):
    def resolve(self, plan):
        plan.say("at most three steps are counted")
        return replace(plan.run, loop=replace(plan.run.loop, max_steps=min(plan.run.loop.max_steps or 3, 3)))

    def check(self, plan, components):
        assert plan.run.loop.max_steps == 3
        if len(components()) > 100:
            raise UserError("dense: too many tables to count")
        if plan.run.dense.lr > 1:
            raise UserError("dense.lr: not above 1 while steps are counted; lower it")

    def identity(self, plan):
        return {"rate": plan.run.dense.lr}

    def needs(self, plan, components, batch):
        yield Need(part="counts", size=7_000_000_000_000 if plan.run.dense.lr == 1 else 8, remedy="count less")

    def remedy(self, plan, fits):
        return "count on fingers"

    def large_table(self):
        return "count it by halves"
"""
    ),
    "callback.py": (
        """
import gc
from sparrow.extensions.counting.settings import Config
from sparrow.training.callbacks import Callback
from sparrow.training.loop import Trainer

class Counting(Callback):
    steps = 0

    def __init__(self, by):
        self.by = by
        self.began = []

    def initialize(self):
        self.began.append("initialize")

    def begin(self):
        self.began.append("begin")

    def steps_ahead(self):
        return self.by - 1

    def after_step(self, step):
        self.steps += self.by

    def results(self):
        return {"counted": self.steps, "began": self.began}

    def after_run(self, results):
        trainers = [each for each in gc.get_objects() if isinstance(each, Trainer)]
        return {"trainers": [str(each.job.dir.path) for each in trainers], "ended": results["counted"]}

def callback(job):
    return Counting(job.run.settings_of(Config).by)
"""
    ),
    "away.py": (
        """
from pathlib import Path

def forget(run_dir):
    Path((run_dir / "counting.txt").read_text()).unlink()

def hand_over(run_dir, heir):
    Path((run_dir / "counting.txt").read_text()).write_text(str(heir))
"""
    ),
}


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An extension that stands elsewhere: an optimizer, and a callback for runs that choose it."""
    folder = tmp_path / "more" / "counting"
    folder.mkdir(parents=True)
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(
        sparrow.extensions, "__path__", [*sparrow.extensions.__path__, str(folder.parent)]
    )
    extensions.cache_clear()
    yield
    extensions.cache_clear()
    for name in [name for name in sys.modules if name.startswith("sparrow.extensions.counting")]:
        del sys.modules[name]


@pytest.mark.usefixtures("counting")
def test_an_extension_adds_a_member_and_goes_along_with_its_runs(
    tmp_path: Path, prepared: Path
) -> None:
    family = Family("sparrow.optimizers")
    assert {"adam", "still"} <= set(family.names())
    run = run_of(
        prepared,
        tmp_path / "run",
        **{"dense.name": "still", "loop.max_steps": 3, "model.name": "dcnv2"},
    )
    assert family.name_of(run.dense) == "still"
    results = train(run)
    assert results["counted"] == results["ended"] == 3
    assert results["began"] == ["initialize", "begin"]
    assert run.run_dir not in results["trainers"]
    assert Run.load(Path(run.run_dir) / "run.toml").dense == run.dense


@pytest.mark.usefixtures("counting")
def test_an_extension_changes_the_model_and_the_optimizer_of_its_runs(
    tmp_path: Path, prepared: Path
) -> None:
    run = run_of(
        prepared,
        tmp_path / "run",
        **{"dense.name": "still", "dense.lr": 0.5, "model.name": "dcnv2"},
    )
    trainer = Trainer(run)
    assert trainer.job.model.model.adapted == trainer.job.optimizer.adapted == 0.5  # type: ignore[attr-defined]
    other = Trainer(run_of(prepared, tmp_path / "other", **{"model.name": "dcnv2"}))
    assert not hasattr(other.job.model.model, "adapted") and not hasattr(
        other.job.optimizer, "adapted"
    )


@pytest.mark.usefixtures("counting")
def test_an_extension_plans_its_runs(
    tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It chooses, checks, says what another model is and what it takes; and what it would do for a
    run without it.
    """
    log = data.open(prepared)
    settings = {"dense.name": "still", "model.name": "dcnv2", "data.batch_size": 64}
    notes: list[str] = []
    run = run_of(prepared, tmp_path / "run", **settings)
    assert (
        train(run, listener=lambda event, values: notes.append(values.get("text", "")))["step"] == 3
    )
    assert "at most three steps are counted" in notes
    assert restore(tmp_path / "run")  # what it is for going on does not hinder scoring
    other = run_of(prepared, tmp_path / "run", **settings, **{"dense.lr": 0.5})
    with pytest.raises(
        UserError,
        match=r"checkpoint of another model: extensions.counting.rate is 0.0 there and 0.5",
    ):
        train(other, resume=True)
    with pytest.raises(UserError, match="dense.lr: not above 1 while steps are counted"):
        train(run_of(prepared, tmp_path / "wrong", **settings, **{"dense.lr": 2.0}))
    resolved = preflight.resolved(run, log)
    assert preflight.estimate(resolved, log).host["counts"] == 8
    large = preflight.resolved(
        run_of(prepared, tmp_path / "large", **settings, **{"dense.lr": 1.0}), log
    )
    with pytest.raises(UserError, match=r"memory: the run needs .*counts 7000.00 GB.*; count less"):
        preflight.check_fits(large, log)
    plain = preflight.resolved(
        run_of(prepared, tmp_path / "plain", **{"model.name": "dlrm", "model.dim": 4}), log
    )
    assert "counts" not in preflight.estimate(plain, log).host
    needs = preflight.estimate(plain, log)
    monkeypatch.setattr(
        preflight, "estimate", lambda *given: replace(needs, host={**needs.host, "tables": 10**15})
    )
    with pytest.raises(UserError, match="or count on fingers"):
        preflight.check_fits(plain, log)
    assert ", or count it by halves" in remedies._fewer(needs)


@pytest.mark.usefixtures("counting")
def test_what_a_run_does_not_use_is_not_loaded(tmp_path: Path, prepared: Path) -> None:
    run = run_of(prepared, tmp_path / "run")
    assert all("counting" not in module.__name__ for module in callback_modules(run, ()))
    assert "sparrow.extensions.counting" in sys.modules
    unused = ("optimizer", "callback", "adaptation", "plan", "settings")
    assert not {f"sparrow.extensions.counting.{name}" for name in unused} & set(sys.modules)


STEPS = {"model.name": "dcnv2", "loop.max_steps": 3}


@pytest.mark.usefixtures("counting")
def test_an_extension_has_settings_of_its_own(tmp_path: Path, prepared: Path) -> None:
    """A run that sets one has the extension; the file holds them as a table, and a run that goes on
    says what has changed.
    """
    run = run_of(prepared, tmp_path / "run", **STEPS, **{"counting.by": 2})
    assert Trainer(run).callbacks.member(LookAhead)._depth == 1
    assert train(run)["counted"] == 6
    file = tmp_path / "run" / "run.toml"
    assert read_toml(file)["counting"] == {"by": 2, "pencil": to_dict(run)["dense"]}
    assert Run.load(file).extensions == run.extensions
    assert Run.load(file, {"counting.by": 1}).extensions == {}
    notes: list[str] = []
    longer = run_of(
        prepared, tmp_path / "run", **{**STEPS, "loop.max_steps": 5}, **{"counting.notebook": "a"}
    )
    train(longer, resume=True, listener=lambda event, values: notes.append(values.get("text", "")))
    assert "resumed with counting.by = 1, it was 2" in notes
    assert "resumed with counting.notebook = a, it was None" in notes
    assert not any("pencil" in note for note in notes)
    plain = run_of(prepared, tmp_path / "plain", **STEPS)
    train(plain)
    assert "counting" not in read_toml(tmp_path / "plain" / "run.toml")


@pytest.mark.usefixtures("counting")
def test_the_settings_of_extensions_are_read_like_all_others(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    begin = 'run_dir = "a"\ndata = { path = "b" }\n'

    def counting(text: str, **flags: object) -> dict[str, object]:
        file.write_text(begin + text)
        return dict(to_dict(Run.load(file, flags)).get("counting", {}))

    pencil = {"pencil": to_dict(Run.of(tmp_path))["dense"]}
    assert counting("[counting]\nby = 2") == {"by": 2, **pencil}
    assert counting("[counting]\nby = 2", **{"counting.notebook": "a"}) == {
        "by": 2,
        "notebook": "a",
        **pencil,
    }
    assert counting("", **{"counting.pencil": "sgd"})["pencil"]["name"] == "sgd"  # type: ignore[index]
    assert counting("[counting]\nby = 1") == counting("[counting]") == {}
    # the earlier name
    assert counting("[loop]\ncounts = 2") == {"by": 2, **pencil}
    assert counting("", **{"loop.counts": 3}) == {"by": 3, **pencil}
    assert counting("[counting]\nby = 2", **{"loop.counts": 3}) == {"by": 3, **pencil}
    assert counting("[loop]\ncounts = 2", **{"counting.by": 1}) == {}
    both = r"loop.counts, counting.by: two names of one setting; give counting.by alone$"
    with pytest.raises(UserError, match=f"^{re.escape(str(file))}: {both}"):
        counting("[loop]\ncounts = 2\n[counting]\nby = 2")
    with pytest.raises(UserError, match=both):
        counting("", **{"loop.counts": 3, "counting.by": 2})
    for text, message in {
        "[counting]\nbi = 2": "counting.bi: unknown key; known: by, notebook, pencil",
        "[counting]\nby = 'two'": "counting.by: expected int, got 'two'; write it without quotes",
        "[counting]\nby = 0": "counting.by: ",
        "[conting]\nby = 2": "conting: unknown key; did you mean 'counting'?",
        "[blend]": "blend: unknown key",
        "counting = 2": "counting: expected a table, got 2",
    }.items():
        with pytest.raises(UserError, match=re.escape(message)):
            counting(text)


def test_no_extension_with_settings_is_called_as_a_setting_of_the_run() -> None:
    assert not {field.name for field in fields(Run)} & set(settings_names())


@pytest.mark.usefixtures("counting")
def test_help_has_the_settings_of_all_extensions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help", "--counting.by", "2"])
    text = capsys.readouterr().out
    assert re.search(r"--counting.by +2\n.*--counting.notebook +\(unset\)", text)
    assert "\ncounting: Steps are counted.\n\nby: what a step counts." in text
    assert "--counting.pencil.name is one of adagrad, adam, sgd" in text
    assert re.search(r"--calibration.method +\"none\"", text)


@pytest.mark.usefixtures("counting")
def test_what_a_run_has_elsewhere_goes_with_its_directory(tmp_path: Path, prepared: Path) -> None:
    """It is handed over with the run's files, and removed with its directory. A run that goes on
    has its extension.
    """
    run, away = (
        run_of(prepared, tmp_path / "run", **{"loop.max_steps": 1, "model.name": "dcnv2"}),
        tmp_path / "away",
    )
    assert "counted" not in train(run) and not modules_elsewhere(tmp_path / "run")
    forget(tmp_path / "run")
    away.write_text("")
    (tmp_path / "run" / "counting.txt").write_text(str(away))
    assert train(replace(run, loop=replace(run.loop, max_steps=3)), resume=True)["counted"] == 2
    (tmp_path / "heir").mkdir()
    search._move(tmp_path / "run", RunDir(tmp_path / "heir"))
    assert away.read_text() == str(tmp_path / "heir")
    forget(tmp_path / "heir")
    assert not away.exists()


@pytest.mark.usefixtures("counting")
def test_what_an_extension_wrote_goes_when_a_run_begins_anew(
    tmp_path: Path, prepared: Path
) -> None:
    run = run_of(prepared, tmp_path / "run", **{"loop.max_steps": 1, "model.name": "dcnv2"})
    file = tmp_path / "run" / "counted.json"
    file.parent.mkdir()
    file.write_text("{}")
    with pytest.raises(UserError, match="no run's, and holds counted.json"):
        train(run)
    assert file.exists()
    file.unlink()
    train(run)
    file.write_text("{}")
    train(run, overwrite=True)
    assert not file.exists()


@pytest.mark.usefixtures("counting")
def test_an_extension_says_what_a_search_tries_for_a_model(prepared: Path) -> None:
    gdcn = {"model.name": "gdcn"}
    assert search.tries(prepared, gdcn) == [{}, {"dense.name": "still"}, {"model.dim": 4}]
    assert search.tries(prepared, {**gdcn, "dense.name": "adam"}) == [{}, {"model.dim": 4}]
    assert {"tables.rule.lr": 0.015} in search.tries(prepared, {"model.name": "dlrm"})
