"""What each part of a blend is worth alone, and whether one of them had done better than all together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparrow.analysis.scores import Rows
from sparrow.data.batches.dataset import Dataset
from sparrow.trained.build import scoring
from sparrow.trained.scorer import Restored

NAMES = {"members": "members that share an MLP", "logistic": "logistic regression", "trees": "boosted trees"}


@torch.no_grad()
def alone(found: Restored, dataset: Dataset, split: str, label: int = 0) -> dict[str, Tensor]:
    """Returns name -> the probabilities [N] of each part of a blend for a part of a log; of another model nothing.

    Args:
        found: the model.
        dataset: the prepared log.
        split: the part of the log.
        label: the number of the label.
    """
    names = found.model.parts_there
    if not names:
        return {}
    batches = (batch.to(found.run.device) for batch in dataset.loader(found.run.data.batch_size, split=split))
    score = scoring(lambda batch: torch.cat(list(found.model.alone(batch).values()), 1), found.run, found.schema)
    scores_NPT = torch.cat([score(batch).cpu() for batch in batches]).unflatten(1, (len(names), -1))
    return {NAMES[name]: scores_NPT[:, i, label] for i, name in enumerate(names)}


def in_words(split: str, rows: Rows, parts: Mapping[str, Tensor]) -> str:
    """Returns a sentence on the part with the least normalised entropy, beside the blend's."""
    whole = rows.estimates()["ne"]
    apart = {name: rows.by(scores_N).estimates()["ne"] for name, scores_N in parts.items()}
    name, best = min(apart.items(), key=lambda item: item[1].value)
    gain = whole - best
    if not gain.value > 0:
        return f"On {split}, no part of the blend is better alone."
    told = f"On {split}, {name} alone would be better: NE {best.value:.4f}, {gain.value:.4f} below the blend's"
    return told + (", within the noise of these rows." if gain.value < 1.96 * gain.error else ".")
