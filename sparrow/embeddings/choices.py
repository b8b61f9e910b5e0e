"""What a run's `[tables]` says: how the tables of a log are addressed, stored and trained, all of
them or some.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from sparrow import embeddings
from sparrow.core.config import Family, from_dict, to_dict
from sparrow.core.errors import UserError, require, suggest
from sparrow.embeddings.addressing import Addressing, AddressingConfig, Numbering, direct, hashed
from sparrow.embeddings.spec import (
    ON_CPU,
    TIERS,
    Cache,
    Placement,
    State,
    TableSpec,
    Tier,
    in_memory,
)
from sparrow.kernels.formats import RowFormat, fp32
from sparrow.kernels.rules import RowRule, rowwise_adagrad


@dataclass(frozen=True, kw_only=True)
class Override:
    """Other choices for some tables: those of these names, for which the condition holds; one of
    the two may be left.

    where: such as "rows > 100_000" or "rows > 10 and rows < 1000". The rest are settings of
    `TableChoices`, of which only what changes is said: `rule = { lr = 0.1 }` keeps the rule,
    another `name` begins from that member's defaults.
    """

    names: tuple[str, ...] | None = None
    where: str | None = None
    addressing: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    rule: dict[str, Any] | None = None
    state: State | None = None
    cache: dict[str, Any] | None = None
    tier: dict[str, Any] | None = None
    init_scale: float | None = None

    def __post_init__(self) -> None:
        embeddings.overrides.check(self)

    def is_for(self, name: str, rows: int) -> bool:
        """Whether a table of this name, with so many rows, is meant."""
        return embeddings.overrides.is_for(self, name, rows)

    def on(self, choices: TableChoices) -> TableChoices:
        """Returns the choices with what this override changes, and without their overrides."""
        return embeddings.overrides.apply(self, choices)


@dataclass(frozen=True, kw_only=True)
class TableChoices:
    """How tables are addressed, stored and trained.

    addressing: by default each id has the row that the log's encoding numbers, and hashes are taken
    modulo the rows. format: how a row is stored. rule: how a row learns, with its learning rate.
    state: how what the rule keeps of a row is stored, "fp32" or "bf16" (2 bytes a number, rounded
    stochastically). cache: fp32 copies of the rows that are used most. tier: whether rows are in
    memory or on an SSD, see `Tier`. init_scale: rows begin uniform in +-init_scale, by default as
    the model has it, or else +-1/sqrt(rows). seed: of the first rows, the run's by default.
    overrides: for some tables, see `Override`; a later one changes what an earlier one made. sizes:
    table -> its addressing with every size written out, which a run settles and writes in its
    run.toml; what is here counts before all else. init: table -> a Parquet file with the vectors
    that rows begin with, see `give_vectors`.
    """

    addressing: Annotated[AddressingConfig | None, Family("sparrow.embeddings.addressing")] = None
    format: Annotated[RowFormat, Family("sparrow.kernels.formats")] = field(
        default_factory=fp32.Config
    )
    rule: Annotated[RowRule, Family("sparrow.kernels.rules")] = field(
        default_factory=rowwise_adagrad.Config
    )
    state: State = "fp32"
    cache: Cache = field(default_factory=Cache)
    tier: Annotated[Tier, TIERS] = field(default_factory=in_memory)
    init_scale: float | None = None
    seed: int | None = None
    overrides: tuple[Override, ...] = ()
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    init: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(least=0, init_scale=self.init_scale)
        require(least=0, most=2**63 - 1, seed=self.seed)
        if self.overrides:
            embeddings.overrides.check_all(self)  # says what is wrong with one before any work
        for name in self.sizes:
            self._settled(name)

    @property
    def placement(self) -> Placement:
        """Where rows are kept. It is no setting of a run, see `at`."""
        return ON_CPU

    def at(self, placement: Placement) -> TableChoices:
        """Returns the choices for tables whose rows are kept there."""
        return _PlacedChoices(**{**vars(self), "placement": placement})

    def alone(self, name: str, rows: int) -> TableChoices:
        """Returns the choices for one table: the overrides that are for it are applied, and none
        are left.

        Args:
            name: the table's.
            rows: as many as the log's encoding gives it.
        """
        if not self.overrides and not self.sizes:
            return self
        sizes = {name: self.sizes[name]} if name in self.sizes else {}
        chosen = replace(self, overrides=(), sizes=sizes)
        for override in self.overrides:
            if override.is_for(name, rows):
                chosen = override.on(chosen)
        return chosen

    def for_table(self, name: str, rows: int) -> TableChoices:
        """Returns what `alone` does, without a cache for a table whose rows are exact, and without
        settled sizes.

        Args:
            name: the table's.
            rows: as many as the log's encoding gives it.
        """
        chosen = self.alone(name, rows)
        # a frame of such a table would be a second copy of the same bits
        is_exact = isinstance(chosen.format, fp32.Config) and chosen.state == "fp32"
        cache = Cache() if is_exact else chosen.cache
        return (
            replace(chosen, sizes={}, cache=cache)
            if chosen.sizes or cache != chosen.cache
            else chosen
        )

    def spec(
        self, name: str, dim: int, ids: Numbering, init_scale: float | None = None
    ) -> TableSpec:
        """Returns what one table of a log is.

        Args:
            name: the table's.
            dim: D of its vectors.
            ids: how they are numbered.
            init_scale: the model's own, for tables of which a run says none.

        Raises:
            UserError: when its ids cannot be addressed as chosen.
        """
        chosen = self.for_table(name, ids.rows)
        addressing = self.addressed(name, ids)
        with self.errors_placed(name, ids.rows):
            addressing.components(dim)
        return TableSpec(
            name=name,
            dim=dim,
            addressing=addressing,
            format=chosen.format,
            rule=chosen.rule,
            state=chosen.state,
            cache=chosen.cache,
            tier=chosen.tier,
            init_scale=init_scale if chosen.init_scale is None else chosen.init_scale,
        )

    def addressed(self, name: str, ids: Numbering) -> Addressing:
        """Returns the addressing of a table.

        Args:
            name: the table's.
            ids: how they are numbered.

        Raises:
            UserError: when its ids cannot be addressed as chosen.
        """
        with self.errors_placed(name, ids.rows):
            return self._chosen(name, ids).build(ids)

    def addressing_of(self, name: str, ids: Numbering) -> dict[str, Any]:
        """Returns the settings of what `addressed` does."""
        return settings_of(self._chosen(name, ids))

    def _chosen(self, name: str, ids: Numbering) -> AddressingConfig:
        if name in self.sizes:
            return self._settled(name)
        return self.for_table(name, ids.rows).addressing or default_addressing(ids)

    def vectors(self, name: str, ids: Numbering) -> int:
        """Returns how many vectors of an id stand side by side, see `Addressing`."""
        return self.addressed(name, ids).traits.vectors

    def placed(self, tiers: Mapping[str, Tier], rows: Mapping[str, int]) -> TableChoices:
        """Returns the choices with other tiers for some tables.

        Args:
            tiers: table -> where its rows are.
            rows: table -> as many as the log's encoding gives it.
        """
        names: dict[Tier, list[str]] = {}
        for name, tier in tiers.items():
            if self.for_table(name, rows[name]).tier != tier:
                names.setdefault(tier, []).append(name)
        more = [
            Override(names=tuple(tables), tier={"name": tier.name, **to_dict(tier)})
            for tier, tables in names.items()
        ]
        return replace(self, overrides=(*self.overrides, *more)) if more else self

    @property
    def in_memory(self) -> TableChoices:
        """The same choices, but no table is on an SSD."""
        return replace(
            self, tier=in_memory(), overrides=tuple(replace(o, tier=None) for o in self.overrides)
        )

    @property
    def unaddressed(self) -> TableChoices:
        """The same choices, but each id has a row."""
        return replace(
            self,
            addressing=None,
            overrides=tuple(replace(o, addressing=None) for o in self.overrides),
            sizes={},
        )

    def place(self, name: str, rows: int) -> str:
        """Returns where a run says how a table is addressed.

        Args:
            name: the table's.
            rows: as many as the log's encoding gives it.
        """
        numbers = [
            n
            for n, override in enumerate(self.overrides)
            if override.addressing is not None and override.is_for(name, rows)
        ]
        return f"tables.overrides[{numbers[-1]}].addressing" if numbers else "tables.addressing"

    @contextmanager
    def errors_placed(self, name: str, rows: int) -> Iterator[None]:
        """Lets errors say where the run addresses the table. The arguments are those of `place`."""
        try:
            yield
        except UserError as error:
            raise UserError(f"{self.place(name, rows)}, table {name!r}: {error}") from None

    def _settled(self, name: str) -> AddressingConfig:
        return from_dict(_Sized, {"addressing": self.sizes[name]}, f"sizes.{name}").addressing

    def unused(self, tables: Mapping[str, int]) -> list[str]:
        """Returns a line for each override that is for no table. tables: name -> rows that the
        log's encoding gives.
        """
        largest = max(tables, key=lambda name: tables[name], default="")
        return [
            f"tables.overrides[{number}]: for no table; the largest is {largest}, of"
            f" {tables[largest]:,} rows"
            for number, override in enumerate(self.overrides)
            if largest and not any(override.is_for(name, rows) for name, rows in tables.items())
        ]

    def check_names(self, tables: list[str]) -> None:
        """Check the names in overrides and sizes. tables: the names of all tables.

        Raises:
            UserError: when one names a table that is not there.
        """
        overridden: list[str] = []
        for override in self.overrides:
            overridden += override.names or ()
        named = {"overrides": overridden, "sizes": list(self.sizes), "init": list(self.init)}
        for part, names in named.items():
            for name in names:
                if name not in tables:
                    raise UserError(f"tables.{part}: no table {name!r}{suggest(name, tables)}")


@dataclass(frozen=True, kw_only=True)
class _PlacedChoices(TableChoices):
    """What a model is built with; run files have no placement."""

    placement: Placement = ON_CPU


@dataclass(frozen=True, kw_only=True)
class _Sized:
    addressing: Annotated[AddressingConfig, Family("sparrow.embeddings.addressing")]


def settings_of(config: AddressingConfig) -> dict[str, Any]:
    """Returns an addressing as it stands in `TableChoices.sizes`."""
    settings: dict[str, Any] = to_dict(_Sized(addressing=config))["addressing"]
    return settings


def default_addressing(ids: Numbering) -> AddressingConfig:
    """Returns the addressing of a table for which none is chosen."""
    return direct.Config() if ids.is_numbered else hashed.Config()
