"""Plans for tables: a choice for each, and the different plans that keep to one budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from sparrow.apps.fewer import knapsack
from sparrow.apps.smaller.alternatives import Alternative, Purpose, changed
from sparrow.embeddings import TableChoices
from sparrow.trained.run import Run

POINTS = 24  # of the curve
MOST = 0.9  # of the bytes: tables that have them are of one kind in a plan of a kind
PART = 4  # of a budget, for which there are plans too


@dataclass(frozen=True, kw_only=True)
class Option:
    """A choice for a table, with the rise of NE that its rebuilt rows cost, and the standard error
    of it.
    """

    alternative: Alternative
    damage: float = 0.0
    error: float = 0.0

    @property
    def cost(self) -> float:
        """What the choice goes by: the damage and an error, where a gain counts as none.

        Else the luckiest measurements would be chosen, and tables made smaller for which there is
        room.
        """
        return max(self.damage, 0.0) + self.error


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An option for each table.

    The damage is the sum of the tables' damages, each measured alone, as if none made another one
    worse. Its error is the root of the sum of their squared errors. Both are of rebuilt rows: what
    training makes of them is another matter, see `sparrow.apps.smaller.trainings`.
    """

    options: tuple[Option, ...]
    purpose: Purpose
    kind: str = "mixed"

    @property
    def bytes(self) -> int:
        """Bytes of all tables."""
        return sum(option.alternative.bytes.to(self.purpose) for option in self.options)

    @property
    def damage(self) -> float:
        """By how much rebuilt rows raise NE."""
        return sum(option.damage for option in self.options)

    @property
    def error(self) -> float:
        """The standard error of the damage."""
        return math.hypot(*(option.error for option in self.options))

    @property
    def is_measured(self) -> bool:
        """Whether rebuilt rows say what each option costs."""
        return all(option.alternative.how != "trained" for option in self.options)

    def tables(self, before: TableChoices) -> TableChoices:
        """Returns the choices of a run with this plan. before: those of the run that was looked
        at.
        """
        changes = {}
        for option in self.options:
            if option.alternative.change:
                changes[option.alternative.table] = option.alternative.change
        return changed(before, changes)

    def run(self, run: Run, run_dir: str) -> Run:
        """Returns a run with these tables.

        Args:
            run: the one that was looked at.
            run_dir: of the new one.
        """
        return replace(run, run_dir=run_dir, tables=self.tables(run.tables))


def choose_plan(
    options: Sequence[Sequence[Option]], budget: int, purpose: Purpose, kind: str = "mixed"
) -> Plan:
    """Choose the plan that fits at the least cost.

    Raises:
        UserError: when none fits.
    """
    classes = [
        [(option.alternative.bytes.to(purpose), option.cost) for option in row] for row in options
    ]
    chosen = knapsack.choose(classes, budget)
    return Plan(
        options=tuple(row[j] for row, j in zip(options, chosen, strict=True)),
        purpose=purpose,
        kind=kind,
    )


def smallest(options: Sequence[Sequence[Option]], purpose: Purpose) -> int:
    """Returns the bytes of the smallest plan."""
    return sum(min(option.alternative.bytes.to(purpose) for option in row) for row in options)


def curve(options: Sequence[Sequence[Option]], purpose: Purpose) -> tuple[Plan, ...]:
    """Returns plans from the smallest to one with all bytes of today, in even steps of the
    logarithm.
    """
    least, most = (
        smallest(options, purpose),
        sum(row[0].alternative.bytes.to(purpose) for row in options),
    )
    factor = most / max(least, 1)
    budgets = [
        least,
        *(int(least * factor ** (i / POINTS)) for i in range(1, POINTS)),
        max(most, least),
    ]
    return tuple(choose_plan(options, budget, purpose) for budget in budgets)


def add_guesses(
    measured: Mapping[str, Sequence[Option]],
    known: Sequence[Sequence[Alternative]],
    purpose: Purpose,
) -> list[list[Option]]:
    """Add to the options of each table those that rows cannot tell, at a guess: as good as any that
    is no larger.

    Args:
        measured: table -> its options that were measured, the present one first.
        known: the choices for each table.
        purpose: which bytes count.
    """
    completed = []
    for row in known:
        options = list(measured[row[0].table])
        dearest = max(option.cost for option in options)
        sizes = [(option.alternative.bytes.to(purpose), option.cost) for option in options]
        for alternative in row:
            if alternative.how == "trained":
                no_larger = [cost for size, cost in sizes if size <= alternative.bytes.to(purpose)]
                options.append(
                    Option(alternative=alternative, damage=min(no_larger, default=dearest))
                )
        completed.append(options)
    return completed


def rivals(
    options: Sequence[Sequence[Option]], budget: int, purpose: Purpose, most: int
) -> list[Plan]:
    """Returns different plans that keep to a budget, at least one.

    The first is the best by rebuilt rows, where such a one fits. Then there is a plan of each kind:
    the largest tables are of this kind, and the others of it, in another format, or as they are.
    Costs of merged rows say little of what training makes of them, so a plan of each kind is worth
    a training. The last are plans of each kind for a part of the budget, since fewer rows may learn
    better.

    Args:
        options: of each table, see `add_guesses`. The first of each is the table as it is.
        budget: the most bytes.
        purpose: which bytes count.
        most: so many plans at most.

    Raises:
        UserError: when no plan fits.
    """
    largest = _largest([row[0].alternative.bytes.to(purpose) for row in options])
    pools = {
        "mixed": [
            [option for option in row if option.alternative.how != "trained"] for row in options
        ]
    }
    for kind in dict.fromkeys(option.alternative.kind for row in options for option in row[1:]):
        pools[kind] = [_options_of_kind(row, kind, i in largest) for i, row in enumerate(options)]
    plans: list[Plan] = []
    for allowed in (budget, budget // PART):
        for kind, pool in pools.items():
            if smallest(pool, purpose) <= allowed:
                plan = choose_plan(pool, allowed, purpose, kind)
                if all(plan.options != earlier.options for earlier in plans):
                    plans.append(plan)
    return plans[:most] or [choose_plan(options, budget, purpose)]


def _largest(sizes: Sequence[int]) -> set[int]:
    """Returns the places of the largest tables, which together have most of the bytes."""
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    before = [0, *accumulate(sizes[i] for i in order)]
    return {i for i, size in zip(order, before, strict=False) if size < MOST * sum(sizes)}


def _options_of_kind(options: Sequence[Option], kind: str, is_large: bool) -> list[Option]:
    """Returns the options of a table in a plan of a kind."""
    same = [option for option in options if option.alternative.kind == kind]
    if is_large and same:
        return same
    plain = [
        o
        for o in options
        if o.alternative.how != "trained" and "addressing" not in o.alternative.change
    ]
    return [*plain, *(option for option in same if option not in plain)]
