from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from sparrow.core import Batch, KeyedJagged
from sparrow.features.schema import Schema
from sparrow.losses import Loss
from sparrow.metrics import BringsMeasures
from sparrow.models._inputs import tasks

MOST_FITTED = 1_000_000  # rows, for what is fitted whole

RunOnRank0 = Callable[[str, Callable[[], Any]], Any]
"""Runs a function on rank 0 alone, and returns what it returned on all ranks. It is given the
function's purpose too.

What the function changed in the model gets to the other ranks by `Ranks.take_rank0s`.
"""


def run_here(purpose: str, call: Callable[[], Any]) -> Any:
    """Returns what a function returns, where there is one rank."""
    return call()


@runtime_checkable
class Fitted(Protocol):
    """A model that is a weighted sum of parts, of which some are fitted whole before the others
    learn by steps.

    fitted_modules: the names of the modules that are fitted whole.
    """

    fitted_modules: tuple[str, ...]

    @property
    def has_part(self) -> dict[str, bool]:
        """Part -> whether the model has it, in the order of `parts`."""
        ...

    def look(self, examples: Callable[[str], Batch]) -> None:
        """Choose what hangs on the inputs alone. See `fit`."""
        ...

    def fit(
        self, examples: Callable[[str], Batch], offsets: tuple[Tensor, Tensor], seed: int
    ) -> None:
        """Fit what does not learn by steps.

        Args:
            examples: part of the log -> its rows; a UserError where it has none.
            offsets: what is added to the logits of training rows and of valid ones, [T] each. They
                differ where the training part has a share of its negatives alone.
            seed: of what is drawn.
        """
        ...

    def grown(self, state: Mapping[str, Tensor], rows: Mapping[str, int]) -> dict[str, Tensor]:
        """Returns what was fitted whole to an earlier log, by name, with rows for ids that are new
        since.

        Args:
            state: name -> the weights of the earlier log's model.
            rows: table -> how many ids that log had. They have their numbers still.
        """
        ...

    def parts(self, batch: Batch) -> Tensor:
        """Returns the logits of the parts, [B, P, T]."""
        ...

    def weigh_parts(
        self, parts_NPT: Tensor, labels_NT: Tensor, weights_N: Tensor | None, offset_T: Tensor
    ) -> dict[str, dict[str, float]]:
        """Choose the weights of the parts, by rows that are not trained on. Returns part -> see
        `Offset.weigh_parts`.
        """
        ...


@runtime_checkable
class BringsLoss(Protocol):
    """A model that learns from more than the run's loss, such as the balance of its experts."""

    def loss(self, logits_BT: Tensor, batch: Batch, of_run: Loss) -> Tensor:
        """Returns a scalar, a mean over the batch's rows as every loss is.

        Args:
            logits_BT: what `forward` has just returned of the batch, with the offset.
            batch: the rows.
            of_run: the run's loss.
        """
        ...


