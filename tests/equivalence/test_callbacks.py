"""What goes along with a run: a member that uses every hook, on one and two ranks, through a kill
and a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparrow import checkpoint
from sparrow.core import Chunk
from sparrow.data.batches.loader import Share
from sparrow.distributed import World
from sparrow.trained.run import Run
from sparrow.training import Trainer, loop, runlog
from sparrow.training.callbacks import STAGES, Callback, Callbacks, Job, StepRecord, finish
from tests.equivalence.pool import Pool
from tests.runs import run_of
from tests.training.test_loop import Kill

SETTINGS: dict[str, Any] = {
    "model.name": "dlrm",
    "data.batch_size": 256,
    "loop.max_steps": 8,
    "log.every": 2,
}
SETTINGS |= {"checkpoint.every": 4, "loop.evaluate_every": 4, "loop.accumulate": 2}
TABLE = "of the member"


class Member(Callback):
    """Counts the examples of each rank, and keeps the counts in every way that a checkpoint has.
    It dies on every rank when so many steps were logged.
    """

    def __init__(self, job: Job, dies_after: int | None) -> None:
        self.job, self.hooks = job, list[str]()
        self.examples = torch.zeros(1, dtype=torch.int64)
        self.steps = 0
        self.dies_after = dies_after
        self.loaded: dict[str, Any] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        self.hooks.append("open")
        yield
        self.hooks.append("close")

    def initialize(self) -> None:
        self.hooks.append("initialize")

    def begin(self) -> None:
        assert any(p.abs().sum() > 0 for p in self.job.model.parameters())
        self.hooks.append("begin")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.hooks.append(f"{name} (")
        yield
        self.hooks.append(")")

    def look_ahead(self, step: int, waiting: Sequence[Share]) -> None:
        assert len(waiting) == 1
        self.hooks.append(f"look ahead of {step}")

    def after_step(self, step: StepRecord) -> None:
        assert len(step.shares) == len(step.outcome.scores) == 2 and not step.outcome.left_out
        self.examples += sum(share.batch.batch_size for share in step.shares)
        self.steps = step.number + 1
        self.hooks.append(f"after step {step.number}")

    def before_evaluation(self) -> None:
        self.hooks.append("before evaluation")

    def log_line(self) -> dict[str, float]:
        # a hook may wait for the other ranks
        total = self.job.ranks.world.all_sum("examples", self.examples.clone())
        return {"counted": float(total)}

    def notes(self) -> list[str]:
        if self.steps == self.dies_after:
            raise Kill
        return [f"{int(self.examples)} examples"]

    def before_save(self, step: int) -> dict[str, Any]:
        self.hooks.append(f"before save {step}")
        return {"member": {"step": step}}

    def state_dict(self) -> dict[str, Tensor]:
        return {"member": self.job.ranks.world.all_sum("examples", self.examples.clone())}

    def pieces(self) -> Iterable[Chunk]:
        rank = self.job.ranks.world.rank
        rows = {"count": self.examples.clone()}
        return [Chunk(table=TABLE, rows=(rank, rank + 1), columns=(0, 1), fields=rows)]

    def after_save(self, step: int) -> None:
        self.hooks.append(f"after save {step}")

    def load(self, saved: checkpoint.Checkpoint) -> None:
        world = self.job.ranks.world
        parts = {chunk.rows[0]: chunk for chunk in saved.chunks() if chunk.table == TABLE}
        self.examples = parts[world.rank].fields["count"].clone()
        self.loaded = {
            "member": saved.state["member"],
            "total": int(saved.part("progressive")["member"]),
        }
        self.hooks.append("load")

    def results(self) -> dict[str, Any]:
        return {"member": int(self.examples), "tables": {"member": "beside those of others"}}

    def after_run(self, results: Mapping[str, Any]) -> dict[str, Any]:
        self.hooks.append("after run")
        return {"after the run": results["member"]}


def trained(world: World, prepared: str, place: str, resume: bool, killed: bool) -> dict[str, Any]:
    """A run with a member, which dies after its sixth step if it is to."""
    made = loop.callbacks_of
    notes: list[str] = []

    def listen(event: str, values: dict[str, Any]) -> None:
        if event == "note":
            notes.append(values["text"])

    with pytest.MonkeyPatch.context() as patch:
        dies_after = 6 if killed else None
        patch.setattr(loop, "callbacks_of", lambda job: [*made(job), Member(job, dies_after)])
        run: Run = run_of(prepared, place, **SETTINGS)
        trainer = Trainer(run, resume=resume, listener=listen)
        member = trainer.callbacks.member(Member)
        try:
            results = finish(trainer.callbacks.finishing, trainer.fit())
        except Kill:
            results = {}
        trainer.job.ranks.world.leave()
    return {"hooks": member.hooks, "results": results, "loaded": member.loaded, "notes": notes}


STEP = ["load (", ")", "batch (", "forward (", ")", "backward (", ")", ")"]


def of_step(number: int) -> list[str]:
    """The hooks of a step of two batches. It looks ahead when the last one is about to be
    computed.
    """
    batch = STEP[2:]
    after = [
        *chain(*([f"{name} (", ")"] for name in STAGES[4:7])),
        "look (",
        f"after step {number}",
        ")",
    ]
    return [*STEP[:2], *batch, f"look ahead of {number}", *batch, *after]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.multi)])
def test_a_member_uses_every_hook(
    prepared: Path, tmp_path: Path, size: int, ranks: Callable[[int], Pool]
) -> None:
    def run(resume: bool, killed: bool) -> dict[str, Any]:
        arguments = (str(prepared), str(tmp_path / "run"), resume, killed)
        if size == 1:
            return trained(World(), *arguments)
        of_ranks = ranks(2).run(trained, *arguments)
        assert of_ranks[0]["hooks"] == of_ranks[1]["hooks"]
        return of_ranks[0]

    first = run(False, True)
    evaluated = ["before evaluation", "before save 4", "after save 4"]  # which is the best so far
    steps = [of_step(number) for number in range(8)]
    begun = ["open", "initialize", "begin", *chain(*steps[:4]), *evaluated]
    begun += ["before save 4", "after save 4"]
    # the context of a killed one is open
    assert first["hooks"] == [*begun, *chain(*steps[4:6])]
    last = run(True, False)
    assert last["hooks"] == going_on(steps, last["results"]["best_step"] == 8)
    assert last["loaded"] == {"member": {"step": 4}, "total": 4 * 2 * 256}
    assert last["results"]["member"] == 8 * 2 * 256 // size
    assert last["results"]["after the run"] == last["results"]["member"]
    assert last["results"]["tables"]["member"] and last["results"]["tables"]["bytes"]
    lines = [line for line in runlog.read(tmp_path / "run") if "loss" in line]
    assert [line["counted"] for line in lines] == [n * 2 * 256 for n in (2, 4, 6, 8)]
    assert f"{8 * 2 * 256 // size} examples" in last["notes"]


def going_on(steps: list[list[str]], is_best: bool) -> list[str]:
    """The hooks of a run that goes on from its fourth step. A better evaluation is saved by
    itself.
    """
    saved = ["before save 8", "after save 8"]
    return [
        "open",
        "load",
        *chain(*steps[4:]),
        "before evaluation",
        *saved * is_best,
        *saved,
        *saved,
        "close",
        "after run",
    ]


def test_two_members_cannot_keep_the_same_name() -> None:
    class One(Callback):
        def log_line(self) -> dict[str, float]:
            return {"one": 1.0}

    with pytest.raises(AssertionError, match=r"two callbacks have \['one'\]"):
        Callbacks([One(), One()]).log_line()


def test_what_was_opened_is_closed_where_a_later_member_fails_to_open() -> None:
    closed = []

    class Opened(Callback):
        @contextmanager
        def open(self) -> Iterator[None]:
            try:
                yield
            finally:
                closed.append(self)

    class Fails(Callback):
        @contextmanager
        def open(self) -> Iterator[None]:
            raise OSError("no place")
            yield

    opened = Opened()
    with pytest.raises(OSError, match="no place"):
        Callbacks([opened, Fails()]).open()
    assert closed == [opened]
