"""What is said of a run for which there is too little memory: what it needs, and the smallest
changes that would do.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from sparrow.core import UserError
from sparrow.core.memory import gb
from sparrow.embeddings import Component
from sparrow.embeddings.sizes import memory_bytes
from sparrow.trained.run import Run
from sparrow.training import preflight
from sparrow.training.plan import Plan, hooks_of_all
from sparrow.training.preflight import DENSE, Needs

_FEWER = (
    "prepare with a larger min_count or fewer rows, or choose a smaller --tables.format.name, such"
    " as int8"
)


def refuse(plan: Plan, needs: Needs) -> NoReturn:
    """Refuse a run that needs more memory than is there.

    Raises:
        UserError: names the sum, its parts, and the smallest change that would do.
    """
    run = plan.run
    place = "memory"
    parts = needs.host
    size = needs.bytes_host
    free = preflight.free_host(needs, plan.per_host)
    if needs.device and size <= free:
        place = f"memory of {run.device}"
        parts = needs.device
        size = needs.bytes_device
        free = preflight.free_device(run)
    sizes = ", ".join(
        f"{name} {gb(part)}"
        for name, part in sorted(parts.items(), key=lambda item: -item[1])
        if part
    )
    if place == "memory" and preflight.is_process_limited():
        place = "memory within the limits of this process (ulimit -v, -d)"
    remedies = "; or ".join([first_remedy(plan, needs), *_remedies_of_extensions(plan, needs)])
    raise UserError(
        f"{place}: the run needs {gb(size)} and {gb(free)} are there ({sizes}); {remedies}"
    )


def refuse_device(run: Run, components: list[Component], error: torch.OutOfMemoryError) -> NoReturn:
    """Refuse a run whose GPU is full.

    Raises:
        UserError: names the largest table and the smallest changes.
    """
    sizes = {
        component.name: memory_bytes(component, component.rows, component.dim)
        for component in components
    }
    table, size = max(sizes.items(), key=lambda item: item[1], default=("none", 0))
    wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    problem = f"memory of {run.device}: it is full" + (
        f", and {wanted[1]} more were asked for" if wanted else ""
    )
    remedy = f"lower --data.batch_size from {run.data.batch_size}, train on more GPUs, or {_FEWER}"
    raise UserError(
        f"{problem}; the largest table, {table!r}, takes {gb(size)}: {remedy}"
    ) from None


def first_remedy(plan: Plan, needs: Needs) -> str:
    """Returns the first of smaller batches and smaller sizes of the model with which it fits, else
    what is largest.

    What an extension takes, and the run would fit without, comes before them.
    """
    run = plan.run
    per_host = plan.per_host
    for need in needs.extras:
        without = dataclasses.replace(needs, host=needs.host | {need.part: 0})
        if need.remedy and preflight.fits(without, run, per_host):
            return need.remedy
    for part, name, value in _smaller_settings(run):
        try:
            changed: Any = dataclasses.replace(getattr(run, part), **{name: value})
            smaller = dataclasses.replace(run, **{part: changed})
            if _fits_estimate(smaller, plan):
                return (
                    f"--{part}.{name} {value if isinstance(value, int) else repr(str(list(value)))}"
                    " fits"
                )
        except UserError:  # a size that has to divide another
            continue
    table, size = needs.largest
    remedies = {
        "tables": (f"its largest table, {table!r}, takes {gb(size)}: {_fewer(needs)}"),
        DENSE: "its weights are what is large: lower several of the model's sizes",
        "evaluation": "its valid part is what is large: prepare with a smaller one",
    }
    parts = {**needs.host, **needs.device}
    return remedies[max(remedies, key=lambda part: parts[part])]


def _fits_estimate(run: Run, plan: Plan) -> bool:
    needs = preflight.estimate(run, plan.dataset, plan.ranks, plan.per_host, plan.options)
    return preflight.fits(needs, run, plan.per_host)


def _fewer(needs: Needs) -> str:
    """Returns what makes tables smaller, and what extensions know beside it."""
    hints = [] if needs.device else [hooks.large_table() for hooks in hooks_of_all()]
    return ", or ".join([_FEWER, *filter(None, hints)])


def _remedies_of_extensions(plan: Plan, needs: Needs) -> list[str]:
    """Returns what extensions would do where tables are most of what the run needs."""
    if 2 * needs.host.get("tables", 0) < needs.bytes_host:
        return []
    run = plan.run
    if plan.ranks > 1:  # a plan may have copies, which only rows in memory can be
        run = dataclasses.replace(run, sharding=dataclasses.replace(run.sharding, plan="auto"))

    def fits(changed: Run) -> bool:
        estimated = preflight.estimate(changed, plan.dataset, plan.ranks, plan.per_host)
        return preflight.fits(estimated, changed, plan.per_host)

    remedies = [hooks.remedy(dataclasses.replace(plan, run=run), fits) for hooks in hooks_of_all()]
    return [remedy for remedy in remedies if remedy]


def _smaller_settings(run: Run) -> Iterator[tuple[str, str, Any]]:
    """Yields (data or model, setting, value): ever smaller batches, then sizes of the model, set
    ones first.
    """
    size = run.data.batch_size
    while (size := size // 2) >= 64:
        yield "data", "batch_size", size
    fields: Any = dataclasses.fields(run.model)  # type: ignore[arg-type]
    for field in sorted(fields, key=lambda field: getattr(run.model, field.name) == field.default):
        value = getattr(run.model, field.name)
        sizes = value if isinstance(value, tuple) else (value,)
        if not sizes or any(type(size) is not int for size in sizes):
            continue
        while min(sizes := tuple(size // 2 for size in sizes)) >= 1:
            yield "model", field.name, sizes if isinstance(value, tuple) else sizes[0]
