"""What every feature model begins with: the schema's tables and dense columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from sparrow.core import Batch, UserError
from sparrow.core.errors import require, suggest
from sparrow.core.repeated import Repeated
from sparrow.embeddings import EmbeddingTables, Feature, Numbering, TableChoices
from sparrow.features.schema import Schema
from sparrow.kernels.expand import expand
from sparrow.layers import CausalTransformer, Linear, NumericEmbedding


@dataclass(frozen=True, kw_only=True)
class History:
    """lists: columns of lists that are not pooled but read, each by a causal transformer of its own.

    layers, heads: of each transformer; heads divide the size of a vector. longest: how many last ids of a list it sees.
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
        UserError: when another column cannot be pooled to a vector, and for a schema without any feature.
    """
    if not schema.dense and not schema.sparse:
        raise UserError("model: this log has no feature; make some of its columns numeric, categorical or list")
    tables.check_names(list(schema.encodings))
    specs = []
    for name, table in schema.encodings.items():
        if table.rows is None:
            raise UserError(f"encodings.{name}.rows: not set; run `sparrow prepare`, or write the number of rows")
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
                f"columns.{name}.pooling: this model needs one vector per sample; use 'sum' or 'mean', or a model that "
                f"reads lists and name {name!r} in model.history.lists"
            )
        assert column.table is not None
        pooling = (column.pooling or "mean") if column.kind == "list" else "sum"
        features.append(Feature(name=name, table=column.table, pooling=pooling))
    return EmbeddingTables(specs, features, seed=tables.seed or 0)


def tasks(schema: Schema) -> int:
    """Returns how many logits a model has: one for each label."""
    return max(1, len(schema.labels))


def pooled(tables: EmbeddingTables, batch: Batch) -> Tensor:
    """Returns the vectors of all features side by side, [B, sum of dims], in the tables' order."""
    if not tables.features:
        return batch.dense_BC.new_zeros(batch.batch_size, 0)
    found = tables.pooled(batch.ids)
    if not isinstance(batch.dense_BC, Repeated):
        return found
    shared = _shared(batch)
    return _known(batch, found, [feature.name in shared for feature in tables.features], tables.widths)


def _shared(batch: Batch) -> set[str]:
    """Returns the id columns that samples of a user share, where the batch says whose they are."""
    numbers = batch.dense_BC
    if not isinstance(numbers, Repeated):
        return set()
    groups = batch.ids.inverse_B.items()
    return {name for group, inverse_B in groups if inverse_B is numbers.users.inverse_B for name in group}


def _known(batch: Batch, found: Tensor, is_shared: list[bool], widths: list[int]) -> Tensor:
    """Returns vectors side by side [B, sum of widths], with what samples of a user share."""
    assert isinstance(batch.dense_BC, Repeated)
    marks_1D = _repeated(tuple(is_shared), tuple(widths)).clone()  # a write into the vectors ends what is known
    return Repeated.of(found, batch.dense_BC.users, marks_1D)


@lru_cache(maxsize=64)
def _repeated(marks: tuple[bool, ...], widths: tuple[int, ...]) -> Tensor:
    """Returns each mark as often as its feature has columns, [1, sum of widths]."""
    return torch.tensor(marks).repeat_interleave(torch.tensor(widths))[None]


