"""Second members of what a run is made of: what advances it, where dense weights are, and what a
model learns from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparrow import checkpoint
from sparrow.core import Batch
from sparrow.distributed import World
from sparrow.distributed.places import Place, put
from sparrow.models import BringsLoss
from sparrow.optimizers import adam
from sparrow.trained import build
from sparrow.trained.scorer import restore
from sparrow.training import Trainer
from sparrow.training.course import Advance, Course, Flags
from sparrow.training.ranks import Ranks
from tests.equivalence.pool import Pool
from tests.runs import run_of
from tests.training.test_loop import Kill, dies_at

SETTINGS: dict[str, Any] = {
    "model.name": "dlrm",
    "data.batch_size": 256,
    "loop.max_steps": 8,
    "log.every": 2,
}
SETTINGS |= {"checkpoint.every": 2, "loop.evaluate_every": 4}
HIDDEN = 6


# -- what advances a run ---------------------------------------------------------------------------


class Growing(Course):
    """Each step takes one batch more than the one before, up to three, and ends after six steps."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.batches = 0

    @property
    def total(self) -> int:
        return 100

    @property
    def finished(self) -> bool:
        return self.batches >= 1 + 2 + 3 + 3 + 3 + 3

    def advance(self, number: int, flags: Flags) -> Advance | None:
        shares = [share for _ in range(min(number + 1, 3)) for share in self.job.feed.take()]
        self.batches += len(shares)
        return self.learn(shares, number, flags) if shares else None

    def state_dict(self) -> dict[str, Tensor]:
        return {"growing": torch.tensor(self.batches)}

    def load(self, saved: checkpoint.Checkpoint) -> None:
        self.batches = int(saved.part("progressive")["growing"])

    def results(self) -> dict[str, Any]:
        return {"batches": self.batches}


