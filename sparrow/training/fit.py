"""A data frame -> a trained model, in one call."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparrow import data
from sparrow.core.arrays import Float32s
from sparrow.core.forks import finalize
from sparrow.core.progress import Progress
from sparrow.data.logs.frames import as_table, shape_rows_like
from sparrow.data.logs.tables import table_log
from sparrow.features.rows import batches
from sparrow.features.schema import Schema, Split
from sparrow.metrics import evaluate
from sparrow.trained.run import Run
from sparrow.trained.scorer import Restored, restore
from sparrow.training.defaults import defaults
from sparrow.training.loop import Listener, train
from sparrow.training.rundir import forget


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """A trained model that takes data frames.

    Args:
        run_dir: the run's directory, which `sparrow evaluate`, `report` and `predict` take too.
        results: as in the run's results.json.
        notes: what `prepare` had to say about the columns.
    """

    run_dir: Path
    results: Mapping[str, Any] = field(repr=False)
    notes: tuple[str, ...]
    _model: Restored = field(repr=False)

    @property
    def schema(self) -> Schema:
        """What the columns mean, with what was fitted."""
        return self._model.schema

    def predict(self, frame: Any) -> Float32s:
        """Returns click probabilities of a frame's rows, in their order: float32 [N], or [N, T] for
        T labels.

        If the model was fitted on rows with lists of candidates, such rows have a score for each
        candidate.
        The frame need not have labels. Ids that training did not see are unknown ids.

        Raises:
            UserError: when a column is absent.
        """
        scores_NT = self._model.score_rows(shape_rows_like(as_table(frame), self.schema))
        return scores_NT[:, 0] if scores_NT.shape[1] == 1 else scores_NT

    def evaluate(self, frame: Any, label: int = 0) -> dict[str, float]:
        """Returns the metrics of a frame with labels, see `sparrow.metrics.evaluate`.

        Args:
            frame: as for `fit`.
            label: the number of the label that is judged.

        Raises:
            UserError: when a column is absent.
        """
        table = self._model.transforms.transform(
            shape_rows_like(as_table(frame), self.schema), training=True
        )
        rows = batches(self._model.schema, table, 8192)
        return evaluate(self._model.scores, rows, label=label, model=self._model.model)


def fit(
    frame: Any,
    *,
    label: str | Sequence[str] | None = None,
    impressions: str | None = None,
    outcomes: str | Sequence[str] = (),
    schema: Schema | None = None,
    split: Split | None = None,
    run_dir: str | Path | None = None,
    overwrite: bool = False,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    listener: Listener | None = None,
) -> Fitted:
    """Prepare a data frame and train a model on it. Returns the model.

    Args:
        frame: a pandas or polars data frame, an arrow table, or anything else that arrow can read.
        label: the column to predict, when its name does not say so; of several the first is
            monitored.
        impressions: the column that says how many showings a row stands for, of which the label
            counts some.
        outcomes: columns that are left out, because they are known only after the label.
        schema: what the columns mean; by default it is inferred.
        split: which rows are held out; by default the last tenths in time where there is a time
            column, else tenths at random.
        run_dir: where the prepared log (`run_dir`/data) and the run go; by default a temporary
            directory, which is removed with the result.
        overwrite: begin again where another run's files are.
        settings: of the run, by dotted name, such as {"model.dim": 32, "precision": "bf16"}; see
            `Run`, and `defaults` for the others.
        progress: is told how far the preparing is.
        listener: hears how the training goes.

    Raises:
        UserError: for what is wrong with frame, schema or settings.

    Example:
        >>> import pyarrow as pa
        >>> import sparrow
        >>> clicks = [i % 3 == 0 for i in range(300)]
        >>> frame = pa.table({"click": clicks, "user": [i % 7 for i in range(300)]})
        >>> model = sparrow.fit(frame, label="click", settings={"model.name": "logistic"})
        >>> model.predict(frame).shape
        (300,)
    """
    log = table_log(as_table(frame))
    directory = Path(tempfile.mkdtemp(prefix="sparrow-") if run_dir is None else run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    fitted = None
    try:
        prepared = data.prepare(
            log,
            directory / "data",
            schema=schema,
            label=label,
            impressions=impressions,
            outcomes=outcomes,
            split=split,
            overwrite=overwrite,
            progress=progress,
        )
        leaves = {"run_dir": str(directory), "log.tensorboard": False, **(settings or {})}
        run = Run.of(directory / "data", defaults(directory / "data", leaves))
        results = train(run, overwrite=overwrite, listener=listener)
        fitted = Fitted(
            run_dir=directory, results=results, notes=prepared.notes, _model=restore(directory)
        )
    finally:
        if run_dir is None and fitted is None:
            _remove(directory)
    if run_dir is None:
        finalize(fitted, _remove, directory)
    return fitted


def _remove(directory: Path) -> None:
    forget(directory)
    shutil.rmtree(directory, ignore_errors=True)
