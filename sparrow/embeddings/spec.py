from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import torch

from sparrow.core.config import Family
from sparrow.core.errors import UserError, require
from sparrow.embeddings.addressing import Addressing
from sparrow.kernels.formats import Field, RowFormat, fp32, int4
from sparrow.kernels.row_cache import WAYS
from sparrow.kernels.row_cache.policies import policy_of
from sparrow.kernels.row_index import Policy
from sparrow.kernels.rules import RowRule, rowwise_adagrad

TIERS = Family("sparrow.embeddings.tiers")


@dataclass(frozen=True, kw_only=True)
class Framed:
    """How many rows have a frame at a time, and which row gives way.

    fraction: of the rows; or bytes: of all frames together. policy: which row gives way, the one used least recently
    ("lru"), or another member of `sparrow.kernels.row_cache.policies`.
    """

    fraction: float = 0.0
    bytes: int = 0
    policy: str = "lru"

    def __post_init__(self) -> None:
        require(least=0, most=1, fraction=self.fraction)
        require(least=0, bytes=self.bytes)
        policy_of(self.policy)
        if self.fraction and self.bytes:
            raise UserError("fraction and bytes are given; choose one")


@dataclass(frozen=True, kw_only=True)
class Cache(Framed):
    """fp32 frames for the rows that are used most. They belong to the table's values: rows that are out are rounded.

    fraction, bytes: how many rows have frames, see `Framed`; 0 of both is no cache. policy: which row gives way, "lru",
    "lfu" (a byte a row more) or another one. protect: rows of so many last batches never give way.
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
class Folder:
    """Where tables have files, if anywhere. window: rows of so many last batches never leave their frames."""

    path: Path | None = None
    window: int = 5


@dataclass(frozen=True, kw_only=True)
class Tier(Framed):
    """Where rows are. Values never depend on it. A member of `sparrow.embeddings.tiers` says what is its own.

    fraction: of the rows that have a frame at a time; by default a tenth, and 65,536 rows at least. A quarter as many
    frames stand by, for rows of batches under way whose places are taken. bytes, policy: see `Framed`.
    """

    is_on: ClassVar[bool] = True  # whether only some rows have frames
    has_blocks: ClassVar[bool] = False  # whether rows are in files of blocks, which checkpoints share

    @property
    def name(self) -> str:
        """The member's name."""
        return TIERS.name_of(self)

    @property
    def has_folder(self) -> bool:
        """Whether rows are in a folder, which the user names."""
        return self.has_blocks

    def reason_against(self, device: str) -> str:
        """Returns why rows that learn on a device cannot be here, with the remedy, or ""."""
        return ""

    def advice(self, device: str) -> str:
        """Returns what a user should know who has chosen this for rows that learn on a device, or ""."""
        return ""

    def memory_bytes(self, component: Component, rows: int, dim: int) -> int:
        """Returns the bytes of memory for a part of the rows, of the device where that has frames."""
        return component.tier_bytes(rows, dim)

    def disk_bytes(self, component: Component, used: float, hosts: int) -> int:
        """Returns the bytes of disk that a component's rows take.

        Args:
            component: whose rows.
            used: its lookups, so that this many rows may learn.
            hosts: among how many the rows are divided.
        """
        return 0

    def beneath_bytes(self, component: Component, rows: int, dim: int) -> int:
        """Returns the bytes of the host for a part of the rows that is beneath frames of a device."""
        return 0

    def store(self, component: Component, rows: int, dim: int, folder: Folder) -> Any:
        """Returns a `RowStore` of a part of the rows.

        Args:
            component: whose they are.
            rows: how many.
            dim: how many of its dimensions.
            folder: where it may make files.
        """
        raise NotImplementedError


def in_memory() -> Tier:
    """Returns the tier where all rows are in memory."""
    return cast(Tier, TIERS.config("memory")())


