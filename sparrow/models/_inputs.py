"""What every feature model begins with: the schema's tables and dense columns."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from sparrow.core import Batch, UserError
from sparrow.data.schema import Schema
from sparrow.embeddings import Addressing, Direct, EmbeddingTables, Feature, Hashed, TableSpec
from sparrow.kernels.rules import RowRule


def tables_for(
    schema: Schema, dim: int, rule: RowRule, seed: int, init_scale: float | None = None, sequences: Collection[str] = ()
) -> EmbeddingTables:
    """Tables of one dim for all of a schema's id columns; those of `sequences` give a vector per id.

    UserError when another column cannot be pooled to a vector.
    """
    specs = []
    for name, table in schema.tables.items():
        if table.rows is None:
            raise UserError(f"tables.{name}.rows: not set; run `sparrow prepare`, or write the number of rows")
        addressing: Addressing = Hashed(table.rows) if table.encoding == "hash" else Direct(table.rows)
        specs.append(TableSpec(name=name, dim=dim, addressing=addressing, rule=rule, init_scale=init_scale))
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
