from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from sparrow.core.config import from_dict, read_toml
from sparrow.core.errors import UserError, suggest
from sparrow.distributed import Grid
from sparrow.embeddings import Component
from sparrow.embeddings.spec import TIERS, Tier
from sparrow.sharding import layout
from sparrow.sharding.layout import Layout

SMALL = 1 << 20  # bytes of a table that every rank may as well have
LARGE = 64 << 20  # bytes up to which a table is never cut
# the same where each part would be on another host: bytes over the network grow with the parts
FAR = 1 << 30
MANY = 8  # tables that are large enough to be cut, from which on one like the others stays whole
ROOM = 4 << 30  # bytes of such a table at most: what every rank has room for


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """What a plan's TOML file says. layouts: of tables by name, such as
    `user = { ranks = [0, 1], rows = 2 }`.

    default: the layout of all others, by its name, or "auto". tiers: where rows of tables are, by
    name, such as `user = { name = "ssd", bytes = 1_000_000 }`; the others are where the run says.
    One process heeds the tiers alone.
    """

    default: str = "auto"
    layouts: dict[str, Layout] = field(default_factory=dict)
    tiers: dict[str, Annotated[Tier, TIERS]] = field(default_factory=dict)


NAMED: dict[str, Callable[[int, Grid], Layout]] = {  # of a table's number, so that tables spread
    "data_parallel": lambda number, world: layout.data_parallel(),
    "table_wise": lambda number, world: layout.table_wise(number % world.size),
    "row_wise": lambda number, world: layout.row_wise(world.size),
    "column_wise": lambda number, world: layout.column_wise(tuple(range(world.size))),
    "table_row_wise": lambda number, world: layout.table_row_wise(
        number % world.hosts, world.local_size
    ),
    "table_column_wise": lambda number, world: layout.table_column_wise(
        number % world.hosts, world.local_size
    ),
    "grid": lambda number, world: layout.grid(tuple(range(world.hosts)), world.local_size),
}


def plan(chosen: str, components: Sequence[Component], world: Grid) -> dict[str, Layout]:
    """Returns component -> layout.

    Under "auto", tables up to SMALL are on every rank. The limit for the others is the larger of
    LARGE and the mean of what a rank has (FAR in the place of LARGE where each of several hosts has
    one rank). Where MANY tables or more are larger than LARGE, the limit is at least twice the mean
    of these, but at most ROOM: whole tables send the fewest bytes, as each part of a cut one sends
    its own sums.

    Tables above the limit are cut by rows. On a single host such a table is cut over the fewest
    ranks that bring its parts down to the limit. Where there are several hosts, it is cut over all
    ranks of some of them, at least one: as many as bring the parts nearest to the limit. Each host
    then adds its partial sums up. The other tables stay whole.

    The largest table is placed first, and each goes where the fewest bytes are. So no rank has more
    than the mean and the largest part of a table. That part is at most the limit, or 1.5 times the
    limit where a table is cut over hosts.

    Args:
        chosen: "auto", a layout's name for all tables, or a TOML file.
        components: what is placed.
        world: the ranks.

    Raises:
        UserError: when `chosen` is none of these, or its file does not fit the tables or the ranks.
    """
    if chosen.endswith(".toml"):
        file = read(chosen)
        names = [component.name for component in components]
        for name in file.layouts:
            if name not in names:
                raise UserError(f"{chosen}: no table {name!r}{suggest(name, names)}")
        return plan(file.default, components, world) | file.layouts
    if chosen == "auto":
        return _auto(components, world)
    if chosen not in NAMED:
        known = ["auto", *NAMED]
        raise UserError(
            f"sharding.plan: {chosen!r} is none of {', '.join(known)} nor a"
            f" .toml{suggest(chosen, known)}"
        )
    return {
        component.name: NAMED[chosen](number, world) for number, component in enumerate(components)
    }


def read(chosen: str) -> PlanFile:
    """Returns what a plan says: its TOML file, or else a layout's name for all tables.

    Raises:
        UserError: when the file cannot be read, or says what no plan can.
    """
    if not chosen.endswith(".toml"):
        return PlanFile(default=chosen)
    return from_dict(PlanFile, read_toml(Path(chosen)), chosen)


def tiers_of(chosen: str, tables: Sequence[str]) -> dict[str, Tier]:
    """Returns table -> where its rows are, as a plan says; of tables of which it says nothing,
    nothing.

    Args:
        chosen: see `plan`.
        tables: the names of all tables.

    Raises:
        UserError: when its file cannot be read, or names a table that is not there.
    """
    tiers = read(chosen).tiers
    for name in tiers:
        if name not in tables:
            raise UserError(f"{chosen}: tiers: no table {name!r}{suggest(name, tables)}")
    return tiers


def summary(plan: Mapping[str, Layout]) -> str:
    """Returns how many tables have which layout, for people."""

    def kind(layout: Layout) -> str:
        if layout.is_replicated:
            return "copied to every rank"
        cut = [
            name
            for name, parts in (("columns", layout.columns), ("rows", layout.rows))
            if parts > 1
        ]
        return f"cut by {' and '.join(cut)}" if cut else "whole on a rank"

    return ", ".join(f"{n} {how}" for how, n in Counter(map(kind, plan.values())).items())


def _auto(components: Sequence[Component], world: Grid) -> dict[str, Layout]:
    sizes = {component.name: component.bytes_values for component in components}
    alone = {component.name for component in components if not component.has_equal_copies}
    layouts = {
        name: layout.data_parallel()
        for name, size in sizes.items()
        if size <= SMALL and name not in alone
    }
    rest = sorted(
        (item for item in sizes.items() if item[0] not in layouts),
        key=lambda item: (-item[1], item[0]),
    )
    limit = _limit([size for _, size in rest], world)
    loads = [0.0] * world.size
    for name, size in rest:
        layouts[name] = _place(size / limit, loads, world)
        for rank in layouts[name].ranks:
            loads[rank] += size / len(layouts[name].ranks)
    return layouts


def _limit(sizes: Sequence[int], world: Grid) -> float:
    """Returns how large a table or a part of one may be. sizes: of the tables that are not on every
    rank.
    """
    least = FAR if world.hosts > 1 and world.local_size == 1 else LARGE
    large = [size for size in sizes if size > least]
    usual = min(2 * sum(large) / len(large), ROOM) if len(large) >= MANY else 0
    return max(sum(sizes) / world.size, usual, least)


def _place(parts: float, loads: Sequence[float], world: Grid) -> Layout:
    """Returns a layout for a table, where the loads are least. parts: its size, in units of what a
    rank may have.
    """
    local = world.local_size
    if world.hosts == 1 or local == 1 or parts <= 1:
        ranks = sorted(range(world.size), key=lambda rank: loads[rank])[: math.ceil(parts)]
        return Layout(ranks=tuple(sorted(ranks)), rows=len(ranks))
    hosts = sorted(
        range(world.hosts), key=lambda host: max(loads[host * local : (host + 1) * local])
    )
    return layout.hosts_row_wise(tuple(sorted(hosts[: max(round(parts / local), 1)])), local)
