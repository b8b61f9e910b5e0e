"""Every model: resumed = uninterrupted, dedup = expanded, sharded = single, compiled = eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from sparrow import data
from sparrow.core import Batch
from sparrow.core.config import Family, to_dict
from sparrow.distributed import World
from sparrow.extensions.low_precision.layers import put_layers
from sparrow.features.schema import Column
from sparrow.layers.dropout import drawing
from sparrow.layers.kinds import Layers
from sparrow.losses import binary_cross_entropy
from sparrow.trained.build import tables_of
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.data.grouped import SCHEMA, made
from tests.equivalence import cases
from tests.equivalence.pool import Pool
from tests.models.test_models import EACH as EACH_MODEL
from tests.models.test_models import MODELS, batch, build, named
from tests.runs import run_of
from tests.training.test_loop import Kill, dies_at, same, tensors

FAMILY = Family("sparrow.models")
NAMES = FAMILY.names()
OTHERS = Layers(bias=False, norm="block", activation="hard-swish")
WITH_OTHERS = ("wukong", "masknet")  # of those that have all that the settings change
EACH = [
    *(pytest.param(*of.values, Layers(), marks=of.marks) for of in EACH_MODEL),
    *(
        pytest.param(*of.values, OTHERS, marks=of.marks)
        for of in EACH_MODEL
        if FAMILY.name_of(of.values[0]) in WITH_OTHERS and not of.values[0].history.lists
    ),
]


def named_with(given: Any) -> str:
    """A model, and whether its layers are others."""
    return ("others" if given == OTHERS else "") if isinstance(given, Layers) else named(given)


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clustered, with groups."""
    place = tmp_path_factory.mktemp("sessions")
    pq.write_table(made(110, 4), place / "log.parquet")
    schema = replace(SCHEMA, columns={**SCHEMA.columns, "row": Column(kind="numeric")})
    return data.prepare([place / "log.parquet"], place / "prepared", schema=schema).out


def settings(**more: Any) -> dict[str, Any]:
    return {"data.batch_size": 60, "data.shuffle": False, **more}


@pytest.mark.parametrize("name", NAMES)
def test_resumed_is_uninterrupted(sessions: Path, tmp_path: Path, name: str) -> None:
    """To the bit."""
    changes = {
        "model.name": name,
        "checkpoint.every": 3,
        **({} if name == "logistic" else {"model.dim": 4}),
    }
    runs = [run_of(sessions, tmp_path / place, **settings(**changes)) for place in ("whole", "cut")]
    whole = train(runs[0])
    with pytest.raises(Kill):
        train(runs[1], listener=dies_at(6))
    cut = train(runs[1], resume=True)
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "cut"))
    assert cut | {"run_dir": ""} == whole | {"run_dir": ""}


@pytest.mark.parametrize("config", MODELS, ids=named)
def test_dedup_is_expanded(sessions: Path, config: Any) -> None:
    """Logits and dense gradients to 1e-5: gradients of a row are added up over its samples
    first.
    """
    dataset = data.open(sessions)
    model = build(config, dataset.schema)
    for tables in tables_of(model):
        tables.mode = "deferred"  # and never updated
    loaders = [dataset.loader(50, dedup=dedup) for dedup in ("on", "off")]
    for loader in loaders:
        loader.with_rows()
    for one, other in zip(*loaders, strict=True):
        assert one.ids.inverse_B and not other.ids.inverse_B
        found = []
        for form in (one, other):
            model.zero_grad()
            with drawing(0, form.row_B):
                logits_BT = model(form)
            binary_cross_entropy(logits_BT, form).backward()
            rows = [
                one.grad_UD for tables in tables_of(model) for one in tables.gradients().values()
            ]
            found.append([logits_BT, *(p.grad for p in model.parameters()), *rows])
            for tables in tables_of(model):
                tables.discard()
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-5, atol=1e-5 * max(float(b.detach().abs().max()), 1e-3)
            )


@pytest.mark.multi
@pytest.mark.parametrize(("config", "layers"), EACH, ids=named_with)
def test_sharded_is_single(
    ranks: Callable[[int], Pool], sessions: Path, tmp_path: Path, config: Any, layers: Layers
) -> None:
    """With dedup between ranks; scores to 1e-5: gradients of shares of a batch are added up in
    another order.
    """
    name = FAMILY.name_of(config)
    # crosses over a transformer multiply rounding: from first rows that differ by 6e-8 of
    # themselves it makes rows that differ by 2e-6 with a rate of 1.0, and by 6e-8 with 0.3
    lr = 0.3 if name == "dcnv2" and config.history.lists else 1.0
    rules = {
        "tables.rule.name": "sgd",
        "tables.rule.lr": lr,
        "dense.name": "sgd",
        "dense.lr": 0.01,
    }  # Adam makes steps of rounding
    rules |= {"data.dedup": "on", "sharding.plan": "table_row_wise"}
    changes = settings(model=to_dict(config) | {"name": name}, layers=to_dict(layers), **rules)
    got = ranks(2).run(cases.fit, str(sessions), str(tmp_path / "run"), changes, False)
    before = torch.get_num_threads()
    want = cases.fit(
        World(), str(sessions), str(tmp_path / "one"), {**changes, "data.dedup": "off"}, False
    )
    torch.set_num_threads(before)
    for score in ("logloss", "ne", "calibration"):
        assert got[0]["results"]["valid"][score] == pytest.approx(
            want["results"]["valid"][score], rel=1e-5
        )
    for weight, value in want["dense"].items():
        largest = float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(got[0]["dense"][weight], value, rtol=1e-4, atol=1e-4 * largest)
    sides = [tables_of(restore(tmp_path / side).model) for side in ("run", "one")]
    for mine, other in zip(
        *([r for t in side for r in t.all_records()] for side in sides), strict=True
    ):
        torch.testing.assert_close(
            mine.fields["weight"], other.fields["weight"], rtol=1e-4, atol=1e-6
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of torch
@pytest.mark.parametrize(("config", "layers"), EACH, ids=named_with)
def test_compiled_is_eager(config: Any, layers: Layers) -> None:
    """Logits and dense gradients to 1e-5, for two sizes of batch. What drops is refused, see
    `check_compiles`.
    """
    config = replace(config, dropout=0.0) if hasattr(config, "dropout") else config
    model, found = build(config), []
    put_layers(model, layers)
    for tables in tables_of(model):
        tables.mode = "deferred"
    for run in (model, torch.compile(model, dynamic=True)):
        found.append([])
        for size in (64, 48):
            example: Batch = batch(size)
            model.zero_grad()
            logits_BT = run(example)
            binary_cross_entropy(logits_BT, example).backward()
            rows = [
                one.grad_UD for tables in tables_of(model) for one in tables.gradients().values()
            ]
            found[-1] += [logits_BT.detach(), *(p.grad.clone() for p in model.parameters()), *rows]
            for tables in tables_of(model):
                tables.discard()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-5, atol=1e-5 * max(float(b.detach().abs().max()), 1e-3)
        )
