"""A run directory -> the model it trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import nn

from sparrow import checkpoint, data
from sparrow.checkpoint import Checkpoint
from sparrow.core import Batch
from sparrow.core.config import Family, flatten, to_dict
from sparrow.core.errors import UserError
from sparrow.data import Transforms
from sparrow.data.clipped import Clipped
from sparrow.data.schema import ROLES, Schema
from sparrow.embeddings import EmbeddingTables, unallocated
from sparrow.layers import computing
from sparrow.losses import probabilities
from sparrow.models import Offset
from sparrow.sharding import ShardedTables
from sparrow.training.run import Run

AnyTables = EmbeddingTables | ShardedTables
Floats = npt.NDArray[np.float32]


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


def check_schema(trained: Schema, log: Schema, place: Path) -> None:
    """UserError when a log was prepared with other columns or fitted values than a run was trained with."""
    ours, theirs = _fitted(trained), _fitted(log)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise UserError(
                f"{place}: prepared with another schema: {key} is {theirs.get(key)!r} there and {ours.get(key)!r} in "
                "the run; prepare the log with --like RUN_DIR"
            )


def build(run: Run, schema: Schema, shard: Callable[[nn.Module], None] | None = None) -> Any:
    """The untrained model on the run's device, its offset 0; UserError when it does not fit into memory.

    shard: puts others in the place of its tables, which then have no memory of their own.
    """
    with within_memory(run.device):
        with nullcontext() if shard is None else unallocated():
            model = Offset(run.model.build(schema, run.tables, run.seed), schema)
        if shard is not None:
            shard(model)
        return model.to(run.device)


@contextmanager
def within_memory(device: str) -> Iterator[None]:
    """UserError for a model that asks the device for more memory than it has."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower() and "allocate" not in str(error) and "overflow" not in str(error):
            raise
        raise UserError(
            f"model: it does not fit into the memory of {device}; lower model.dim, other sizes of the model or the "
            "rows of the tables"
        ) from None


def tables_of(model: nn.Module) -> list[AnyTables]:
    """The model's embedding tables."""
    found: list[AnyTables] = []
    for child in model.children():
        found += [child] if isinstance(child, EmbeddingTables | ShardedTables) else tables_of(child)
    return found


def of_whole_log(scores: torch.Tensor, kept: float) -> torch.Tensor:
    """Probabilities of a model that saw a share `kept` of the negatives, as they are where all negatives are.

    p / (p + (1 - p) / kept) (He et al., ADKDD 2014, section 6.3).
    """
    return scores / (scores + (1 - scores) / kept) if kept < 1 else scores


def scoring(model: Any, run: Run, schema: Schema) -> Callable[[Batch], torch.Tensor]:
    """Batch -> click probabilities [B, T] of the whole log, in the run's precision."""
    kept, device = schema.split.negatives, torch.device(run.device)

    def score(batch: Batch) -> torch.Tensor:
        with computing(run.precision, device):
            scores_BT = probabilities(model(batch))
        return of_whole_log(scores_BT, kept)

    return score


