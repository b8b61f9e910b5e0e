from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparrow.core import Batch, Jagged, UserError
from sparrow.core.errors import suggest
from sparrow.data.schema import Schema
from sparrow.interactions import DotInteraction
from sparrow.kernels.rules import RowRule
from sparrow.layers import MLP, CausalTransformer, Linear, require_sizes, to_compute
from sparrow.losses import judged
from sparrow.models._inputs import tables_for, tasks


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: of every embedding. history: lists that a transformer reads, all unless named; layers, heads, longest: its
    blocks, its heads, and how many of a list's last ids it sees. bottom, top: hidden sizes of DLRM's MLPs.
    """

    dim: int = 64
    history: tuple[str, ...] = ()
    layers: int = 2
    heads: int = 2
    longest: int = 50
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (64, 32)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,), bottom=self.bottom, top=self.top)

    def build(self, schema: Schema, rule: RowRule, seed: int) -> nn.Module:
        """The model for a log."""
        return History(schema, self, rule=rule, seed=seed)


class History(nn.Module):
    """DLRM (arXiv 1906.00091) whose lists are read by causal transformers instead of pooled.

    A transformer runs on the distinct rows of a dedup group, and its vectors are repeated for the samples behind it
    (RecD's O7, arXiv 2211.05239): nothing in it depends on the candidate. UserError for a log without a list, or
    without another feature to pair with.
    """

    def __init__(self, schema: Schema, config: Config, *, rule: RowRule, seed: int = 0) -> None:
        super().__init__()
        lists = [name for name in schema.sparse if schema.columns[name].kind == "list"]
        for name in config.history:
            if name not in lists:
                raise UserError(f"model.history: no list {name!r}{suggest(name, lists)}")
        self.history = config.history or tuple(lists)
        if not self.history:
            raise UserError("model: history reads lists of ids and this log has none; use dlrm or dcnv2")
        self.tables = tables_for(schema, config.dim, rule, seed, sequences=self.history)
        make = CausalTransformer
        self.readers = nn.ModuleList(
            make(config.dim, config.layers, config.heads, config.longest) for _ in self.history
        )
        self.bottom = MLP(len(schema.dense), [*config.bottom, config.dim]) if schema.dense else None
        self.interaction = DotInteraction()
        vectors = len(schema.sparse) + (self.bottom is not None)
        if vectors < 2:
            raise UserError("model: history pairs vectors and this log has one feature; use logistic or dcnv2")
        pairs = DotInteraction.out_features(vectors)
        self.top = MLP(pairs + (config.dim if self.bottom is not None else 0), config.top)
        self.head = Linear(self.top.out_features, tasks(schema))

    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, T]."""
        vectors = [] if self.bottom is None else [self.bottom(batch.dense_BC)]
        for name, found in self.tables(batch.ids).items():
            if isinstance(found, Jagged):
                read_UD = self.readers[self.history.index(name)](found.values_N, found.offsets_B1)
                vectors.append(read_UD if found.inverse_B is None else read_UD.index_select(0, found.inverse_B))
            else:
                vectors.append(found)
        pairs = self.interaction(torch.stack([to_compute(v) for v in vectors], 1))
        return self.head(self.top(pairs if self.bottom is None else torch.cat([to_compute(vectors[0]), pairs], 1)))

    def loss(self, batch: Batch) -> Tensor:
        """Mean logloss."""
        return self.learn(batch)[0]

    def learn(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean logloss, and the probabilities [B, T] that it judges."""
        return judged(self(batch), batch)

    def score(self, batch: Batch) -> Tensor:
        """Probabilities [B, T]."""
        return torch.sigmoid(self(batch).float())
