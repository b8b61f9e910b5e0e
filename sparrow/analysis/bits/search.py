"""Which parts of a model may have fewer bits, so that NE rises by no more than a budget.

All begin in their narrowest formats. What each alone does to NE ranks them, and the most harmful get wider formats, one
after another, until the rise is within the budget (arXiv 2105.12676).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparrow.analysis.judge import Judge
from sparrow.core import Batch
from sparrow.core.progress import Progress
from sparrow.metrics.intervals import Estimate, t_quantile

LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a model that can have fewer bits.

    kind: what it is, such as "table". name: which one. steps: formats that it may have, narrowest first; the last one
    is that of the model as it is.
    """

    kind: str
    name: str
    steps: tuple[str, ...]


Choice = Mapping[Part, str]
"""Part -> its format. Parts that are not there stay as they are."""

Scores = Callable[[Batch], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rise:
    """By how much NE rises, as a share of the NE before, of the label of which the upper bound is highest.

    value: the rise. error: its standard error, of paired rows. units: sessions, or else rows.
    """

    value: float
    error: float
    units: int

    @property
    def upper(self) -> float:
        """The upper end of its 95 % interval."""
        return self.value + self._width * self.error

    @property
    def _width(self) -> float:
        return t_quantile(LEVEL, max(self.units - 1, 1))

    def units_for(self, budget: float) -> int | None:
        """Returns how many units would show that the rise is within the budget; None when it is not."""
        room = budget - self.value
        return math.ceil(self.units * (self._width * self.error / room) ** 2) if room > 0 else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Tried:
    """Formats of all parts, and what they do to NE."""

    choice: Choice
    rise: Rise


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """What a search found.

    ne: of the model as it is, for each label. alone: part -> format -> what it does to NE alone. tried: what was tried
    of all parts together, the narrowest first. The last one is taken.
    """

    ne: list[float]
    alone: dict[Part, dict[str, Rise]]
    tried: list[Tried]

    @property
    def best(self) -> Tried:
        """The one that is taken."""
        return self.tried[-1]


def rises(before: Sequence[Estimate], after: Sequence[Estimate]) -> Rise:
    """Returns by how much NE rises, of paired estimates for each label."""
    each = []
    for one, other in zip(before, after, strict=True):
        rise = other - one
        each.append(Rise(value=rise.value / one.value, error=rise.error / one.value, units=rise.influence_G.numel()))
    return max(each, key=lambda rise: rise.upper)


def damages(
    parts: Sequence[Part], scores: Callable[[Choice], Scores], judge: Judge, told: Progress
) -> tuple[list[Estimate], dict[Part, dict[str, Rise]]]:
    """Returns NE of the model as it is, and what each part alone, in each of its formats, does to it.

    Args:
        parts: what is measured.
        scores: choice -> what scores a batch with it.
        judge: has the rows.
        told: is told how far it is.
    """
    before = judge.ne_of(scores({}))
    total, done = sum(len(part.steps) - 1 for part in parts), 0
    alone: dict[Part, dict[str, Rise]] = {}
    for part in parts:
        for step in part.steps[:-1]:
            told("parts alone", done, total)
            alone.setdefault(part, {})[step] = rises(before, judge.ne_of(scores({part: step})))
            done += 1
    told("parts alone", total, total)
    return before, alone


def search(
    parts: Sequence[Part],
    scores: Callable[[Choice], Scores],
    judge: Judge,
    budget: float,
    told: Progress,
) -> Found:
    """Returns the narrowest formats of which the rise of NE is shown to be within a budget.

    Choices are tried from the narrowest to the model as it is (`fallbacks`). The first one that keeps to the budget is
    taken.

    Args:
        parts: what can have fewer bits.
        scores: see `damages`.
        judge: has the rows.
        budget: how much NE may rise, as a share of it, >= 0.
        told: is told how far it is.
    """
    before, alone = damages(parts, scores, judge, told)
    order = fallbacks(parts, {part: {step: rise.value for step, rise in of.items()} for part, of in alone.items()})
    tried: list[Tried] = []
    for choice in order:
        told("all together", len(tried), len(order))
        rise = rises(before, judge.ne_of(scores(choice)))
        tried.append(Tried(choice=choice, rise=rise))
        if rise.upper <= budget:
            break  # the model as it is, the last one, does not rise at all
    told("all together", len(order), len(order))
    return Found(ne=[one.value for one in before], alone=alone, tried=tried)


def fallbacks(parts: Sequence[Part], damage: Mapping[Part, Mapping[str, float]]) -> list[Choice]:
    """Returns choices from all in their narrowest formats to none: the most harmful part gets its next format.

    Args:
        parts: what can have fewer bits.
        damage: part -> format -> what it alone does.
    """
    now = dict.fromkeys(parts, 0)
    queue = [(-damage[part][part.steps[0]], number, part) for number, part in enumerate(parts)]
    heapq.heapify(queue)
    order: list[Choice] = [{part: part.steps[0] for part in parts}]
    while queue:
        _, number, part = heapq.heappop(queue)
        now[part] += 1
        step = part.steps[now[part]]
        if step != part.steps[-1]:
            heapq.heappush(queue, (-damage[part][step], number, part))
        order.append({one: one.steps[at] for one, at in now.items() if at < len(one.steps) - 1})
    return order
