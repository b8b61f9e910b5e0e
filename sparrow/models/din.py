from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparrow.core import Batch, Jagged, UserError
from sparrow.core.errors import suggest
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.kernels.expand import expand, expand_jagged, sum_rows
from sparrow.layers.mlp import MLP, Head, Linear, require_sizes
from sparrow.layers.numeric import NumericEmbedding
from sparrow.models._inputs import History, Ids, Numbers, tasks


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: the size of a feature's vector. attention: hidden sizes of the MLP that weighs an id.
    deep: hidden sizes of the MLP that predicts.

    pairs: list -> the candidate's column that weighs its ids; by default each list whose table has
    an id column. dropout: of the MLP that predicts, see `MLP`.
    history: lists that transformers read instead.
    """

    dim: int = 16
    attention: tuple[int, ...] = (32,)
    deep: tuple[int, ...] = (128, 64)
    pairs: dict[str, str] = field(default_factory=dict)
    dropout: float = 0.0
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,), attention=self.attention, deep=self.deep)

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return DIN(schema, self, tables)


class DIN(nn.Module):
    """Lists summed with weights that depend on the candidate, beside the other features (DIN, arXiv
    1706.06978).

    As in the paper the weights are not a softmax, so many similar ids count more than one. They
    begin near 1, as in a sum. The column's own pooling is ignored. Hidden layers have ReLUs, where
    the paper has PReLU or Dice. The weights depend on the candidate and so differ between the
    samples of a dedup group, or of a user whose candidates are ranked. So lists are expanded before
    they are weighed, and the attention runs for each candidate. It raises UserError for a log
    without a list to weigh, and the UserErrors of `Ids`.
    """

    def __init__(self, schema: Schema, config: Config, tables: TableChoices) -> None:
        super().__init__()
        columns = schema.columns
        single = [name for name in schema.sparse if columns[name].kind == "categorical"]
        single_of = {columns[name].table: name for name in reversed(single)}
        lists = [name for name in schema.sparse if columns[name].kind == "list"]
        self.pairs = config.pairs or {
            name: single_of[columns[name].table]
            for name in lists
            if columns[name].table in single_of and name not in config.history.lists
        }
        self.ids = Ids(schema, config.dim, tables, config.history, sequences=self.pairs)
        for name, candidate in self.pairs.items():
            if name not in lists:
                raise UserError(f"model.pairs: no list {name!r}{suggest(name, lists)}")
            if candidate not in single:
                raise UserError(
                    f"model.pairs.{name}: no id column {candidate!r}{suggest(candidate, single)}"
                )
            if name in config.history.lists:
                raise UserError(
                    f"model.pairs.{name}: model.history.lists names it too; leave it out of one of"
                    " them"
                )
        if not lists:
            raise UserError(
                "model: the log has no list, and din weighs lists; make a column one, or use"
                " another model"
            )
        if not self.pairs:
            raise UserError(
                "model: no list shares its table with an id column, other than those of"
                " model.history.lists; name some as model.pairs, or use another model"
            )
        if self.ids.vectors > len(schema.sparse):
            raise UserError(
                "model: din reads one vector of an id; choose another operation than 'features'"
            )
        self.attention = nn.ModuleList(MLP(4 * config.dim, config.attention) for _ in self.pairs)
        self.weights = nn.ModuleList(Linear(mlp.out_features, 1) for mlp in self.attention)  # type: ignore[arg-type]
        for weight in self.weights:
            nn.init.ones_(weight.bias)  # type: ignore[arg-type]
        self.numbers = Numbers(schema, config.dim)
        self.numeric = NumericEmbedding(self.numbers.columns, config.dim)
        vectors = self.numbers.vectors + len(schema.sparse)
        self.deep = MLP(
            self.numeric.out_features + vectors * config.dim, config.deep, config.dropout
        )
        self.head = Head(self.deep.out_features, tasks(schema))

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T]."""
        vectors = self.ids.by_name(batch)
        for place, (name, candidate) in enumerate(self.pairs.items()):
            vectors[name] = self._weighed(expand_jagged(vectors[name]), vectors[candidate], place)
        vectors_BE = torch.cat(list(vectors.values()), 1)
        wide, narrow = self.numeric(*self.numbers(batch.dense_BC, vectors_BE))
        if not len(self.deep.layers):
            return self.head(self.deep(wide))
        return self.head(self.deep(narrow, self.numeric.fold))

    def _weighed(self, listed: Jagged, candidate_BD: Tensor, place: int) -> Tensor:
        """Returns the sum of a list's vectors, each times its weight, [B, D]."""
        count = candidate_BD.shape[0]  # not `len`, which `torch.export` takes for a constant
        item_ND = listed.values_N
        row_N = listed.row_of_each()
        candidate_ND = expand(candidate_BD, row_N)
        pair_NE = torch.cat(
            [item_ND, candidate_ND, item_ND - candidate_ND, item_ND * candidate_ND], 1
        )
        weight_N1 = self.weights[place](self.attention[place](pair_NE))
        if listed.weights_N is not None:
            weight_N1 = weight_N1 * listed.weights_N[:, None]
        return sum_rows((item_ND * weight_N1).to(candidate_BD.dtype), row_N, count)