class Offset(nn.Module):
    """Adds a fixed number for each label to a model's logits [B, T], like the offset of a
    generalised linear model.

    The numbers are saved with the weights, and no optimizer changes them.
    """

    offset_T: Tensor

    def __init__(self, model: Any, schema: Schema) -> None:
        super().__init__()
        self.model = model
        self.measures = model.measures if isinstance(model, BringsMeasures) else ()
        self._schema = schema
        self.register_buffer("offset_T", torch.zeros(tasks(schema)))

    def forward(self, batch: Batch) -> Tensor:
        """Returns logits [B, T], fp32."""
        logits: Tensor = self.model(batch).float()
        return logits + (self.offset_T if logits.dim() < 3 else self.offset_T[:, None])

    def loss_of(self, of_run: Loss) -> Loss:
        """Returns the loss that the model learns from. of_run: the run's."""
        model = self.model
        return partial(model.loss, of_run=of_run) if isinstance(model, BringsLoss) else of_run

    def measure(self) -> Tensor:
        """See `BringsMeasures`. It is asked of models that have measures."""
        measures_BM: Tensor = self.model.measure()
        return measures_BM

    @torch.no_grad()
    def begin(self, log_odds: Sequence[float]) -> None:
        """Choose the offset so that an example without ids, whose numbers are 0, gets these logits
        [T].

        With the log-odds of the training rows, first predictions lie near the base rate, for rare
        labels too, and whatever constant the random first weights make. The model then learns how
        examples differ from it.
        """
        keys = self._schema.sparse
        device = self.offset_T.device
        ids = KeyedJagged(
            keys=keys,
            values_N=torch.zeros(0, dtype=torch.int64),
            lengths=torch.zeros(len(keys), dtype=torch.int64),
        )
        empty = Batch(dense_BC=torch.zeros(1, len(self._schema.numbers)), ids=ids).to(device)
        was_training = self.training
        logits_T = self.eval().model(empty)[0].float()  # it is no batch of training
        self.train(was_training)
        self.offset_T.copy_(torch.tensor(log_odds, device=device) - logits_T)

    def fit(
        self,
        examples: Callable[[str], Batch],
        log_odds: Sequence[float],
        seed: int,
        run_on_rank0: RunOnRank0 = run_here,
    ) -> None:
        """See `Fitted.fit`, and `begin` for the log-odds. Of another model nothing changes."""
        model = self.model
        if isinstance(model, Fitted):
            run_on_rank0("ranges of numbers", lambda: model.look(examples))
            self.begin(log_odds)  # on all ranks together, because it asks the tables
            self.fit_whole(examples, seed, run_on_rank0)

    def begin_with(
        self, state: Mapping[str, Tensor], shift: float, rows: Mapping[str, int] | None = None
    ) -> None:
        """Take another run's dense weights, and its offset moved by `shift`.

        Args:
            state: the weights.
            shift: of the logits.
            rows: see `Fitted.grown`; None to leave out what is fitted whole.
        """
        fitted = self.fitted_prefixes
        weights = {name: value for name, value in state.items() if not name.startswith(fitted)}
        if isinstance(self.model, Fitted):
            weights = {**self.state_dict(), **weights}
            if rows is not None:
                inner = {name.removeprefix("model."): value for name, value in state.items()}
                grown = self.model.grown(inner, rows)
                weights |= {f"model.{name}": value for name, value in grown.items()}
        self.load_state_dict(weights)
        self.offset_T.add_(shift)

    def fit_whole(
        self, examples: Callable[[str], Batch], seed: int, run_on_rank0: RunOnRank0 = run_here
    ) -> None:
        """See `Fitted.fit`. Of another model nothing changes."""
        model = self.model
        if isinstance(model, Fitted):
            run_on_rank0(
                "parts that are fitted whole", lambda: model.fit(examples, self._offsets(), seed)
            )

    @property
    def fitted_prefixes(self) -> tuple[str, ...]:
        """How the names of weights begin that are fitted whole; of another model than a `Fitted`
        none.
        """
        if not isinstance(self.model, Fitted):
            return ()
        return tuple(f"model.{name}." for name in self.model.fitted_modules)

    def _offsets(self) -> tuple[Tensor, Tensor]:
        """Returns what is added to the logits of training rows, and of rows that have all their
        negatives.
        """
        return self.offset_T, self.offset_T + math.log(self._schema.split.negatives)

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the parts of a blend; of another model none."""
        if not isinstance(self.model, Fitted):
            return ()
        return tuple(name for name, is_part in self.model.has_part.items() if is_part)

    def alone(self, batch: Batch) -> dict[str, Tensor]:
        """Returns the logits [B, T] that each of `part_names` would have alone."""
        logits_BPT = self.model.parts(batch).float() + self.offset_T
        places = {name: place for place, name in enumerate(self.model.has_part)}
        return {name: logits_BPT[:, places[name]] for name in self.part_names}

    @torch.no_grad()
    def weigh_parts(
        self, batches: Iterable[Batch], run_on_rank0: RunOnRank0 = run_here
    ) -> dict[str, dict[str, float]]:
        """See `Fitted.weigh_parts`. Of another model nothing changes, and there are no parts.

        batches: the same on all ranks, which ask the tables together.

        Returns:
            Part -> its weight in the logits of the first label, and its normalised entropy (ne)
            alone on these rows.
        """
        model = self.model
        if not isinstance(model, Fitted):
            return {}
        columns = [(model.parts(b), b.labels_BT, b.weights_B) for b in batches]
        parts, labels, weights = zip(*columns, strict=True)
        weights_N = None if weights[0] is None else torch.cat(weights)
        rows = (torch.cat(parts), torch.cat(labels), weights_N, self._offsets()[1])
        weights_of_parts: dict[str, dict[str, float]] = run_on_rank0(
            "weights of the parts", lambda: model.weigh_parts(*rows)
        )
        return weights_of_parts
