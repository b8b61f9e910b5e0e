from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise

import torch
from torch import Tensor, nn

from sparrow.core.errors import UserError, require
from sparrow.embeddings.addressing._product import TableLinear
from sparrow.embeddings.addressing._size import LogTable, Numbering, Size, Traits
from sparrow.embeddings.addressing.hashed import Hashed


def popularity_dims(
    popularity: Sequence[float],
    rows: Sequence[int],
    most: Sequence[int],
    alpha: float,
    budget: float | None = None,
    power_of_two: bool = False,
) -> list[int]:
    """Returns a dim d_i = scale * D_i * p_i^alpha for each block of rows (arXiv 1909.11810,
    algorithm 3), 1 to D_i.

    Args:
        popularity: p_i, how often a row of each block is looked up, in any unit.
        rows: n_i of each block.
        most: D_i, that of each block's table. The block that is looked up most has all, unless
            there is a budget.
        alpha: 0 makes all dims equal.
        budget: the most that the sum of n_i d_i may be. The scale is the largest that keeps to it.
        power_of_two: whole numbers are rounded to powers of two, by their logarithm.

    Raises:
        UserError: when the budget is too small.
    """
    p = torch.tensor(popularity, dtype=torch.float64)
    most_N = torch.tensor(most, dtype=torch.float64)
    shape = most_N * (p / p.max()).pow(alpha) if p.max() > 0 else most_N

    def dims(scale: float) -> list[int]:
        exact = (shape * scale).clamp(min=1)
        rounded = exact.round().log2().round().exp2() if power_of_two else exact.round()
        return [int(d) for d in rounded.minimum(most_N)]

    def numbers(scale: float) -> int:
        return sum(n * d for n, d in zip(rows, dims(scale), strict=True))

    if budget is None:
        return dims(1.0)
    if numbers(0) > budget:
        raise UserError(
            f"budget: {budget:,.0f} numbers are fewer than the rows, {numbers(0):,}; give more"
        )
    low = 0.0
    high = float((most_N / shape)[shape > 0].max())
    if numbers(high) <= budget:
        return dims(high)
    for _ in range(100):  # the sum grows with the scale
        middle = (low + high) / 2
        low, high = (middle, high) if numbers(middle) <= budget else (low, middle)
    return dims(low)


class Projections(nn.Module):
    """The sum of P x over the blocks, P without a bias. A block with all columns has no P.

    Args:
        dims: of the blocks.
        dim: of the vector that is made.
    """

    is_linear = True
    is_product = False

    def __init__(self, dims: Sequence[int], dim: int) -> None:
        super().__init__()
        blocks = [nn.Identity() if d == dim else TableLinear(d, dim) for d in dims]
        self.blocks = nn.ModuleList(blocks)
        for block in blocks:
            if isinstance(block, TableLinear):
                nn.init.xavier_uniform_(block.weight)

    def parts(self, dims: Sequence[int]) -> list[tuple[int, Tensor | None]]:
        """Returns the place and the weight of each component's vectors, see `Combine.parts`."""
        return [
            (0, block.weight if isinstance(block, TableLinear) else None) for block in self.blocks
        ]

    def forward(self, vectors: Sequence[Tensor], ids_N: Tensor | None) -> Tensor:
        """Returns the sum of the projected vectors, float32 [N, D]."""
        projected = [block(x_ND) for block, x_ND in zip(self.blocks, vectors, strict=True)]
        return torch.stack(projected).sum(0) if len(projected) > 1 else projected[0]


