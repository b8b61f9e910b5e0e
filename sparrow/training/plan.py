"""What extensions say of a run before it has a model: whether it can be, what it chooses, what it
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sparrow.core import Batch
from sparrow.core.extensions import all_plan_modules, plan_modules
from sparrow.data.batches.dataset import Dataset
from sparrow.embeddings import Component
from sparrow.trained.run import Run


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run before it has a model.

    Args:
        run: the settings.
        dataset: the prepared log.
        ranks: how many the job has.
        per_host: how many of them share a host.
        options: what else was asked for, by name: "probe", "profile", "baseline".
        say: tells a person.
    """

    run: Run
    dataset: Dataset
    ranks: int = 1
    per_host: int = 1
    options: Collection[str] = ()
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, kw_only=True)
class Need:
    """Memory of the host that an extension takes.

    Args:
        part: what it is for.
        size: bytes.
        turn: what the run does meanwhile, a member of `preflight.IN_TURN`; "" where it is taken
            always.
        remedy: what to do where the run would fit without it.
    """

    part: str
    size: int
    turn: str = ""
    remedy: str = ""


class PlanHooks:
    """What an extension says. Its module `plan` has a subclass with the name `Hooks`."""

    def resolve(self, plan: Plan) -> Run:
        """Returns the run with the extension's own choices made. The other choices are not made
        yet.

        Raises:
            UserError: when settings do not fit each other.
        """
        return plan.run

    def check(self, plan: Plan, components: Callable[[], Sequence[Component]]) -> None:
        """Check that the run can be.

        Args:
            plan: with every choice made.
            components: finds the rows of all tables.

        Raises:
            UserError: when it cannot. It names the setting, its value and the remedy.
        """

    def identity(self, plan: Plan) -> Mapping[str, Any]:
        """Returns, as plain data, what must be equal for a run to go on from a checkpoint."""
        return {}

    def needs(self, plan: Plan, components: Sequence[Component], batch: Batch) -> Iterable[Need]:
        """Returns what the extension takes of memory.

        Args:
            plan: with every choice made.
            components: the rows of all tables.
            batch: some rows of the log.
        """
        return ()

    def remedy(self, plan: Plan, fits: Callable[[Run], bool]) -> str:
        """Returns what the extension would do for a run that does not fit, or "". It may not go
        along with the run.

        Args:
            plan: the run.
            fits: whether another one would.
        """
        return ""

    def large_table(self) -> str:
        """Returns what may help a run without a device whose largest table is too large, or ""."""
        return ""


def hooks_of(plan: Plan) -> list[PlanHooks]:
    """Returns the hooks of the extensions that go along with a run."""
    return [cast(PlanHooks, module.Hooks()) for module in plan_modules(plan.run, plan.options)]


def hooks_of_all() -> list[PlanHooks]:
    """Returns the hooks of all extensions."""
    return [cast(PlanHooks, module.Hooks()) for module in all_plan_modules()]


def identities(plan: Plan) -> dict[str, Any]:
    """Returns extension -> its identity, of those that have one."""
    modules = plan_modules(plan.run, plan.options)
    by_extension = {}
    for module in modules:
        identity = dict(module.Hooks().identity(plan))
        if identity:
            by_extension[module.__name__.split(".")[2]] = identity
    return by_extension
