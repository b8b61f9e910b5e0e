"""What every feature model begins with: the schema's tables and dense columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from sparrow.core import Batch, UserError
from sparrow.core.errors import require, suggest
from sparrow.core.plain import Informed
from sparrow.embeddings import EmbeddingTables, Feature, Numbering, TableChoices
from sparrow.features.schema import Schema
from sparrow.layers.mlp import Linear


@dataclass(frozen=True, kw_only=True)
class History:
    """lists: columns of lists that are not pooled but read, each by a causal transformer of its
    own.

    layers, heads: of each transformer; heads divide the size of a vector. longest: how many last
    ids of a list it sees.
    """

    lists: tuple[str, ...] = ()
    layers: int = 2
    heads: int = 2
    longest: int = 50

    def __post_init__(self) -> None:
        require(least=1, layers=self.layers, heads=self.heads, longest=self.longest)
        if len(set(self.lists)) < len(self.lists):
            raise UserError("lists: a list is named twice; name it once")


def tables_for(
    schema: Schema,
    dim: int,
    tables: TableChoices,
    init_scale: float | None = None,
    sequences: Collection[str] = (),
    several: Mapping[str, int] = MappingProxyType({}),
) -> EmbeddingTables:
    """Returns tables of one dim for all of a schema's id columns.

    Args:
        schema: of the log.
        dim: D of the vectors.
        tables: how tables are addressed, stored and trained.
        init_scale: the model's own, for tables of which a run says none.
        sequences: columns of lists that give a vector per id.
        several: table -> how many vectors of dim side by side an id of it has, by default one.

    Raises:
        UserError: when another column cannot be pooled to a vector, and for a schema without any
            feature.
    """
    if not schema.dense and not schema.sparse:
        raise UserError(
            "model: this log has no feature; make some of its columns numeric, categorical or list"
        )
    tables.check_names(list(schema.encodings))
    specs = []
    for name, table in schema.encodings.items():
        if table.rows is None:
            raise UserError(
                f"encodings.{name}.rows: not set; run `sparrow prepare`, or write the number of"
                " rows"
            )
        ids = Numbering.of(table)
        size = dim * several.get(name, 1) * tables.vectors(name, ids)
        specs.append(tables.spec(name, size, ids, init_scale))
    features = []
    for name in schema.sparse:
        column = schema.columns[name]
        if name in sequences:
            features.append(Feature(name=name, table=str(column.table), pooling="none"))
            continue
        if column.pooling == "none":
            raise UserError(
                f"columns.{name}.pooling: this model needs one vector per sample; use 'sum' or"
                f" 'mean', or a model that reads lists and name {name!r} in model.history.lists"
            )
        assert column.table is not None
        pooling = (column.pooling or "mean") if column.kind == "list" else "sum"
        features.append(Feature(name=name, table=column.table, pooling=pooling))
    return EmbeddingTables(specs, features, seed=tables.seed or 0, placement=tables.placement)


def tasks(schema: Schema) -> int:
    """Returns how many logits a model has: one for each label."""
    return max(1, len(schema.labels))


def pooled(tables: EmbeddingTables, batch: Batch) -> Tensor:
    """Returns the vectors of all features side by side, [B, sum of dims], in the tables' order."""
    if not tables.features:
        return batch.dense_BC.new_zeros(batch.batch_size, 0)
    vectors = tables.pooled(batch.ids)
    if not isinstance(batch.dense_BC, Informed):
        return vectors
    from sparrow.models import _user_columns  # a service's batches alone say whose samples they are

    shared = _user_columns.shared_columns(batch)
    return _user_columns.mark(
        batch, vectors, [feature.name in shared for feature in tables.features], tables.widths
    )