@dataclass(frozen=True)
class MixedDimension:
    """Blocks of rows with vectors of their own size, which a matrix P of the block makes `dim`
    long.

    Mixed dimension embeddings, arXiv 1909.11810.

    Args:
        rows: how many ids there are.
        dims: of the blocks.
        edges: the first ids of all blocks but the first.
        is_hashed: whether ids are hashes, which are taken modulo the rows first, as by `Hashed`.
    """

    rows: int
    dims: tuple[int, ...]
    edges: tuple[int, ...] = ()
    is_hashed: bool = False

    @property
    def ids(self) -> int | None:
        """As many ids as rows; None where they are hashes."""
        return None if self.is_hashed else self.rows

    @property
    def traits(self) -> Traits:
        """An id is in one block."""
        return Traits(is_partial=len(self.dims) > 1)

    def components(self, dim: int) -> tuple[Size, ...]:
        """Returns one component for each block."""
        if max(self.dims) > dim:
            raise UserError(
                f"dims: {max(self.dims)} is more than the {dim} of the model's vectors; give less"
            )
        ends = (0, *self.edges, self.rows)
        names = [f"block{i}" if len(self.dims) > 1 else "" for i in range(len(self.dims))]
        return tuple(
            Size(n, b - a, d) for n, (a, b), d in zip(names, pairwise(ends), self.dims, strict=True)
        )

    def rows_of(self, ids_N: Tensor) -> tuple[Tensor, ...]:
        """Returns the row of each id in each component, int64 [N]."""
        if self.is_hashed:
            return Hashed(self.rows).rows_of(ids_N)
        ends = (0, *self.edges, self.rows)
        return tuple(
            torch.where((ids_N >= a) & (ids_N < b), ids_N - a, -1) for a, b in pairwise(ends)
        )

    def combine(self, dim: int) -> nn.Module | None:
        """Returns new `Projections`, or None for one block with all columns."""
        return None if self.dims == (dim,) else Projections(self.dims, dim)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Rows that are looked up less have shorter vectors: d = scale * popularity^alpha, 1 to the
    model's dim.

    alpha: 0 makes all equal. blocks: of a table, of equally many lookups each, for which ids must
    be numbered by frequency; with 1, a table is a block. Popularity is the mean of a block's rows
    in the training part, over all tables with these settings. budget: the share of their numbers
    that may stay; by default the most popular block has all columns. power_of_two: dims are rounded
    to powers of two. dims, edges: of the blocks, and the first ids of all but the first, which are
    settled when a run begins.
    """

    alpha: float = 0.3
    blocks: int = 1
    budget: float | None = None
    power_of_two: bool = False
    dims: tuple[int, ...] = ()
    edges: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(least=0, alpha=self.alpha)
        require(least=1, blocks=self.blocks)
        require(above=0, most=1, budget=self.budget)
        for d in self.dims:
            require(least=1, dims=d)
        if self.dims and len(self.edges) != len(self.dims) - 1:
            raise UserError(
                f"edges: {len(self.edges)} for {len(self.dims)} dims; give one less than dims"
            )
        if any(b <= a for a, b in pairwise((0, *self.edges))):
            raise UserError("edges: they must increase from 1")

    def build(self, ids: Numbering) -> MixedDimension:
        """Returns the addressing of a table with these ids."""
        self._check(ids)
        if not self.dims:
            raise UserError(
                "dims: not settled; give one for each block, or let `sparrow train` settle them"
            )
        if self.edges and self.edges[-1] >= ids.rows:
            raise UserError(
                f"edges: {self.edges[-1]} is not below the {ids.rows} ids of the log; give less"
            )
        return MixedDimension(ids.rows, self.dims, self.edges, not ids.is_numbered)

    def settled(self, tables: Sequence[LogTable]) -> list[Config]:
        """Returns these settings with dims and edges, for each table."""
        if self.dims:
            return [self for _ in tables]
        for table in tables:
            self._check(table.ids)  # before what takes long
        blocks = [self._blocks(table) for table in tables]
        rows: list[int] = []
        popularity: list[float] = []
        most: list[int] = []
        for table, (block_rows, block_popularity) in zip(tables, blocks, strict=True):
            rows += block_rows
            popularity += block_popularity
            most += [table.dim] * len(block_rows)
        budget = None
        if self.budget is not None:
            budget = self.budget * sum(table.dim * table.ids.rows for table in tables)
        dims = iter(popularity_dims(popularity, rows, most, self.alpha, budget, self.power_of_two))
        configs = []
        for block_rows, _ in blocks:
            table_dims = tuple(islice(dims, len(block_rows)))
            edges = tuple(accumulate(block_rows[:-1]))
            configs.append(replace(self, dims=table_dims, edges=edges))
        return configs

    def _check(self, ids: Numbering) -> None:
        if self.blocks > 1 or self.edges:
            ids.check_frequent_first("blocks")

    def _blocks(self, table: LogTable) -> tuple[list[int], list[float]]:
        """Returns the rows of a table's blocks, and the mean lookups of their rows."""
        counts = table.counts()
        if self.blocks == 1:
            return [table.ids.rows], [float(counts.sum()) / table.ids.rows]
        mass = counts.double().cumsum(0)
        marks = mass[-1] * torch.arange(1, self.blocks, dtype=torch.float64) / self.blocks
        inner = (torch.searchsorted(mass, marks) + 1).tolist()
        ends = sorted({0, *(end for end in inner if end < table.ids.rows), table.ids.rows})
        parts = list(pairwise(ends))
        lookups = [float(counts[begin:end].sum()) / (end - begin) for begin, end in parts]
        return [end - begin for begin, end in parts], lookups
