"""A model brings metrics of what it measures of each row, beside scores and labels."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import sparrow.extensions
from sparrow import data
from sparrow.apps.report import report
from sparrow.cli import main
from sparrow.core import Batch, UserError
from sparrow.core.extensions import extensions
from sparrow.distributed import World
from sparrow.metrics import METRICS
from sparrow.trained.run import Run
from sparrow.trained.scorer import restore
from sparrow.training import Trainer, train
from sparrow.training.course import Advance
from sparrow.training.runlog import read
from tests.equivalence.pool import Pool
from tests.runs import run_of
from tests.training.test_loop import Kill

MEMBERS = Path(__file__).parents[1] / "models" / "members"
SETTINGS: dict[str, Any] = {
    "model.name": "signs",
    "data.batch_size": 250,
    "data.shuffle": False,
    "loop.monitor": "perplexity",
    "loop.evaluate_every": 4,
    "checkpoint.every": 4,
    "log.every": 3,
}
# first weights stay, so that every line of the log is of one model
STILL: dict[str, Any] = {"loop.update_mode": "off", "dense.lr": 1e-30, "data.id_dropout": {}}


@contextmanager
def member() -> Iterator[None]:
    """Models have a second member, whose file declares two metrics when the member is named."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparrow.extensions, "__path__", [*sparrow.extensions.__path__, str(MEMBERS)])
        extensions.cache_clear()
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.signs")]:
                del sys.modules[name]
            for name in ("perplexity", "signs_a_row"):
                METRICS.pop(name, None)
    extensions.cache_clear()


PACKAGE = sparrow.extensions.__name__


@pytest.fixture
def signs() -> Iterator[None]:
    with member():
        yield


def reference(run_dir: Path, batches: Iterable[Batch]) -> tuple[float, float]:
    """The perplexity and the signs a row, number by number, by plain torch."""
    model = restore(run_dir).model.model
    loss, signs, rows = 0.0, 0, 0
    with torch.no_grad():
        for batch in batches:
            weights_CD, bias_C = model.signs.weight, model.signs.bias
            logits_BC = model.ids(batch) @ weights_CD.T + bias_C
            for numbers, logits in zip(batch.dense_BC.tolist(), logits_BC.tolist(), strict=True):
                rows += 1
                for number, logit in zip(numbers, logits, strict=True):
                    if abs(number) > 0.5:
                        signs += 1
                        loss += math.log1p(math.exp(-math.copysign(1, number) * logit))
    return math.exp(loss / signs), signs / rows


