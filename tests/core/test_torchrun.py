from __future__ import annotations

import pytest

from sparrow.core.torchrun import launcher


def test_launcher_is_the_agent_whatever_its_attempt_and_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert launcher() == ""
    found = set()
    for attempt, rank in ((0, 0), (0, 1), (2, 1)):
        monkeypatch.setenv(
            "TORCHELASTIC_ERROR_FILE",
            f"/tmp/torchelastic_a/none_b/attempt_{attempt}/{rank}/error.json",
        )
        found.add(launcher())
    assert found == {"/tmp/torchelastic_a/none_b"}
