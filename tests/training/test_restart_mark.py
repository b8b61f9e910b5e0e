from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparrow.training import restart_mark
from sparrow.training.restart_mark import RestartMark


class Ranks:
    """A world of as many ranks as agents are named, seen from rank 0."""

    rank = 0

    def __init__(self, *agents: str) -> None:
        self.agents = list(agents)

    def gathered(self, what: str, mine: str) -> list[str]:
        return self.agents

    def broadcast(self, what: str, value: Any) -> Any:
        return value


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An attempt by new processes of these agents."""
    count = iter(range(100))

    def begin(*agents: str) -> RestartMark:
        monkeypatch.setattr(restart_mark, "PROCESS", f"process {next(count)}")
        return RestartMark(Ranks(*agents), tmp_path)  # type: ignore[arg-type]

    return begin


def test_goes_on_when_one_of_its_agents_has_begun(attempt) -> None:
    first = attempt("a", "a", "b", "b")
    assert not first.restarted
    assert not attempt("a", "a", "b", "b").restarted  # the first has not begun
    first.write()
    for agents in (("a", "a", "b", "b"), ("a", "a", "c", "c"), ("c", "c", "b", "b"), ("b",)):
        assert attempt(*agents).restarted


def test_a_chain_of_agents_is_one_job(attempt) -> None:
    """Each comes back once, and nobody is left who began."""
    attempt("a", "b").write()
    second = attempt("a", "c")
    assert second.restarted
    second.write()
    assert attempt("d", "c").restarted


def test_another_job_does_not_go_on(attempt) -> None:
    attempt("a", "b").write()
    assert not attempt("c", "d").restarted
    attempt("c", "d").write()
    assert not attempt("a", "b").restarted


def test_without_torchrun_nothing_goes_on(attempt, tmp_path: Path) -> None:
    attempt("").write()
    assert not attempt("").restarted
    assert list(tmp_path.iterdir()) == []


def test_a_second_training_of_the_same_process_does_not_go_on(tmp_path: Path) -> None:
    world: Any = Ranks("a")
    RestartMark(world, tmp_path).write()
    assert not RestartMark(world, tmp_path).restarted


@pytest.mark.parametrize("text", ["", "[]", "{}", "7", '{"agents": 3, "process": ""}', "\0"])
def test_a_damaged_mark_is_none(attempt, tmp_path: Path, text: str) -> None:
    (tmp_path / ".begun.json").write_text(text)
    assert not attempt("a").restarted
