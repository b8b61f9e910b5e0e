"""What each part of a blend is worth alone, and whether one of them had done better than all
together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparrow.analysis.scores import Rows
from sparrow.core import Batch
from sparrow.data.batches.dataset import Dataset
from sparrow.extensions.blend.baseline import fit_baseline
from sparrow.trained.build import scoring
from sparrow.trained.scorer import Restored

NAMES = {
    "members": "members that share an MLP",
    "logistic": "logistic regression",
    "trees": "boosted trees",
}
NAMES |= {"constant": "a constant"}


class Alone:
    """What a model is compared with: each part of a blend alone, and for another model a logistic
    regression.

    Args:
        model: what is compared.
        dataset: the prepared log.
    """

    def __init__(self, model: Restored, dataset: Dataset) -> None:
        self._dataset = dataset
        self._run = model.run
        self.names: tuple[str, ...] = model.model.part_names
        self.compared = "blend" if self.names else "model"
        self._device = model.run.device
        self._score = None
        if self.names:

            def logits(batch: Batch) -> Tensor:
                return torch.cat(list(model.model.alone(batch).values()), 1)

            self._score = scoring(logits, model.run, model.schema)
        elif score := fit_baseline(dataset):
            self._device = "cpu"
            self._score = score
            self.names = ("logistic",)

    @torch.no_grad()
    def scores(self, split: str, label: int = 0) -> dict[str, Tensor]:
        """Returns name -> the probabilities [N] of each for a part of the log; none where there is
        nothing.

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


def in_words(split: str, rows: Rows, parts: Mapping[str, Tensor], compared: str = "blend") -> str:
    """Returns a sentence on the part with the least normalised entropy, beside the blend's or
    another model's.

    Args:
        split: the part of the log.
        rows: of it, with the model's scores.
        parts: name -> the scores of a part alone.
        compared: what the model is called.
    """
    ne = rows.estimates()["ne"]
    ne_of_parts = {name: rows.by(scores_N).estimates()["ne"] for name, scores_N in parts.items()}
    name, best = min(ne_of_parts.items(), key=lambda item: item[1].value)
    gain = ne - best
    if not gain.value > 0:
        subject = "part of the blend" if compared == "blend" else name
        return f"On {split}, no {subject} is better alone."
    sentence = (
        f"On {split}, {name} alone would be better: NE {best.value:.4f}, {gain.value:.4f} below the"
        f" {compared}'s"
    )
    is_noise = gain.value < 1.96 * gain.error
    return sentence + (", within the noise of these rows." if is_noise else ".")
