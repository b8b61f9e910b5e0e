"""What goes along with a run: one protocol, and the list of its members. The loop knows no member
by name.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from sparrow.checkpoint import Checkpoint
from sparrow.core import Chunk
from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.loader import Share
from sparrow.embeddings import EmbeddingTables
from sparrow.embeddings.stores import External
from sparrow.trained.run import Run
from sparrow.training.feed import Feed
from sparrow.training.ranks import Ranks
from sparrow.training.rundir import RunDir

Kind = TypeVar("Kind", bound="Callback")

STAGES = (
    "load",
    "batch",
    "forward",
    "backward",
    "guard and clip",
    "dense optimizer",
    "table update",
    "look",
)
"""The parts of a step, in their order. "batch" holds the forward and the backward of one of the
batches of a step.
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step came to.

    Args:
        scores: the probabilities of this rank's share of each batch before the step, [B, T], on the
            host. None where a rank's are not finite.
        measures: what the model measures of each row, [B, M], where scores are; see
            `BringsMeasures`. None where it measures nothing.
        losses: float64 [2], the sums of loss * mass and of mass.
        norm: of all gradients together, or None when nobody asks.
        left_out: whether the step changed nothing.
        flags: how many ranks raised each.
    """

    scores: list[Tensor | None]
    measures: list[Tensor | None]
    losses: Tensor
    norm: float | None
    left_out: bool
    flags: list[float]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run as its callbacks see it.

    Args:
        run: the settings, with every choice made.
        dataset: the prepared log.
        model: on its device, with its tables.
        optimizer: of the dense weights.
        tables: the model's.
        feed: the batches.
        total_steps: how many steps the run has.
        ranks: the ranks.
        dir: the run's directory.
        say: tells a person.
        options: what else was asked for, by name.
        identity: what must be equal for a run to go on from a checkpoint.
        saved: the checkpoint from which the run goes on.
    """

    run: Run
    dataset: Dataset
    model: Any
    optimizer: Optimizer
    tables: Sequence[EmbeddingTables]
    feed: Feed
    total_steps: int
    ranks: Ranks
    dir: RunDir
    say: Callable[[str], None]
    options: Collection[str] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    saved: Checkpoint | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.device(self.run.device)

    @property
    def dense(self) -> list[Tensor]:
        """The dense weights that are trained."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step that was made.

    Args:
        number: how many steps were made before.
        epoch: the number of the epoch, from 0.
        examples: how many examples of the run came before.
        shares: this rank's share of each of its batches.
        outcome: what it came to.
    """

    number: int
    epoch: int
    examples: int
    shares: Sequence[Share]
    outcome: Outcome


