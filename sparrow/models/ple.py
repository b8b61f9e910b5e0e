from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparrow.core import Batch
from sparrow.core.errors import require
from sparrow.embeddings import TableChoices
from sparrow.features.schema import Schema
from sparrow.layers.mlp import MLP, Head, Linear, require_sizes
from sparrow.models._inputs import History, tasks
from sparrow.models._vectors import Vectors


@dataclass(frozen=True, kw_only=True)
class Config:
    """dim: the size of a feature's vector. shared: how many experts all labels share, in each
    level. own: how many each label has for itself, in each level.

    levels: layers of experts. expert: sizes of an expert's MLP. tower: sizes of the MLP of each
    label after them. dropout: of experts and towers, see `MLP`. history: lists that transformers
    read.
    """

    dim: int = 16
    shared: int = 2
    own: int = 2
    levels: int = 2
    expert: tuple[int, ...] = (64,)
    tower: tuple[int, ...] = (32,)
    dropout: float = 0.0
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        require_sizes(dim=(self.dim,), expert=self.expert, tower=self.tower)
        require(least=1, shared=self.shared, levels=self.levels)
        require(least=0, own=self.own)

    def build(self, schema: Schema, tables: TableChoices) -> nn.Module:
        """Returns the model for a log."""
        return PLE(schema, self, tables)


class PLE(nn.Module):
    """Shared experts and experts of single labels, mixed for each label by a gate (PLE; Tang et
    al., RecSys 2020).
    """

    def __init__(self, schema: Schema, config: Config, tables: TableChoices) -> None:
        super().__init__()
        self.vectors = Vectors(schema, config.dim, tables, config.history)
        labels = tasks(schema)
        size = self.vectors.features * config.dim
        self.levels = nn.ModuleList()
        for level in range(config.levels):
            self.levels.append(_Level(size, labels, config, is_last=level == config.levels - 1))
            size = config.expert[-1] if config.expert else size
        self.towers = nn.ModuleList(MLP(size, config.tower, config.dropout) for _ in range(labels))
        self.heads = nn.ModuleList(Head(tower.out_features, 1) for tower in self.towers)  # type: ignore[arg-type]

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T]."""
        x = self.vectors(batch).flatten(1)
        streams = [x] * (len(self.towers) + 1)  # of each label, and of what all share
        for level in self.levels:
            streams = level(streams)
        ways = zip(self.heads, self.towers, streams, strict=False)
        return torch.cat([head(tower(x)) for head, tower, x in ways], 1)


class _Level(nn.Module):
    """CGC (section 4.1): the gate of a label mixes its own experts and the shared ones; the shared
    gate mixes all.
    """

    def __init__(self, inputs: int, labels: int, config: Config, *, is_last: bool) -> None:
        super().__init__()
        counts = [config.own] * labels + [config.shared]
        self.experts = nn.ModuleList()
        for count in counts:
            experts = (MLP(inputs, config.expert, config.dropout) for _ in range(count))
            self.experts.append(nn.ModuleList(experts))
        mixed = [config.own + config.shared] * labels
        if not is_last:
            mixed.append(config.own * labels + config.shared)
        self.gates = nn.ModuleList(Linear(inputs, n, bias=False) for n in mixed)

    def forward(self, streams: list[Tensor]) -> list[Tensor]:
        outputs: list[list[Tensor]] = []  # of the experts of each label, and of the shared ones
        for experts, x in zip(self.experts, streams, strict=True):
            outputs.append([expert(x) for expert in experts])  # type: ignore[attr-defined]
        shared = outputs[-1]
        everything = list(itertools.chain.from_iterable(outputs))
        mixed = []
        for place, (gate, x) in enumerate(zip(self.gates, streams, strict=False)):
            is_shared = place == len(outputs) - 1
            mixable = everything if is_shared else [*outputs[place], *shared]
            share_BX = gate(x).float().softmax(1)
            mixed.append((torch.stack(mixable, 2) * share_BX[:, None]).sum(2))
        return mixed
