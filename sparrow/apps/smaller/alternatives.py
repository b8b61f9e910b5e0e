"""What a table of a run could be instead of what it is, and the bytes of each choice, without
building it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sparrow.embeddings import (
    Addressing,
    Direct,
    Hashed,
    LogTable,
    Numbering,
    TableChoices,
    TableSpec,
)
from sparrow.embeddings.addressing import mixed_dimension
from sparrow.embeddings.choices import Override
from sparrow.embeddings.sizes import disk_bytes, state_bytes
from sparrow.features.schema import Schema
from sparrow.trained.run import Run
from sparrow.training.preflight import Shapes

Purpose = Literal["train", "serve"]
How = Literal["kept", "rebuilt", "trained"]

FORMATS = ("fp16", "int8")
FEW_BITS = "int4"
MOST_OF_FEW = 1 / 4  # of the rows: tables with more are not also stored in few bits
SHARES = (1 / 2, 1 / 4, 1 / 10, 1 / 30)  # of the rows
COLUMNS = (2, 4)  # divide the columns
NARROW = 8  # and so does this
BLOCKS = 8  # of a table, which are looked up equally often
ALPHAS = (0.3, 0.6)  # how much shorter vectors of blocks are that have more rows
COLLISIONS = (4, 16, 60)
FACTORS: tuple[dict[str, Any], ...] = (
    {"name": "quotient_remainder", "operation": "mult"},
    {"name": "quotient_remainder", "operation": "add"},
    {"name": "quotient_remainder", "operation": "concat"},
    {"name": "coprime", "operation": "mult"},
    {"name": "path"},
)
# which have no bucket for a path
FACTORS_OF_HASHES = tuple({**factors, "fold": True} for factors in FACTORS[:-1])
MOST_MAPPED = 1_000_000  # ids: a map of more takes minutes to fit
LEAST_ROWS = 3  # a row for a missing id, one for unknown ids, and one that others share


def _combine_sizes(addressing: Addressing, dim: int) -> list[int]:
    """Returns the bytes of each dense weight of an addressing."""
    # whose weights do not depend on the rows
    if isinstance(addressing, mixed_dimension.MixedDimension):
        return [4 * d * dim for d in addressing.dims if d != dim]
    with torch.device("meta"), Shapes():
        module = addressing.combine(dim)
    return [] if module is None else [p.nbytes for p in module.parameters()]


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of a table, by what they are for.

    Args:
        weights: values of the rows.
        state: what the rule keeps of them, touched bytes, and frames of caches and tiers.
        map: what says the rows of ids.
        combine: weights of the module that makes one vector of several.
        combine_state: what the dense optimizer keeps of these.
        disk: how many of the bytes of weights and state are on a disk to train.
    """

    weights: int
    state: int
    map: int
    combine: int
    combine_state: int
    disk: int

    @classmethod
    def from_spec(cls, spec: TableSpec, dense: tuple[int, int]) -> Bytes:
        """Returns the bytes of a table. dense: see `sparrow.training.preflight.dense_state`."""
        parts = spec.components
        weights = sum(part.bytes_values for part in parts)
        ids = sum(part.bytes_ids for part in parts)
        sizes = _combine_sizes(spec.addressing, spec.dim)
        factor, constant = dense
        return cls(
            weights=weights,
            state=sum(state_bytes(part) for part in parts),
            map=spec.addressing.traits.bytes_map + ids,
            combine=sum(sizes),
            combine_state=factor * sum(sizes) + constant * len(sizes),
            disk=sum(disk_bytes(part, part.rows, part.dim) for part in parts),
        )

    def to(self, purpose: Purpose) -> int:
        """Returns the bytes that are needed to train, or to serve."""
        needed = self.weights + self.map + self.combine
        return needed if purpose == "serve" else needed + self.state + self.combine_state


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A choice for a table.

    Args:
        change: the settings of an `Override` that makes it; none for the table as it is.
        spec: what the table then is.
        bytes: of it.
        how: what says its damage before it is trained. "rebuilt": rows that are made of the trained
            ones. "trained": nothing. Factors and blocks train far better than they are rebuilt, and
            rows of very few bits or columns train worse. "kept": there is none.
    """

    change: dict[str, Any]
    spec: TableSpec
    bytes: Bytes
    how: How

    @property
    def table(self) -> str:
        """The name of the table."""
        return self.spec.name

    @property
    def kind(self) -> str:
        """The name of its addressing, or "format" where only that changes."""
        return str(self.change.get("addressing", {}).get("name", "format"))

    @property
    def description(self) -> str:
        """What changes, in words."""
        words = []
        if addressing := dict(self.change.get("addressing", {})):
            words.append(addressing.pop("name"))
            if "file" in addressing:  # its name says less than the rows
                addressing = {"rows": self.spec.components[0].rows}
            if edges := addressing.pop("edges", None):
                words.append(f"{len(edges) + 1} blocks")
            words += [
                "folded" if name == "fold" else f"{name} {_in_words(value)}"
                for name, value in addressing.items()
            ]
        if stored := self.change.get("format"):
            words.append(stored["name"])
        return ", ".join(words) or "as it is"


def alternatives(
    run: Run,
    schema: Schema,
    spec: TableSpec,
    dense: tuple[int, int],
    maps: Sequence[Path] = (),
    hits_R: Tensor | None = None,
) -> list[Alternative]:
    """Returns the choices for a table, the present one first. None of the others takes more bytes
    of values.

    Only tables whose ids have rows of their own, or are hashed, have others.

    Args:
        run: its settings.
        schema: of its log.
        spec: what the table is.
        dense: see `sparrow.training.preflight.dense_state`.
        maps: files with maps of its ids, see `mapped_rows`.
        hits_R: how often the training part looks up each row. Without it the table is not cut into
            blocks.
    """
    ids = Numbering.of(schema.encodings[spec.name])
    now = Alternative(change={}, spec=spec, bytes=Bytes.from_spec(spec, dense), how="kept")
    choices = [now]
    if not isinstance(spec.addressing, (Direct, Hashed)):
        return choices

    # the other tables' choices need not be gone through each time
    own = run.tables.alone(spec.name, ids.rows)

    def build(how: How, **change: Any) -> Alternative:
        chosen = Override(names=(spec.name,), **change).on(own)
        chosen = replace(chosen, sizes={}) if "addressing" in change else chosen
        then = chosen.spec(spec.name, spec.dim, ids, spec.init_scale)
        return Alternative(change=change, spec=then, bytes=Bytes.from_spec(then, dense), how=how)

    def take(candidate: Alternative, reference: Alternative) -> None:
        if candidate.bytes.to("serve") < min(reference.bytes.to("serve"), now.bytes.to("serve")):
            choices.append(candidate)

    for name in FORMATS:
        take(build("rebuilt", format={"name": name}), now)
    learned = [{"name": "learned", "file": str(path)} for path in maps]
    for addressing in (*_smaller(spec, ids), *learned):
        plain = build("rebuilt", addressing=addressing)
        take(plain, now)
        take(build("rebuilt", addressing=addressing, format={"name": "int8"}), plain)
    for change in _only_trained(spec, ids, hits_R):
        take(build("trained", **change), now)
    return choices


def mapped_rows(spec: TableSpec, ids: Numbering) -> list[int]:
    """Returns how many rows a table could have with a learned map; none where ids have no rows of
    their own.
    """
    if not isinstance(spec.addressing, Direct) or ids.rows > MOST_MAPPED:
        return []
    fewer = (max(LEAST_ROWS, round(share * ids.rows)) for share in SHARES)
    return [rows for rows in fewer if rows < ids.rows]


def changed(tables: TableChoices, changes: Mapping[str, Mapping[str, Any]]) -> TableChoices:
    """Returns the choices with other ones for some tables. Tables with the same change share an
    override.

    Args:
        tables: the choices of a run.
        changes: table -> settings of an `Override`.
    """
    groups: list[tuple[Mapping[str, Any], list[str]]] = []
    for name, change in changes.items():
        names = next((names for same, names in groups if same == change), None)
        if names is None:
            groups.append((change, [name]))
        else:
            names.append(name)
    new = tuple(Override(names=tuple(names), **change) for change, names in groups if change)
    left = {
        name: size
        for name, size in tables.sizes.items()
        if "addressing" not in changes.get(name, {})
    }
    return replace(tables, overrides=(*tables.overrides, *new), sizes=left)


def _smaller(spec: TableSpec, ids: Numbering) -> Iterator[dict[str, Any]]:
    """Yields addressings with fewer rows or columns, whose rows can be made of the trained ones."""
    rows = spec.components[0].rows
    for name in ("cut", "hashed"):
        for share in SHARES:
            fewer = max(LEAST_ROWS, round(share * rows))
            can = name == "hashed" or (
                isinstance(spec.addressing, Direct) and ids.order == "frequency"
            )
            if can and fewer < rows:
                yield {"name": name, "rows": fewer}
    for part in COLUMNS:
        if _is_whole(spec, ids) and spec.dim >= part:
            yield {"name": "mixed_dimension", "dims": [spec.dim // part]}


def _only_trained(
    spec: TableSpec, ids: Numbering, hits_R: Tensor | None
) -> Iterator[dict[str, Any]]:
    """Yields changes whose damage trained rows do not tell: see `Alternative`."""
    yield {"format": {"name": FEW_BITS}}
    for addressing in _smaller(spec, ids):
        if addressing.get("rows", math.inf) <= MOST_OF_FEW * spec.components[0].rows:
            yield {"addressing": addressing, "format": {"name": FEW_BITS}}
    if not _is_whole(spec, ids):
        return
    for factors in FACTORS if ids.is_numbered else FACTORS_OF_HASHES:
        if factors.get("operation") != "concat" or spec.dim > 1:
            yield from (
                {"addressing": {**factors, "collisions": collisions}} for collisions in COLLISIONS
            )
    if spec.dim >= NARROW:
        yield {"addressing": {"name": "mixed_dimension", "dims": [spec.dim // NARROW]}}
    if hits_R is not None and ids.order == "frequency":
        counted = LogTable(ids, spec.dim, lambda: hits_R)
        for alpha in ALPHAS:
            (blocks,) = mixed_dimension.Config(alpha=alpha, blocks=BLOCKS).settled([counted])
            if blocks.edges:
                dims, edges = list(blocks.dims), list(blocks.edges)
                yield {"addressing": {"name": "mixed_dimension", "dims": dims, "edges": edges}}


def _is_whole(spec: TableSpec, ids: Numbering) -> bool:
    """Whether the table has the rows that other addressings make of the log's ids."""
    return spec.addressing == (Direct(ids.rows) if ids.is_numbered else Hashed(ids.rows))


def _in_words(value: Any) -> str:
    """Returns a setting as it is shown: counts with thousands marked, and all that is in a list."""
    if isinstance(value, list):
        return " ".join(map(_in_words, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
