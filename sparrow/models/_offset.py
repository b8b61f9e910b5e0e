from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparrow.core import Batch, KeyedJagged
from sparrow.features.schema import Schema
from sparrow.models._inputs import tasks


class Offset(nn.Module):
    """Adds a fixed number for each label to a model's logits [B, T], like the offset of a generalised linear model.

    The numbers are saved with the weights, and no optimizer changes them.
    """

    offset_T: Tensor

    def __init__(self, model: Any, schema: Schema) -> None:
        super().__init__()
        self.model = model
        self._schema = schema
        self.register_buffer("offset_T", torch.zeros(tasks(schema)))

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T], fp32."""
        logits: Tensor = self.model(batch).float() + self.offset_T
        return logits

    @torch.no_grad()
    def begin(self, log_odds: Sequence[float]) -> None:
        """Choose the offset so that an example without ids, whose numbers are 0, gets these logits [T].

        With the log-odds of the training rows, first predictions lie near the base rate, for rare labels too, and
        whatever constant the random first weights make. The model then learns how examples differ from it.
        """
        keys = self._schema.sparse
        none = torch.zeros(0, dtype=torch.int64), torch.zeros(len(keys), dtype=torch.int64)
        ids = KeyedJagged(keys=keys, values_N=none[0], lengths=none[1])
        nothing = Batch(dense_BC=torch.zeros(1, len(self._schema.dense)), ids=ids).to(self.offset_T.device)
        was = self.training
        logits_T = self.eval().model(nothing)[0].float()  # it is no batch of training
        self.train(was).offset_T.copy_(torch.tensor(log_odds, device=self.offset_T.device) - logits_T)
