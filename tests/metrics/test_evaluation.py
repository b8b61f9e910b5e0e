from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor

from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.metrics import (
    METRICS,
    Metric,
    _columns,
    across,
    ece,
    evaluate,
    evaluate_labels,
    gauc,
    groups,
    topk,
)


def cut(
    scores: Tensor,
    labels: Tensor | None,
    weights: Tensor | None = None,
    sessions: Tensor | None = None,
) -> list:
    def part(t: Tensor | None, low: int) -> Tensor | None:
        return None if t is None else t[low : low + 300]

    return [
        Batch(
            dense_BC=scores[low : low + 300, None],
            ids=KeyedJagged.from_lists({}),
            labels_BT=None if labels is None else labels[low : low + 300, None],
            weights_B=part(weights, low),
            session_B=part(sessions, low),
        )
        for low in range(0, len(scores), 300)
    ]


@pytest.fixture
def rows() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    scores = torch.rand(2000)
    return scores, torch.bernoulli(scores), torch.rand(2000) + 0.5, torch.arange(2000) // 7


@pytest.mark.parametrize("flat", [False, True])
def test_all_batches_count(rows: tuple, flat: bool) -> None:
    scores, labels, weights, sessions = rows
    got = evaluate(lambda b: b.dense_BC[:, 0] if flat else b.dense_BC, cut(*rows), exact=True)
    assert got["auc"] == pytest.approx(
        roc_auc_score(labels, scores, sample_weight=weights), abs=1e-9
    )
    assert got["logloss"] == pytest.approx(
        log_loss(labels, scores.double(), sample_weight=weights), rel=1e-6
    )
    grouped = gauc(scores, labels, sessions, weights)
    assert (got["gauc"], got["gauc_groups"]) == (grouped.value, grouped.counted)
    assert 0 < got["gauc_groups"] < 2000 / 7
    assert got["examples"] == 2000
    assert got["calibration"] == pytest.approx(
        float((weights * scores).sum() / (weights * labels).sum()), rel=1e-5
    )


def test_rows_are_judged_in_pieces(rows: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory is bounded: no piece has more rows than it may, but for ties and groups, and
    all figures stay.
    """
    scores, labels, weights, sessions = rows
    # many ties
    scores = torch.where(torch.arange(len(scores)) % 3 > 0, scores, (scores * 20).round() / 20)
    batches, sizes = cut(scores, labels, weights, sessions), list[int]()
    whole = evaluate(lambda b: b.dense_BC, batches)
    for module in (across, groups, _columns):
        monkeypatch.setattr(module, "PIECE", 150)
    for module, name in ((across, "auc"), (groups, "auc_by_group"), (groups, "topk_by_group")):
        judge = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *of, judge=judge: sizes.append(len(of[0])) or judge(*of)
        )
    got = evaluate(lambda b: b.dense_BC, batches)
    assert got == pytest.approx(whole, rel=1e-12) and got.keys() == whole.keys()
    assert len(sizes) == 3 * 14 and sum(sizes) == 3 * 2000 and max(sizes) < 400
    alike = evaluate(lambda b: b.dense_BC * 0 + 0.5, batches)  # one score cannot be cut
    assert (alike["auc"], alike["gauc"]) == pytest.approx((0.5, 0.5))


PEAK = """
import re, sys
import torch
from sparrow.core import Batch, KeyedJagged
from sparrow.core.memory import keep_freed_memory
from sparrow.metrics import evaluate
from sparrow.metrics.evaluation import bytes_of

keep_freed_memory()
torch.set_num_threads(1)


def peak(rows):
    for low in range(0, rows, 4096):
        scores = torch.rand(4096, 1)
        work = torch.ones(1 << 20)  # what a model would take, and free again
        labels, sessions = torch.bernoulli(scores), torch.arange(low, low + 4096) // 7
        yield Batch(dense_BC=scores, ids=KeyedJagged.from_lists({}), labels_BT=labels, session_B=sessions)


def judged(rows):
    evaluate(lambda batch: batch.dense_BC, peak(rows))
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])


