"""What a baseline that is fitted after a run takes of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from typing_extensions import override

from sparrow.core import Batch
from sparrow.embeddings import Component
from sparrow.extensions.blend.baseline import bytes_of_baseline, has_baseline
from sparrow.training.plan import Need, Plan, PlanHooks

TURN = "a baseline"


class Hooks(PlanHooks):
    """It is fitted when the run has ended."""

    @override
    def needs(self, plan: Plan, components: Sequence[Component], batch: Batch) -> Iterable[Need]:
        if has_baseline(plan.dataset):
            yield Need(part=TURN, size=bytes_of_baseline(plan.dataset, batch), turn=TURN)