State = Literal["fp32", "bf16"]
STATES: dict[State, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
TAG_BYTES = 8  # beside a record in a frame: its row and its last batch
FRAMES = 1 << 16  # of a table on an SSD, at least, if nothing is said: its batches under way fit in them
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
    format: Annotated[RowFormat, Family("sparrow.kernels.formats")] = field(default_factory=fp32.Config)
    rule: Annotated[RowRule, Family("sparrow.kernels.rules")] = field(default_factory=rowwise_adagrad.Config)
    state: State = "fp32"
    cache: Cache = field(default_factory=Cache)
    tier: Annotated[Tier, TIERS] = field(default_factory=in_memory)
    init_scale: float = 0.0
    init_mean: float = 0.0
    policy: Policy | None = None

    def __post_init__(self) -> None:
        require(least=1, rows=self.rows, dim=self.dim)

    def fields_of(self, dim: int) -> dict[str, Field]:
        """Returns every field of a row record with `dim` columns: the format's, the rule's, and a touched byte.

        Raises:
            UserError: when format and rule both have a field of one name.
        """
        payload = self.format.fields(dim)
        state, kind = self.rule.fields(dim), STATES[self.state]
        state = {name: of if of.dtype == kind else replace(of, dtype=kind) for name, of in state.items()}
        own = {"touched": Field(dtype=torch.uint8, across="max")} | (OF_IDS if self.policy else {})
        if both := [name for name in (*state, *own) if name in payload or name in state.keys() & own.keys()]:
            raise UserError(f"table {self.name!r}: format and rule both have a field {both[0]!r}; rename one")
        return payload | state | own

    @cached_property
    def fields(self) -> dict[str, Field]:
        """The fields of a whole row."""
        return self.fields_of(self.dim)

    @property
    def bytes_row(self) -> int:
        """Bytes of a row record."""
        return sum(field.bytes_row for field in self.fields.values())

    @cached_property
    def in_frames(self) -> Component:
        """The same rows as frames of a cache hold them."""
        return replace(self, format=fp32.Config(), state="fp32", cache=Cache(), tier=in_memory(), policy=None)

    def frame_fields(self, dim: int) -> dict[str, Field]:
        """Returns the fields of a frame: those of a row, the row's number, its last batch and its last update."""
        numbers = {name: Field(dtype=torch.int32, across="max") for name in ("tag", "stamp", "changed")}
        return self.in_frames.fields_of(dim) | numbers

    def frame_bytes(self, dim: int) -> int:
        """Returns the bytes of a frame."""
        return sum(field.bytes_row for field in self.frame_fields(dim).values())

    def frames(self, rows: int) -> int:
        """Returns how many frames a part with so many rows has: whole sets, one at least, and as many as rows need.

        A fraction is rounded up, so that 1 is a frame for each row. Bytes are those of all rows with all columns, and a
        bound that only first sets may pass. Parts of the same rows have the same frames, however columns are cut.
        """
        return self._sets(self.cache.fraction, self.cache.bytes, self.frame_bytes(self.dim), rows)

    def _sets(self, fraction: float, size: int, frame_bytes: int, rows: int) -> int:
        share = size * rows // (self.rows * WAYS * frame_bytes)
        sets = math.ceil(fraction * rows / WAYS) if fraction else share
        return WAYS * max(1, min(sets, -(-rows // WAYS)))

    def tier_frames(self, rows: int) -> tuple[int, int]:
        """Returns the frames over a part with so many rows on an SSD: of its cache, and those that stand by."""
        fraction = self.tier.fraction or (0.0 if self.tier.bytes else min(max(0.1, FRAMES / max(rows, 1)), 1.0))
        frames = self._sets(fraction, self.tier.bytes * 4 // 5, self.bytes_row + TAG_BYTES, rows)
        return frames, min(max(frames // 4, WAYS), max(rows - frames, 0))

    def tier_bytes(self, rows: int, dim: int) -> int:
        """Returns the bytes of the frames of a tier for a part of the rows, and of counts of their uses."""
        size = sum(field.bytes_row for field in self.fields_of(dim).values()) + TAG_BYTES
        return sum(self.tier_frames(rows)) * size + rows * policy_of(self.tier.policy).bytes_row

    def bytes_of(self, rows: int, dim: int) -> int:
        """Returns the bytes of a part of the rows with `dim` columns, with its cache's frames and its ids' index.

        They are bytes of memory, see `Tier.memory_bytes`.
        """
        own = self.tier.memory_bytes(self, rows, dim)
        own += self.policy.index_bytes(rows) if self.policy else 0
        if not self.cache.is_on:
            return own
        return own + self.frames(rows) * self.frame_bytes(dim) + rows * policy_of(self.cache.policy).bytes_row

    @property
    def bytes_ids(self) -> int:
        """Bytes that tell which ids have which rows, where they come and go: ids, times and their index."""
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
        """Check that a part of the rows can have these columns, of which the second is the one after the last.

        Raises:
            UserError: when it cannot.
        """
        extra = self.rule.regularization
        if columns != (0, self.dim) and (extra.clip_norm or extra.max_norm):
            raise UserError(f"plan: table {self.name!r} is cut by columns, and its rule bounds norms of whole rows")
        for name, of in self.fields.items():
            if why := of.uncut(columns, self.dim):
                remedy = "cut it by rows, or leave it whole"
                raise UserError(f"plan: table {self.name!r} is cut by columns, and {name!r} {why}; {remedy}")


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
        init_scale: rows begin uniform in +-init_scale, by default +-1/sqrt(rows) (DLRM, arXiv 1906.00091).
        oov_row: the id that stands for ids outside the table, which are counted. None makes them an error.
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
        if isinstance(self.format, int4.Config) and self.format.search == "greedy":
            raise UserError(
                f"table {self.name!r}: format.search is 'greedy', which converts trained rows; a table that learns or "
                "reads them has 'min-max', the same layout"
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
                init_scale=0.0 if begin is not None else rows**-0.5 if self.init_scale is None else self.init_scale,
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
        pooling: "sum" or "mean" over the ids of a sample, or "none" for one vector per id. Sum and mean are weighted
            when the batch brings weights, and a mean still divides by the count.
        times: another feature, and how the products of both features' vectors are pooled, for those who can multiply
            them while they look them up. It is for features of components.
    """

    name: str
    table: str
    pooling: Literal["sum", "mean", "none"] = "sum"
    times: tuple[str, Literal["sum", "mean", "none"]] | None = None
