"""What each part of a blend is worth alone, and whether one of them had done better than all together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparrow.analysis.scores import Rows
from sparrow.core import Batch
from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.dataset import open as open_log
from sparrow.embeddings import TableChoices
from sparrow.layers import Layers, Precision
from sparrow.metrics import evaluate
from sparrow.models import blend
from sparrow.trained.build import build, scoring
from sparrow.trained.run import Run
from sparrow.trained.scorer import Restored
from sparrow.training.defaults import SMALL_ROWS
from sparrow.training.warm import WHOLE

NAMES = {"members": "members that share an MLP", "logistic": "logistic regression", "trees": "boosted trees"}
NAMES |= {"constant": "a constant"}

_ROWS = 4096  # that are scored at a time


def baseline(run: Run, dataset: Dataset) -> Callable[[Batch], Tensor] | None:
    """Returns what scores a batch by a logistic regression that is fitted to a log, in the way of a blend's part.

    None for a log for which a blend is not the default, see `sparrow.training.defaults`, and for one with ids that no
    table numbers. The scores are probabilities [B, T].

    Args:
        run: its rows and seed are taken.
        dataset: the prepared log.
    """
    schema = dataset.schema
    is_small = 0 < dataset.rows("train") <= SMALL_ROWS and dataset.rows("valid") and schema.labels
    if not is_small or not all(schema.encodings[str(schema.columns[name].table)].rows for name in schema.sparse):
        return None
    config = blend.Config(dim=1, number_dim=1, deep=(1,), members=1, trees=0)
    alike = replace(run, model=config, tables=TableChoices(), precision=Precision(), layers=Layers(), device="cpu")
    model = build(alike, schema).eval()
    model.fit(lambda part: dataset.first(WHOLE, part), dataset.log_odds(), run.seed)
    return scoring(lambda batch: model.alone(batch)["logistic"], alike, schema)


class Alone:
    """What a model is compared with: each part of a blend alone, and for another model a logistic regression.

    Args:
        found: the model.
        dataset: the prepared log.
    """

    def __init__(self, found: Restored, dataset: Dataset) -> None:
        self._dataset, self._run = dataset, found.run
        self.names: tuple[str, ...] = found.model.parts_there
        self.whole = "blend" if self.names else "model"
        self._device, self._score = found.run.device, None
        if self.names:
            self._score = scoring(
                lambda batch: torch.cat(list(found.model.alone(batch).values()), 1), found.run, found.schema
            )
        elif score := baseline(found.run, dataset):
            self._device, self._score, self.names = "cpu", score, ("logistic",)

    @torch.no_grad()
    def scores(self, split: str, label: int = 0) -> dict[str, Tensor]:
        """Returns name -> the probabilities [N] of each for a part of the log; none where there is nothing.

        Args:
            split: the part of the log.
            label: the number of the label.
        """
        if self._score is None:
            return {}
        batches = self._dataset.loader(self._run.data.batch_size, split=split)
        scores_NPT = torch.cat([self._score(batch.to(self._device)).cpu() for batch in batches])
        scores_NPT = scores_NPT.unflatten(1, (len(self.names), -1))
        return {NAMES[name]: scores_NPT[:, i, label] for i, name in enumerate(self.names)}


def beside(run: Run, results: Mapping[str, Any]) -> dict[str, float] | None:
    """Returns the metrics of a logistic regression for the valid part, beside those of a run that has ended.

    None for a run that was stopped, for a blend, of which it is a part, and where `baseline` has none.

    Args:
        run: its settings; automatic choices need not be made.
        results: as `train` returned them.
    """
    valid = results["best"] or results["valid"]
    if results["stopped_by"] or not valid or valid.get("parts"):
        return None
    dataset = open_log(run.data.path)
    score = baseline(run, dataset)
    return score and evaluate(score, dataset.loader(_ROWS, split="valid"))


def in_words(split: str, rows: Rows, parts: Mapping[str, Tensor], whole_is: str = "blend") -> str:
    """Returns a sentence on the part with the least normalised entropy, beside the blend's or another model's."""
    whole = rows.estimates()["ne"]
    apart = {name: rows.by(scores_N).estimates()["ne"] for name, scores_N in parts.items()}
    name, best = min(apart.items(), key=lambda item: item[1].value)
    gain = whole - best
    if not gain.value > 0:
        return f"On {split}, {'no part of the blend' if whole_is == 'blend' else f'no {name}'} is better alone."
    told = f"On {split}, {name} alone would be better: NE {best.value:.4f}, {gain.value:.4f} below the {whole_is}'s"
    return told + (", within the noise of these rows." if gain.value < 1.96 * gain.error else ".")
