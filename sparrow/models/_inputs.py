"""What every feature model begins with: the schema's tables and dense columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from torch import Tensor, nn

from sparrow.core import Batch, UserError
from sparrow.data.schema import Schema
from sparrow.embeddings import Addressing, Direct, EmbeddingTables, Feature, Hashed, TableSpec
from sparrow.kernels.rules import RowRule
from sparrow.layers import NumericEmbedding


def tables_for(
    schema: Schema,
    dim: int,
    rule: RowRule,
    seed: int,
    init_scale: float | None = None,
    sequences: Collection[str] = (),
    several: Mapping[str, int] = MappingProxyType({}),
) -> EmbeddingTables:
    """Tables of one dim for all of a schema's id columns; those of `sequences` give a vector per id.

    several: table -> how many vectors of dim side by side an id of it has, else one. UserError when another column
    cannot be pooled to a vector.
    """
    specs = []
    for name, table in schema.tables.items():
        if table.rows is None:
            raise UserError(f"tables.{name}.rows: not set; run `sparrow prepare`, or write the number of rows")
        addressing: Addressing = Hashed(table.rows) if table.encoding == "hash" else Direct(table.rows)
        size = dim * several.get(name, 1)
        specs.append(TableSpec(name=name, dim=size, addressing=addressing, rule=rule, init_scale=init_scale))
    features = []
    for name in schema.sparse:
        column = schema.columns[name]
        if name in sequences:
            features.append(Feature(name=name, table=str(column.table), pooling="none"))
            continue
        if column.pooling == "none":
            raise UserError(f"columns.{name}.pooling: this model needs one vector per sample; use 'sum' or 'mean'")
        assert column.table is not None
        pooling = (column.pooling or "mean") if column.kind == "list" else "sum"
        features.append(Feature(name=name, table=column.table, pooling=pooling))
    return EmbeddingTables(specs, features, seed=seed)


def tasks(schema: Schema) -> int:
    """Logits that a model has: one for each label."""
    return max(1, len(schema.labels))


def pooled(tables: EmbeddingTables, batch: Batch) -> Tensor:
    """The vectors of all features side by side, [B, sum of dims], in the tables' order."""
    if not tables.features:
        return batch.dense_BC.new_zeros(batch.batch_size, 0)
    return tables.pooled(batch.ids)


class Vectors(nn.Module):
    """A vector of `dim` for each feature, [B, features, dim]: a dense column's is its number times one that is learned.

    names: of the features, dense columns first, then id columns, lists pooled. UserError for a log with fewer than
    `least` features.
    """

    def __init__(self, schema: Schema, dim: int, rule: RowRule, seed: int, least: int = 1) -> None:
        super().__init__()
        self.names = (*schema.dense, *schema.sparse)
        self.dim, self.features = dim, len(self.names)
        if self.features < least:
            raise UserError(f"model: it needs {least} features and this log has {self.features}; use logistic or dcnv2")
        self.tables = tables_for(schema, dim, rule, seed)
        self.numeric = NumericEmbedding(len(schema.dense), dim)

    def forward(self, batch: Batch) -> Tensor:
        """[B, features, dim]."""
        found, _ = self.numeric(batch.dense_BC, pooled(self.tables, batch))
        return found.unflatten(1, (self.features, self.dim))
