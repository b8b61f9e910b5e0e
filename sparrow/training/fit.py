"""A data frame -> a trained model, in one call."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from sparrow import data
from sparrow.core.arrays import Float32s
from sparrow.core.errors import UserError
from sparrow.core.progress import Progress
from sparrow.data.logs.read import made_again, table_log
from sparrow.features.rows import batches
from sparrow.features.schema import Schema, Split
from sparrow.metrics import evaluate
from sparrow.trained.run import Run
from sparrow.trained.scorer import Restored, restore
from sparrow.training.blocks import forget
from sparrow.training.defaults import defaults
from sparrow.training.loop import Listener, train


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
        """Returns click probabilities of a frame's rows, in their order: float32 [N], or [N, T] for T labels.

        If the model was fitted on rows with lists of candidates, such rows have a score for each candidate.
        The frame need not have labels. Ids that training did not see are unknown ids.

        Raises:
            UserError: when a column is absent.
        """
        scores_NT = self._model.score_rows(self._rows(frame))
        return scores_NT[:, 0] if scores_NT.shape[1] == 1 else scores_NT

    def evaluate(self, frame: Any, label: int = 0) -> dict[str, float]:
        """Returns what `sparrow.metrics.evaluate` does, of a frame with labels.

        Args:
            frame: as for `fit`.
            label: the number of the label that is judged.

        Raises:
            UserError: when a column is absent.
        """
        table = self._model.transforms.transform(self._rows(frame), training=True)
        return evaluate(self._model.scores, batches(self._model.schema, table, 8192), label=label)

    def _rows(self, frame: Any) -> pa.Table:
        """Returns a frame's rows as those of the log were made, see `Log.shaped`."""
        schema, table = self._model.schema, as_table(frame)
        log = made_again(table_log(table), schema.source, schema)
        return log.sample(2**62) if log.steps else table


def fit(
    frame: Any,
    *,
    label: str | None = None,
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
        label: the column to predict, when its name does not say so.
        schema: what the columns mean; by default it is inferred.
        split: which rows are held out; by default the last tenths in time where there is a time column, else tenths at
            random.
        run_dir: where the prepared log (`run_dir`/data) and the run go; by default a temporary directory, which is
            removed with the result.
        overwrite: begin again where another run's files are.
        settings: of the run, by dotted name, such as {"model.dim": 32, "precision": "bf16"}; see `Run`, and `defaults`
            for the others.
        progress: is told how far the preparing is.
        listener: hears how the training goes.

    Raises:
        UserError: for what is wrong with frame, schema or settings.
    """
    log = table_log(as_table(frame))
    directory = Path(tempfile.mkdtemp(prefix="sparrow-") if run_dir is None else run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    fitted = None
    try:
        made = data.prepare(
            log, directory / "data", schema=schema, label=label, split=split, overwrite=overwrite, progress=progress
        )
        leaves = {"run_dir": str(directory), "log.tensorboard": False, **(settings or {})}
        run = Run.of(directory / "data", defaults(directory / "data", leaves))
        results = train(run, overwrite=overwrite, listener=listener)
        fitted = Fitted(run_dir=directory, results=results, notes=made.notes, _model=restore(directory))
    finally:
        if run_dir is None and fitted is None:
            _remove(directory)
    if run_dir is None:
        weakref.finalize(fitted, _remove, directory)
    return fitted


def _remove(directory: Path) -> None:
    forget(directory)
    shutil.rmtree(directory, ignore_errors=True)


def as_table(frame: Any) -> pa.Table:
    """Returns an arrow table of a data frame's columns.

    Raises:
        UserError: when it is no data frame.
    """
    try:
        table = pa.table(frame)
    except (TypeError, ValueError, pa.ArrowException) as error:
        kind = f"{type(frame).__module__}.{type(frame).__name__}"
        remedy = "give a pandas or polars data frame, or an arrow table"
        if isinstance(error, pa.ArrowException):  # pandas columns of mixed types: two sentences
            told, remedy = "; ".join(map(str, error.args)), "give each column values of one type"
        else:
            told = str(error).splitlines()[0]
        raise UserError(f"frame: a {kind} cannot be read ({told}); {remedy}") from None
    names = [name for name in table.column_names if not name.startswith("__index_level_")]
    try:
        return pa.table({name: _without_views(table[name]) for name in names})
    except pa.ArrowException as error:
        raise UserError(f"frame: {str(error).splitlines()[0]}; give plain text instead of views into it") from None


def _without_views(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns the column without views into text, which polars makes and few of arrow's functions take."""
    if pa.types.is_dictionary(column.type):
        kind = _plain(column.type.value_type)
        parts = [pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(kind)) for chunk in column.chunks]
        return pa.chunked_array(parts, pa.dictionary(column.type.index_type, kind, column.type.ordered))
    return column.cast(_plain(column.type))


def _plain(kind: pa.DataType) -> pa.DataType:
    if kind == pa.string_view():
        return pa.large_string()
    if kind == pa.binary_view():
        return pa.large_binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_plain(kind.value_type))
    return kind
