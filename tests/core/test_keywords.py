from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest

from sparrow.core.keywords import keywords


def test_a_function_shows_the_settings_that_it_takes() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        rows: int = 3
        seed: int

    @keywords(Settings)
    def draw(out: str, *, overwrite: bool = False, **settings: Any) -> Settings:
        return Settings(**settings)

    shown = inspect.signature(draw).parameters
    assert list(shown) == ["out", "overwrite", "rows", "seed"]
    assert shown["rows"].default == 3 and shown["seed"].kind is inspect.Parameter.KEYWORD_ONLY
    assert draw("x", seed=1) == Settings(rows=3, seed=1)
    with pytest.raises(TypeError, match="'row'"):
        draw("x", seed=1, row=2)
