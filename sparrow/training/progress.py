"""How far a run is, and the best that it came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparrow.core import UserError


@dataclass(kw_only=True)
class Progress:
    """How far a run is. A checkpoint keeps it by these names.

    Args:
        step: how many steps were made.
        epoch: how many epochs have ended.
        examples: how many the steps learnt from.
        skipped: how many steps were left out.
        skipped_in_row: how many of the last ones.
        worse: how many evaluations in a row were no better than the best.
        best: the cost of the best one.
        best_step: its step.
        last_evaluation: the metrics of the last one, with its step.
        best_evaluation: those of the best one, with what the parts of the model are worth.
    """

    step: int = 0
    epoch: int = 0
    examples: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    worse: int = 0
    best: float | None = None
    best_step: int | None = None
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    best_evaluation: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Progress:
        """Returns what a checkpoint kept. Earlier ones have no best evaluation."""
        names = [name for name in vars(cls()) if name != "best_evaluation" or name in state]
        return cls(**{name: state[name] for name in names})

    @property
    def is_evaluated(self) -> bool:
        """Whether the last step has its evaluation."""
        return self.last_evaluation.get("step") == self.step

    def compare(self, cost: float) -> bool:
        """Keep the best; count evaluations without a better one. Returns whether this is the best.

        cost: of the last evaluation; less is better.
        """
        is_better = self.best is None or cost < self.best
        if is_better:
            self.best = cost
            self.best_step = self.step
        self.worse = 0 if is_better else self.worse + 1
        return is_better

    def diverged(self, quantity: str) -> UserError:
        """Returns the error of a run whose numbers are not finite."""
        return UserError(
            f"step {self.step}: {quantity} are not finite, the model diverged; lower the learning"
            " rates and resume from the last checkpoint"
        )
