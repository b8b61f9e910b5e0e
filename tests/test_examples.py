"""What the front page offers has an example each, and each runs."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

import sparrow

OFFERED = [name for name in sparrow.__all__ if not name.startswith("_")]


@pytest.mark.parametrize("name", OFFERED)
def test_an_example_runs(name: str) -> None:
    offered: Any = getattr(sparrow, name)
    (example,) = doctest.DocTestFinder(recurse=False).find(offered, name, globs={})
    assert example.examples, f"{name}: no example"
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert not results.failed
