from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from sparrow.core.errors import require
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.models import ple
from sparrow.models._inputs import History


@dataclass(frozen=True, kw_only=True)
class Config:
    """MMoE (Ma et al., KDD 2018): one level of `experts` that all labels share, a gate and a tower
    for each label.

    It is `ple` with one level and without experts of single labels. The other settings are those of
    `ple`.
    """

    dim: int = 16
    experts: int = 4
    expert: tuple[int, ...] = (64,)
    tower: tuple[int, ...] = (32,)
    dropout: float = 0.0
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        require(least=1, experts=self.experts)
        self._as_ple()

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return self._as_ple().build(schema, tables)

    def _as_ple(self) -> ple.Config:
        return ple.Config(
            dim=self.dim,
            shared=self.experts,
            own=0,
            levels=1,
            expert=self.expert,
            tower=self.tower,
            dropout=self.dropout,
            history=self.history,
        )