def grown(world: World, prepared: str, place: str, resume: bool, killed: bool) -> dict[str, Any]:
    """A run that another course advances; a killed one dies after its fourth step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam.Config, "course", lambda config, *given: Growing(*given), raising=False)
        trainer = Trainer(
            run_of(prepared, place, **SETTINGS),
            resume=resume,
            listener=dies_at(4) if killed else None,
        )
        try:
            results = trainer.fit()
        except Kill:
            results = {}
        trainer.job.ranks.world.leave()
    dense = {name: value.clone() for name, value in trainer.job.model.state_dict().items()}
    return {
        "dense": dense,
        "step": trainer.progress.step,
        "examples": trainer.progress.examples,
        "batches": results.get("batches"),
    }


def test_another_course_advances_a_run_and_goes_on_after_a_kill(
    prepared: Path, tmp_path: Path, ranks: Callable[[int], Pool]
) -> None:
    whole = grown(World(), str(prepared), str(tmp_path / "whole"), False, False)
    assert (whole["step"], whole["batches"], whole["examples"]) == (6, 15, 15 * 256)
    grown(World(), str(prepared), str(tmp_path / "killed"), False, True)
    resumed = grown(World(), str(prepared), str(tmp_path / "killed"), True, False)
    assert resumed["step"] == 6 and resumed["batches"] == 15
    assert all(torch.equal(value, whole["dense"][name]) for name, value in resumed["dense"].items())
    on_two = ranks(2).run(grown, str(prepared), str(tmp_path / "two"), False, False)
    for name, value in on_two[0]["dense"].items():
        torch.testing.assert_close(value, whole["dense"][name], rtol=1e-4, atol=1e-5)


# -- where dense weights are -----------------------------------------------------------------------


class Hidden(torch.autograd.Function):
    """x [B, C] times a weight [H, C] of which each host has some rows: [B, H].

    Members of a host have the same rows, and each knows the gradient of its share of the batch
    alone.
    """

    @staticmethod
    def forward(ctx: Any, x_BC: Tensor, weight_HC: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.sizes = group, _sizes(len(x_BC), group)
        x_NC = _gather(x_BC, ctx.sizes, group)
        ctx.save_for_backward(x_NC, weight_HC)
        parts = _gather(x_NC @ weight_HC.T, [len(x_NC)] * dist.get_world_size(group), group)
        y_NH = torch.cat(parts.split(len(x_NC)), dim=1)
        return y_NH.split(ctx.sizes)[dist.get_rank(group)]

    @staticmethod
    def backward(ctx: Any, grad_BH: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        x_NC, weight_HC = ctx.saved_tensors
        grad_NH = _gather(grad_BH.contiguous(), ctx.sizes, ctx.group)
        own = dist.get_rank(ctx.group) * len(weight_HC)
        return None, grad_NH[:, own : own + len(weight_HC)].T @ x_NC, None


def _sizes(rows: int, group: Any) -> list[int]:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([rows]), group=group)
    return [int(size) for size in sizes]


def _gather(rows: Tensor, sizes: Sequence[int], group: Any) -> Tensor:
    padded = torch.zeros(max(sizes), rows.shape[1])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class Lifted(nn.Module):
    """A model with a further layer on the numbers, whose rows may be divided among hosts."""

    def __init__(self, inner: nn.Module, numbers: int) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.randn(HIDDEN, numbers) / 10)
        self.group: Any = None

    def forward(self, batch: Batch) -> Tensor:
        if self.group is None:
            y_BH = batch.dense_BC @ self.weight.T
        else:
            y_BH = Hidden.apply(batch.dense_BC, self.weight, self.group)
        logits: Tensor = self.inner(batch) + torch.relu(y_BH).sum(1, keepdim=True)
        return logits


@contextmanager
def lifted() -> Iterator[None]:
    """Every model has the further layer; on many ranks its rows are divided."""
    plain, alone = build.untrained, Ranks.build

    def untrained(run: Any, schema: Any, *where: Any) -> nn.Module:
        model = plain(run, schema, *where)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return Lifted(model, len(schema.numbers))

    def divided(ranks: Ranks, run: Any, schema: Any) -> Any:
        model = alone(ranks, run, schema)
        world, layer = ranks.world, model.model
        if world.size > 1:
            apiece = HIDDEN // world.hosts
            rows = (world.host * apiece, (world.host + 1) * apiece)
            layer.weight = put(
                nn.Parameter(layer.weight[slice(*rows)].detach().clone()),
                Place(dim="local", rows=rows),
            )
            layer.group = world._groups["", "host"]
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "untrained", untrained)
        patch.setattr(Ranks, "build", divided)
        yield


def divided_run(
    world: World, prepared: str, place: str, resume: bool, steps: int
) -> dict[str, Any]:
    """A run of a model whose further layer is divided among hosts; its gradients are clipped by
    their common norm.
    """
    with lifted():
        settings = {
            **SETTINGS,
            "loop.clip_norm": 0.05,
            "loop.max_steps": steps,
            "schedule.decay": "constant",
        }
        trainer = Trainer(run_of(prepared, place, **settings), resume=resume)
        results = trainer.fit()
        trainer.job.ranks.world.leave()
        shape = list(trainer.job.model.model.weight.shape)
    return {"valid": results["valid"], "shape": shape}


@pytest.mark.multi
def test_rows_of_a_dense_weight_are_on_other_hosts(
    prepared: Path, tmp_path: Path, ranks: Callable[[int], Pool]
) -> None:
    """Their gradient is summed within a host, their norm counts once, and who has them saves
    them.
    """
    alone = divided_run(World(), str(prepared), str(tmp_path / "alone"), False, 8)
    four = ranks(4)
    begun = four.run(divided_run, str(prepared), str(tmp_path / "four"), False, 4)
    ended = four.run(divided_run, str(prepared), str(tmp_path / "four"), True, 8)
    assert begun[0]["shape"] == ended[3]["shape"] == [HIDDEN // 2, alone["shape"][1]]
    assert ended[0]["valid"]["ne"] == pytest.approx(alone["valid"]["ne"], rel=1e-5)
    with lifted():
        one, other = (restore(tmp_path / name) for name in ("alone", "four"))  # by one process
    name = "model.weight"
    weights = [scorer.model.state_dict()[name] for scorer in (one, other)]
    assert weights[0].shape == (HIDDEN, alone["shape"][1])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)
    saved = checkpoint.load(tmp_path / "four" / "checkpoints")
    assert {f"{name}[0:3]", f"{name}[3:6]"} <= set(saved.part("dense"))
    assert {f"{name}:exp_avg[0:3]", f"{name}:exp_avg[3:6]", f"{name}:step"} <= set(
        saved.part("optimizer")
    )
    # a run of one process goes on with what four have saved
    resumed = divided_run(World(), str(prepared), str(tmp_path / "four"), True, 10)
    assert resumed["shape"] == alone["shape"]


# -- what a model learns from ----------------------------------------------------------------------


class Balanced(nn.Module):
    """A model that also learns that its logits are small."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Batch) -> Tensor:
        logits: Tensor = self.inner(batch)
        return logits

    def loss(
        self, logits_BT: Tensor, batch: Batch, of_run: Callable[[Tensor, Batch], Tensor]
    ) -> Tensor:
        return of_run(logits_BT, batch) + 10.0 * logits_BT.square().mean()


def test_a_model_brings_its_loss(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Trainer(run_of(prepared, tmp_path / "plain", **SETTINGS))
    plain.fit()
    untrained = build.untrained
    monkeypatch.setattr(build, "untrained", lambda *given: Balanced(untrained(*given)))
    trainer = Trainer(run_of(prepared, tmp_path / "balanced", **SETTINGS))
    assert isinstance(trainer.job.model.model, BringsLoss)
    trainer.fit()
    batch = plain.job.dataset.first(512)
    with torch.no_grad():
        large, small = (
            float(of.job.model.eval()(batch).square().mean()) for of in (plain, trainer)
        )
    assert small < 0.8 * large
