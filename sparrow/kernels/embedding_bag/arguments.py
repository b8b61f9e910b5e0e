"""What the operators are given: tables, and the bags of a batch that look into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels.formats import RowFormat
from sparrow.kernels.rules import RowRule

Pooling = Literal["sum", "mean", "none"]
NEVER = -(1 << 63)  # in the place of a time that nobody knows
POOLINGS: tuple[Pooling, ...] = ("sum", "mean", "none")


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Row records that lie together: the fields of the format, those of the rule, and a byte that
    says "touched".

    payload, state: field -> [R] or [R, entries]. touched_R: uint8 [R], 1 if the row was ever
    updated. changed_R: int32 [R], the number of the row's last update, 0 for none since it was
    copied here; None where nobody asks. rows_R: int32 [R], which row of the table each is, where
    they are not in order, since stochastic rounding depends on it.
    """

    format: RowFormat
    payload: dict[str, Tensor]
    touched_R: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)
    changed_R: Tensor | None = None
    rows_R: Tensor | None = None

    @property
    def count(self) -> int:
        """R."""
        return self.touched_R.shape[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """A table's rows, on one storage level or several, and how they learn.

    rows, dim: R and D. Slots number the rows of all levels in turn, and there may be more slots
    than R. Lookups and updates take slots. `row_gradients`, which only adds up gradients, takes row
    numbers. key: of the random numbers of stochastic rounding. place: the row and the column of the
    whole component with which its levels begin.
    """

    levels: tuple[Rows, ...]
    rule: RowRule
    rows: int
    dim: int
    key: int = 0
    place: tuple[int, int] = (0, 0)

    @property
    def slots(self) -> int:
        """How many rows all levels have together."""
        return sum(level.count for level in self.levels)


class Tables(tuple[Table, ...]):
    """The tables of one call. What the C++ operators read of them is listed once."""

    @cached_property
    def groups_by_purpose(self) -> dict[str, Any]:
        """What the Triton kernels must know of them, by its purpose: see `gpu/groups.py`."""
        return {}

    @cached_property
    def levels(self) -> list[Rows]:
        """All levels of all tables."""
        return list(chain.from_iterable(table.levels for table in self))

    @cached_property
    def payload(self) -> list[Tensor]:
        """Every level's values, field by field."""
        return list(chain.from_iterable(level.payload.values() for level in self.levels))

    @cached_property
    def formats(self) -> str:
        """The C++ codec of every level, by commas."""
        return ",".join(level.format.cpp() or "" for level in self.levels)

    @cached_property
    def is_compiled(self) -> bool:
        """Whether the C++ operators know all formats."""
        return all(level.format.cpp() for level in self.levels)

    @cached_property
    def dims(self) -> list[int]:
        """D of every table."""
        return [table.dim for table in self]

    @cached_property
    def rounding(self) -> list[int]:
        """For every table key, first row and first column; then for every level 1 if it rounds
        stochastically.
        """
        numbers: list[int] = []
        for table in self:
            numbers += [_signed(table.key), *table.place]
        numbers += [int(level.format.rounding == "stochastic") for level in self.levels]
        return numbers

    @cached_property
    def rounding_T(self) -> Tensor:
        """The same, int64."""
        return torch.tensor(self.rounding)

    @cached_property
    def touched(self) -> list[Tensor]:
        """Every level's touched bytes."""
        return [level.touched_R for level in self.levels]

    @cached_property
    def changed(self) -> list[Tensor]:
        """Every level's numbers of last updates; empty where nobody asks. No level's if nobody asks
        for any.
        """
        return _level_tensors([level.changed_R for level in self.levels])

    @cached_property
    def row_numbers(self) -> list[Tensor]:
        """Every level's row numbers; empty where rows are in order. No level's if all are."""
        return _level_tensors([level.rows_R for level in self.levels])

    @cached_property
    def state(self) -> list[Tensor]:
        """Every level's state, field by field."""
        return list(chain.from_iterable(level.state.values() for level in self.levels))

    @cached_property
    def level_counts(self) -> list[int]:
        """Levels per table."""
        return [len(table.levels) for table in self]

    @cached_property
    def sizes(self) -> list[int]:
        """Rows and dim of every table."""
        return list(chain.from_iterable((table.rows, table.dim) for table in self))

    @cached_property
    def rules(self) -> tuple[str, Tensor]:
        """Name of every table's rule, by commas, and seven numbers for each: see `rule_of` in
        cpu/arguments.cpp.
        """
        names: list[str] = []
        numbers: list[float] = []
        for table in self:
            name, own = table.rule.cpp()
            extra = table.rule.regularization
            numbers += [
                extra.weight_decay,
                float(extra.decay == "decoupled"),
                extra.clip_norm,
                extra.max_norm,
            ]
            numbers += [own.get("eps", 0.0), own.get("beta1", 0.0), own.get("beta2", 0.0)]
            names.append(name)
        return ",".join(names), torch.tensor(numbers, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A feature: bags of key number `key` pooled from table number `table`.

    pooling: "sum", "mean" (over the lookups of a bag, weighted or not), or "none": a vector per
    lookup. inverse: the number of the index in `Bags.inverses` that says which bag each sample
    uses, or -1. output, column: where its vectors go. by, by_key: a second table and key, or -1:
    the row of each lookup is multiplied by that of the same place there. Both keys have bags of the
    same lengths. Both tables are of fp32 on one level.
    """

    table: int
    pooling: Pooling
    key: int
    inverse: int = -1
    output: int = 0
    column: int = 0
    by: int = -1
    by_key: int = -1


class Lookups(tuple[Lookup, ...]):
    """The features of one call."""

    def to_numbers(self) -> list[int]:
        """Returns the lookups as plain numbers, six for each. Those of products are not among
        them.
        """
        numbers: list[int] = []
        for f in self:
            numbers += [f.table, POOLINGS.index(f.pooling), f.key, f.inverse, f.output, f.column]
        return numbers

    numbers = cached_property(to_numbers)

    @cached_property
    def table_of(self) -> dict[int, int]:
        """Key -> the table into which it looks."""
        return {f.key: f.table for f in self}

    @cached_property
    def products(self) -> list[int]:
        """Number, second table and key of every lookup that multiplies, and 3: both tables want
        gradients.
        """
        return self._products(3)

    @cached_property
    def sides(self) -> tuple[list[int], list[int]]:
        """`products` where only the first tables want gradients, and where only the second ones
        do.
        """
        second: list[int] = []
        for i, f in enumerate(self):
            second += [i, f.by, f.by_key, 0 if f.by < 0 else 2]
        return self._products(1), second

    def _products(self, wanted: int) -> list[int]:
        numbers: list[int] = []
        for i, f in enumerate(self):
            if f.by >= 0:
                numbers += [i, f.by, f.by_key, wanted]
        return numbers

    @cached_property
    def second(self) -> list[int]:
        """The tables whose rows multiply others."""
        return sorted({f.by for f in self if f.by >= 0})

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> Lookups:
        """Returns the lookups that `numbers` came from."""
        names = [f.name for f in fields(Lookup)][:6]
        parts = [
            dict(zip(names, numbers[i : i + 6], strict=True)) for i in range(0, len(numbers), 6)
        ]
        return cls(Lookup(**{**part, "pooling": POOLINGS[part["pooling"]]}) for part in parts)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bags:
    """A batch. Bag b of all keys is slots_N[offsets_B1[b] : offsets_B1[b + 1]].

    Args:
        slots_N: int32 or int64, key by key.
        offsets_B1: int64, where each bag begins.
        bags: how many bags each key has, on the host.
        bounds: where the slots of each key begin, and where the last key's end, on the host.
        weights_N: float32 per lookup; 1 by default.
        inverses: int64 [samples] each.
        lookups: the features. Features with the same `output` stand side by side in one matrix
            [samples, sum of dims], at their columns.
        moment: how many samples the batch has and when the last one was, or NEVER. Operators do not
            ask.
    """

    slots_N: Tensor
    offsets_B1: Tensor
    bags: Sequence[int]
    bounds: Sequence[int]
    lookups: Lookups
    weights_N: Tensor | None = None
    inverses: Sequence[Tensor] = ()
    moment: tuple[int, int] = (0, NEVER)

    def samples(self, f: Lookup) -> int:
        """Returns how many vectors a feature gets."""
        if f.inverse >= 0:
            return self.inverses[f.inverse].numel()
        return (
            self.bounds[f.key + 1] - self.bounds[f.key] if f.pooling == "none" else self.bags[f.key]
        )

    def outputs(self, dims: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the shape of each output. dims: of the tables. UserError when features of one
        output do not fit.
        """
        shapes: list[tuple[int, int]] = []
        for f in self.lookups:
            rows, columns = shapes[f.output] if f.output < len(shapes) else (self.samples(f), 0)
            if rows != self.samples(f) or columns != f.column or f.output > len(shapes):
                raise UserError(
                    f"output {f.output}: {f} does not follow {rows} x {columns}; give it its own"
                    " output"
                )
            shapes[f.output : f.output + 1] = [(rows, columns + dims[f.table])]
        return shapes


def _level_tensors(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    none = torch.empty(0, dtype=torch.int32)
    if all(tensor is None for tensor in tensors):
        return []
    return [none if tensor is None else tensor for tensor in tensors]


def _signed(key: int) -> int:
    return key - (1 << 64) if key >= 1 << 63 else key
