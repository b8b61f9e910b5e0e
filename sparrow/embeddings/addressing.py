"""Which row does an id use? One small class per answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparrow.core.errors import require


class Addressing(Protocol):
    """Maps ids to rows of a table with `rows` rows."""

    @property
    def rows(self) -> int:
        """R, the rows of the table."""
        ...

    @property
    def maps(self) -> bool:
        """Whether rows differ from ids."""
        ...

    def slots(self, ids_N: Tensor) -> Tensor:
        """Rows [N] of ids [N]; a row outside [0, rows) marks an id the table does not hold."""
        ...


@dataclass(frozen=True)
class Direct:
    """Id i is row i; what becomes of ids outside [0, rows) is for `TableSpec.oov_row` to say."""

    rows: int
    maps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(least=1, rows=self.rows)

    def slots(self, ids_N: Tensor) -> Tensor:
        """The ids themselves."""
        return ids_N


@dataclass(frozen=True)
class Hashed:
    """Any 64-bit id but 0, by a multiply-shift mix (splitmix64's finaliser) of id + seed, modulo rows - 1, plus 1.

    Id 0 stands for a missing one and has row 0 to itself, so that "missing" is not what some ids happen to be.
    """

    rows: int
    seed: int = 0
    maps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(least=1, rows=self.rows)

    def slots(self, ids_N: Tensor) -> Tensor:
        """Rows [N]; two ids may share one. A table of one row has it for all."""
        h = ids_N.long() + (self.seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % (1 << 63)
        h = (h ^ _shift_right(h, 30)) * _signed(0xBF58476D1CE4E5B9)
        h = (h ^ _shift_right(h, 27)) * _signed(0x94D049BB133111EB)
        h = h ^ _shift_right(h, 31)
        rows_N = 1 + (h & torch.iinfo(torch.int64).max) % max(self.rows - 1, 1)
        return torch.where(ids_N == 0, 0, rows_N.clamp(max=self.rows - 1))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts int64 arithmetically: clear the copies of the sign


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
