"""Equal rows of a group looked up once: the same training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.apps.report import report
from sparrow.core import KeyedJagged
from sparrow.embeddings import Direct, EmbeddingTables, Feature, TableSpec
from sparrow.kernels.rules import rowwise_adagrad
from sparrow.metrics import evaluate
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.data.grouped import SCHEMA, made
from tests.runs import run_of


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("dedup")
    pq.write_table(made(600, 6), place / "log.parquet")
    data.prepare([place / "log.parquet"], place / "prepared", schema=SCHEMA)
    return place / "prepared"


MODELS: dict[str, dict[str, Any]] = {
    "dcnv2": {}, "dlrm": {"model.name": "dlrm"},
    "history": {"model.name": "dlrm", "model.history.lists": ["history", "tags"]},
    "dcnv2 and history": {"model.history.lists": ["history", "tags"], "model.history.layers": 1},
}  # fmt: skip


def fit(log: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    return train(run_of(log, run_dir, **{"data.batch_size": 64, "model.dim": 4, **changes}))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_training_with_dedup_is_training_without(
    log: Path, tmp_path: Path, model: str, shuffle: bool
) -> None:
    """To 1e-5: gradients of a row are first added up over the samples of each unique one."""
    on, off = (
        fit(log, tmp_path / way, **{"data.dedup": way, "data.shuffle": shuffle, **MODELS[model]})
        for way in ("on", "off")
    )
    assert on["step"] == off["step"] > 20
    for one, other in zip(
        [*on["progressive"], on["valid"]], [*off["progressive"], off["valid"]], strict=True
    ):
        for name in ("logloss", "ne", "calibration"):
            assert one[name] == pytest.approx(other[name], rel=1e-5)
        assert one["auc"] == pytest.approx(other["auc"], abs=2e-5)  # goes by pairs
    weights = [restore(tmp_path / way).model.state_dict() for way in ("on", "off")]
    for name, value in weights[0].items():
        torch.testing.assert_close(
            value, weights[1][name], rtol=1e-4, atol=1e-4 * float(value.abs().max())
        )


def test_scores_do_not_depend_on_dedup(log: Path, tmp_path: Path) -> None:
    fit(log, tmp_path / "run")
    model, dataset = restore(tmp_path / "run"), data.open(log)
    found = [
        evaluate(model.scores, dataset.loader(50, split="valid", dedup=way))
        for way in ("on", "off")
    ]  # type: ignore[arg-type]
    assert found[0] == found[1]


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_tables_are_equal_to_the_bit_for_gradients_that_add_up_exactly(pooling: str) -> None:
    """Integers: sums of floats depend on their order, and with an inverse index samples of a unique
    row come first.
    """
    lists = [[3, 1, 3], [], [7], [1, 2]]
    inverse_B = torch.tensor([0, 0, 1, 2, 0, 3, 2, 2])
    plain = KeyedJagged.from_lists({"h": [lists[i] for i in inverse_B.tolist()]})
    unique = KeyedJagged.from_lists({"h": lists})
    deduped = KeyedJagged(
        keys=("h",),
        values_N=unique.values_N,
        lengths=unique.lengths,
        inverse_B={("h",): inverse_B},
        rows=(4,),
    )
    grad = torch.randint(-8, 8, (8, 4), generator=torch.Generator().manual_seed(0)).float()
    found = []
    for ids in (plain, deduped):
        spec = TableSpec(name="t", dim=4, addressing=Direct(9), rule=rowwise_adagrad.Config())
        tables = EmbeddingTables(
            [spec], [Feature(name="h", table="t", pooling=pooling)], seed=1, mode="fused"
        )  # type: ignore[arg-type]
        out = tables.pooled(ids)
        out.backward(grad * 6)  # sixths: of means of up to three
        found.append((out.detach(), tables.record("t").fields))
    assert torch.equal(found[0][0], found[1][0])
    for name, values in found[0][1].items():
        if pooling == "sum":
            assert torch.equal(values, found[1][1][name])
        else:
            torch.testing.assert_close(values, found[1][1][name], rtol=1e-6, atol=1e-7)


def test_the_report_says_what_groups_are_worth(log: Path, tmp_path: Path) -> None:
    fit(log, tmp_path / "run")
    text = report(tmp_path / "run", rows=0, split="valid").read_text()
    dataset = data.open(log)
    for group in ("user", "tags"):
        assert f"{dataset.factor(group):.2f}" in text
    assert text.count("once for each run</td>") == sum(map(dataset.pays, ("user", "tags"))) > 0
    fit(log, tmp_path / "off", **{"data.dedup": "off"})
    assert (
        "once for each run</td>" not in report(tmp_path / "off", rows=0, split="valid").read_text()
    )
