from __future__ import annotations

from pathlib import Path

import pytest

from sparrow.models import dcnv2
from sparrow.serving import Scorer, load
from sparrow.serving.export import export
from sparrow.trained.run import Loop
from sparrow.training import train
from tests.runs import small_run


@pytest.fixture(scope="session")
def exported(prepared: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCNv2 of some steps, as a model folder."""
    place = tmp_path_factory.mktemp("bits")
    model = dcnv2.Config(dim=8, deep=(16, 8), cross_layers=2)
    train(small_run(prepared, place / "run", model=model, loop=Loop(max_steps=12)))
    export(place / "run", place / "model", [log])
    return place / "model"


@pytest.fixture(scope="session")
def served(exported: Path) -> Scorer:
    return load(exported)
