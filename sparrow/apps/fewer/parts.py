"""The parts of a model that may take fewer bytes, and what each alone does to NE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparrow.core.progress import Progress
from sparrow.metrics.intervals import Estimate, t_quantile

LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a model that may take fewer bytes.

    kind: what it is, such as "table". name: which one. steps: what it may become, narrowest first;
    the last one is what it is.
    """

    kind: str
    name: str
    steps: tuple[Any, ...] = field(hash=False)


Choice = Mapping[Part, Any]
"""Part -> one of its steps. Parts that are not there stay as they are."""

Measure = Callable[[Choice], Sequence[Estimate]]
"""Returns NE of the same rows with a choice, for each label."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rise:
    """By how much NE rises, as a share of the NE before, of the label of which the upper bound is
    highest.

    value: the rise. error: its standard error, of paired rows. units: sessions, or else rows.
    """

    value: float
    error: float
    units: int

    def __str__(self) -> str:
        return f"{100 * self.value:+.4f} % (95 %: at most {100 * self.upper:+.4f} %)"

    @property
    def upper(self) -> float:
        """The upper end of its 95 % interval."""
        return self.value + self._width * self.error

    @property
    def _width(self) -> float:
        return t_quantile(LEVEL, max(self.units - 1, 1))

    def units_for(self, budget: float) -> int | None:
        """Returns how many units would show that the rise is within the budget; None when it is
        not.
        """
        room = budget - self.value
        return math.ceil(self.units * (self._width * self.error / room) ** 2) if room > 0 else None

    def plain(self) -> dict[str, float]:
        """Returns it as plain data."""
        return {"value": self.value, "error": self.error, "upper": self.upper}


def rises(before: Sequence[Estimate], after: Sequence[Estimate]) -> Rise:
    """Returns by how much NE rises, of paired estimates for each label."""
    by_label = []
    for ne, changed in zip(before, after, strict=True):
        rise = changed - ne
        by_label.append(
            Rise(
                value=rise.value / ne.value,
                error=rise.error / ne.value,
                units=rise.influence_G.numel(),
            )
        )
    return max(by_label, key=lambda rise: rise.upper)


def alone(
    parts: Sequence[Part], measure: Measure, progress: Progress
) -> Iterator[tuple[Part, Any, Sequence[Estimate]]]:
    """Yields each part with each of its steps but the last, and NE where that alone changes.

    Args:
        parts: what is measured.
        measure: has the rows.
        progress: shows how far it is.
    """
    measured = 0
    total = sum(len(part.steps) - 1 for part in parts)
    for part in parts:
        for step in part.steps[:-1]:
            progress("parts alone", measured, total)
            yield part, step, measure({part: step})
            measured += 1
    progress("parts alone", total, total)


def damages(
    parts: Sequence[Part], measure: Measure, progress: Progress
) -> tuple[Sequence[Estimate], dict[Part, dict[str, Rise]]]:
    """Returns NE of the model as it is, and what each part alone does to it in each of its formats;
    see `alone`.
    """
    before = measure({})
    damage: dict[Part, dict[str, Rise]] = {}
    for part, step, after in alone(parts, measure, progress):
        damage.setdefault(part, {})[step] = rises(before, after)
    return before, damage
