"""What a run in low precision says before it has a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from typing_extensions import override

from sparrow.core import Batch, UserError
from sparrow.embeddings import Component
from sparrow.extensions.low_precision.probe import bytes_of
from sparrow.layers.precision import AUTO
from sparrow.training.plan import Need, Plan, PlanHooks

PART = "the probe"


class Hooks(PlanHooks):
    """A precision is chosen before a run. A probe is of models that are not compiled, and takes
    memory.
    """

    @override
    def check(self, plan: Plan, components: Callable[[], Sequence[Component]]) -> None:
        if plan.run.precision.name == AUTO:
            remedy = "give Python what apps.numerics.auto.choose_precision returns"
            raise UserError(f"precision: 'auto' is decided by `sparrow train`; {remedy}")
        if "probe" in plan.options and plan.run.compile:
            raise UserError("probe: not of compiled models; leave --probe or compile out")

    @override
    def needs(self, plan: Plan, components: Sequence[Component], batch: Batch) -> Iterable[Need]:
        if "probe" in plan.options:
            size = bytes_of(plan.run, plan.dataset.schema, batch)
            yield Need(
                part=PART,
                size=size,
                remedy="leave --probe out, or name a precision in the place of auto",
            )
