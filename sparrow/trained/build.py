"""A run's settings and a log's schema -> the model; what of it a checkpoint holds, and how it
scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparrow.checkpoint import Checkpoint
from sparrow.core import Batch
from sparrow.core.config import Family, differences, flatten, to_dict
from sparrow.core.errors import UserError
from sparrow.core.extensions import adapt_model
from sparrow.embeddings import UNALLOCATED, EmbeddingTables, Placement, RowRecords
from sparrow.features.schema import Encoding, Schema
from sparrow.layers.precision import computing
from sparrow.losses import probabilities
from sparrow.models import Offset
from sparrow.trained.dense import read_weights
from sparrow.trained.run import Run


def identity(run: Run, schema: Schema) -> dict[str, Any]:
    """Returns what makes two models the same model: if it is equal, a checkpoint of one fits the
    other.
    """
    # dropout came after the first checkpoints, which name none
    settings = {
        name: value for name, value in to_dict(run.model).items() if name != "dropout" or value
    }
    return {
        "model": {"name": Family("sparrow.models").name_of(run.model), **settings},
        "layers": run.layers.changes,
        "tables": {name: _table(run, name, table) for name, table in schema.encodings.items()},
        "features": {name: schema.columns[name].table for name in schema.sparse},
        "dense columns": list(schema.numbers),
        "dense optimizer": Family("sparrow.optimizers").name_of(run.dense),
    }


def _table(run: Run, name: str, table: Encoding) -> dict[str, Any]:
    """Returns what must stay the same of a table: its rows and fields. The model says the sizes of
    vectors.
    """
    chosen = run.tables.for_table(name, table.rows or 0)
    return {
        "rows": table.rows,
        "encoding": table.kind,
        "addressing": to_dict(chosen).get("addressing"),
        "format": Family("sparrow.kernels.formats").name_of(chosen.format),
        "rule": Family("sparrow.kernels.rules").name_of(chosen.rule),
        "state": chosen.state,
        "cache": to_dict(chosen.cache),
    }


def check_schema(trained: Schema, log: Schema, place: Path) -> None:
    """Check that a log was prepared with the columns and fitted values that a run was trained with.

    Args:
        trained: the schema of the run.
        log: the schema of the log.
        place: where the log is, for errors.

    Raises:
        UserError: when columns or fitted values differ.
    """
    for key, trained_value, log_value in differences(fitted_values(trained), fitted_values(log)):
        raise UserError(
            f"{place}: prepared with another schema: {key} is {log_value!r} there and"
            f" {trained_value!r} in the run; prepare the log with --like RUN_DIR"
        )


def check_features(saved: Checkpoint, schema: Schema) -> None:
    """Check that a checkpoint was trained on features of a run's schema. Those of earlier Sparrows
    do not say.

    Raises:
        UserError: when it is another run's. It names the first value that differs.
    """
    saved_values = saved.state.get("features", {})
    own_values = fitted_values(schema)
    # a later Sparrow may know more of a column
    for key in sorted(saved_values.keys() & own_values.keys()):
        if saved_values[key] != own_values[key]:
            raise UserError(
                f"{saved.path}: checkpoint of another run: its features have {key}"
                f" {saved_values[key]!r}, and this run's {own_values[key]!r}; delete the folder, or"
                " put back the run's own"
            )


def build(run: Run, schema: Schema, shard: Callable[[nn.Module], None] | None = None) -> Any:
    """Returns the untrained model on the run's device, with the offset 0.

    Args:
        run: its settings.
        schema: of the log.
        shard: puts others in the place of its tables, which then have no memory of their own.

    Raises:
        UserError: when it does not fit into memory.
    """
    with within_memory(run.device):
        model = Offset(
            untrained(run, schema, run.placement if shard is None else UNALLOCATED), schema
        )
        if shard is not None:
            shard(model)
        return model.to(run.device)


def untrained(run: Run, schema: Schema, placement: Placement) -> nn.Module:
    """Returns the model itself, with first values drawn from the run's seed. placement: of its
    tables' rows.
    """
    seed = run.seed if run.tables.seed is None else run.tables.seed
    model = run.model.build(schema, replace(run.tables, seed=seed).at(placement))
    adapt_model(model, run)
    return model


@contextmanager
def within_memory(device: str) -> Iterator[None]:
    """Turns a lack of memory within this context into an error for people. device: of the model.

    Raises:
        UserError: when the model asks the device for more memory than it has.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if (
            "memory" not in str(error).lower()
            and "allocate" not in str(error)
            and "overflow" not in str(error)
        ):
            raise
        raise UserError(
            f"model: it does not fit into the memory of {device}; lower model.dim, other sizes of"
            " the model or the rows of the tables"
        ) from None


