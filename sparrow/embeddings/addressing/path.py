from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sparrow.core.errors import require
from sparrow.embeddings.addressing._product import TableProduct
from sparrow.embeddings.addressing._size import LogTable, Numbering, Size, Traits
from sparrow.kernels.expand import expand
from sparrow.layers.activation import Activation


class Paths(nn.Module):
    """An MLP D -> hidden -> D for each bucket of ids: an id's vector goes through its bucket's.

    Its result is added to the vector, and begins at 0: a table begins as one whose ids share the
    rows.

    Args:
        dim: D.
        hidden: of each MLP.
        buckets: how many MLPs.
        rows: how many ids a bucket has: id // rows is the bucket.
    """

    is_linear = False
    is_product = False

    def __init__(self, dim: int, hidden: int, buckets: int, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.into_KHD = nn.Parameter(
            torch.empty(buckets, hidden, dim).uniform_(-(dim**-0.5), dim**-0.5)
        )
        self.bias_KH = nn.Parameter(torch.zeros(buckets, hidden))
        self.out_KDH = nn.Parameter(torch.zeros(buckets, dim, hidden))
        self.into = TableProduct()
        self.out = TableProduct()
        self.activation = Activation()

    def parts(self, dims: Sequence[int]) -> list[tuple[int, Tensor | None]]:
        """It is not linear."""
        raise NotImplementedError

    def forward(self, vectors: Sequence[Tensor], ids_N: Tensor | None) -> Tensor:
        """Returns vectors float32 [N, D]. Ids are grouped by bucket: weights of each id, [N, D,
        hidden], never exist.
        """
        assert ids_N is not None
        bucket_N, order_N = (ids_N // self.rows).sort(stable=True)
        counts = torch.bincount(bucket_N, minlength=len(self.into_KHD)).tolist()
        parts = []
        for k, x_MD in enumerate(expand(vectors[0], order_N).split(counts)):
            bias_H = None if self.bias_KH is None else self.bias_KH[k]
            h_MH = self.activation(self.into(x_MD, self.into_KHD[k], bias_H))
            parts.append(x_MD + self.out(h_MH, self.out_KDH[k]))
        return expand(torch.cat(parts), order_N.argsort())


@dataclass(frozen=True)
class Path:
    """Ids 0 <= id < ids. id mod rows is a row, and id // rows the bucket whose MLP its vector goes
    through.

    The path-based composition of arXiv 1909.02107, section 3.2.
    """

    ids: int
    rows: int
    hidden: int
    traits = Traits()

    def components(self, dim: int) -> tuple[Size, ...]:
        """Returns one component."""
        return (Size("", self.rows, dim),)

    def rows_of(self, ids_N: Tensor) -> tuple[Tensor, ...]:
        """Returns the row of each id in each component, int64 [N]."""
        return (ids_N % self.rows,)

    def combine(self, dim: int) -> nn.Module:
        """Returns new `Paths`."""
        return Paths(dim, self.hidden, -(-self.ids // self.rows), self.rows)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Ids share rows, and those that do go through different MLPs, whose weights are dense.

    collisions: how many ids share a row, which is also how many MLPs there are. rows: of the table
    instead. hidden: of each MLP.
    """

    collisions: int = 4
    rows: int | None = None
    hidden: int = 16

    def __post_init__(self) -> None:
        require(least=1, collisions=self.collisions, rows=self.rows, hidden=self.hidden)

    def build(self, ids: Numbering) -> Path:
        """Returns the addressing of a table with these ids."""
        ids.check_numbered("path")
        return Path(
            ids.rows, min(self.rows or -(-ids.rows // self.collisions), ids.rows), self.hidden
        )

    def settled(self, tables: Sequence[LogTable]) -> list[Config]:
        """Returns these settings with what the log decides, for each table."""
        return [replace(self, rows=self.build(table.ids).rows) for table in tables]
