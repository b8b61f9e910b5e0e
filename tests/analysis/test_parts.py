from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparrow import data
from sparrow.analysis import parts
from sparrow.analysis.scores import Rows, score_part
from sparrow.apps.report import report
from sparrow.extensions.blend import model as blend
from sparrow.trained.scorer import restore
from tests.extensions.blend.test_model import log, run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blend")
    run(folder, log(folder, signal=1.5, rows=3000), **{"loop.epochs": 2, "loop.evaluate_every": 2})
    return folder


def test_parts_alone_make_the_blend(place: Path) -> None:
    """The weighted mean of their logits is the blend's, row by row."""
    restored, dataset = restore(place / "run"), data.open(place / "prepared")
    rows = score_part(restored, dataset, "test", lambda *_: None)
    scores = parts.Alone(restored, dataset).scores("test")
    assert len(scores) == 2 + blend.available()
    weights = [float(w) for w in restored.model.model.weights_PT[:, 0]]
    logits = sum(
        w * torch.logit(p_N.double()) for w, p_N in zip(weights, scores.values(), strict=False)
    )
    logits = logits + (1 - sum(weights)) * float(restored.model.offset_T[0])
    torch.testing.assert_close(torch.sigmoid(logits), rows.scores_N.double(), atol=1e-5, rtol=1e-4)


def test_the_report_says_which_is_better(place: Path) -> None:
    html = report(place / "run", rows=0).read_text(encoding="utf-8")
    assert "test: logistic regression alone" in html and "valid: logistic regression alone" in html
    assert "no part of the blend is better alone" in html or "alone would be better: NE" in html


def test_words() -> None:
    """A part that knows more than the blend is named, and one that does not is not."""
    random = torch.Generator().manual_seed(0)
    truth_N = torch.rand(4000, generator=random)
    labels_N = (torch.rand(4000, generator=random) < truth_N).float()
    half_N = (truth_N + 0.5) / 2
    rows = Rows(scores_N=half_N, labels_N=labels_N, weights_N=None, sessions_N=None)
    half = torch.full((4000,), 0.5)
    sentence = parts.in_words("test", rows, {"boosted trees": truth_N, "logistic regression": half})
    assert sentence.startswith("On test, boosted trees alone would be better: NE 0.7")
    assert sentence.endswith("below the blend's.")
    sign_N = torch.where(torch.arange(4000) % 2 > 0, 1.0, -1.0)
    sign_N[:8] = 1
    close_N = half_N + 0.002 * (labels_N - 0.5) * sign_N
    assert parts.in_words("test", rows, {"trees": close_N}).endswith(
        "within the noise of these rows."
    )
    none = "On test, no part of the blend is better alone."
    assert parts.in_words("test", rows.by(truth_N), {"trees": half_N}) == none
