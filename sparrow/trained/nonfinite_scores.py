"""What is said of scores that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.core import Batch, UserError
from sparrow.features.schema import Schema


def error(scores_BT: Tensor, batch: Batch, schema: Schema, row0: int, step: int) -> UserError:
    """Returns an error that names the first row with such a score, and its largest number.

    Args:
        scores_BT: some are not finite.
        batch: the samples.
        schema: of the log.
        row0: the first row's number in the log.
        step: of the checkpoint.
    """
    rows = (~torch.isfinite(scores_BT)).any(1).nonzero()[:, 0].tolist()
    name, largest = _largest_number(batch, schema, rows[0])
    return UserError(
        f"row {row0 + rows[0]}: its score and {len(rows) - 1} others are not finite; the largest"
        f" number there is {name} = {largest:g}: mend it, or, if it is an ordinary one, use an"
        f" earlier --checkpoint than step {step}, where the model diverged"
    )


def _largest_number(batch: Batch, schema: Schema, row: int) -> tuple[str, float]:
    """Returns the feature with the number farthest from 0 that the model read of a row, and that
    number.
    """
    numbers = dict(zip(schema.numbers, batch.dense_BC[row].tolist(), strict=True)) | {"": 0.0}
    for name in batch.ids.keys:
        ids = batch.ids[name].expanded()
        if ids.weights_N is not None:
            weights = ids.weights_N[ids.offsets_B1[row] : ids.offsets_B1[row + 1]].tolist()
            numbers[f"the weights of {name}"] = max(weights, key=abs, default=0.0)
    return max(numbers.items(), key=lambda item: abs(item[1]))
