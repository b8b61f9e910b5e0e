from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import torch

from sparrow.core.config import Family
from sparrow.core.errors import UserError, require
from sparrow.embeddings.addressing import Addressing, Policy
from sparrow.kernels.formats import Field, RowFormat, fp32
from sparrow.kernels.rules import RowRule, rowwise_adagrad

TIERS = Family("sparrow.embeddings.tiers")
CACHES = Family("sparrow.embeddings.caches")
POLICIES = Family("sparrow.kernels.row_cache.policies")


@dataclass(frozen=True, kw_only=True)
class Framed:
    """How many rows have a frame at a time, and which row gives way.

    fraction: of the rows; or bytes: of all frames together. policy: which row gives way, the one
    used least recently ("lru"), or another member of `sparrow.kernels.row_cache.policies`.
    """

    fraction: float = 0.0
    bytes: int = 0
    policy: str = "lru"

    def __post_init__(self) -> None:
        require(least=0, most=1, fraction=self.fraction)
        require(least=0, bytes=self.bytes)
        if self.policy != Framed.policy:  # most runs have no frames, and load no policy
            POLICIES.config(self.policy, "policy")
        if self.fraction and self.bytes:
            raise UserError("fraction and bytes are given; choose one")


@dataclass(frozen=True, kw_only=True)
class Cache(Framed):
    """fp32 frames for the rows that are used most. They belong to the table's values: rows that are
    out are rounded.

    fraction, bytes: how many rows have frames, see `Framed`; 0 of both is no cache. policy: which
    row gives way, "lru", "lfu" (a byte a row more) or another one. protect: rows of so many last
    batches never give way.
    """

    protect: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(least=1, protect=self.protect)

    @property
    def is_on(self) -> bool:
        """Whether there are frames."""
        return bool(self.fraction or self.bytes)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a process keeps the rows of its tables.

    device: that on which they learn; the host never holds a whole table of a GPU. folder: where
    tables whose tier needs one have files. window: rows of so many last batches never leave their
    frames. store: (component, rows, columns) -> a `RowStore` for so many of its rows and columns,
    in the place of what tier and cache say.
    """

    device: str = "cpu"
    folder: Path | None = None
    window: int = 5
    store: Callable[[Component, int, int], Any] | None = None


ON_CPU = Placement()


@dataclass(frozen=True, kw_only=True)
class Tier(Framed):
    """Where rows are. Values never depend on it. A member of `sparrow.embeddings.tiers` says what
    is its own.

    fraction: of the rows that have a frame at a time; by default a tenth, and 65,536 rows at least.
    A quarter as many frames stand by, for rows of batches under way whose places are taken. bytes,
    policy: see `Framed`.
    """

    is_on: ClassVar[bool] = True  # whether only some rows have frames
    # whether rows are in files of blocks, which checkpoints share
    has_blocks: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The member's name."""
        return TIERS.name_of(self)

    @property
    def has_folder(self) -> bool:
        """Whether rows are in a folder, which the user names."""
        return self.has_blocks

    @property
    def is_in_memory(self) -> bool:
        """Whether all rows are in memory, of the device or of the host."""
        return False

    def reason_against(self, device: str) -> str:
        """Returns why rows that learn on a device cannot be here, with the remedy, or ""."""
        return ""

    def advice(self, device: str) -> str:
        """Returns what a user should know who has chosen this for rows that learn on a device, or
        "".
        """
        return ""

    def memory_bytes(self, component: Component, rows: int, dim: int) -> int:
        """Returns the bytes of memory for a part of the rows, of the device where that has
        frames.
        """
        raise NotImplementedError

    def disk_bytes(self, component: Component, used: float, hosts: int) -> int:
        """Returns the bytes of disk that a component's rows take.

        Args:
            component: whose rows.
            used: its lookups, so that this many rows may learn.
            hosts: among how many the rows are divided.
        """
        return 0

    def beneath_bytes(self, component: Component, rows: int, dim: int) -> int:
        """Returns the bytes of the host for a part of the rows that is beneath frames of a
        device.
        """
        return 0

    def store(self, component: Component, rows: int, dim: int, placement: Placement) -> Any:
        """Returns a `RowStore` of a part of the rows.

        Args:
            component: whose they are.
            rows: how many.
            dim: how many of its dimensions.
            placement: the device, and where it may make files.
        """
        raise NotImplementedError


