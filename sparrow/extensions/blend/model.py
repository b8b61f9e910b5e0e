"""For small logs: three models of other kinds, and the weights of their logits that are best for
the valid rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparrow.core import Batch, KeyedJagged, UserError
from sparrow.core.batch import Jagged
from sparrow.core.errors import require
from sparrow.core.memory import let_go
from sparrow.core.plain import plain
from sparrow.embeddings import TableChoices
from sparrow.extensions.blend.deep import Members, PiecewiseLinear, mean_logit
from sparrow.extensions.blend.forest import WIDEST, Forest, available
from sparrow.extensions.blend.logistic import (
    Logistic,
    bytes_of_examples,
    bytes_of_fit,
    ids_of_columns,
)
from sparrow.extensions.blend.targets import TargetMeans
from sparrow.features.encodings import UNKNOWN
from sparrow.features.schema import Schema
from sparrow.layers.mlp import require_sizes
from sparrow.layers.precision import to_compute
from sparrow.metrics import labelled, logloss_from_logits, ne
from sparrow.models._inputs import History, Ids, Numbers, tasks

_TREES = 4  # times the bytes of their inputs
_DOUBT = 6.0  # nats that a unit of weight must gain over the offset alone


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: the size of an id's vector. number_dim: of a number's. ranges: of a number, see
    `PiecewiseLinear`.

    deep, members, dropout: see `Members`. logistic: whether a logistic regression is a part. trees:
    how many, at most, where LightGBM is installed (pip install 'sparrow-rec[trees]'); 0 for none.
    history: lists that transformers read.
    """

    dim: int = 16
    number_dim: int = 8
    ranges: int = 32
    deep: tuple[int, ...] = (128, 128)
    members: int = 8
    dropout: float = 0.1
    logistic: bool = True
    trees: int = 300
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim, self.number_dim), deep=self.deep)
        require(least=1, members=self.members, ranges=self.ranges)
        require(least=0, trees=self.trees)

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return Blend(schema, self, tables)

    def bytes_of_fit(self, schema: Schema, batch: Batch, rows: tuple[int, int]) -> int:
        """Returns about how many bytes of memory it takes to fit what does not learn by steps.

        Args:
            schema: of the log.
            batch: some rows of the log.
            rows: how many there are of the training part and of the valid one.
        """
        if not rows[1]:
            return 0
        total = bytes_of_examples(schema, batch, rows)
        if self.logistic:
            total += bytes_of_fit(schema, batch, rows)
        if self.trees and available():  # float64, copies of it, and what LightGBM makes of it
            singles = sum(column.kind == "categorical" for column in schema.columns.values())
            inputs = len(schema.numbers) + singles * (1 + tasks(schema))
            total += _TREES * 8 * inputs * sum(rows)
        return total


