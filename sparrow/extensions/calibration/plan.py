"""What a run that calibrates its scores says before it has a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from typing_extensions import override

from sparrow.embeddings import Component
from sparrow.trained.calibrate import check_valid
from sparrow.training.plan import Plan, PlanHooks


class Hooks(PlanHooks):
    """Calibrators need valid rows of both kinds."""

    @override
    def check(self, plan: Plan, components: Callable[[], Sequence[Component]]) -> None:
        check_valid(plan.run.calibrator, plan.dataset)