before, rows = judged(4096), int(sys.argv[1]) // 4096 * 4096
print(judged(rows) - before, bytes_of(rows, 1))
"""


def measure_peak(rows: int) -> tuple[int, int]:
    """Returns bytes that were taken and those that are counted."""
    told = subprocess.run(
        [sys.executable, "-c", PEAK, str(rows)], check=True, capture_output=True, text=True
    ).stdout
    took, counted = map(int, told.split())
    return took, counted


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="only Linux tells the largest memory of a process",
)
@pytest.mark.parametrize(
    "rows", [100_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (2_000_000, 10_000_000))]
)
def test_memory_is_what_the_preflight_counts(rows: int) -> None:
    """To 15 % and a few MB of the program. What batches free is used again, though rows are kept
    between them.
    """
    peaks = []
    for _ in range(3):  # where threads wait for a core, more is held at a time
        peaks.append(measure_peak(rows))
        took, counted = min(peaks)
        if took <= 1.05 * counted + 8e6:
            break
    assert took <= 1.05 * counted + 8e6 and counted <= 1.15 * took + 16e6, peaks


def test_within_groups(rows: tuple) -> None:
    scores, labels, weights, sessions = rows
    got = evaluate(lambda b: b.dense_BC, cut(*rows), ks=(3, 1))
    assert {name: got[name] for name in got if "@" in name or name == "mrr"} == {
        name: value
        for name, value in topk(scores, labels, sessions, weights, (1, 3)).items()
        if "groups" not in name
    }
    assert "recall@5" not in got
    without = sum(not labels[sessions == session].any() for session in sessions.unique())
    assert got["groups_without_positive"] == without > 0
    assert got["ranked_groups"] == len(sessions.unique()) - without > got["gauc_groups"]
    calls = []
    with pytest.raises(UserError, match="k: 0"):
        evaluate(calls.append, cut(*rows), ks=[0])  # type: ignore[arg-type]
    assert not calls


def test_streaming_has_no_groups_and_bins(rows: tuple) -> None:
    scores, labels, weights, _ = rows
    exact, streamed = (evaluate(lambda b: b.dense_BC, cut(*rows), exact=e) for e in (True, False))
    assert exact["ece"] == pytest.approx(ece(scores, labels, weights), rel=1e-12)
    for name, near in (("auc", 1e-3), ("ece", 3e-4)):
        assert streamed.pop(name) == pytest.approx(exact.pop(name), abs=near)
    assert streamed == {name: exact[name] for name in streamed}
    assert set(exact) - set(streamed) > {"gauc", "mrr", "recall@5"}


def test_a_missing_weight_is_one(rows: tuple) -> None:
    scores, labels, weights, _ = rows
    weights[:300] = 1
    batches = cut(scores, labels, weights)
    mixed = cut(scores[:300], labels[:300]) + batches[1:]
    assert evaluate(lambda b: b.dense_BC, mixed) == evaluate(lambda b: b.dense_BC, batches)
    assert "gauc" not in evaluate(lambda b: b.dense_BC, mixed)


def test_gradients_are_not_kept(rows: tuple) -> None:
    weight = torch.ones((), requires_grad=True)
    grads = []

    def score(batch: Batch) -> Tensor:
        scores = weight * batch.dense_BC
        grads.append(scores.requires_grad)
        return scores

    evaluate(score, cut(*rows))
    assert not any(grads)


@pytest.mark.parametrize("exact", [False, True])
def test_nothing_to_measure(rows: tuple, exact: bool) -> None:
    scores, labels, *_ = rows
    with pytest.raises(UserError, match="no labels"):
        evaluate(lambda b: b.dense_BC, cut(scores, None), exact=exact)
    with pytest.raises(UserError, match="no rows"):
        evaluate(lambda b: b.dense_BC, cut(scores[:0], labels[:0]), exact=exact)
    with pytest.raises(UserError, match="one score"):
        evaluate(lambda b: b.dense_BC.expand(-1, 2), cut(scores, labels), exact=exact)
    ones = evaluate(lambda b: b.dense_BC, cut(scores, torch.ones_like(labels)), exact=exact)
    assert math.isnan(ones["auc"])


@pytest.mark.parametrize("exact", [False, True])
def test_rows_that_lack_a_label_are_in_none_of_its_metrics(rows: tuple, exact: bool) -> None:
    """A label's figures are those of the rows that have it, to the last bit; one that nobody has
    has none.
    """
    labels = rows[1]
    lacks = torch.rand(2000) < 0.4
    three = torch.stack(
        [labels.where(~lacks, torch.nan), labels, torch.full_like(labels, torch.nan)], 1
    )
    batches = [
        dataclasses.replace(batch, labels_BT=of)
        for batch, of in zip(cut(*rows), three.split(300), strict=True)
    ]
    found = evaluate_labels(lambda b: b.dense_BC.expand(-1, 3), batches, [0, 1, 2], exact=exact)
    assert found[1] == evaluate(lambda b: b.dense_BC, cut(*rows), exact=exact)
    kept = [None if part is None else part[~lacks] for part in rows]
    alone = evaluate(lambda b: b.dense_BC, cut(*kept), exact=exact)
    assert found[0].keys() == alone.keys() and found[0]["examples"] == int((~lacks).sum())
    for name, value in alone.items():
        assert found[0][name] == pytest.approx(value, rel=1e-12)  # batches are cut elsewhere
    assert found[2]["examples"] == 0 and math.isnan(found[2]["ne"]) and math.isnan(found[2]["auc"])
    with pytest.raises(UserError, match="no rows"):
        evaluate(lambda b: b.dense_BC.expand(-1, 3), batches, label=2)


@pytest.mark.parametrize("exact", [False, True])
def test_several_labels_are_judged_in_one_pass(rows: tuple, exact: bool) -> None:
    scores, _, weights, sessions = rows
    other = torch.bernoulli(scores / 3)
    batches = [
        dataclasses.replace(batch, labels_BT=torch.cat([batch.labels_BT, o[:, None]], 1))
        for batch, o in zip(cut(*rows), other.split(300), strict=True)
    ]
    calls = []

    def score(batch: Batch) -> Tensor:
        calls.append(batch)
        return torch.cat([batch.dense_BC, batch.dense_BC / 3], 1)

    found = evaluate_labels(score, batches, [1, 0], exact=exact)
    assert len(calls) == len(batches)
    assert found == [evaluate(score, batches, label=label, exact=exact) for label in (1, 0)]
    assert found[1] == evaluate(lambda b: b.dense_BC, cut(*rows), exact=exact)
    assert found[0] == evaluate(
        lambda b: b.dense_BC / 3, cut(scores, other, weights, sessions), exact=exact
    )
    assert ("gauc" in found[0]) == exact
    with pytest.raises(UserError, match="one score"):
        evaluate_labels(score, batches, [0, 2], exact=exact)


class Measuring:
    """A model that has scored nothing yet; it measures the first two of its inputs."""

    measures = ("sums", "counts")

    def score(self, batch: Batch) -> Tensor:
        self.measured_BM = batch.dense_BC[:, :2]
        return batch.dense_BC[:, 2:]

    def measure(self) -> Tensor:
        return self.measured_BM


def test_what_a_model_measures_counts_by_weight_and_of_each_label_where_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metric = Metric(
        name="mean",
        title="mean",
        better="lower",
        measures=("sums", "counts"),
        value=lambda sums, counts: sums / counts,
    )
    monkeypatch.setitem(METRICS, "mean", metric)
    other = dataclasses.replace(metric, name="other", measures=("sums", "tokens"))
    monkeypatch.setitem(METRICS, "other", other)
    random = torch.Generator().manual_seed(3)
    columns_BC = torch.rand(700, 4, generator=random)
    labels_BT = (torch.rand(700, 2, generator=random) < 0.4).float()
    labels_BT[torch.rand(700, generator=random) < 0.3, 1] = math.nan
    weights_B = torch.rand(700, generator=random)
    whole = Batch(
        dense_BC=columns_BC,
        ids=KeyedJagged.from_lists({}),
        labels_BT=labels_BT,
        weights_B=weights_B,
    )
    batches = [whole.part(0, 300), whole.part(300, 300), whole.part(300, 700)]
    model = Measuring()
    for exact in (True, False):
        results = evaluate_labels(model.score, batches, [0, 1], exact=exact, model=model)
        for t, result in enumerate(results):
            known_B = ~labels_BT[:, t].isnan()
            weight_N = weights_B[known_B].double()
            sums, counts = (weight_N @ columns_BC[known_B, m].double() for m in (0, 1))
            assert result["mean"] == pytest.approx(float(sums / counts), rel=1e-12)
            assert "other" not in result
        assert results[0]["mean"] != results[1]["mean"]
    assert "mean" not in evaluate_labels(model.score, batches, [0])[0]  # nobody said who measures