class Callback:
    """Goes along with a run. Each hook does nothing unless a member says otherwise.

    All ranks call every hook in the same order, so that a hook may wait for the other ranks.
    """

    def open(self) -> AbstractContextManager[object]:
        """Returns a context from before the first weights are read to the end of the run."""
        return nullcontext()

    def initialize(self) -> None:
        """Gives a run that continues no checkpoint its first weights, where others than random ones
        are known.
        """

    def begin(self) -> None:
        """A run that continues no checkpoint has its first weights: all members have done
        `initialize`.
        """

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Returns a context around a part of a step. name: one of `STAGES`."""
        return nullcontext()

    def steps_ahead(self) -> int:
        """Returns for how many coming steps, at most `MOST_AHEAD`, rows are to be looked up before
        they are needed.
        """
        return 0

    def look_ahead(self, step: int, waiting: Sequence[Share]) -> None:
        """A step is about to compute, so that the batches of the next ones may be looked at.

        Args:
            step: its number.
            waiting: the batches of this step that nobody has looked up.
        """

    def after_step(self, step: StepRecord) -> None:
        """A step was made, or left out."""

    def before_evaluation(self) -> None:
        """The valid part is about to be scored."""

    def log_line(self) -> dict[str, float]:
        """Returns values for the next line of the run log."""
        return {}

    def notes(self) -> list[str]:
        """Returns what a person should know now, each once. Asked when the run log gets a line."""
        return []

    def before_save(self, step: int) -> dict[str, Any]:
        """Returns plain values that a checkpoint keeps, by name. What lies beside the checkpoint is
        written now.
        """
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns tensors that a checkpoint keeps, by a name that no other member has."""
        return {}

    def pieces(self) -> Iterable[Chunk | External]:
        """Returns rows that a checkpoint keeps, of this rank."""
        return ()

    def after_save(self, step: int) -> None:
        """A checkpoint was handed to the one who writes."""

    def load(self, saved: Checkpoint) -> None:
        """Continues from a checkpoint, after the model and its optimizer."""

    def results(self) -> dict[str, Any]:
        """Returns what the results of the run have of it. Dictionaries of several members are
        merged.
        """
        return {}

    def after_run(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Returns more results of a run, when all its files are complete and the trainer's tables
        are gone.

        A member that does something here has no tables of the trainer either.

        Args:
            results: so far.
        """
        return {}


class Callbacks(Callback):
    """Several callbacks as one, in their order."""

    def __init__(self, members: Sequence[Callback]) -> None:
        self.members: list[Callback] = []
        self._staged: list[Callback] = []
        for member in members:
            self.add(member)

    def add(self, member: Callback) -> None:
        """Let another one go along, after the others."""
        members = member.members if isinstance(member, Callbacks) else [member]
        self.members += members
        self._staged += [m for m in members if type(m).stage is not Callback.stage]

    @property
    def finishing(self) -> list[Callback]:
        """The members that do something after the run."""
        return [
            member for member in self.members if type(member).after_run is not Callback.after_run
        ]

    def member(self, kind: type[Kind]) -> Kind:
        """Returns the member of a class, for who knows that there is one."""
        return next(member for member in self.members if isinstance(member, kind))

    @override
    def open(self) -> AbstractContextManager[object]:
        """Returns the contexts of all members; the last one to be opened is closed first."""
        stack = ExitStack()
        with ExitStack() as opening:
            for member in self.members:
                opening.enter_context(member.open())
            stack = opening.pop_all()
        return stack

    @override
    def initialize(self) -> None:
        for member in self.members:
            member.initialize()

    @override
    def begin(self) -> None:
        for member in self.members:
            member.begin()

    @override
    def stage(self, name: str) -> AbstractContextManager[object]:
        if not self._staged:
            return nullcontext()
        stack = ExitStack()
        for member in self._staged:
            stack.enter_context(member.stage(name))
        return stack

    @override
    def steps_ahead(self) -> int:
        return max((member.steps_ahead() for member in self.members), default=0)

    @override
    def look_ahead(self, step: int, waiting: Sequence[Share]) -> None:
        for member in self.members:
            member.look_ahead(step, waiting)

    @override
    def after_step(self, step: StepRecord) -> None:
        for member in self.members:
            member.after_step(step)

    @override
    def before_evaluation(self) -> None:
        for member in self.members:
            member.before_evaluation()

    @override
    def log_line(self) -> dict[str, float]:
        return join_dicts(member.log_line() for member in self.members)

    @override
    def notes(self) -> list[str]:
        return [note for member in self.members for note in member.notes()]

    @override
    def before_save(self, step: int) -> dict[str, Any]:
        return join_dicts(member.before_save(step) for member in self.members)

    @override
    def state_dict(self) -> dict[str, Tensor]:
        return join_dicts(member.state_dict() for member in self.members)

    @override
    def pieces(self) -> Iterator[Chunk | External]:
        return chain.from_iterable(member.pieces() for member in self.members)

    @override
    def after_save(self, step: int) -> None:
        for member in self.members:
            member.after_save(step)

    @override
    def load(self, saved: Checkpoint) -> None:
        for member in self.members:
            member.load(saved)

    @override
    def results(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for member in self.members:
            _merge(merged, member.results())
        return merged


def finish(members: Sequence[Callback], results: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of a run with what its members do afterwards, when nobody has the trainer
    any more.
    """
    if members:
        gc.collect()  # the trainer's tables go before those of a checkpoint come
    for member in members:
        results = {**results, **member.after_run(results)}
    return results


def join_dicts(dictionaries: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns one dictionary of several, which have no name in common."""
    united: dict[str, Any] = {}
    for values in dictionaries:
        common = united.keys() & values.keys()
        assert not common, f"two callbacks have {sorted(common)}"
        united |= values
    return united


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            assert name not in into, f"two callbacks have results {name!r}"
            into[name] = value
