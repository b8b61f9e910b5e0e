from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.interactions.fm import FactorizationMachine
from sparrow.layers.mlp import require_sizes
from sparrow.models._inputs import History, tasks
from sparrow.models._vectors import Vectors


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: the size of the vectors whose dot products weigh the pairs. history: lists that
    transformers read; its heads must divide labels * (dim + 1), which is all of a feature's
    numbers.
    """

    dim: int = 16
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,))

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return FM(schema, self, tables)


class FM(nn.Module):
    """Factorization machine (Rendle 2010): each label has vectors and weights of its own, side by
    side in a table.
    """

    def __init__(self, schema: Schema, config: Config, tables: TableChoices) -> None:
        super().__init__()
        self.vectors = Vectors(schema, tasks(schema) * (config.dim + 1), tables, config.history)
        self.machine = FactorizationMachine(tasks(schema))

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T]."""
        return self.machine(self.vectors(batch))
