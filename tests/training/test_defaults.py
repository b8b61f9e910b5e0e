from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparrow.core.errors import UserError
from sparrow.trained.run import Run
from sparrow.training import defaults as module
from sparrow.training.defaults import SMALL, SMALL_ROWS, defaults


@pytest.fixture
def sized(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A log that says how many rows it has."""

    def say(train: int, valid: int) -> Path:
        opened = module.data.open(prepared)
        manifest = {**opened.manifest, "rows": {"train": train, "valid": valid, "test": 0}}
        monkeypatch.setattr(
            module.data, "open", lambda path: type(opened)(opened.path, opened.schema, manifest)
        )
        return prepared

    return say


def test_a_small_log_gets_a_blend_and_several_epochs(sized: Any) -> None:
    assert defaults(sized(SMALL_ROWS, 100), {}) == SMALL
    assert defaults(sized(SMALL_ROWS + 1, 100), {}) == {}
    assert defaults(sized(1000, 0), {"seed": 1}) == {"seed": 1}  # nothing would end it


def test_what_a_person_says_counts(sized: Any) -> None:
    small = sized(1000, 100)
    assert defaults(small, {"model.name": "dcnv2"}) == {"model.name": "dcnv2"}
    assert defaults(small, {"loop.epochs": 2}) == {**SMALL, "loop.epochs": 2}
    other = defaults(small, {"tables.rule.name": "sgd"})
    # a rate of another rule
    assert other["tables.rule.name"] == "sgd" and "tables.rule.lr" not in other
    run = Run.of(small, defaults(small, {"model.dim": 8}))
    assert (run.model.dim, run.loop.patience, json.dumps(SMALL)) == (8, 2, json.dumps(SMALL))


def test_a_run_goes_on_with_its_model(sized: Any, tmp_path: Path) -> None:
    """Of the day before, and its optimizers. A log that has grown too large for a blend does not
    change it.
    """
    for name, small in (("blend", SMALL), ("dlrm", {})):
        (tmp_path / name).mkdir()
        rest = '[tables.rule]\nname = "sgd"\nlr = 0.5\n[loop]\nepochs = 7\n'
        (tmp_path / name / "run.toml").write_text(f'[model]\nname = "{name}"\ndim = 8\n{rest}')
        given = {"init_from": str(tmp_path / name)}
        its = {"model.name": name, "model.dim": 8, "tables.rule.name": "sgd", "tables.rule.lr": 0.5}
        for rows in (1000, SMALL_ROWS + 1):
            assert defaults(sized(rows, 100), given) == {**small, **its, **given}
        alone = {"data.batch_size": 256, **its} if name == "blend" else its
        # nothing would say when to stop
        assert defaults(sized(1000, 0), given) == {**alone, **given}
    given |= {"model.name": "dcnv2"}
    assert defaults(sized(1000, 100), given) == {
        "tables.rule.name": "sgd",
        "tables.rule.lr": 0.5,
        **given,
    }
    given = {"init_from": str(tmp_path / "none")}  # training says what is wrong
    assert defaults(sized(1000, 100), given) == {**SMALL, **given}


def test_a_gpu_trains_no_blend(sized: Any) -> None:
    assert defaults(sized(1000, 100), {"device": "cuda"}) == {"device": "cuda"}
    assert defaults(sized(1000, 100), {"device": "cpu"}) == {**SMALL, "device": "cpu"}


def test_no_prepared_log(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a prepared log"):
        defaults(tmp_path, {})
