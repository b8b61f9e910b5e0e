from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.interactions.fm import FactorizationMachine
from sparrow.layers.mlp import MLP, Head, require_sizes
from sparrow.models._inputs import History, tasks
from sparrow.models._vectors import Vectors


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: the size of a feature's vector. deep: hidden sizes of the MLP. dropout: of it, see
    `MLP`. history: lists that transformers read; its heads must divide labels * (dim + 1), which is
    all of a feature's numbers.
    """

    dim: int = 16
    deep: tuple[int, ...] = (128, 64)
    dropout: float = 0.0
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,), deep=self.deep)

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return DeepFM(schema, self, tables)


class DeepFM(nn.Module):
    """A factorization machine beside an MLP that reads the same vectors (arXiv 1703.04247).

    With several labels each has dim + 1 numbers of a vector for its machine; the MLP reads all but
    the weights.
    """

    def __init__(self, schema: Schema, config: Config, tables: TableChoices) -> None:
        super().__init__()
        self.vectors = Vectors(schema, tasks(schema) * (config.dim + 1), tables, config.history)
        self.machine = FactorizationMachine(tasks(schema))
        self.deep = MLP(
            self.vectors.features * tasks(schema) * config.dim, config.deep, config.dropout
        )
        self.head = Head(self.deep.out_features, tasks(schema), bias=False)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T]."""
        vectors_BFD = self.vectors(batch)
        unweighted = self.machine.split(vectors_BFD)[0].flatten(1)
        return self.machine(vectors_BFD) + self.head(self.deep(unweighted))
