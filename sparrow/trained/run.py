"""`Run`: the whole of a training job as one tree of plain values; a TOML file and a Python call
spell it alike.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, TypeVar

import torch

from sparrow.core.config import (
    Family,
    OfExtensions,
    OneOf,
    from_dict,
    named,
    read_toml,
    to_dict,
    write_toml,
)
from sparrow.core.errors import UserError, require
from sparrow.core.extensions import extension_of, take_earlier_names
from sparrow.core.files import write_text
from sparrow.distributed.codecs import Codec, cast
from sparrow.embeddings import Placement, TableChoices
from sparrow.embeddings.components import Mode
from sparrow.layers.kinds import Layers
from sparrow.layers.precision import Precision, with_recipe
from sparrow.losses import LossConfig, bce
from sparrow.metrics import monitored
from sparrow.models import ModelConfig, dcnv2
from sparrow.optimizers import OptimizerConfig, adam
from sparrow.trained.calibrators import KINDS

MOST_AHEAD = 4  # steps
Settings = TypeVar("Settings", bound="ExtensionSettings")


@dataclass(frozen=True, kw_only=True)
class Data:
    """path: the prepared log. batch_size: examples per forward, 0 for a choice by the log's size.

    shuffle: else the log's own order is kept; by default a log that was split by time keeps it.
    dedup: whether equal rows of the schema's groups are looked up once (RecD, arXiv 2211.05239);
    "auto" where a group's factor pays. id_dropout: column -> share of its known ids that a batch
    takes for unknown, so that the row of unknown ids learns; by default so many that training has
    the share of unknown ids of valid. {} is none.
    """

    path: str
    batch_size: int = 0
    shuffle: bool | None = None
    dedup: Literal["auto", "on", "off"] = "auto"
    id_dropout: dict[str, float] | None = None

    def __post_init__(self) -> None:
        require(least=0, batch_size=self.batch_size)
        for column, share in (self.id_dropout or {}).items():
            require(least=0, most=1, **{f"id_dropout.{column}": share})


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A factor on both learning rates: up linearly over warmup_steps, then constant, at the end
    down to `final`.

    hold: the share of all steps before it goes down (warm-up, stable, decay: MiniCPM, arXiv
    2404.06395, section 4).
    """

    warmup_steps: int = 0
    decay: Literal["constant", "linear", "cosine"] = "linear"
    hold: float = 0.7
    final: float = 0.0

    def __post_init__(self) -> None:
        require(least=0, warmup_steps=self.warmup_steps)
        require(least=0, most=1, hold=self.hold, final=self.final)

    def factor(self, step: int, total: int) -> float:
        """Returns the factor for a step. step: 0 <= step < total. total: how many steps the run
        has.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        begin = max(self.warmup_steps, self.hold * total)
        share = max(step - begin, 0) / max(total - begin, 1)
        shape = 1.0 - share
        if self.decay == "cosine":
            shape = (1 + math.cos(math.pi * min(share, 1.0))) / 2
        return self.final + (1 - self.final) * shape


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How the training loop goes.

    epochs, max_steps: whichever ends first. accumulate: batches per step. clip_norm: bound on the
    global gradient norm, tables included. nonfinite: "skip" leaves a step with a NaN or infinite
    gradient out (100 in a row stop the run), "stop" ends the run, "off" does not look: a table row
    then leaves out a gradient whose square is not finite, which nothing counts or tells, but dense
    weights take it, and one above 1e19 ends what they learn by Adam or AdaGrad. update_mode: of the
    tables; "auto" is "fused" unless accumulation, clipping or the guard need whole gradients.
    progressive: report how well each fifth of the first epoch was predicted before it was trained
    on. evaluate_every: steps between evaluations on the valid part (by default each epoch's end).
    patience: stop after so many evaluations without a better `monitor`, which is of the first label
    where there are several.
    """

    epochs: int = 1
    max_steps: int | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    nonfinite: Literal["skip", "stop", "off"] = "skip"
    update_mode: Literal["auto", "fused", "deferred", "off"] = "auto"
    progressive: bool = True
    evaluate_every: int | None = None
    patience: int | None = None
    monitor: Annotated[str, OneOf(monitored)] = "ne"

    def __post_init__(self) -> None:
        require(least=1, epochs=self.epochs, max_steps=self.max_steps, accumulate=self.accumulate)
        require(least=1, evaluate_every=self.evaluate_every, patience=self.patience)
        require(above=0, clip_norm=self.clip_norm)
        if self.monitor not in monitored():
            raise UserError(
                f"monitor: {self.monitor!r} is not one of {', '.join(map(repr, monitored()))}"
            )
        if self.update_mode == "fused" and self._needs_whole_gradients:
            raise UserError(
                "update_mode: 'fused' updates tables inside backward, too early for accumulate > 1,"
                " clip_norm or a nonfinite guard; use 'deferred' or 'auto', or nonfinite = 'off'"
            )

    @property
    def table_mode(self) -> Mode:
        """`update_mode`, with a choice in the place of "auto"."""
        if self.update_mode != "auto":
            return self.update_mode
        return "deferred" if self._needs_whole_gradients else "fused"

    @property
    def _needs_whole_gradients(self) -> bool:
        return self.accumulate > 1 or self.clip_norm is not None or self.nonfinite != "off"


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Where tables live when there are many ranks (`torchrun -m sparrow train`); with one it says
    nothing.

    plan: "auto", the name of a layout for all tables, or a TOML file, see `sparrow.sharding.plan`.
    forward, backward: codecs of vectors and of their gradients between ranks. dense: what the dense
    gradients are rounded to on their way. ranks_per_host: by default as torchrun says. timeout_s:
    how long a rank waits for the others before it gives up.
    """

    plan: str = "auto"
    forward: Annotated[Codec, Family("sparrow.distributed.codecs")] = dataclasses.field(
        default_factory=cast.Config
    )
    backward: Annotated[Codec, Family("sparrow.distributed.codecs")] = dataclasses.field(
        default_factory=cast.Config
    )
    dense: Literal["fp32", "bf16"] = "fp32"
    ranks_per_host: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        require(least=1, ranks_per_host=self.ranks_per_host)
        require(above=0, timeout_s=self.timeout_s)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """every: steps between checkpoints (the end always gets one). keep: how many of the last, plus
    the best.

    background: written while training continues, for which tables, or frames of those on an SSD,
    are in memory twice meanwhile.
    """

    every: int | None = None
    keep: int = 3
    background: bool = False

    def __post_init__(self) -> None:
        require(least=1, every=self.every, keep=self.keep)


@dataclass(frozen=True, kw_only=True)
class Log:
    """every: steps between lines of the run log. tensorboard: also write event files, when it is
    installed.
    """

    every: int = 20
    tensorboard: bool = True

    def __post_init__(self) -> None:
        require(least=1, every=self.every)


class ExtensionSettings:
    """What the settings of an extension say of a run. Its `Config` is a frozen dataclass of this
    class, with a default for every field.
    """

    @property
    def calibrator(self) -> KINDS:
        """What the scores of each checkpoint are to pass through last."""
        return "none"

    def placed(self, placement: Placement) -> Placement:
        """Returns where tables have their rows, with what the extension says of it."""
        return placement

    def on_this_machine(self, run: Run) -> Run:
        """Returns the run without what is not here, so that its checkpoints are scored anywhere."""
        return run


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training job.

    run_dir: where everything about it is written. model, dense (the optimizer of all but tables,
    with its lr) and loss: members of their families, picked by name. tables: how they are
    addressed, stored and trained.
    layers: biases, norms and activations of any model.
    threads: CPU threads that share each operation of a step, 0 for a choice by its size, which is
    then written down, because sums depend on it; loading and judging have threads of their own.
    device: "cpu", "cuda", "cuda:1", ... precision: of the matrix products, by name or by a recipe
    file, see docs/precision.md. compile: through torch.compile, which takes some tens of seconds at
    the beginning. init_from: the directory of a run to begin with what it learnt, see `warm_start`.
    extensions: name -> settings, of the extensions of which something is set. In a file they are
    tables beside the others.
    """

    run_dir: str
    data: Data
    model: Annotated[ModelConfig, Family("sparrow.models")] = dataclasses.field(
        default_factory=dcnv2.Config
    )
    layers: Layers = dataclasses.field(default_factory=Layers)
    tables: TableChoices = dataclasses.field(default_factory=TableChoices)
    dense: Annotated[OptimizerConfig, Family("sparrow.optimizers")] = dataclasses.field(
        default_factory=adam.Config
    )
    loss: Annotated[LossConfig, Family("sparrow.losses")] = dataclasses.field(
        default_factory=bce.Config
    )
    schedule: Schedule = Schedule()
    loop: Loop = Loop()
    checkpoint: Checkpoints = Checkpoints()
    sharding: Sharding = Sharding()
    log: Log = Log()
    seed: int = 0
    device: str = "cpu"
    threads: int = 0
    precision: Precision = dataclasses.field(default_factory=Precision)
    compile: bool = False
    init_from: str | None = None
    extensions: Annotated[Mapping[str, ExtensionSettings], OfExtensions()] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        if not self.run_dir:
            raise UserError("run_dir: empty; name a directory, such as runs/first")
        require(least=0, most=4 * (os.cpu_count() or 1), threads=self.threads)
        require(least=0, most=2**63 - 1, seed=self.seed)
        try:
            device = torch.device(self.device)
            assert device.type in ("cpu", "cuda")
        except (RuntimeError, AssertionError):
            raise UserError(
                f"device: {self.device!r} is not one to train on; use cpu or cuda"
            ) from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError(
                f"device: {self.device!r}, but torch sees no CUDA device; use --device cpu"
            )

    @property
    def placement(self) -> Placement:
        """Where tables have their rows. No row leaves its frame within the steps at which a run may
        look.
        """
        window = (1 + MOST_AHEAD) * self.loop.accumulate
        placement = Placement(device=self.device, window=window)
        for settings in self.extensions.values():
            placement = settings.placed(placement)
        return placement

    @property
    def calibrator(self) -> KINDS:
        """What the scores of each checkpoint are to pass through last, as an extension says."""
        kinds = [settings.calibrator for settings in self.extensions.values()]
        return next((kind for kind in kinds if kind != "none"), "none")

    def settings_of(self, kind: type[Settings]) -> Settings:
        """Returns the settings of an extension, defaults where none is set. kind: its `Config`."""
        own = (settings for settings in self.extensions.values() if isinstance(settings, kind))
        return next(own, None) or kind()

    def with_settings(self, settings: ExtensionSettings) -> Run:
        """Returns the run with other settings of an extension."""
        name = extension_of(settings)
        extensions = {k: v for k, v in self.extensions.items() if k != name}
        if settings != type(settings)():
            extensions[name] = settings
        return dataclasses.replace(self, extensions=extensions)

    def resolved(self, rows: int, in_time_order: bool) -> Run:
        """Returns the same run with every automatic choice made but `threads`.

        Args:
            rows: how many training rows the log has.
            in_time_order: whether the log was split by time.
        """
        loop = dataclasses.replace(self.loop, update_mode=self.loop.table_mode)
        shuffle = not in_time_order if self.data.shuffle is None else self.data.shuffle
        data = dataclasses.replace(
            self.data, batch_size=self.data.batch_size or batch_size_for(rows), shuffle=shuffle
        )
        return dataclasses.replace(self, loop=loop, data=data)

    def save(self, path: Path) -> None:
        """Write the run as TOML. Files beside it are named as they are seen from there."""
        data = _with_files(to_dict(self), lambda file: os.path.relpath(file, path.parent))
        write_text(path, write_toml(data, header="A Sparrow run, every choice made."))

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: dict[str, Any] | None = None,
        held: dict[str, Any] | None = None,
    ) -> Run:
        """Returns the run of a TOML file.

        With another member for a family (`model.name`), settings begin from that member's defaults,
        because the file's were for the old member.

        Args:
            path: the file.
            overrides: other values for settings, by dotted name.
            held: what the file holds, where another rank has read it.

        Raises:
            UserError: when the file cannot be read or a setting is wrong. It names file and key.
        """
        if Path(path).is_dir():
            raise UserError(f"{path}: a folder, not a run file; a run's own is RUN_DIR/run.toml")
        try:
            data = read_toml(path) if held is None else held
            data = with_recipe(data, Path(path).parent)
            return cls._from(
                _with_files(data, lambda file: str(Path(path).parent / file)), overrides or {}
            )
        except UserError as error:
            message = str(error)
            place = "" if message.startswith(str(path)) else f"{path}: "
            raise UserError(f"{place}{message}") from None

    @classmethod
    def of(cls, prepared: str | Path, overrides: dict[str, Any] | None = None) -> Run:
        """Returns a run of defaults on a prepared log, in runs/NAME.

        Args:
            prepared: the prepared log.
            overrides: other values for settings, by dotted name.

        Raises:
            UserError: when a setting is wrong.
        """
        path = Path(prepared)
        return cls._from(
            {"run_dir": f"runs/{path.resolve().name}", "data": {"path": str(path)}}, overrides or {}
        )

    @classmethod
    def _from(cls, data: dict[str, Any], overrides: dict[str, Any]) -> Run:
        data, renamed = take_earlier_names(data)
        for name, value in renamed.items():
            _override(data, name, value)
        tables = data.get("tables")
        changes_sizes = ("tables.addressing", "tables.overrides")
        if _is_table(tables) and any(name.startswith(changes_sizes) for name in overrides):
            data = {**data, "tables": {k: v for k, v in tables.items() if k != "sizes"}}
        values = named(cls, overrides)
        for name in sorted(values, key=lambda name: not name.endswith(".name")):
            _override(data, name, values[name])
        return from_dict(cls, with_recipe(data, Path()))


