"""A run directory -> the model it trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from sparrow import checkpoint
from sparrow.checkpoint.whole import is_current
from sparrow.core import Batch
from sparrow.core.arrays import Float32s
from sparrow.core.config import Family
from sparrow.core.errors import UserError
from sparrow.features.clipped import Clipped
from sparrow.features.rows import batches
from sparrow.features.schema import ROLES, Schema
from sparrow.features.transforms import Transforms
from sparrow.trained.build import build, identity, load_weights, scoring, tables_of
from sparrow.trained.calibrators import Calibrator, kind_of, load_of_step, passed
from sparrow.trained.run import Run


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A trained model, ready to score, with what it was trained from.

    calibrators: what its scores pass through last, one for each label, or none. calibrated_on: the fingerprint of the
    prepared log to whose valid part they were fitted.
    """

    model: Any  # nn.Module and sparrow.models.Model at once, which the type system cannot say
    run: Run
    transforms: Transforms
    step: int
    calibrators: tuple[Calibrator, ...] = ()
    calibrated_on: str = ""

    @property
    def schema(self) -> Schema:
        """What the columns mean."""
        return self.transforms.schema

    def score_rows(
        self, rows: pa.RecordBatch | pa.Table, batch_size: int = 8192, row0: int = 0, clipped: Clipped | None = None
    ) -> Float32s:
        """Returns probabilities float32 [N, T] of raw rows, in order.

        Args:
            rows: N rows of a raw log.
            batch_size: rows per forward.
            row0: the first row's number in the log, see `Transforms.transform`.
            clipped: see `Transforms.transform`.

        Raises:
            UserError: for rows that cannot be transformed, bad ids and scores that are not finite.
        """
        columns = self.schema.columns
        features = (*self.schema.dense, *self.schema.sparse)
        read = {source for name in features for source in self.schema.sources(name)}
        roles = {columns[n].source or n for n in self.schema.of_kind(*ROLES)}
        rows = rows.select([n for n in rows.schema.names if n in read or n not in roles])  # labels may be anything
        table = self.transforms.transform(rows, training=False, row0=row0, clipped=clipped)
        scores = [torch.empty(0, len(self.schema.labels) or 1)]
        for i, batch in enumerate(batches(self.schema, table, batch_size)):
            scores.append(self.scores(batch, row0 + i * batch_size))
        return torch.cat(scores).numpy()

    @torch.no_grad()
    def scores(self, batch: Batch, row0: int = 0) -> torch.Tensor:
        """Returns probabilities [B, T] of a batch, on the host.

        Args:
            batch: the samples.
            row0: the first row's number in the log, for errors.

        Raises:
            UserError: for bad ids and for scores that are not finite.
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
        return passed(scores, self.calibrators)

    def through(self, log: str, split: str) -> str:
        """Returns ", KIND" if scores pass through calibrators, and says where these were fitted to the rows scored.

        Metrics of such rows are too good. The text is for the name of a row of metrics.

        Args:
            log: the fingerprint of a prepared log.
            split: its part that is scored.
        """
        if not self.calibrators:
            return ""
        seen = " fitted to these rows" if split == "valid" and log == self.calibrated_on else ""
        return f", {kind_of(self.calibrators)}{seen}"

    def _largest(self, batch: Batch, row: int) -> tuple[str, float]:
        """Returns the feature with the number farthest from 0 that the model read of a row, and that number."""
        numbers = dict(zip(self.schema.numbers, batch.dense_BC[row].tolist(), strict=True)) | {"": 0.0}
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


def restore(
    run_dir: str | Path, *, which: str = "best", device: str | None = None, calibrated: bool = True, own: bool = False
) -> Restored:
    """Returns the model of a run directory, made from its settings and safetensors. Nothing from disk is executed.

    A checkpoint that gets all its rows meanwhile, or is removed by its run, is looked for anew.

    Args:
        run_dir: the run directory.
        which: "best" (by the run's monitor, else the last), "last", or a step number.
        device: such as "cpu" or "cuda"; by default the run's.
        calibrated: whether scores pass through the checkpoint's calibrators, if it has some.
        own: whether table rows are to change. Then those on an SSD are copied; else they are read where the run has
            them.

    Raises:
        UserError: when there is no such run or checkpoint, or it cannot be read; see also `load_of_step`.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "run.toml").exists():
        raise UserError(f"{run_dir}: not a run directory (no run.toml); give the run_dir of a `sparrow train` job")
    run = Run.load(run_dir / "run.toml", {} if device is None else {"device": device})
    if run.ssd is not None and not Path(run.ssd).is_dir():  # it is on another machine
        run = replace(run, ssd=None, tables=run.tables.in_memory)
    transforms = Transforms.load(run_dir)
    schema = transforms.schema
    directory = run_dir / "checkpoints"
    saved = checkpoint.load(directory, checkpoint.named(directory, which))
    saved.check(identity(run, schema))
    calibrators: tuple[Calibrator, ...] = ()
    log = ""
    if calibrated:
        calibrators, log = load_of_step(run_dir, saved.step, checkpoint=saved.fingerprint, kind=run.calibrate)
    model = build(run, schema)
    try:
        load_weights(model, saved, learns=own)
    except (UserError, FileNotFoundError):
        if is_current(saved):
            raise
        model = None
    if model is None:  # only here nothing holds the first one any more
        return restore(run_dir, which=which, device=device, calibrated=calibrated, own=own)
    return Restored(
        model=model.eval(), run=run, transforms=transforms, step=saved.step, calibrators=calibrators, calibrated_on=log
    )
