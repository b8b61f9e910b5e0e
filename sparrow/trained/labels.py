"""Several labels: numbers without a name are the first one's, by which runs are judged; the others' are beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparrow.core import Batch


def together(labels: Sequence[str], found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns each label's metrics as one flat dict: the first label's as they are, the others' as LABEL.METRIC."""
    others = zip(labels[1:], found[1:], strict=True)
    return {**found[0], **{f"{label}.{name}": value for label, one in others for name, value in one.items()}}


def by_label(labels: Sequence[str], values: Mapping[str, float]) -> list[tuple[str, Mapping[str, float]]]:
    """Returns each label's metrics out of what `together` made.

    They are named "valid", or "valid, LABEL" where there are several labels.
    """
    found = {f"valid{of_first(labels)}": values}
    for label in labels[1:]:
        start = f"{label}."
        of_label = {n.removeprefix(start): value for n, value in values.items() if n.startswith(start)}
        if of_label:  # runs of before had the first label's alone
            found[f"valid, {label}"] = of_label
    return list(found.items())


def of_first(labels: Sequence[str]) -> str:
    """Returns ", LABEL" where there are several labels, else nothing, for numbers of the first label alone."""
    return f", {labels[0]}" if len(labels) > 1 else ""


def first_label(batch: Batch, kept: float = 1) -> tuple[Tensor, Tensor | None]:
    """Returns the first label's values and their weights, [B] on the host.

    Args:
        batch: the samples.
        kept: the share of negatives that are in training. Each counts for 1 / kept: for itself and those left out.
    """
    batch = batch.on_host
    assert batch.labels_BT is not None
    labels_B = batch.labels_BT[:, 0].cpu()
    weights_B = None if batch.weights_B is None else batch.weights_B.cpu()
    if kept < 1:
        count_B = torch.where(labels_B == 0, 1 / kept, 1.0)
        weights_B = count_B if weights_B is None else weights_B * count_B
    return labels_B, weights_B