def _with_files(data: dict[str, Any], named: Callable[[str], str]) -> dict[str, Any]:
    """Returns what a run file holds with other names for the files that settled addressings of
    tables read.
    """
    tables = data.get("tables")
    if not _is_table(tables) or not _is_table(tables.get("sizes")):
        return data
    moved = dict(tables["sizes"])
    for name, settled in moved.items():
        if _is_table(settled) and isinstance(settled.get("file"), str):
            moved[name] = {**settled, "file": named(settled["file"])}
    return {**data, "tables": {**tables, "sizes": moved}}


def _is_table(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether it is a table of TOML; what else a person wrote there is told where it is
    converted.
    """
    return isinstance(value, dict)


def batch_size_for(rows: int) -> int:
    """Returns a power of two between 64 and 4096 that leaves about 400 steps an epoch, if it
    can.
    """
    return min(max(1 << (rows // 400).bit_length(), 64), 4096)


def _override(data: dict[str, Any], name: str, value: Any) -> None:
    *parents, leaf = name.split(".")
    for parent in parents:
        if isinstance(data.get(parent), str):  # a bare word
            data[parent] = {"name": data[parent]}
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise UserError(
                f"--{name}: {parent} is a value, not a table; see `sparrow train --help` for the"
                " names"
            )
    if leaf == "name" and data.get(leaf) != value:
        data.clear()
    # of the recipe before, and so are weights
    if name == "precision.name" and data.pop("sites", None):
        data.pop("weights", None)
    data[leaf] = value