def in_memory() -> Tier:
    """Returns the tier where all rows are in memory."""
    return cast(Tier, TIERS.config("memory")())


State = Literal["fp32", "bf16"]
STATES: dict[State, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
OF_IDS = {  # what a row keeps of the id that has it; all parts of a row have the same
    "id": Field(dtype=torch.int64, across="max"),
    "time": Field(dtype=torch.int64, across="max"),
    "count": Field(across="max"),
    "sightings": Field(dtype=torch.int32, across="max"),
}
"""See `row_index.Index`; the four counters of sightings are one number here."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """Rows of one kind. It is what plans, checkpoints, preflight and sharding see of a table.

    Args:
        name: the table's, or "TABLE.PART" where it has several components.
        rows: R.
        dim: D.
        format: how a row is stored.
        rule: how a row learns.
        state: how the rule's state is stored; bf16 is rounded stochastically.
        cache: fp32 frames for the rows that are used most.
        tier: where its rows are.
        init_scale: rows begin uniform in init_mean +- init_scale.
        policy: which ids have rows, where ids come and go.
        init_mean: see init_scale.
    """

    name: str
    rows: int
    dim: int
    format: Annotated[RowFormat, Family("sparrow.kernels.formats")] = field(
        default_factory=fp32.Config
    )
    rule: Annotated[RowRule, Family("sparrow.kernels.rules")] = field(
        default_factory=rowwise_adagrad.Config
    )
    state: State = "fp32"
    cache: Cache = field(default_factory=Cache)
    tier: Annotated[Tier, TIERS] = field(default_factory=in_memory)
    init_scale: float = 0.0
    init_mean: float = 0.0
    policy: Policy | None = None

    def __post_init__(self) -> None:
        require(least=1, rows=self.rows, dim=self.dim)

    def fields_of(self, dim: int) -> dict[str, Field]:
        """Returns every field of a row record with `dim` columns: the format's, the rule's, and a
        touched byte.

        Raises:
            UserError: when format and rule both have a field of one name.
        """
        payload = self.format.fields(dim)
        kind = STATES[self.state]
        state = {name: replace(entry, dtype=kind) for name, entry in self.rule.fields(dim).items()}
        own = {"touched": Field(dtype=torch.uint8, across="max")} | (OF_IDS if self.policy else {})
        if twice := [
            name for name in (*state, *own) if name in payload or name in state.keys() & own.keys()
        ]:
            raise UserError(
                f"table {self.name!r}: format and rule both have a field {twice[0]!r}; rename one"
            )
        return payload | state | own

    @cached_property
    def fields(self) -> dict[str, Field]:
        """The fields of a whole row."""
        return self.fields_of(self.dim)

    @property
    def bytes_row(self) -> int:
        """Bytes of a row record."""
        return sum(field.bytes_row for field in self.fields.values())

    def record_bytes(self, dim: int) -> int:
        """Returns the bytes of a row record with `dim` columns."""
        return sum(field.bytes_row for field in self.fields_of(dim).values())

    @cached_property
    def in_frames(self) -> Component:
        """The same rows as frames of a cache hold them."""
        return replace(
            self, format=fp32.Config(), state="fp32", cache=Cache(), tier=in_memory(), policy=None
        )

    @property
    def top_tier(self) -> Tier:
        """Where rows are looked up: in the frames of their cache, above their tier, or in the tier
        itself.
        """
        if not self.cache.is_on:
            return self.tier
        return cast(Tier, CACHES.config("frames")(cache=self.cache, beneath=self.tier))

    @property
    def bytes_ids(self) -> int:
        """Bytes that tell which ids have which rows, where they come and go: ids, times and their
        index.
        """
        return self.rows * 16 + self.policy.index_bytes(self.rows) if self.policy else 0

    @property
    def bytes_values(self) -> int:
        """Bytes of the values of all rows, without what the rule keeps."""
        return self.rows * sum(field.bytes_row for field in self.format.fields(self.dim).values())

    @property
    def has_equal_copies(self) -> bool:
        """Whether copies of the rows stay equal when each learns from the same gradients.

        A copy on an SSD has frames for the rows of its own rank's batches alone.
        """
        return not (self.cache.is_on or self.tier.is_on) and self.policy is None

    def check_columns(self, columns: tuple[int, int]) -> None:
        """Check that a part of the rows can have these columns, of which the second is the one
        after the last.

        Raises:
            UserError: when it cannot.
        """
        extra = self.rule.regularization
        if columns != (0, self.dim) and (extra.clip_norm or extra.max_norm):
            raise UserError(
                f"plan: table {self.name!r} is cut by columns, and its rule bounds norms of whole"
                " rows"
            )
        for name, kind in self.fields.items():
            if why := kind.uncut(columns, self.dim):
                remedy = "cut it by rows, or leave it whole"
                raise UserError(
                    f"plan: table {self.name!r} is cut by columns, and {name!r} {why}; {remedy}"
                )


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """What decides a table's values. Where its rows are kept is decided by the plan.

    Args:
        name: the table's.
        dim: D >= 1.
        addressing: ids -> rows.
        format: how a row is stored.
        rule: how a row learns.
        state: how the rule's state is stored, see `Component`.
        cache: fp32 frames for the rows that are used most.
        tier: where its rows are. It changes no value.
        init_scale: rows begin uniform in +-init_scale, by default +-1/sqrt(rows) (DLRM, arXiv
            1906.00091).
        oov_row: the id that stands for ids outside the table, which are counted. None makes them an
            error.

    Example:
        >>> from sparrow import TableSpec
        >>> from sparrow.embeddings.addressing import hashed
        >>> spec = TableSpec(name="user", dim=16, addressing=hashed.Hashed(1000))
        >>> [(part.rows, part.dim) for part in spec.components]
        [(1000, 16)]
    """

    name: str
    dim: int
    addressing: Addressing
    format: RowFormat = field(default_factory=fp32.Config)
    rule: RowRule = field(default_factory=rowwise_adagrad.Config)
    state: State = "fp32"
    cache: Cache = Cache()
    tier: Annotated[Tier, TIERS] = field(default_factory=in_memory)
    init_scale: float | None = None
    oov_row: int | None = None

    def __post_init__(self) -> None:
        require(least=1, dim=self.dim)
        most = math.inf if self.addressing.ids is None else self.addressing.ids - 1
        require(least=0, most=most, oov_row=self.oov_row)
        if vars(self.format).get("search") == "greedy":  # of int4, which few tables have
            raise UserError(
                f"table {self.name!r}: format.search is 'greedy', which converts trained rows; a"
                " table that learns or reads them has 'min-max', the same layout"
            )

    @property
    def components(self) -> tuple[Component, ...]:
        """The components of which the table consists."""
        return tuple(
            Component(
                name=f"{self.name}.{part}" if part else self.name,
                rows=rows,
                dim=dim,
                format=self.format,
                rule=self.rule,
                state=self.state,
                cache=self.cache,
                tier=self.tier,
                init_scale=(
                    0.0
                    if begin is not None
                    else rows**-0.5
                    if self.init_scale is None
                    else self.init_scale
                ),
                init_mean=begin or 0.0,
                policy=self.addressing.traits.policy,
            )
            for part, rows, dim, begin in self.addressing.components(self.dim)
        )


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A column of ids that looks into a table. Several features may share a table.

    Args:
        name: the column's.
        table: the table's name.
        pooling: "sum" or "mean" over the ids of a sample, or "none" for one vector per id. Sum and
            mean are weighted when the batch brings weights, and a mean still divides by the count.
        times: another feature, and how the products of both features' vectors are pooled, for those
            who can multiply them while they look them up. It is for features of components.

    Example:
        >>> from sparrow import Feature
        >>> Feature(name="clicked", table="item", pooling="mean").table
        'item'
    """

    name: str
    table: str
    pooling: Literal["sum", "mean", "none"] = "sum"
    times: tuple[str, Literal["sum", "mean", "none"]] | None = None