def run_on(world: World, prepared: str, place: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The results of a run on ranks."""
    with member():
        trainer = Trainer(run_of(prepared, place, **SETTINGS, **settings))
        results = trainer.fit()
        trainer.job.ranks.world.leave()
    return results


def check_still(prepared: Path, run_dir: Path, results: dict[str, Any]) -> dict[str, float]:
    """Check a run whose weights stay against the reference. Returns its held-out metrics."""
    dataset = data.open(prepared)
    perplexity, signs_a_row = reference(run_dir, dataset.loader(300, split="valid"))
    assert results["valid"]["perplexity"] == pytest.approx(perplexity, rel=1e-6)
    assert results["valid"]["signs_a_row"] == signs_a_row  # counts are exact
    log = read(run_dir)
    lines = [record for record in log if record["event"] == "train"]
    batches = list(dataset.loader(250, split="train"))
    assert len(lines) == 3
    for line in lines:
        window = batches[line["step"] - 3 : line["step"]]
        assert line["perplexity"] == pytest.approx(reference(run_dir, window)[0], rel=1e-6)
        assert "signs_a_row" not in line  # the run log does not have it
    fifths = results["progressive"]
    whole = reference(run_dir, batches[:9])[0]
    assert min(fifth["perplexity"] for fifth in fifths) <= whole
    assert max(fifth["perplexity"] for fifth in fifths) >= whole
    return dict(results["valid"])


def test_sums_are_those_of_a_plain_loop_on_any_number_of_ranks(
    prepared: Path, tmp_path: Path, ranks: Callable[[int], Pool]
) -> None:
    settings = {**STILL, "loop.max_steps": 9}
    results = run_on(World(), str(prepared), str(tmp_path / "1"), settings)
    with member():
        alone = check_still(prepared, tmp_path / "1", results)
        for size in (2, 3, 5):
            place = tmp_path / str(size)
            of_ranks = ranks(size).run(run_on, str(prepared), str(place), settings)
            assert all(result["valid"] == of_ranks[0]["valid"] for result in of_ranks)
            several = check_still(prepared, place, of_ranks[0])
            assert several["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-7)


def killed(world: World, prepared: str, place: str, resume: bool) -> list[dict[str, Any]]:
    """A run that dies after its sixth step, or goes on from the checkpoint of its fourth."""
    with member():
        trainer = Trainer(
            run_of(prepared, place, **SETTINGS, **{"loop.max_steps": 12}), resume=resume
        )
        record = trainer.record

        def record_and_die(advance: Advance) -> None:
            record(advance)
            if trainer.progress.step == 6 and not resume:
                raise Kill

        trainer.record = record_and_die  # type: ignore[method-assign]
        with suppress(Kill):
            trainer.fit()
        trainer.job.ranks.world.leave()
    keys = ("step", "event", "perplexity", "auc")
    return [{key: record.get(key) for key in keys} for record in read(Path(place))]


def test_a_resumed_run_logs_the_same_bits(
    prepared: Path, tmp_path: Path, ranks: Callable[[int], Pool]
) -> None:
    """Steps 5 and 6 are in a line with step 4, which came before the checkpoint."""
    settings = {"loop.max_steps": 12}
    for size in (1, 2):
        place = tmp_path / str(size)
        if size == 1:
            run_on(World(), str(prepared), str(place / "whole"), settings)
            killed(World(), str(prepared), str(place / "killed"), False)
            lines = killed(World(), str(prepared), str(place / "killed"), True)
        else:
            pool = ranks(size)
            pool.run(run_on, str(prepared), str(place / "whole"), settings)
            pool.run(killed, str(prepared), str(place / "killed"), False)
            lines = pool.run(killed, str(prepared), str(place / "killed"), True)[0]
        whole = read(place / "whole")
        perplexities = [(r["step"], r["event"], r["perplexity"]) for r in whole]
        assert len(perplexities) == 4 + 3  # lines of training and evaluations
        assert [(r["step"], r["event"], r["perplexity"]) for r in lines] == perplexities


@pytest.mark.usefixtures("signs")
def test_a_run_is_judged_by_it(prepared: Path, tmp_path: Path) -> None:
    """Less is better: the best checkpoint is chosen by it, and patience ends with it."""
    settings = {**SETTINGS, "loop.epochs": 3}
    results = train(run_of(prepared, tmp_path / "run", **settings))
    values = {r["step"]: r["perplexity"] for r in read(tmp_path / "run") if r["event"] == "valid"}
    assert len(values) > 3 and values[results["best_step"]] == min(values.values())
    assert results["best"]["perplexity"] == min(values.values()) < max(values.values()) - 1e-3
    # the weights stay, so that nothing is better than the first
    settings = {**SETTINGS, **STILL, "loop.epochs": 3, "loop.patience": 2}
    results = train(run_of(prepared, tmp_path / "still", **settings))
    assert (results["step"], results["best_step"]) == (12, 4)


@pytest.mark.usefixtures("signs")
def test_a_step_that_is_left_out_spoils_no_sum(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(prepared, tmp_path / "run", **SETTINGS, **{"loop.max_steps": 3})
    from sparrow.extensions.signs.model import Signs  # type: ignore[import-not-found]

    forward = Signs.forward
    second = list(data.open(prepared).loader(250, split="train"))[1]

    def spoilt(model: Any, batch: Batch) -> torch.Tensor:
        logits_BT: torch.Tensor = forward(model, batch)
        if torch.equal(batch.dense_BC, second.dense_BC):
            model.loss_B = model.loss_B * math.nan  # the scores are sound
        return logits_BT

    monkeypatch.setattr(Signs, "forward", spoilt)
    results = train(run)
    assert results["skipped_steps"] == 1
    assert sum(fifth["examples"] for fifth in results["progressive"]) == 500
    lines = [record for record in read(tmp_path / "run") if record["event"] == "train"]
    assert all(1 < line["perplexity"] < 3 for line in lines) and lines


@pytest.mark.usefixtures("signs")
def test_another_model_has_no_such_metric(prepared: Path, tmp_path: Path) -> None:
    run_of(prepared, tmp_path / "signs", **SETTINGS)  # its file is loaded
    settings = {**SETTINGS, "model.name": "logistic", "loop.max_steps": 4}
    message = "^loop.monitor: this model does not measure what 'perplexity' is made of"
    with pytest.raises(UserError, match=message):
        train(run_of(prepared, tmp_path / "other", **settings))
    results = train(run_of(prepared, tmp_path / "other", **{**settings, "loop.monitor": "ne"}))
    assert "perplexity" not in results["valid"] and "perplexity" not in results["progressive"][0]


def test_a_run_file_may_name_the_metric_before_the_model(prepared: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = f'run_dir = "x"\n[loop]\nmonitor = "perplexity"\n[data]\npath = "{prepared}"\n'
    path.write_text(text + '[model]\nname = "signs"\n')
    with member():
        assert Run.load(path).loop.monitor == "perplexity"
    path.write_text(text + '[model]\nname = "logistic"\n')
    with pytest.raises(UserError, match="monitor: 'perplexity' is not one of 'auc'"):
        Run.load(path)


@pytest.mark.usefixtures("signs")
def test_every_door_shows_it(
    prepared: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model.name", "signs", "--loop.monitor", "perplexity", "--threads", "1"]
    runs = [str(tmp_path / seed) for seed in "ab"]
    for seed, run_dir in enumerate(runs):
        own = ["--run_dir", run_dir, "--seed", str(seed), "--loop.max_steps", "4"]
        assert main(["train", str(prepared), *own, *flags]) == 0
    assert "best by perplexity: step" in capsys.readouterr().out

    out = tmp_path / "numbers.json"
    assert main(["evaluate", runs[0], "--json-out", str(out), "--slices", "cat_0"]) == 0
    numbers = json.loads(out.read_text())
    perplexity, signs_a_row = reference(tmp_path / "a", data.open(prepared).loader(300, "test"))
    whole, _, *slices = numbers.values()  # the second is a baseline
    assert whole["perplexity"] == pytest.approx(perplexity, rel=1e-6)
    assert whole["signs_a_row"] == signs_a_row
    tokens = sum(piece["examples"] * piece["signs_a_row"] for piece in slices)
    assert tokens == pytest.approx(whole["examples"] * signs_a_row, rel=1e-12)
    assert f"{perplexity:.4f}" in capsys.readouterr().out

    assert main(["compare", *runs]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if "│ perplexity" in x)
    values = [float(x) for x in re.findall(r"\d+\.\d{4}", line)[:2]]
    others = reference(tmp_path / "b", data.open(prepared).loader(300, "test"))[0]
    assert values == [round(perplexity, 4), round(others, 4)]
    other = ["--run_dir", str(tmp_path / "other"), "--loop.max_steps", "4", "--threads", "1"]
    assert main(["train", str(prepared), "--model.name", "logistic", *other]) == 0
    capsys.readouterr()
    for sides in ([runs[0], str(tmp_path / "other")], [str(tmp_path / "other"), runs[0]]):
        assert main(["compare", *sides]) == 0
        names = re.findall(r"^│ (\w+)", capsys.readouterr().out, re.MULTILINE)
        assert "logloss" in names and "perplexity" not in names  # one side has none

    html = report(runs[0], rows=200).read_text(encoding="utf-8")
    assert f"<b>{perplexity:.4f}</b><span>perplexity of signs, test</span>" in html
    assert "Perplexity is 2 where signs are guessed." in html
    assert 'alt="logloss, NE, perplexity, AUC over examples"' in html
    assert 'alt="AUC, NE, calibration, perplexity by' in html
    plain = report(tmp_path / "other", rows=200).read_text(encoding="utf-8")
    assert "erplexity" not in plain

    windows = ["--out", str(tmp_path / "windows"), "--windows", "2"]
    assert main(["backtest", str(log), *windows, *flags]) == 0
    assert "AUC and NE and perplexity of the windows" in capsys.readouterr().out
