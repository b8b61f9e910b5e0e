"""Every model in formats of few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow import data
from sparrow.apps.bits.calibrate import observe, watched
from sparrow.apps.bits.quantize import last
from sparrow.apps.bits.variants import Variants
from sparrow.extensions.blend import model as blend
from sparrow.layers.product import sites
from sparrow.models import autoint, dcnv2, din, dlrm, finalmlp, mmoe, wukong
from sparrow.serving import Scorer, products
from sparrow.serving.rows import tensors_of
from tests.models.test_models import MODELS, SOME, named
from tests.serving.test_scorer import served as served_model

# a model for each kind of product: of one weight, of several at once, of pairs and of activations
QUICK = (dlrm, dcnv2, finalmlp, autoint, din, mmoe, wukong, blend)
QUICK_CONFIGS = tuple(module.Config for module in QUICK)


# of a blend with a logistic regression, which may weigh all, the products need not count
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            config,
            marks=(
                () if config in SOME and isinstance(config, QUICK_CONFIGS) else pytest.mark.slow
            ),
        )
        for config in MODELS
        if not getattr(config, "logistic", False)
    ],
    ids=named,
)
def test_every_model_in_few_bits(model: Any, prepared: Path, log: Path, tmp_path: Path) -> None:
    """Every product is seen, with its weight as it is used. With all in few bits, scores are near
    those of fp32.
    """
    scorer = served_model(prepared, log, tmp_path, model=model)
    batches = last(data.open(prepared), 600)
    seen = observe(scorer.model, scorer.scores, batches)
    assert seen.keys() == sites(scorer.model).keys()
    rows = dict.fromkeys(seen, 0)

    def see(site: str, parts: object, y: torch.Tensor) -> None:
        x, of = products.join_inputs(parts), seen[site]  # type: ignore[arg-type]
        expected = x @ of.weight_OI.t() + (0 if of.bias is None else of.bias)
        torch.testing.assert_close(
            y.float(), expected.relu() if of.relu else expected, rtol=1e-4, atol=1e-5
        )
        assert of.low <= float(x.min()) and float(x.max()) <= of.high
        rows[site] += len(x)

    with watched(scorer.model, see):
        for batch in batches:
            scorer.scores(batch)
    assert rows == {site: of.inputs for site, of in seen.items()}
    assert all(int(of.counts_H.sum()) == of.inputs * of.weight_OI.shape[1] for of in seen.values())
    variants = Variants(scorer, seen, tmp_path)
    parts = variants.parts("int4", "int8")
    assert {part.name for part in parts if part.kind == "product"} == seen.keys()
    few, batch = variants.score({part: part.steps[0] for part in parts}), batches[0]
    exact, found = scorer.scores(batch), few(batch)
    assert 0 < float((found - exact).abs().max()) < 0.2
    # fp32 between the products sums in another order, and may move an input to the next code
    for row in (0, 50):
        assert float((few(batch.part(row, row + 1)) - found[row]).abs().max()) < 1e-2
    assert bool((few(batch) == found).all())


@pytest.mark.parametrize(
    ("number", "formats"),
    [(1.0, ["int4", "int8", "fp16"]), (9e4, ["int4", "int8"]), (2e6, ["int8"])],
    ids=str,
)
def test_formats_in_which_a_row_is_not_finite_are_not_tried(
    number: float,
    formats: list[str],
    served: Scorer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row that no row of the log meets would show in no score, and fail the first request that
    meets it.
    """

    def changed(path: Path) -> dict[str, torch.Tensor]:
        found = tensors_of(path)
        if path.stem == "item":
            found["weight"] = found["weight"].clone()
            found["weight"][3, 2] = number
        return found

    monkeypatch.setattr("sparrow.apps.bits.variants.tensors_of", changed)
    parts = Variants(served, {}, tmp_path).parts("int4", "fp32")
    steps = {part.name: part.steps for part in parts}
    assert steps["item"] == (*formats, "fp32") and steps["user"] == ("int4", "int8", "fp16", "fp32")
