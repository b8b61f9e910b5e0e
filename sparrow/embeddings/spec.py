from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sparrow.core.errors import require
from sparrow.embeddings.addressing import Addressing
from sparrow.kernels.rules import RowRule
from sparrow.kernels.rules.rowwise_adagrad import Config as RowWiseAdaGrad


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """What decides a table's values; where its rows live is the plan's business.

    name: the table's. dim: D >= 1. addressing: ids -> rows. rule: how a row learns.
    Rows begin uniform in +-init_scale, +-1/sqrt(rows) unless told (DLRM, arXiv 1906.00091).
    oov_row: where ids outside the table go, and are counted; None makes them an error.
    """

    name: str
    dim: int
    addressing: Addressing
    rule: RowRule = field(default_factory=RowWiseAdaGrad)
    init_scale: float | None = None
    oov_row: int | None = None

    def __post_init__(self) -> None:
        require(least=1, dim=self.dim)
        require(least=0, most=self.addressing.rows - 1, oov_row=self.oov_row)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A column of ids that looks into a table; several may share one.

    pooling: "sum" or "mean" (over the ids of a sample; weighted when the batch brings weights, and a mean still
    divides by the count), or "none": one vector per id.
    """

    name: str
    table: str
    pooling: Literal["sum", "mean", "none"] = "sum"
