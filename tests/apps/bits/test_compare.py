"""Where two models part."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparrow.apps.bits.compare import partings
from sparrow.core import UserError
from sparrow.layers.product import sites
from sparrow.serving import Scorer
from tests.serving.test_scorer import served as served_model


def changed(scorer: Scorer, name: str) -> Scorer:
    """The same model with one weight a hundredth larger."""
    model = copy.deepcopy(scorer.model)
    with torch.no_grad():
        model.get_parameter(name).mul_(1.01)
    return replace(scorer, model=model)


def test_a_model_does_not_part_from_itself(served: Scorer) -> None:
    found = partings(served, served)
    assert found.first is None
    assert found.scores == 0
    assert [one.site for one in found.products] == list(sites(served.model))


@pytest.mark.parametrize(
    "site", ["model.cross.weights.1", "model.deep.layers.1.weight", "model.head.weight"]
)
def test_the_first_product_that_differs_is_named(served: Scorer, site: str) -> None:
    found = partings(served, changed(served, site))
    first = found.first
    assert first is not None
    assert first.site == site
    assert first.inputs == 0 < first.outputs
    assert found.scores > 0


def test_other_rows_show_in_what_the_first_product_reads(served: Scorer) -> None:
    first = partings(served, changed(served, "model.numeric.weight_CD")).first
    assert first is not None  # folded into the first weights
    assert first.outputs > 0


def test_models_of_two_kinds_are_refused(
    served: Scorer, prepared: Path, log: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="one architecture"):
        partings(served, served_model(prepared, log, tmp_path))
