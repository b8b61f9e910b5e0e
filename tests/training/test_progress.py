from __future__ import annotations

import pytest

from sparrow.training.progress import Progress


def test_a_checkpoint_keeps_it_by_its_names() -> None:
    """Checkpoints of earlier versions have all but the best evaluation."""
    progress = Progress(step=3, examples=768, best=0.5, best_step=2, last_evaluation={"step": 3})
    progress.best_evaluation = {"step": 2, "ne": 0.5, "parts": {}}
    state = dict(vars(progress))
    assert Progress.load({**state, "loader": {}}) == progress
    del state["best_evaluation"]
    assert Progress.load(state).best_evaluation == {}
    del state["worse"]
    with pytest.raises(KeyError, match="worse"):
        Progress.load(state)


def test_the_best_is_the_first_of_the_least() -> None:
    progress = Progress()
    costs = [0.9, 0.7, 0.7, 0.8, 0.6]
    found = []
    for progress.step, cost in enumerate(costs):
        found.append((progress.compare(cost), progress.best_step, progress.worse))
    assert found == [(True, 0, 0), (True, 1, 0), (False, 1, 1), (False, 1, 2), (True, 4, 0)]


def test_the_beginning_has_no_evaluation() -> None:
    assert not Progress().is_evaluated
    assert Progress(last_evaluation={"step": 0}).is_evaluated
