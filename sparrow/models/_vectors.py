"""`Vectors`: what models begin with that compare all features, numbers too, as vectors of one
size.
"""

from __future__ import annotations

from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.layers.numeric import NumericEmbedding
from sparrow.models._inputs import History, Ids, Numbers


class Vectors(nn.Module):
    """A vector of `dim` for each feature, [B, features, dim]. A number's is the number times one
    that is learned.

    names: of the features: numeric columns first, then vector columns, then id columns, one with
    several vectors as often.

    Args:
        schema: of the log.
        dim: D of the vectors.
        tables: see `tables_for`.
        history: the lists that transformers read.

    Raises:
        UserError: as for `Ids`.
    """

    def __init__(self, schema: Schema, dim: int, tables: TableChoices, history: History) -> None:
        super().__init__()
        self.dim = dim
        self.ids = Ids(schema, dim, tables, history)
        number_names = (*schema.of_kind("numeric"), *schema.of_kind("vector"))
        id_names: list[str] = []
        for name, count in self.ids.vectors_of.items():
            id_names += [name] * count
        self.names = (*number_names, *id_names)
        self.features = len(self.names)
        self.numbers = Numbers(schema, dim)
        self.numeric = NumericEmbedding(self.numbers.columns, dim)

    def forward(self, batch: Batch) -> Tensor:
        """Returns [B, features, dim]."""
        vectors, _ = self.numeric(*self.numbers(batch.dense_BC, self.ids(batch)))
        return vectors.unflatten(1, (self.features, self.dim))
