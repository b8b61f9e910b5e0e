from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def poison() -> Iterator[None]:
    """What aten leaves uninitialised, for C++ too, is NaN (or the largest integer), so that reading
    it shows.
    """
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
