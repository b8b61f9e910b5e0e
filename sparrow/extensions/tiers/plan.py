"""What a run whose tables are larger than memory says before it has a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from typing_extensions import override

from sparrow.core import Batch, UserError
from sparrow.core.errors import listed
from sparrow.distributed import Grid
from sparrow.embeddings import Component
from sparrow.embeddings.spec import in_memory
from sparrow.extensions.tiers.disk import bytes_of_kept_blocks, bytes_of_saving, check_disks
from sparrow.extensions.tiers.reuse import on_ssd
from sparrow.extensions.tiers.settings import Config
from sparrow.trained.run import Run
from sparrow.training.plan import Need, Plan, PlanHooks
from sparrow.training.preflight import row_bytes_of_ranks


class Hooks(PlanHooks):
    """Tiers need a folder and room on its disk, and memory for what knows where rows are."""

    @override
    def resolve(self, plan: Plan) -> Run:
        """Changes nothing, and says which settings do nothing."""
        run = plan.run
        folder = run.settings_of(Config).folder
        rows = {name: table.rows or 0 for name, table in plan.dataset.schema.encodings.items()}
        tiers = {name: run.tables.for_table(name, count).tier for name, count in rows.items()}
        is_on = any(tier.is_on for tier in tiers.values())
        with_folder = [name for name, tier in tiers.items() if tier.has_folder]
        if with_folder and folder is None:
            place = f"is {tiers[with_folder[0]].name} for {listed(with_folder)}"
            raise UserError(
                f"tables.tier: {place}, and no folder on an SSD is named; give --tiers.folder DIR"
            )
        for advice in sorted(
            {tier.advice(torch.device(run.device).type) for tier in tiers.values()} - {""}
        ):
            plan.say(f"tables.tier: {advice}")
        if folder is not None and not with_folder:
            remedy = "name some with --tables.tier.name ssd, or with a plan of `sparrow plan`"
            plan.say(f"tiers.folder: no table is there; {remedy}")
        if not is_on and any(
            not tier.has_folder and tier != in_memory() for tier in tiers.values()
        ):
            remedy = "--tables.tier.name ssd puts them in --tiers.folder"
            plan.say(f"tables.tier: it says nothing while tables are in memory; {remedy}")
        if is_on and run.compile:
            plan.say("tiers.prefetch: rows without frames are not read ahead with --compile")
        return run

    @override
    def check(self, plan: Plan, components: Callable[[], Sequence[Component]]) -> None:
        if plan.run.settings_of(Config).folder is not None:
            check_disks(plan.run, components(), plan.dataset, plan.ranks // plan.per_host)

    @override
    def needs(self, plan: Plan, components: Sequence[Component], batch: Batch) -> Iterable[Need]:
        if any(component.tier.has_blocks for component in components):
            yield Need(part="rows on an SSD", size=bytes_of_saving(components), turn="a checkpoint")
            size = bytes_of_kept_blocks(components, plan.run.checkpoint.keep)
            yield Need(part="blocks of checkpoints", size=size)
        grid = Grid(plan.ranks // plan.per_host, plan.per_host)
        beneath = row_bytes_of_ranks(plan.run, components, grid, _beneath_bytes)
        yield Need(part="rows beneath frames", size=max(beneath))

    @override
    def remedy(self, plan: Plan, fits: Callable[[Run], bool]) -> str:
        remedy = on_ssd(plan.run, plan.dataset, fits)
        if remedy and plan.ranks > 1:
            remedy = f"--sharding.plan auto {remedy} in one process"
        if not remedy:
            return ""
        better = "`sparrow plan RUN --tiers.folder DIR` divides memory better"
        return f"tables on an SSD fit: {remedy}; {better}"

    @override
    def large_table(self) -> str:
        return "keep it on an SSD with few frames in memory (--tiers.folder, --tables.tier ssd)"


def _beneath_bytes(component: Component, rows: int, dim: int) -> int:
    return component.tier.beneath_bytes(component, rows, dim)
