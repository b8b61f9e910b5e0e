from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sparrow.core.config import from_dict, read_toml
from sparrow.core.errors import UserError, suggest
from sparrow.distributed import World
from sparrow.embeddings import TableSpec
from sparrow.sharding import layout
from sparrow.sharding.layout import Layout

SMALL = 1 << 20  # bytes of a table that every rank may as well have


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """What a plan's TOML file says. tables: by name, such as `user = { ranks = [0, 1], rows = 2 }`, see `Layout`.

    default: the layout of all others, by its name, or "auto".
    """

    default: str = "auto"
    tables: dict[str, Layout] = field(default_factory=dict)


NAMED: dict[str, Callable[[int, World], Layout]] = {  # of a table's number, so that tables spread
    "data_parallel": lambda number, world: layout.data_parallel(),
    "table_wise": lambda number, world: layout.table_wise(number % world.size),
    "row_wise": lambda number, world: layout.row_wise(world.size),
    "column_wise": lambda number, world: layout.column_wise(tuple(range(world.size))),
    "table_row_wise": lambda number, world: layout.table_row_wise(number % world.hosts, world.local_size),
    "table_column_wise": lambda number, world: layout.table_column_wise(number % world.hosts, world.local_size),
    "grid": lambda number, world: layout.grid(tuple(range(world.hosts)), world.local_size),
}


def plan(chosen: str, specs: Sequence[TableSpec], world: World) -> dict[str, Layout]:
    """Table -> layout. chosen: "auto", a layout's name for all tables, or a TOML file (`PlanFile`). UserError.

    "auto": tables below SMALL everywhere; those that are more than a rank's half of what remains by rows; the others
    whole, the largest first, each to the rank with the fewest bytes.
    """
    if chosen.endswith(".toml"):
        file = from_dict(PlanFile, read_toml(Path(chosen)), chosen)
        names = [spec.name for spec in specs]
        for name in file.tables:
            if name not in names:
                raise UserError(f"{chosen}: no table {name!r}{suggest(name, names)}")
        return plan(file.default, specs, world) | file.tables
    if chosen == "auto":
        return _auto(specs, world)
    if chosen not in NAMED:
        known = ["auto", *NAMED]
        raise UserError(f"sharding.plan: {chosen!r} is none of {', '.join(known)} nor a .toml{suggest(chosen, known)}")
    return {spec.name: NAMED[chosen](number, world) for number, spec in enumerate(specs)}


def summary(plan: Mapping[str, Layout]) -> str:
    """How many tables live how, for people."""

    def kind(layout: Layout) -> str:
        if layout.is_replicated:
            return "copied to every rank"
        cut = [name for name, parts in (("columns", layout.columns), ("rows", layout.rows)) if parts > 1]
        return f"cut by {' and '.join(cut)}" if cut else "whole on a rank"

    return ", ".join(f"{n} {how}" for how, n in Counter(map(kind, plan.values())).items())


def _auto(specs: Sequence[TableSpec], world: World) -> dict[str, Layout]:
    sizes = {spec.name: 4 * spec.addressing.rows * spec.dim for spec in specs}
    found = {name: layout.data_parallel() for name, size in sizes.items() if size <= SMALL}
    total = sum(size for name, size in sizes.items() if name not in found)
    loads = [0] * world.size
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if name in found:
            continue
        if size > total / (2 * world.size):
            found[name] = layout.row_wise(world.size)
            loads = [load + size // world.size for load in loads]
        else:
            rank = loads.index(min(loads))
            found[name] = layout.table_wise(rank)
            loads[rank] += size
    return found
