"""What a step changes: clipping, weights of rows, gradients that are not finite."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow import data
from sparrow.core import Batch
from sparrow.data.batches.loader import Share
from sparrow.embeddings import TableChoices
from sparrow.kernels.formats import mxfp4, mxint8
from sparrow.kernels.rules import sgd
from sparrow.layers.precision import Precision
from sparrow.models import dcnv2
from sparrow.optimizers import sgd as dense_sgd
from sparrow.trained.run import Loop, Schedule
from sparrow.training import Trainer
from tests.runs import learn, small_run


def shares(*batches: Batch) -> list[Share]:
    """A step's batches as one rank takes them."""
    return [Share(batch, batch.batch_size, batch.mass) for batch in batches]


def test_a_nonfinite_gradient_leaves_tables_alone(prepared: Path, tmp_path: Path) -> None:
    trainer = Trainer(small_run(prepared, tmp_path / "run"))
    before = [r.weight.clone() for t in trainer.job.tables for r in t.all_records()]
    next(trainer.job.model.model.head.parameters()).register_hook(lambda g: g * float("inf"))
    learn(trainer, shares(next(iter(data.open(prepared).loader(256)))))
    after = [r.weight for t in trainer.job.tables for r in t.all_records()]
    assert trainer.progress.skipped == 1
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


NARROW: dict[str, dict[str, Any]] = {
    **{name: {"precision": Precision(name)} for name in ("mxfp8", "mxint8", "mx4", "fp8")},
    "rows in mxfp4": {"tables": TableChoices(format=mxfp4.Config(), rule=sgd.Config(lr=0.1))},
    "both": {
        "precision": Precision("mxfp6", weights="split"),
        "tables": TableChoices(format=mxint8.Config(), rule=sgd.Config(lr=0.1)),
    },
}


def state(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of what a step changes: weights, what the optimizer keeps, rows."""
    kept = [
        t
        for of in trainer.job.optimizer.state.values()
        for t in of.values()
        if isinstance(t, torch.Tensor)
    ]
    rows = [
        t
        for tables in trainer.job.tables
        for record in tables.all_records()
        for t in record.fields.values()
    ]
    return [t.detach().clone() for t in (*trainer.job.dense, *kept, *rows)]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", NARROW)
def test_a_nan_in_few_bits_leaves_the_batch_out(
    prepared: Path, tmp_path: Path, name: str, where: str
) -> None:
    """Most formats of blocks have no code for it: the scale says it, of a block that is NaN
    throughout.

    It is in one number of a batch, or in what flows back to one row. Weights, optimizer and rows
    are those of before.
    """
    trainer = Trainer(
        small_run(prepared, tmp_path / "run", model=dcnv2.Config(dim=4, deep=(8,)), **NARROW[name])
    )
    batches = iter(data.open(prepared).loader(256))
    learn(trainer, shares(next(batches)))
    batch, before = next(batches), state(trainer)
    spoilt, handles = batch, []
    if where == "forward":
        spoilt = dataclasses.replace(batch, dense_BC=batch.dense_BC.clone())
        spoilt.dense_BC[7, 1] = torch.nan
    else:

        def spoil(grad: torch.Tensor) -> torch.Tensor:
            return torch.where(torch.arange(len(grad))[:, None] == 7, torch.nan, grad)

        def hook(layer: object, inputs: object, y: torch.Tensor) -> None:
            y.register_hook(spoil)

        handles.append(trainer.job.model.model.deep.register_forward_hook(hook))
    learn(trainer, shares(spoilt))
    assert trainer.progress.skipped == 1
    assert all(torch.equal(one, two) for one, two in zip(state(trainer), before, strict=True))
    for handle in handles:
        handle.remove()
    learn(trainer, shares(batch))
    after = state(trainer)
    assert trainer.progress.skipped == 1 and all(t.float().isfinite().all() for t in after)
    assert not all(torch.equal(one, two) for one, two in zip(after, before, strict=True))


def test_clipping_bounds_the_whole_step(prepared: Path, tmp_path: Path) -> None:
    """With plain SGD at lr 1 the step's length is the clipped norm, over dense weights and rows
    together.
    """
    changes = {
        "dense": dense_sgd.Config(lr=1.0),
        "tables": TableChoices(rule=sgd.Config(lr=1.0)),
        "schedule": Schedule(),
    }
    trainer = Trainer(small_run(prepared, tmp_path / "run", loop=Loop(clip_norm=1e-3), **changes))
    weights = [*trainer.job.dense, *(r.weight for t in trainer.job.tables for r in t.all_records())]
    before = [w.detach().clone() for w in weights]
    learn(trainer, shares(next(iter(data.open(prepared).loader(256)))))
    moved = torch.stack(
        [(a.detach() - b).double().norm() for a, b in zip(weights, before, strict=True)]
    ).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-3)


def test_a_step_of_weight_zero_changes_nothing(prepared: Path, tmp_path: Path) -> None:
    trainer = Trainer(
        small_run(
            prepared,
            tmp_path / "run",
            dense=dense_sgd.Config(lr=1.0),
            tables=TableChoices(rule=sgd.Config(lr=1.0)),
        )
    )
    before = [p.detach().clone() for p in trainer.job.dense]
    batch = next(iter(data.open(prepared).loader(256)))
    learn(trainer, shares(dataclasses.replace(batch, weights_B=torch.zeros(256))))
    assert all(torch.equal(a, b) for a, b in zip(trainer.job.dense, before, strict=True))


def test_weights_count_alike_however_they_are_batched(prepared: Path, tmp_path: Path) -> None:
    batch = next(iter(data.open(prepared).loader(256)))
    weights_B = torch.linspace(0, 2, 256)
    stream = iter(data.open(prepared).loader(64))  # four batches of the same 256 rows
    parts = [dataclasses.replace(next(stream), weights_B=w) for w in weights_B.split(64)]
    plain = {"dense": dense_sgd.Config(lr=0.1), "tables": TableChoices(rule=sgd.Config(lr=0.1))}
    one, four = (
        Trainer(small_run(prepared, tmp_path / d, loop=Loop(accumulate=4), **plain))
        for d in ("one", "four")
    )
    learn(one, shares(dataclasses.replace(batch, weights_B=weights_B)))
    learn(four, shares(*parts))
    for a, b in zip(one.job.dense, four.job.dense, strict=True):
        torch.testing.assert_close(a, b)
