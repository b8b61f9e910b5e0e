from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.equivalence import cases
from tests.equivalence.pool import Pool
from tests.faults.training import Training


@pytest.fixture
def training(prepared: Path, tmp_path: Path) -> Training:
    return Training(prepared, tmp_path)


@pytest.fixture(scope="session")
def whole(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Training]:
    """What nothing befell, by the number of ranks. Without torchrun, which takes seconds."""
    found: dict[int, Training] = {}

    def of(ranks: int) -> Training:
        if ranks not in found:
            found[ranks] = Training(prepared, tmp_path_factory.mktemp("whole"))
            pool = Pool(ranks, ranks)
            arguments = found[ranks].command()[3:]  # of `sparrow train`
            assert pool.run(cases.commanded, [arguments] * ranks) == [""] * ranks
            pool.close()
        return found[ranks]

    return of


@pytest.fixture(scope="session")
def alone(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """One rank that nothing befell."""
    found, before = Training(prepared, tmp_path_factory.mktemp("alone")), torch.get_num_threads()
    found.trainer().fit()
    torch.set_num_threads(before)
    return found