class Ids(nn.Module):
    """The vectors of all id columns side by side, [B, sum of dims], in the schema's order.

    Lists are pooled, but for those that transformers read (`history`) and those that the model itself treats
    (`sequences`, see `by_name`). Transformers run on the distinct rows of a dedup group, and their vectors are repeated
    for the samples that share a row (RecD's O7, arXiv 2211.05239): nothing in them depends on the candidate.

    vectors_of: column -> how many vectors of dim it has. vectors: of all columns.

    Args:
        schema: of the log.
        dim: D of the vectors.
        tables: see `tables_for`.
        history: the lists that transformers read.
        sequences: see `tables_for`.
        several: see `tables_for`.

    Raises:
        UserError: as `tables_for`, and for a history that is no list of the log or whose heads do not divide dim.
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
            what = f"model.history.heads: {history.heads} do not divide the {dim} numbers of a vector"
            raise UserError(f"{what}; take a divisor, or another model.dim")
        self.tables = tables_for(schema, dim, tables, sequences={*history.lists, *sequences}, several=several)
        self.lists = history.lists
        wide = {spec.name: spec.dim for spec in self.tables.specs}
        self.vectors_of = {name: wide[str(schema.columns[name].table)] // dim for name in schema.sparse}
        self.vectors = sum(self.vectors_of.values())
        sizes = [dim * self.vectors_of[name] for name in history.lists]
        self.readers = nn.ModuleList(
            CausalTransformer(size, history.layers, history.heads, history.longest) for size in sizes
        )

    def forward(self, batch: Batch) -> Tensor:
        """Returns [B, sum of dims]. It is not for a model with `sequences`."""
        return torch.cat(list(self.by_name(batch).values()), 1) if self.lists else pooled(self.tables, batch)

    def by_name(self, batch: Batch) -> dict[str, Any]:
        """Returns column -> its vector [B, dim], or a Jagged of the vectors of its ids for one of `sequences`."""
        found: dict[str, Any] = self.tables(batch.ids)
        for name, reader in zip(self.lists, self.readers, strict=True):
            listed = found[name]
            read_UD = reader(listed)
            found[name] = read_UD if listed.inverse_B is None else expand(read_UD, listed.inverse_B)
        for name in _shared(batch):
            if isinstance(found[name], Tensor):
                found[name] = _known(batch, found[name], [True], [found[name].shape[1]])
        return found


class Numbers(nn.Module):
    """Tells the numbers of a batch apart: those of numeric columns, and each vector as one of `dim`, like an id's.

    A vector column's is its product with a matrix that is learned. So a content embedding of 768 numbers meets other
    features as an id does, and not as 768 features.

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
        each = zip(self.widths, self.is_vector, strict=True)
        sizes = [width for width, is_vector in each if is_vector] if dim else []
        self.products = nn.ModuleList(Linear(size, dim or 0, bias=False) for size in sizes)
        for size, product in zip(sizes, self.products, strict=True):  # a vector begins as long as that of a number
            nn.init.normal_(product.weight, std=(size * (dim or 1)) ** -0.5)  # type: ignore[arg-type]

    def plain(self, dense_BC: Tensor) -> Tensor:
        """Returns the numbers of numeric columns, [B, columns]."""
        return self._apart(dense_BC)[0] if self.vectors else dense_BC

    def forward(self, dense_BC: Tensor, rest_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the numbers of numeric columns [B, columns], and vectors beside others [B, vectors * dim + R]."""
        if not self.vectors:
            return dense_BC, rest_BR
        numbers, vectors = self._apart(dense_BC)
        made = [product(x_BS) for product, x_BS in zip(self.products, vectors, strict=True)]
        return numbers, torch.cat([*made, rest_BR], 1)

    def _apart(self, dense_BC: Tensor) -> tuple[Tensor, list[Tensor]]:
        parts = list(zip(dense_BC.split(self.widths, 1), self.is_vector, strict=True))
        numbers = [part for part, is_vector in parts if not is_vector]
        vectors = [part for part, is_vector in parts if is_vector]
        return torch.cat(numbers, 1) if numbers else dense_BC[:, :0], vectors


class Vectors(nn.Module):
    """A vector of `dim` for each feature, [B, features, dim]. A number's is the number times one that is learned.

    names: of the features: numeric columns first, then vector columns, then id columns, one with several vectors as
    often.

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
        of_numbers = (*schema.of_kind("numeric"), *schema.of_kind("vector"))
        self.names = (*of_numbers, *(name for name, count in self.ids.vectors_of.items() for _ in range(count)))
        self.features = len(self.names)
        self.numbers = Numbers(schema, dim)
        self.numeric = NumericEmbedding(self.numbers.columns, dim)

    def forward(self, batch: Batch) -> Tensor:
        """Returns [B, features, dim]."""
        found, _ = self.numeric(*self.numbers(batch.dense_BC, self.ids(batch)))
        return found.unflatten(1, (self.features, self.dim))
