from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def poisoned(poison: None) -> None:
    """Every test here."""


@pytest.fixture
def processors() -> Iterator[list[str]]:
    """Those that this machine can be; the best is put back afterwards."""
    here = []
    for name in ("avx512", "avx2", "portable"):
        with contextlib.suppress(ValueError):
            here.append(torch.ops.sparrow.processor(name))
    torch.ops.sparrow.processor("best")
    yield here
    torch.ops.sparrow.processor("best")
