"""Several labels: numbers without a name are the first one's, by which runs are judged; the others'
are beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparrow.core import Batch


def join_labels(labels: Sequence[str], results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns each label's metrics as one flat dict: the first label's as they are, the others' as
    LABEL.METRIC.
    """
    joined = dict(results[0])
    for label, metrics in zip(labels[1:], results[1:], strict=True):
        joined |= {f"{label}.{name}": value for name, value in metrics.items()}
    return joined


def split_labels(
    labels: Sequence[str], values: Mapping[str, float]
) -> list[tuple[str, Mapping[str, float]]]:
    """Returns each label's metrics out of what `join_labels` returned.

    They are named "valid", or "valid, LABEL" where there are several labels.
    """
    named = {f"valid{first_label_suffix(labels)}": values}
    for label in labels[1:]:
        start = f"{label}."
        label_values = {
            n.removeprefix(start): value for n, value in values.items() if n.startswith(start)
        }
        if label_values:  # runs of before had the first label's alone
            named[f"valid, {label}"] = label_values
    return list(named.items())


def first_label_suffix(labels: Sequence[str]) -> str:
    """Returns ", LABEL" where there are several labels, else nothing, for numbers of the first
    label alone.
    """
    return f", {labels[0]}" if len(labels) > 1 else ""


def read_first_label(batch: Batch, negatives: float = 1) -> tuple[Tensor, Tensor | None]:
    """Returns the first label's values and their weights, [B] on the host.

    Args:
        batch: the samples.
        negatives: the share of negatives that are in training. Each counts for 1 / negatives: for
            itself and those left out.
    """
    batch = batch.on_host
    assert batch.labels_BT is not None
    labels_B = batch.labels_BT[:, 0].cpu()
    weights_B = None if batch.weights_B is None else batch.weights_B.cpu()
    if negatives < 1:
        count_B = torch.where(labels_B == 0, 1 / negatives, 1.0)
        weights_B = count_B if weights_B is None else weights_B * count_B
    return labels_B, weights_B