class Blend(nn.Module):
    """A weighted mean of the logits of three parts. Its weights are those that are best for the
    valid rows.

    The parts are members that share an MLP (TabM), which learn by steps, a logistic regression, and
    boosted trees, both of which are fitted whole before. In training `forward` returns the members'
    logits alone. Members alone read vector columns.
    """

    fitted_modules = ("logistic", "targets", "forest")
    weights_PT: Tensor

    def __init__(self, schema: Schema, config: Config, tables: TableChoices) -> None:
        super().__init__()
        self.apart = Numbers(schema)
        columns = self.apart.columns
        labels = tasks(schema)
        self.config = config
        self.ids = Ids(schema, config.dim, tables, config.history)
        self.numbers = PiecewiseLinear(columns, config.ranges, config.number_dim)
        width = config.dim * self.ids.vectors + self.numbers.out_features + len(schema.numbers)
        self.members = Members(width, config.deep, labels, config.members, config.dropout)
        self.table_of = {name: str(schema.columns[name].table) for name in schema.sparse}
        encodings = {name: schema.encodings[table] for name, table in self.table_of.items()}
        rows = dict(zip(schema.sparse, ids_of_columns(schema), strict=True))
        self.logistic = Logistic(list(rows.values()), columns, config.ranges, labels)
        self.rows = {self.table_of[name]: count for name, count in rows.items()}
        self.singles = [
            name for name in schema.sparse if schema.columns[name].kind == "categorical"
        ]
        orderless = [
            encodings[name].order != "value" and rows[name] <= WIDEST for name in self.singles
        ]
        self.targets = TargetMeans([rows[name] for name in self.singles], labels)
        self.forest = Forest([columns + i for i, is_set in enumerate(orderless) if is_set], labels)
        self.register_buffer("weights_PT", torch.zeros(3, labels))
        self.weights_PT[0].fill_(1)

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T], in training those of members, [B, T, K]."""
        if self.training:
            return self._members(batch)
        return (self.parts(batch) * self.weights_PT).sum(1)

    def parts(self, batch: Batch) -> Tensor:
        """Returns the logits of members, logistic regression and trees, [B, 3, T]."""
        ids = batch.ids.expanded()
        dense_BC = self.apart.plain(plain(batch.dense_BC))
        logits_BT = self.logistic(ids, dense_BC, self.numbers.knots_CK1)
        ids_BS = self._single(dense_BC, ids)
        trees_BT = self.forest(self._for_trees(dense_BC, ids_BS, self.targets(ids_BS)))
        return torch.stack([mean_logit(self._members(batch)), logits_BT, trees_BT], 1)

    @property
    def has_part(self) -> dict[str, bool]:
        """See `Fitted.has_part`."""
        is_fitted = any(bool(weights.any()) for weights in self.logistic.buffers())
        return {"members": True, "logistic": is_fitted, "trees": len(self.forest.root_G) > 0}

    def _members(self, batch: Batch) -> Tensor:
        dense_BC = plain(batch.dense_BC)
        inputs = [self.ids(batch), self.numbers(self.apart.plain(dense_BC)), dense_BC]
        return self.members(torch.cat([to_compute(plain(input_BX)) for input_BX in inputs], 1))

    def _for_trees(self, dense_BC: Tensor, ids_BS: Tensor, targets: Tensor) -> Tensor:
        """Returns numbers, ids and what `TargetMeans` made of these side by side, [B, X] in
        float64.
        """
        return torch.cat([dense_BC.double(), ids_BS.double(), targets.double()], 1)

    def _single(self, dense_BC: Tensor, ids: KeyedJagged) -> Tensor:
        """Returns the ids of columns that have one each, [B, S]."""
        return torch.cat(
            [dense_BC[:, :0].long(), *(_first(ids[name])[:, None] for name in self.singles)], 1
        )

    def look(self, examples: Callable[[str], Batch]) -> None:
        """Choose the ranges of numbers. See `fit`."""
        self.numbers.fit(self.apart.plain(examples("train").dense_BC))

    def fit(
        self, examples: Callable[[str], Batch], offsets: tuple[Tensor, Tensor], seed: int
    ) -> None:
        """Fit what does not learn by steps.

        Args:
            examples: part of the log -> its rows; a UserError where it has none.
            offsets: are added to the logits of training rows and of valid ones.
            seed: of what is drawn.
        """
        if self.weights_PT.device.type != "cpu":
            raise UserError("model.name: a blend is trained on the CPU alone; use --device cpu")
        train = replace(examples("train"), host=None)
        try:
            valid = replace(examples("valid"), host=None)
        except UserError:
            # it has no rows, so nothing says when to stop: the members alone are the model
            self.weights_PT.zero_()[0].fill_(1)
            return
        train, valid = (
            replace(batch, ids=batch.ids.expanded(), dense_BC=self.apart.plain(batch.dense_BC))
            for batch in (train, valid)
        )
        let_go()  # what reading took is not what fitting takes
        with ThreadPoolExecutor(1) as pool:  # trees grow beside the logistic regression
            forest = pool.submit(self._grow, (train, valid), offsets, seed, torch.get_num_threads())
            if self.config.logistic:
                self.logistic.fit((train, valid), self.numbers.knots_CK1, offsets)
            forest.result()

    def grown(self, state: Mapping[str, Tensor], rows: Mapping[str, int]) -> dict[str, Tensor]:
        """See `Fitted.grown`. A new id has the weights of unknown ids. To trees it is greater than
        all they know.
        """
        fitted = {
            name: weights
            for name, weights in state.items()
            if name.split(".")[0] in self.fitted_modules
        }
        columns_of = {"targets.mean_RT": self.singles, "targets.count_R": self.singles}
        if len(fitted["logistic.ids_RT"]):
            columns_of["logistic.ids_RT"] = list(self.table_of)
        for name, columns in columns_of.items():
            tables = [self.table_of[column] for column in columns]
            parts = zip(fitted[name].split([rows[table] for table in tables]), tables, strict=True)
            fitted[name] = torch.cat(
                [fitted[name][:0], *(_with_new(part, self.rows[table]) for part, table in parts)]
            )
        return fitted

    def _grow(
        self, parts: tuple[Batch, Batch], offsets: tuple[Tensor, Tensor], seed: int, threads: int
    ) -> None:
        train, valid = parts
        has_inputs = train.dense_BC.shape[1] or self.singles
        if not (self.config.trees and available() and has_inputs):
            return
        ids_NS, ids_VS = (self._single(part.dense_BC, part.ids) for part in parts)
        inputs = (
            self._for_trees(train.dense_BC, ids_NS, self.targets.fit(ids_NS, train, seed)),
            self._for_trees(valid.dense_BC, ids_VS, self.targets(ids_VS)),
        )
        self.forest.fit(parts, inputs, offsets, self.config.trees, seed, threads)

    @torch.no_grad()
    def weigh_parts(
        self, parts_NPT: Tensor, labels_NT: Tensor, weights_N: Tensor | None, offset_T: Tensor
    ) -> dict[str, dict[str, float]]:
        """Choose the parts' weights, by the loss of valid rows.

        They are the mean over all weights that are multiples of a tenth with a sum of at most 1,
        each as likely as the rows say (Bayesian model averaging). Before any row, each part that
        counts costs half the logarithm of the number of rows, as in the Bayesian information
        criterion, and each unit of weight `_DOUBT`. So a part that few positives favour by chance
        gets little. What is left to 1 is the weight of the offset alone, which is right where
        nothing that was learnt still holds.

        Args:
            parts_NPT: what `parts` gave for the rows.
            labels_NT: their labels, NaN where one is missing.
            weights_N: their weights.
            offset_T: is added to the logits.

        Returns:
            See `Offset.weigh_parts`.
        """
        tenths = [range(11) if is_there else range(1) for is_there in self.has_part.values()]
        choices = [choice for choice in itertools.product(*tenths) if sum(choice) <= 10]
        choices_SP = torch.tensor(choices) / 10
        for task in range(labels_NT.shape[1]):
            labels_N, parts_NP, mass_N = labelled(
                labels_NT[:, task], parts_NPT[:, :, task], weights_N
            )
            mass = float(len(labels_N) if mass_N is None else mass_N.sum())
            costs_S = torch.zeros(len(choices_SP))  # without rows all are as likely
            if mass:
                logits = (parts_NP @ choice_P + offset_T[task] for choice_P in choices_SP)
                losses = [logloss_from_logits(logits_N, labels_N, mass_N) for logits_N in logits]
                used_S = (choices_SP > 0).sum(1)
                prior_S = 0.5 * math.log(max(mass, 1.0)) * used_S + _DOUBT * choices_SP.sum(1)
                costs_S = prior_S + mass * torch.tensor(losses)
            self.weights_PT[:, task] = torch.softmax(-costs_S.double(), 0).float() @ choices_SP
        constant_N1 = torch.zeros(len(parts_NPT), 1)
        first_NP = torch.sigmoid(torch.cat([parts_NPT[:, :, 0], constant_N1], 1) + offset_T[0])
        labels_N, first_NP, mass_N = labelled(labels_NT[:, 0], first_NP, weights_N)
        alone = [ne(p_N, labels_N, mass_N) for p_N in first_NP.unbind(1)]
        weights = [*self.weights_PT[:, 0].tolist(), float(1 - self.weights_PT[:, 0].sum())]
        parts = zip({**self.has_part, "constant": True}.items(), weights, alone, strict=True)
        return {
            name: {"weight": weight, "ne": value}
            for (name, is_there), weight, value in parts
            if is_there
        }


def _with_new(weights_R: Tensor, rows: int) -> Tensor:
    """Returns the weights of a table's ids [R, ...] for so many ids, of which the last are new."""
    row_R = torch.arange(rows)
    return weights_R[torch.where(row_R < len(weights_R), row_R, UNKNOWN)]


def _first(ids: Jagged) -> Tensor:
    """Returns the first id of each sample, 0 where there is none."""
    return F.pad(ids.values_N, (0, 1))[ids.offsets_B1[:-1]] * (ids.lengths_B > 0)
