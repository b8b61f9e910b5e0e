"""The prepared log that a model was trained on."""

from __future__ import annotations

from pathlib import Path

from sparrow import data
from sparrow.core.errors import UserError
from sparrow.data.batches.dataset import Dataset
from sparrow.trained.build import check_schema
from sparrow.trained.scorer import Restored


def open_log(restored: Restored) -> Dataset:
    """Returns the prepared log of a run, or the one that `restore` was given in its place.

    Raises:
        UserError: when it is not there, is damaged, or was prepared with another schema.
    """
    path = Path(restored.run.data.path)
    if not path.exists():
        raise UserError(
            f"{path}: the prepared log of the run is not found from here, nor from the run's"
            " directory up; say where it is with --data"
        )
    dataset = data.open(path)
    check_schema(restored.schema, dataset.schema, dataset.path)
    return dataset
