"""A run directory -> the model it trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sparrow import checkpoint
from sparrow.checkpoint import Checkpoint
from sparrow.core.config import Family, to_dict
from sparrow.core.errors import UserError
from sparrow.data.schema import Schema
from sparrow.embeddings import EmbeddingTables
from sparrow.training.run import Run


def identity(run: Run, schema: Schema) -> dict[str, Any]:
    """What makes two models the same model: a checkpoint of one fits the other."""
    return {
        "model": {"name": Family("sparrow.models").name_of(run.model), **to_dict(run.model)},
        "tables": {name: {"rows": t.rows, "encoding": t.encoding} for name, t in schema.tables.items()},
        "features": {name: schema.columns[name].table for name in schema.sparse},
        "dense columns": list(schema.dense),
        "table rule": Family("sparrow.kernels.rules").name_of(run.tables),
        "dense optimizer": Family("sparrow.optimizers").name_of(run.dense),
    }


def tables_of(model: nn.Module) -> list[EmbeddingTables]:
    """The model's embedding tables."""
    return [module for module in model.modules() if isinstance(module, EmbeddingTables)]


def load_weights(model: nn.Module, saved: Checkpoint) -> None:
    """Dense weights and table rows from a checkpoint; UserError when it is damaged or incomplete."""
    model.load_state_dict(saved.part("dense"))
    owners = {record.spec.name: (t, record) for t in tables_of(model) for record in t.all_records()}
    missing = {name: record.spec.addressing.rows for name, (_, record) in owners.items()}
    for chunk in saved.chunks():
        owners[chunk.table][0].load_chunk(chunk)
        missing[chunk.table] -= chunk.rows[1] - chunk.rows[0]
    for name, rows in missing.items():
        if rows:
            raise UserError(f"{saved.path}: damaged checkpoint (table {name!r} lacks {rows} rows); delete the folder")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A trained model, ready to score, with what it was trained from."""

    model: Any  # nn.Module and sparrow.models.Model at once, which the type system cannot say
    run: Run
    schema: Schema
    step: int


def restore(run_dir: str | Path, *, which: str = "best", device: str | None = None) -> Restored:
    """Rebuild the model of a run directory from its config and safetensors; nothing from disk is executed.

    which: "best" (by the run's monitor, else the last), "last", or a step number. Raises UserError.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "run.toml").exists():
        raise UserError(f"{run_dir}: not a run directory (no run.toml); give the run_dir of a `sparrow train` job")
    run = Run.load(run_dir / "run.toml", {} if device is None else {"device": device})
    schema = Schema.load(run_dir / "schema.toml")
    directory = run_dir / "checkpoints"
    if which not in ("best", "last") and not which.isdigit():
        raise UserError(f"checkpoint: {which!r} is not 'best', 'last' or a step number")
    step = int(which) if which.isdigit() else checkpoint.latest(directory, best=which == "best")
    saved = checkpoint.load(directory, step)
    saved.check(identity(run, schema))
    model = run.model.build(schema, run.tables, run.seed)
    load_weights(model, saved)
    return Restored(model=model.to(run.device).eval(), run=run, schema=schema, step=saved.step)