def load_weights(model: nn.Module, saved: Checkpoint) -> None:
    """Dense weights and table rows from a checkpoint; UserError when it is damaged or incomplete."""
    model.load_state_dict(saved.part("dense"))
    records = [record for tables in tables_of(model) for record in tables.all_records()]
    missing = {record.name: record.weight.numel() for record in records}
    for chunk in saved.chunks([record.place for record in records]):
        for record in records:
            if record.spec.name == chunk.table:
                missing[record.name] -= record.load_chunk(chunk)
    for name, numbers in missing.items():
        if numbers:
            raise UserError(
                f"{saved.path}: damaged checkpoint (table {name!r} lacks {numbers} numbers); delete the folder"
            )
    for tables in tables_of(model):
        tables.changed()


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Checkpoint) -> None:
    """The state of the dense optimizer from a checkpoint."""
    state = optimizer.state_dict()
    state["state"] = {}
    for key, value in saved.part("optimizer").items():
        index, name = key.split(".", 1)
        state["state"].setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A trained model, ready to score, with what it was trained from."""

    model: Any  # nn.Module and sparrow.models.Model at once, which the type system cannot say
    run: Run
    transforms: Transforms
    step: int

    @property
    def schema(self) -> Schema:
        """What the columns mean."""
        return self.transforms.schema

    def score_rows(
        self, rows: pa.RecordBatch | pa.Table, batch_size: int = 8192, row0: int = 0, clipped: Clipped | None = None
    ) -> Floats:
        """Probabilities float32 [N, T] of raw rows, in order; row0, clipped: see `Transforms.transform`."""
        columns = self.schema.columns
        features = (*self.schema.dense, *self.schema.sparse)
        read = {source for n in features for source in (columns[n].source or n, columns[n].weights)}
        roles = {columns[n].source or n for n in self.schema.of_kind(*ROLES)}
        rows = rows.select([n for n in rows.schema.names if n in read or n not in roles])  # labels may be anything
        table = self.transforms.transform(rows, training=False, row0=row0, clipped=clipped)
        scores = [torch.empty(0, len(self.schema.labels) or 1)]
        for i, batch in enumerate(data.batches(self.schema, table, batch_size)):
            scores.append(self.scores(batch, row0 + i * batch_size))
        return torch.cat(scores).numpy()

    @torch.no_grad()
    def scores(self, batch: Batch, row0: int = 0) -> torch.Tensor:
        """Probabilities [B, T] of a batch on the host; UserError for bad ids and for scores that are not finite.

        row0: the first row's number in the log, for errors.
        """
        score = scoring(self.model, self.run, self.schema)
        scores = score(batch.to(self.run.device)).cpu()
        for tables in tables_of(self.model):
            tables.raise_bad_ids()
        bad = (~torch.isfinite(scores)).any(1).nonzero()[:, 0].tolist()
        if bad:
            name, largest = self._largest(batch, bad[0])
            raise UserError(
                f"row {row0 + bad[0]}: its score and {len(bad) - 1} others are not finite; the largest number there is "
                f"{name} = {largest:g}: mend it, or, if it is an ordinary one, use an earlier --checkpoint than step "
                f"{self.step}, where the model diverged"
            )
        return scores

    def _largest(self, batch: Batch, row: int) -> tuple[str, float]:
        """The feature of a row that has the number farthest from 0, of those the model read, and that number."""
        numbers = dict(zip(self.schema.dense, batch.dense_BC[row].tolist(), strict=True)) | {"": 0.0}
        for name in batch.ids.keys:
            one = batch.ids[name].expanded()
            if one.weights_N is not None:
                weights = one.weights_N[one.offsets_B1[row] : one.offsets_B1[row + 1]].tolist()
                numbers[f"the weights of {name}"] = max(weights, key=abs, default=0.0)
        return max(numbers.items(), key=lambda item: abs(item[1]))

    @property
    def name(self) -> str:
        """The model's name in a run file."""
        return Family("sparrow.models").name_of(self.run.model)


def restore(run_dir: str | Path, *, which: str = "best", device: str | None = None) -> Restored:
    """Rebuild the model of a run directory from its config and safetensors; nothing from disk is executed.

    which: "best" (by the run's monitor, else the last), "last", or a step number. Raises UserError.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "run.toml").exists():
        raise UserError(f"{run_dir}: not a run directory (no run.toml); give the run_dir of a `sparrow train` job")
    run = Run.load(run_dir / "run.toml", {} if device is None else {"device": device})
    transforms = Transforms.load(run_dir)
    schema = transforms.schema
    directory = run_dir / "checkpoints"
    if which not in ("best", "last") and not which.isdigit():
        raise UserError(f"checkpoint: {which!r} is not 'best', 'last' or a step number; use one of them")
    step = int(which) if which.isdigit() else checkpoint.latest(directory, best=which == "best")
    saved = checkpoint.load(directory, step)
    saved.check(identity(run, schema))
    model = build(run, schema)
    load_weights(model, saved)
    return Restored(model=model.eval(), run=run, transforms=transforms, step=saved.step)


def _fitted(schema: Schema) -> dict[str, Any]:
    whole = to_dict(schema)
    found = flatten({"columns": whole["columns"], "tables": whole["tables"]})
    return {key: value for key, value in found.items() if key.rpartition(".")[2] not in ("note", "distinct")}