class Ids(nn.Module):
    """The vectors of all id columns side by side, [B, sum of dims], in the schema's order.

    Lists are pooled, but for those that transformers read (`history`) and those that the model
    itself treats (`sequences`, see `by_name`). Transformers run on the distinct rows of a dedup
    group, and their vectors are repeated for the samples that share a row (RecD's O7, arXiv
    2211.05239): nothing in them depends on the candidate.

    vectors_of: column -> how many vectors of dim it has. vectors: of all columns.

    Args:
        schema: of the log.
        dim: D of the vectors.
        tables: see `tables_for`.
        history: the lists that transformers read.
        sequences: see `tables_for`.
        several: see `tables_for`.

    Raises:
        UserError: as `tables_for`, and for a history that is no list of the log or whose heads do
            not divide dim.
    """

    def __init__(
        self,
        schema: Schema,
        dim: int,
        tables: TableChoices,
        history: History,
        sequences: Collection[str] = (),
        several: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        lists = [name for name in schema.sparse if schema.columns[name].kind == "list"]
        for name in history.lists:
            if name not in lists:
                raise UserError(f"model.history.lists: no list {name!r}{suggest(name, lists)}")
        if history.lists and dim % history.heads:
            raise UserError(
                f"model.history.heads: {history.heads} do not divide the {dim} numbers of a vector;"
                " take a divisor, or another model.dim"
            )
        self.tables = tables_for(
            schema, dim, tables, sequences={*history.lists, *sequences}, several=several
        )
        self.lists = history.lists
        wide = {spec.name: spec.dim for spec in self.tables.specs}
        self.vectors_of = {
            name: wide[str(schema.columns[name].table)] // dim for name in schema.sparse
        }
        self.vectors = sum(self.vectors_of.values())
        self.readers = nn.ModuleList()
        if history.lists:
            from sparrow.models import _histories  # few models read lists

            for name in history.lists:
                size = dim * self.vectors_of[name]
                self.readers.append(
                    _histories.new_reader(size, history.layers, history.heads, history.longest)
                )

    def forward(self, batch: Batch) -> Tensor:
        """Returns [B, sum of dims]. It is not for a model with `sequences`."""
        if not self.lists:
            return pooled(self.tables, batch)
        return torch.cat(list(self.by_name(batch).values()), 1)

    def by_name(self, batch: Batch) -> dict[str, Any]:
        """Returns column -> its vector [B, dim], or a Jagged of the vectors of its ids for one of
        `sequences`.
        """
        vectors: dict[str, Any] = self.tables(batch.ids)
        if self.lists:
            from sparrow.models import _histories  # as above

            for name, reader in zip(self.lists, self.readers, strict=True):
                vectors[name] = _histories.read(reader, vectors[name])
        if isinstance(batch.dense_BC, Informed):
            from sparrow.models import _user_columns  # as in `pooled`

            for name in _user_columns.shared_columns(batch):
                if isinstance(vectors[name], Tensor):
                    vectors[name] = _user_columns.mark(
                        batch, vectors[name], [True], [vectors[name].shape[1]]
                    )
        return vectors


class Numbers(nn.Module):
    """Tells the numbers of a batch apart: those of numeric columns, and each vector as one of
    `dim`, like an id's.

    A vector column's is its product with a matrix that is learned. So a content embedding of 768
    numbers meets other features as an id does, and not as 768 features.

    columns: how many numeric columns there are. vectors: how many vector columns.

    Args:
        schema: of the log.
        dim: D of the vectors; None for the numbers alone.
    """

    def __init__(self, schema: Schema, dim: int | None = None) -> None:
        super().__init__()
        self.widths = [schema.columns[name].width for name in schema.dense]
        self.is_vector = [schema.columns[name].kind == "vector" for name in schema.dense]
        self.vectors = sum(self.is_vector)
        self.columns = len(self.widths) - self.vectors
        sizes = []
        if dim:
            columns = zip(self.widths, self.is_vector, strict=True)
            sizes = [width for width, is_vector in columns if is_vector]
        self.products = nn.ModuleList(Linear(size, dim or 0, bias=False) for size in sizes)
        # a vector begins as long as that of a number
        for size, product in zip(sizes, self.products, strict=True):
            nn.init.normal_(product.weight, std=(size * (dim or 1)) ** -0.5)  # type: ignore[arg-type]

    def plain(self, dense_BC: Tensor) -> Tensor:
        """Returns the numbers of numeric columns, [B, columns]."""
        return self._apart(dense_BC)[0] if self.vectors else dense_BC

    def forward(self, dense_BC: Tensor, rest_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the numbers of numeric columns [B, columns], and vectors beside others [B,
        vectors * dim + R].
        """
        if not self.vectors:
            return dense_BC, rest_BR
        numbers, vectors = self._apart(dense_BC)
        pairs = zip(self.products, vectors, strict=True)
        products = [product(x_BS) for product, x_BS in pairs]
        return numbers, torch.cat([*products, rest_BR], 1)

    def _apart(self, dense_BC: Tensor) -> tuple[Tensor, list[Tensor]]:
        parts = list(zip(dense_BC.split(self.widths, 1), self.is_vector, strict=True))
        numbers = [part for part, is_vector in parts if not is_vector]
        vectors = [part for part, is_vector in parts if is_vector]
        return torch.cat(numbers, 1) if numbers else dense_BC[:, :0], vectors
