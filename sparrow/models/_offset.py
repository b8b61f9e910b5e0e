from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from sparrow.core import Batch, KeyedJagged
from sparrow.features.schema import Schema
from sparrow.models._inputs import tasks


@runtime_checkable
class Fitted(Protocol):
    """A model that is a weighted sum of parts, of which some are fitted whole before the others learn by steps.

    whole: the names of the modules that are fitted whole.
    """

    whole: tuple[str, ...]

    @property
    def there(self) -> dict[str, bool]:
        """Part -> whether the model has it, in the order of `parts`."""
        ...

    def look(self, examples: Callable[[str], Batch]) -> None:
        """Choose what hangs on the inputs alone. See `fit`."""
        ...

    def fit(self, examples: Callable[[str], Batch], offsets: tuple[Tensor, Tensor], seed: int) -> None:
        """Fit what does not learn by steps.

        Args:
            examples: part of the log -> its rows; a UserError where it has none.
            offsets: what is added to the logits of training rows and of valid ones, [T] each. They differ where the
                training part has a share of its negatives alone.
            seed: of what is drawn.
        """
        ...

    def parts(self, batch: Batch) -> Tensor:
        """Returns the logits of the parts, [B, P, T]."""
        ...

    def settle(
        self, parts_NPT: Tensor, labels_NT: Tensor, weights_N: Tensor | None, offset_T: Tensor
    ) -> dict[str, dict[str, float]]:
        """Choose the weights of the parts, by rows that are not trained on. Returns part -> see `Offset.settle`."""
        ...


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
        logits: Tensor = self.model(batch).float()
        return logits + (self.offset_T if logits.dim() < 3 else self.offset_T[:, None])

    @torch.no_grad()
    def begin(self, log_odds: Sequence[float]) -> None:
        """Choose the offset so that an example without ids, whose numbers are 0, gets these logits [T].

        With the log-odds of the training rows, first predictions lie near the base rate, for rare labels too, and
        whatever constant the random first weights make. The model then learns how examples differ from it.
        """
        keys = self._schema.sparse
        none = torch.zeros(0, dtype=torch.int64), torch.zeros(len(keys), dtype=torch.int64)
        ids = KeyedJagged(keys=keys, values_N=none[0], lengths=none[1])
        nothing = Batch(dense_BC=torch.zeros(1, len(self._schema.numbers)), ids=ids).to(self.offset_T.device)
        was = self.training
        logits_T = self.eval().model(nothing)[0].float()  # it is no batch of training
        self.train(was).offset_T.copy_(torch.tensor(log_odds, device=self.offset_T.device) - logits_T)

    def fit(self, examples: Callable[[str], Batch], log_odds: Sequence[float], seed: int) -> None:
        """See `Fitted.fit`, and `begin` for the log-odds. Of another model nothing changes."""
        if isinstance(self.model, Fitted):
            self.model.look(examples)
            self.begin(log_odds)
            self.model.fit(examples, self._offsets(), seed)

    def begin_with(
        self, state: Mapping[str, Tensor], shift: float, examples: Callable[[str], Batch], seed: int
    ) -> None:
        """Take another run's dense weights, and its offset moved by `shift`.

        What is fitted whole is fitted anew, see `Fitted.fit`.
        """
        is_fitted = isinstance(self.model, Fitted)
        anew = tuple(f"model.{name}." for name in self.model.whole) if is_fitted else ()
        taken = {name: value for name, value in state.items() if not name.startswith(anew)}
        self.load_state_dict({**self.state_dict(), **taken} if is_fitted else taken)
        self.offset_T.add_(shift)
        if is_fitted:
            self.model.fit(examples, self._offsets(), seed)

    def _offsets(self) -> tuple[Tensor, Tensor]:
        """Returns what is added to the logits of training rows, and of rows that have all their negatives."""
        return self.offset_T, self.offset_T + math.log(self._schema.split.negatives)

    @property
    def parts_there(self) -> tuple[str, ...]:
        """The names of the parts of a blend; of another model none."""
        there = self.model.there if isinstance(self.model, Fitted) else {}
        return tuple(name for name, is_there in there.items() if is_there)

    def alone(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the logits [B, T] that each of `parts_there` would have alone."""
        logits_BPT = self.model.parts(batch).float() + self.offset_T
        return {name: logits_BPT[:, i] for i, name in enumerate(self.model.there) if name in self.parts_there}

    @torch.no_grad()
    def settle(self, batches: Iterable[Batch]) -> dict[str, dict[str, float]]:
        """See `Fitted.settle`. Of another model nothing changes, and there are no parts.

        Returns:
            Part -> its weight in the logits of the first label, and its normalised entropy (ne) alone on these rows.
        """
        if not isinstance(self.model, Fitted):
            return {}
        found = [(self.model.parts(b), b.labels_BT, b.weights_B) for b in batches]
        parts, labels, weights = zip(*found, strict=True)
        weights_N = None if weights[0] is None else torch.cat(weights)
        return self.model.settle(torch.cat(parts), torch.cat(labels), weights_N, self._offsets()[1])
