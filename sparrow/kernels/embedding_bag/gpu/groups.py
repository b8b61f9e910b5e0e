"""What kernels must know of tables: what they are compiled for, and numbers and addresses in device
memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from sparrow.core.errors import UserError
from sparrow.kernels.embedding_bag.arguments import Rows, Table, Tables
from sparrow.kernels.embedding_bag.gpu import CODECS
from sparrow.kernels.embedding_bag.gpu.launch import block_of, numbers, rows_of
from sparrow.kernels.rules import RowRule
from sparrow.numerics.formats import FORMATS

# numbers of a table: its own, then those of each level
KEY, FIRST_ROW, FIRST_COLUMN, TABLE, OWN = (tl.constexpr(i) for i in range(5))
BEGIN, COUNT, TOUCHED, CHANGED, ROWS, WEIGHT, LOW, STATE0, STATE1, STATE2, LEVEL = (
    tl.constexpr(i) for i in range(11)
)
RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam")
FIELDS = 3  # of a rule's state, at most
Purpose = Literal["values", "rows", "dims"]


class Mx(NamedTuple):
    """An MX format, see `numerics.Element`. most: the code of its largest number. is_ceil: whether
    none is cut off.
    """

    bits: int
    mantissa: int
    bias: int
    most: int
    largest: float
    is_complement: bool
    is_ceil: bool


class Level(NamedTuple):
    """How a level's rows are stored.

    format: its name in `CODECS`, or "mx" for what `Kind.mx` says. states: of each field of the
    rule's state "fp32" or "bf16", and "row" or "number"; "" for none.
    """

    format: str
    is_stochastic: bool = False
    has_changed: bool = False
    has_rows: bool = False
    states: tuple[str, ...] = ("",) * FIELDS


class Rule(NamedTuple):
    """A rule's name and numbers, with the logarithms of its betas."""

    name: str
    eps: float
    beta1: float
    beta2: float
    log2_beta1: float
    log2_beta2: float
    weight_decay: float
    decay: str
    clip_norm: float
    max_norm: float


class Kind(NamedTuple):
    """What a kernel is compiled for. Kernels call it OF.

    D: columns. BLOCK_D: the power of two that holds them. ROWS: of a tile. ALIGN: how many bytes
    divide the addresses of payload and state. levels: of each table. rule: of each table, if the
    kernel needs it. mx: of levels in an MX format.
    """

    D: int
    BLOCK_D: int
    ROWS: int
    ALIGN: int = 4
    levels: tuple[Level, ...] = ()
    rule: Rule | None = None
    mx: Mx | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tables for which kernels are compiled alike, so that one launch serves all of them.

    Args:
        members: their numbers among all tables.
        numbers: on the device, int64 [members, see above].
        kind: what kernels are compiled for.
    """

    members: list[int]
    numbers: Tensor
    kind: Kind

    @property
    def size(self) -> Kind:
        """The kind of kernels that do not touch the tables' rows."""
        return Kind(self.kind.D, self.kind.BLOCK_D, self.kind.ROWS)


def groups_of(tables: Tables, purpose: Purpose) -> list[Group]:
    """Returns the groups of tables.

    Args:
        tables: T tables.
        purpose: "values" for kernels that read what lookups read, "rows" for those that write rows,
            "dims" for those that do neither. The fewer things matter, the fewer groups there are.
    """
    if purpose not in tables.groups_by_purpose:
        kinds: dict[Kind, list[int]] = {}
        for number, table in enumerate(tables):
            kinds.setdefault(_kind(table, purpose), []).append(number)
        groups = []
        for kind, members in kinds.items():
            device = tables[members[0]].levels[0].touched_R.device
            rows = [] if purpose == "dims" else [_numbers(tables, number) for number in members]
            groups.append(Group(members=members, numbers=numbers(rows, device), kind=kind))
        tables.groups_by_purpose[purpose] = groups
    known: list[Group] = tables.groups_by_purpose[purpose]
    return known


def _rule(rule: RowRule) -> Rule:
    name, own = rule.cpp()
    if name not in RULES:
        raise UserError(f"rule {name} has no Triton row function; use impl='reference'")
    beta1, beta2, extra = own.get("beta1", 0.0), own.get("beta2", 0.0), rule.regularization
    return Rule(
        name=name,
        eps=own.get("eps", 0.0),
        beta1=beta1,
        beta2=beta2,
        log2_beta1=math.log2(max(beta1, 1e-300)),
        log2_beta2=math.log2(max(beta2, 1e-300)),
        weight_decay=extra.weight_decay,
        decay=extra.decay,
        clip_norm=extra.clip_norm,
        max_norm=extra.max_norm,
    )


def _kind(table: Table, purpose: Purpose) -> Kind:
    size = (table.dim, block_of(table.dim), rows_of(table.dim))
    if purpose == "dims":
        return Kind(*size)
    levels = tuple(_level(level, purpose) for level in table.levels)
    tensors = chain.from_iterable(_tensors(level, purpose) for level in table.levels)
    align = math.gcd(16, *(tensor.data_ptr() for tensor in tensors))
    # its levels have one format, but for fp32
    mx = next(filter(None, map(_mx, table.levels)), None)
    return Kind(*size, align, levels, _rule(table.rule) if purpose == "rows" else None, mx)


def _mx(level: Rows) -> Mx | None:
    name = level.format.cpp() or ""
    if not name.startswith("mx"):
        return None
    element = FORMATS[name.removesuffix("_floor")].element
    is_ceil = not name.endswith("_floor")
    numbers = (
        element.bits,
        element.mantissa_bits,
        element.bias,
        element.largest_code,
        element.largest,
    )
    return Mx(*numbers, element.twos_complement, is_ceil)


def _level(level: Rows, purpose: Purpose) -> Level:
    name = level.format.cpp()
    if name is None or name not in CODECS:
        raise UserError(f"row format {name} has no Triton codec; use impl='reference'")
    name = "mx" if _mx(level) else name
    if purpose == "values":
        return Level(name)
    types = [
        "bf16" if tensor.dtype == torch.bfloat16 else "fp32" for tensor in level.state.values()
    ]
    widths = ["row" if tensor.dim() > 1 else "number" for tensor in level.state.values()]
    states = [f"{kind} {width}" for kind, width in zip(types, widths, strict=True)]
    states += [""] * (FIELDS - len(states))
    has = level.changed_R is not None, level.rows_R is not None
    return Level(name, level.format.rounding == "stochastic", *has, tuple(states))


def _tensors(level: Rows, purpose: Purpose) -> list[Tensor]:
    return [*level.payload.values(), *(level.state.values() if purpose == "rows" else ())]


def _numbers(tables: Tables, number: int) -> list[int]:
    table_numbers = [*tables.rounding[3 * number : 3 * number + 3], number]
    begin = 0
    for level in tables[number].levels:
        table_numbers += [begin, level.count, level.touched_R.data_ptr()]
        for tensor in (level.changed_R, level.rows_R):
            table_numbers.append(0 if tensor is None else tensor.data_ptr())
        table_numbers += _addresses([*level.payload.values()], 2)
        table_numbers += _addresses([*level.state.values()], FIELDS)
        begin += level.count
    return table_numbers


def _addresses(tensors: Sequence[Tensor], count: int) -> list[int]:
    assert all(tensor.is_contiguous() for tensor in tensors), "rows of a table lie together"
    return [*(tensor.data_ptr() for tensor in tensors), *[0] * (count - len(tensors))]