def tables_of(model: nn.Module) -> list[EmbeddingTables]:
    """Returns the model's embedding tables."""
    return [module for module in model.modules() if isinstance(module, EmbeddingTables)]


def records_of(model: nn.Module) -> list[RowRecords]:
    """Returns the rows of all components of the model's tables that are here."""
    return [record for tables in tables_of(model) for record in tables.all_records()]


def undo_sampling(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Returns the probabilities of the whole log, from those of a model that saw a share of the
    negatives.

    They are p / (p + (1 - p) / share) (He et al., ADKDD 2014, section 6.3).

    Args:
        scores: p, of any shape.
        share: the share of the negatives that the model saw.
    """
    return scores / (scores + (1 - scores) / share) if share < 1 else scores


def scoring(model: Any, run: Run, schema: Schema) -> Callable[[Batch], torch.Tensor]:
    """Returns a function Batch -> click probabilities [B, T] of the whole log, in the run's
    precision.
    """
    negatives = schema.split.negatives
    device = torch.device(run.device)

    def score(batch: Batch) -> torch.Tensor:
        with computing(run.precision, device):
            scores_BT = probabilities(model(batch))
        return undo_sampling(scores_BT, negatives)

    return score


def load_weights(model: nn.Module, saved: Checkpoint, learns: bool = True) -> None:
    """Load dense weights and table rows from a checkpoint.

    Args:
        model: whose they become.
        saved: the checkpoint.
        learns: whether they are to change. If not, rows on an SSD are read where the run has them.

    Raises:
        UserError: when the checkpoint is damaged or incomplete.
    """
    read_weights(model, saved)
    records = records_of(model)
    missing = {record.name: record.rows * record.dim for record in records}
    for part in saved.external():
        for record in records:
            if record.go_on(part, learns):
                del missing[record.name]
    left = [record for record in records if record.name in missing]
    for chunk in saved.chunks([record.place for record in left]):
        for record in left:
            if record.component.name == chunk.table:
                missing[record.name] -= record.load_chunk(chunk)
    gone_on = [record for record in records if record.name not in missing]
    for chunk in saved.caches([record.place for record in gone_on]):
        for record in gone_on:
            if record.component.name == chunk.table:
                record.load_chunk(chunk)
    for name, numbers in missing.items():
        if numbers:
            raise UserError(
                f"{saved.path}: damaged checkpoint (table {name!r} lacks {numbers} numbers); delete"
                " the folder"
            )
    for tables in tables_of(model):
        tables.changed()


def fitted_values(schema: Schema) -> dict[str, Any]:
    """Returns what was fitted to the training rows that features are made by, as plain data by
    dotted name.

    Separators and texts for missing are left out: they say how a log spells its values, not what
    these are.
    """
    learned = {name: column for name, column in schema.columns.items() if column.kind != "baseline"}
    for name in schema.of_kind("time"):  # its ends go on from day to day
        learned[name] = replace(learned[name], low=None, high=None)
    values = flatten(to_dict(replace(schema, columns=learned), only=("columns", "encodings")))
    spelling = ("note", "distinct", "separator", "missing")
    return {key: value for key, value in values.items() if key.rpartition(".")[2] not in spelling}
