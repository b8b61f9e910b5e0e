"""A run directory -> the model it trained."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from sparrow import checkpoint
from sparrow.checkpoint.current import is_current
from sparrow.core import Batch
from sparrow.core.arrays import Float32s
from sparrow.core.config import Family
from sparrow.core.errors import UserError
from sparrow.core.files import MANIFEST
from sparrow.features.rows import raw_batches
from sparrow.features.schema import Schema
from sparrow.features.skew import Skew
from sparrow.features.transforms import Transforms
from sparrow.layers.precision import mixing
from sparrow.trained.build import build, check_features, identity, load_weights, scoring, tables_of
from sparrow.trained.calibrators import FOLDER as CALIBRATORS
from sparrow.trained.calibrators import Calibrator, kind_of, passed
from sparrow.trained.run import Run


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A trained model, ready to score, with what it was trained from.

    run: its settings; `data.path` is where the prepared log is now. calibrators: what its scores
    pass through last, one for each label, or none. calibrated_on: the fingerprint of the prepared
    log to whose valid part they were fitted.
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

    @property
    def mixing(self) -> str:
        """Why a row's score depends on the rows that it is scored with, in words; "" if it does
        not.
        """
        return mixing(self.model, self.run.precision)

    def score_rows(
        self,
        rows: pa.RecordBatch | pa.Table,
        batch_size: int = 8192,
        row0: int = 0,
        skew: Skew | None = None,
    ) -> Float32s:
        """Returns probabilities float32 [N, T] of raw rows, in order.

        Args:
            rows: N rows of a raw log.
            batch_size: rows per forward.
            row0: the first row's number in the log, see `Transforms.transform`.
            skew: see `Transforms.transform`.

        Raises:
            UserError: for rows that cannot be transformed, bad ids and scores that are not finite.
        """
        scores = [torch.empty(0, len(self.schema.labels) or 1)]
        for i, batch in enumerate(raw_batches(self.transforms, rows, batch_size, row0, skew)):
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
        if not torch.isfinite(scores).all():
            from sparrow.trained import nonfinite_scores  # and then the job ends

            raise nonfinite_scores.error(scores, batch, self.schema, row0, self.step)
        return passed(scores, self.calibrators)

    def through(self, log: str, split: str) -> str:
        """Returns ", KIND" if scores pass through calibrators, and says where these were fitted to
        the rows scored.

        Metrics of such rows are too good. The text is for the name of a row of metrics.

        Args:
            log: the fingerprint of a prepared log.
            split: its part that is scored.
        """
        if not self.calibrators:
            return ""
        remark = " fitted to these rows" if split == "valid" and log == self.calibrated_on else ""
        return f", {kind_of(self.calibrators)}{remark}"

    @property
    def name(self) -> str:
        """The model's name in a run file."""
        return Family("sparrow.models").name_of(self.run.model)


def restore(
    run_dir: str | Path,
    *,
    which: str = "best",
    device: str | None = None,
    calibrated: bool = True,
    own: bool = False,
    data_dir: str | Path | None = None,
) -> Restored:
    """Returns the model of a run directory, made from its settings and safetensors. Nothing from
    disk is executed.

    A checkpoint that gets all its rows meanwhile, or is removed by its run, is looked for anew.

    Args:
        run_dir: the run directory.
        which: "best" (by the run's monitor, else the last), "last", or a step number.
        device: such as "cpu" or "cuda"; by default the run's.
        calibrated: whether scores pass through the checkpoint's calibrators, if it has some.
        own: whether table rows are to change. Then those on an SSD are copied; else they are read
            where the run has them.
        data_dir: the prepared log. By default it is the run's. It is looked for where the run's
            settings say, as seen from here and from each folder that the run's directory is in. So
            a run is used from anywhere, and run and log may be moved together.

    Raises:
        UserError: when there is no such run or checkpoint, or it cannot be read; see also
            `calibrator_files.load_of_step`.
    """
    run_dir = Path(run_dir)
    _check_run_dir(run_dir)
    run = Run.load(run_dir / "run.toml", {} if device is None else {"device": device})
    for settings in run.extensions.values():
        run = settings.on_this_machine(run)
    transforms = Transforms.load(run_dir)
    schema = transforms.schema
    directory = run_dir / "checkpoints"
    saved = checkpoint.load(directory, checkpoint.named(directory, which))
    expected = identity(run, schema)
    if "extensions" in saved.identity:  # of which only a run that goes on has to know
        expected["extensions"] = saved.identity["extensions"]
    saved.check(expected)
    check_features(saved, schema)
    if data_dir is None:
        data_dir = find_log(run_dir, run.data.path, saved.state.get("data"))
    run = replace(run, data=replace(run.data, path=str(data_dir)))
    calibrators: tuple[Calibrator, ...] = ()
    log = ""
    if calibrated and (run.calibrator != "none" or (run_dir / CALIBRATORS).exists()):
        from sparrow.trained.calibrator_files import load_of_step  # few runs have some

        calibrators, log = load_of_step(
            run_dir, saved.step, checkpoint=saved.fingerprint, kind=run.calibrator
        )
    model = build(run, schema)
    try:
        load_weights(model, saved, learns=own)
    except (UserError, FileNotFoundError):
        if is_current(saved):
            raise
        model = None
    if model is None:  # only here nothing holds the first one any more
        return restore(
            run_dir, which=which, device=device, calibrated=calibrated, own=own, data_dir=data_dir
        )
    return Restored(
        model=model.eval(),
        run=run,
        transforms=transforms,
        step=saved.step,
        calibrators=calibrators,
        calibrated_on=log,
    )


def _check_run_dir(run_dir: Path) -> None:
    if not (run_dir / "run.toml").exists():
        raise UserError(
            f"{run_dir}: not a run directory (no run.toml); give the run_dir of a `sparrow"
            " train` job"
        )
    if (run_dir / "check.parquet").exists():
        raise UserError(
            f"{run_dir}: a model folder, not a run directory; give the run that it was exported"
            " from"
        )


def find_log(run_dir: Path, written: str, fingerprint: str | None) -> Path:
    """Returns where the prepared log of a run is; as its settings say where it is in none of the
    places.

    Args:
        run_dir: the run directory.
        written: `data.path` of its settings.
        fingerprint: of the log that it was trained on; None takes any.
    """
    for folder in (Path(), *run_dir.resolve().parents):
        place = folder / written
        if not (place / MANIFEST).is_file():
            continue
        if fingerprint is None:
            return place
        if fingerprint == hashlib.sha256((place / MANIFEST).read_bytes()).hexdigest():
            return place
    return Path(written)
