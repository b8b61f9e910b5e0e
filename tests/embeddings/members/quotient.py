"""Quotient and remainder (arXiv 1909.02107): id i has row i // parts of one component and i % parts
of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from sparrow.core.errors import UserError
from sparrow.embeddings.addressing import LogTable, Numbering, Size, Traits


class Product(nn.Module):
    """The vectors' product times a gain for each column, which is a dense weight: not linear in
    sums of ids.
    """

    is_linear = False
    is_product = False

    def parts(self, dims: Sequence[int]) -> list[tuple[int, Tensor | None]]:
        raise NotImplementedError

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain_D = nn.Parameter(torch.ones(dim))

    def forward(self, vectors: Sequence[Tensor], ids_N: Tensor | None) -> Tensor:
        return vectors[0] * vectors[1] * self.gain_D


class Sum(nn.Module):
    """The vectors' sum: linear, so that pooling comes first."""

    is_linear = True
    is_product = False

    def parts(self, dims: Sequence[int]) -> list[tuple[int, Tensor | None]]:
        return [(0, None), (0, None)]

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, vectors: Sequence[Tensor], ids_N: Tensor | None) -> Tensor:
        return vectors[0] + vectors[1]


@dataclass(frozen=True)
class Quotient:
    ids: int
    parts: int
    how: Literal["product", "sum"] = "product"
    traits = Traits()

    def components(self, dim: int) -> tuple[Size, ...]:
        return Size("quotient", -(-self.ids // self.parts), dim), Size("remainder", self.parts, dim)

    def rows_of(self, ids_N: Tensor) -> tuple[Tensor, ...]:
        return ids_N // self.parts, ids_N % self.parts

    def combine(self, dim: int) -> nn.Module:
        return (Product if self.how == "product" else Sum)(dim)


@dataclass(frozen=True, kw_only=True)
class Config:
    parts: int = 4
    how: Literal["product", "sum"] = "product"

    def build(self, ids: Numbering) -> Quotient:
        if not ids.is_numbered:
            raise UserError("quotient: hashes have no quotient")
        return Quotient(ids.rows, self.parts, self.how)

    def settled(self, tables: Sequence[LogTable]) -> list[Config]:
        return [self for _ in tables]
