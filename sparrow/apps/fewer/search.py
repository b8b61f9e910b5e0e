"""Which parts of a model may have fewer bits, so that NE rises by no more than a budget.

All begin in their narrowest formats. What each alone may do to NE ranks them, and the most harmful
get wider formats, one after another, until the rise is within the budget (arXiv 2105.12676). What
each may do is the upper end of its interval, because a part that few bits improve may be a lucky
one. Then narrower formats are tried again. At the end other rows say what the choice costs, because
the first of many that keeps to a budget is a lucky one, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sparrow.analysis.judge import Judge
from sparrow.apps.fewer.parts import Choice, Part, Rise, damages, rises
from sparrow.core.progress import Progress
from sparrow.metrics.intervals import Estimate


@dataclass(frozen=True, kw_only=True, eq=False)
class Attempt:
    """Formats of all parts, and what they do to NE."""

    choice: Choice
    rise: Rise


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchResult:
    """What a search found.

    ne: of the model as it is, for each label. alone: part -> format -> what it does to NE alone.
    tried: what was tried of all parts together, the narrowest first. best: the one that is taken.
    checked: the rise with it on other rows.
    """

    ne: list[float]
    alone: dict[Part, dict[str, Rise]]
    tried: list[Attempt]
    best: Attempt
    checked: Rise


def search(
    parts: Sequence[Part],
    ne: Callable[[Judge, Choice], Sequence[Estimate]],
    judges: Sequence[Judge],
    budget: float,
    progress: Progress,
) -> SearchResult:
    """Returns the narrowest formats of which the rise of NE is shown to be within a budget.

    Choices are tried from the narrowest to the model as it is (`fallbacks`). Of the first one that
    keeps to the budget, each part then gets the narrowest format with which all still keep to it,
    the least harmful part first.

    Args:
        parts: what can have fewer bits.
        ne: returns NE of the rows that a judge has, with a choice, for each label.
        judges: have the rows that choose, and others.
        budget: how much NE may rise, as a share of it, >= 0.
        progress: shows how far it is.
    """
    measure, check = (partial(ne, judge) for judge in judges)
    before, alone = damages(parts, measure, progress)
    order = fallbacks(parts, alone)
    tried: list[Attempt] = []

    def attempt(choice: Choice) -> Attempt:
        if known := [earlier for earlier in tried if earlier.choice == choice]:
            return known[0]
        tried.append(Attempt(choice=choice, rise=rises(before, measure(choice))))
        return tried[-1]

    for number, choice in enumerate(order):
        progress("all together", number, len(order))
        best = attempt(choice)
        if best.rise.upper <= budget:
            break  # the model as it is, the last one, does not rise at all
    progress("all together", len(order), len(order))
    for number, part in enumerate(sorted(alone, key=lambda part: alone[part][part.steps[0]].upper)):
        progress("narrower formats again", number, len(alone))
        best = _give_back(part, alone[part], best, attempt, budget)
    progress("narrower formats again", len(alone), len(alone))
    unseen = check({})
    checked = rises(unseen, check(best.choice) if best.choice else unseen)
    return SearchResult(
        ne=[estimate.value for estimate in before],
        alone=alone,
        tried=tried,
        best=best,
        checked=checked,
    )


def _give_back(
    part: Part,
    alone: Mapping[str, Rise],
    best: Attempt,
    attempt: Callable[[Choice], Attempt],
    budget: float,
) -> Attempt:
    """Returns the best with the narrowest format of a part with which it keeps to the budget.

    alone: format -> what the part alone does. One that alone may go beyond the budget is not tried.
    """
    now = part.steps.index(best.choice.get(part, part.steps[-1]))
    for step in part.steps[:now]:
        if alone[step].upper <= budget:
            tried = attempt({**best.choice, part: step})
            if tried.rise.upper <= budget:
                return tried
    return best


def fallbacks(parts: Sequence[Part], alone: Mapping[Part, Mapping[str, Rise]]) -> list[Choice]:
    """Returns choices from all in their narrowest formats to none: the most harmful part gets its
    next format.

    Args:
        parts: what can have fewer bits.
        alone: part -> format -> what it alone does. The upper bound counts.
    """
    order: list[Choice] = [{part: part.steps[0] for part in parts}]
    while choice := order[-1]:
        worst = max(choice, key=lambda part: alone[part][choice[part]].upper)
        step = worst.steps[worst.steps.index(choice[worst]) + 1]
        wider = {**choice, worst: step}
        order.append({part: step for part, step in wider.items() if step != part.steps[-1]})
    return order
