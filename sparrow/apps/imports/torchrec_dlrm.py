"""torchrec's `models.dlrm.DLRM` -> a run of ours, which gives the same scores and learns on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparrow import data
from sparrow.core.errors import UserError, listed, suggest
from sparrow.core.files import cannot_write
from sparrow.core.workplace import workplace
from sparrow.features.encodings import FIRST
from sparrow.features.encodings.range import Range
from sparrow.features.schema import Schema
from sparrow.features.transforms import Transforms
from sparrow.trained.build import tables_of
from sparrow.trained.run import Run
from sparrow.training.checkpointer import Checkpointer
from sparrow.training.loop import Trainer
from sparrow.training.preflight import threads_given_back
from sparrow.training.rundir import RunDir

TABLES = "sparse_arch.embedding_bag_collection.embedding_bags."
BOTTOM = "dense_arch.model._mlp.{}._linear"
TOP = "over_arch.model.0._mlp.{}._linear"
HEAD = "over_arch.model.1"
SAVE = (
    "safetensors.torch.save_file({n: t.contiguous() for n, t in model.state_dict().items()},"
    " 'dlrm.safetensors')"
)
Layer = tuple[Tensor, Tensor]  # weight [out, in] and bias [out]


def import_dlrm(
    state: str | Path,
    prepared: str | Path,
    run_dir: str | Path,
    *,
    features: Sequence[str],
    dense: Sequence[str] = (),
    pooling: Literal["sum", "mean"] = "sum",
) -> Run:
    """Write the directory of a run that has learnt what a DLRM of torchrec has. Returns its
    settings.

    Row i of a table of theirs is the vector of the integer i. A missing or unknown id gets a vector
    of zeros, as an empty bag has there. Pairs are in another order in torchrec, so columns of the
    top MLP's first weight move.

    Args:
        state: its state dict, as a safetensors file.
        prepared: the prepared log. Its tables have encodings of kind "range".
        run_dir: the directory, which must not exist.
        features: its features, in the order of its EmbeddingBagCollection, which the file does not
            keep. Each is TABLE=COLUMN, or COLUMN where the table is called so or "t_COLUMN".
        dense: its numeric columns, in its order; by default those of the log. Others of the log get
            the weight 0.
        pooling: of its tables.

    Raises:
        UserError: when file, log and features do not fit together, or `run_dir` exists.
    """
    run_dir = Path(run_dir)
    dataset = data.open(prepared)
    source = _open(Path(state))
    if run_dir.exists():
        raise UserError(f"{run_dir}: exists; choose another name")
    schema = dataset.schema
    tables = _columns(source, schema, features)
    numbers = tuple(dense) or schema.numbers
    _check_columns(source, schema, tables, pooling)
    _check_sizes(source, schema, tables, numbers)
    *bottom, dim = [len(weight) for weight, _ in source.bottom]
    sizes = {
        "model.dim": dim,
        "model.bottom": bottom,
        "model.top": [len(weight) for weight, _ in source.top[:-1]],
    }
    plain = {"model.name": "dlrm", "tables.addressing.name": "direct", "tables.format.name": "fp32"}
    with threads_given_back():
        trainer = Trainer(Run.of(prepared, {"run_dir": str(run_dir), **plain, **sizes}))
        _copy_weights(trainer.job.model, source, schema, tables, numbers)
        with workplace(run_dir) as (work, _):
            _write(trainer, dataset.transforms, work / "new")
            try:
                (work / "new").rename(run_dir)
            except OSError as error:
                raise cannot_write(run_dir, error) from error
    return trainer.job.run


def _write(trainer: Trainer, transforms: Transforms, folder: Path) -> None:
    """Write a run of no steps. It knows every id of its tables, also those that the log's training
    part lacks.
    """
    folder.mkdir()
    job = replace(trainer.job, dir=RunDir(folder))
    job.dir.begin(job.dataset, job.run.precision)
    known = {
        name: (
            Range(encoding.low, np.full_like(encoding.counts_I, Range.KNOWN))
            if isinstance(encoding, Range)
            else encoding
        )
        for name, encoding in transforms.vocabularies.items()
    }
    replace(transforms, vocabularies=known).save(folder)
    job.run.save(folder / "run.toml")
    checkpointer = Checkpointer(job, trainer.callbacks)
    checkpointer.save(trainer.progress)
    checkpointer.saver.finish()


# -- their file ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What a file holds. tables: name -> name in the file. bottom, top: their layers, the last one
    of `top` too.
    """

    path: Path
    tables: Mapping[str, str]
    bottom: list[Layer]
    top: list[Layer]
    file: Any

    def shape(self, table: str) -> tuple[int, int]:
        """Returns rows and dim of a table."""
        rows, dim = self.file.get_slice(self.tables[table]).get_shape()
        return rows, dim


def _open(path: Path) -> _Source:
    try:
        file = safe_open(path, "pt")
        left = set(file.keys())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the state dict of a torchrec DLRM") from None
    except (OSError, SafetensorError):
        why = "no safetensors file, and to read others, such as .pt, is to run code"
        raise UserError(f"{path}: {why}; where the model is, run {SAVE}") from None
    refusal = f"{path}: not the state dict of torchrec's models.dlrm.DLRM"
    for name in sorted(left):
        if (kind := file.get_slice(name).get_dtype()) not in ("F64", "F32", "F16", "BF16"):
            raise UserError(
                f"{refusal}: {name} is {kind}; save the model as it was trained, not a"
                " quantised one"
            )
    # of a wrapper
    prefix = next((name.partition(TABLES)[0] for name in sorted(left) if TABLES in name), None)
    if prefix is None:
        raise UserError(
            f"{refusal}: nothing in it is called {TABLES}*; other models cannot be imported"
        )
    table_names = re.compile(re.escape(prefix + TABLES) + r"(.+)\.weight")
    tables = {match[1]: match[0] for name in sorted(left) if (match := table_names.fullmatch(name))}
    left -= set(tables.values())
    for name in tables.values():
        _require_shape(file, path, name, 2)

    def layer(name: str) -> Layer:
        parts = f"{prefix}{name}.weight", f"{prefix}{name}.bias"
        for part in parts:
            if part not in left:
                raise UserError(f"{refusal}: {part} is not in it; save the whole state dict")
            left.remove(part)
        return _read(file, path, parts[0], 2), _read(file, path, parts[1], 1)

    def layers(names: str) -> list[Layer]:
        pattern = re.compile(re.escape(prefix + names).replace(r"\{\}", r"\d+") + r"\.weight")
        count = sum(bool(pattern.fullmatch(name)) for name in left)
        return [layer(names.format(number)) for number in range(max(count, 1))]

    source = _Source(
        path=path, tables=tables, bottom=layers(BOTTOM), top=[*layers(TOP), layer(HEAD)], file=file
    )
    if left:
        names = listed([repr(name) for name in sorted(left)])
        raise UserError(
            f"{refusal}: it has {names}; DLRM_DCN and DLRM_Projection cannot be imported"
        )
    return source


def _read(file: Any, path: Path, name: str, dims: int) -> Tensor:
    """Returns a tensor of a layer in fp32. Shape and values are checked."""
    _require_shape(file, path, name, dims)
    weight: Tensor = file.get_tensor(name).float()
    _require_finite(weight, path, name)
    return weight


def _require_shape(file: Any, path: Path, name: str, dims: int) -> None:
    shape = file.get_slice(name).get_shape()
    if len(shape) != dims or 0 in shape:
        needed = "[outputs]" if dims == 1 else "[rows or outputs, columns]"
        raise UserError(
            f"{path}: {name} has the shape {shape}, and {needed} is needed; save the whole state"
            " dict"
        )


def _require_finite(weight: Tensor, path: Path, name: str) -> None:
    """Check values in fp32: one that is not finite there makes scores that are no numbers."""
    # which also passes NaN on, and needs no memory
    if torch.stack(weight.aminmax()).isfinite().all():
        return
    place = (~weight.isfinite()).nonzero()[0]
    value = weight[tuple(place)].item()
    remedy = "save the state dict of a step before the model diverged"
    raise UserError(
        f"{path}: {name}{place.tolist()} is {value} in fp32, and scores would be no numbers;"
        f" {remedy}"
    )


# -- their features and our columns ----------------------------------------------------------------


def _columns(source: _Source, schema: Schema, features: Sequence[str]) -> dict[str, str]:
    """Returns our column -> their table, in the order of their features."""
    tables: dict[str, str] = {}
    for feature in features:
        table, _, column = feature.rpartition("=")
        if not table:
            table = next(
                (name for name in (column, f"t_{column}") if name in source.tables), column
            )
        if table not in source.tables:
            raise UserError(
                f"features: {source.path} has no table {table!r}{suggest(table, source.tables)}"
            )
        if column not in schema.sparse:
            raise UserError(
                f"features: the log has no id column {column!r}{suggest(column, schema.sparse)}"
            )
        if column in tables:
            raise UserError(f"features: column {column!r} is named twice; name each once")
        tables[column] = table
    remedy = (
        "name all features in the order of the EmbeddingBagCollection"
        " (DLRM.sparse_arch.sparse_feature_names)"
    )
    for name in source.tables:
        if name not in tables.values():
            raise UserError(f"features: none reads table {name!r} of {source.path}; {remedy}")
    for name in schema.sparse:
        if name not in tables:
            raise UserError(
                f"features: the model has none for column {name!r}; prepare the log with it as"
                " 'ignore'"
            )
    return tables


def _check_columns(
    source: _Source, schema: Schema, tables: Mapping[str, str], pooling: str
) -> None:
    """Check that ids mean the same rows there, and that bags are pooled alike."""
    used: dict[str, str] = {}  # our table -> theirs
    for name, table in tables.items():
        column = schema.columns[name]
        rows, _ = source.shape(table)
        table_name = str(column.table)
        remedy = "prepare the log with another schema"
        if used.setdefault(table_name, table) != table:
            reason = (
                f"shares table {table_name!r} with a column of table {used[table_name]!r} there"
            )
            raise UserError(
                f"columns.{name}: {reason}, and its own is {table!r}; give it a table of its own in"
                " the schema"
            )
        encoding = schema.encodings[table_name]
        if (encoding.kind, encoding.low, encoding.high) != ("range", 0, rows - 1):
            has = (
                f"{encoding.kind} {encoding.low}..{encoding.high}"
                if encoding.kind == "range"
                else encoding.kind
            )
            reason = (
                f"ids are numbered by {has}, and rows of {table!r} are those of the integers"
                f" 0..{rows - 1}"
            )
            says = f'prepare the log with kind = "range", low = 0, high = {rows - 1} in its schema'
            raise UserError(f"encodings.{table_name}: {reason}; {says}")
        if column.kind == "list" and (column.pooling or "mean") != pooling:
            reason = f"{column.pooling or 'mean'!r} in the log, and {pooling!r} in the model"
            raise UserError(f"columns.{name}.pooling: {reason}; {remedy}, or say --pooling")
        if column.weights:
            raise UserError(f"columns.{name}.weights: the model's ids have none; {remedy}")
    if schema.split.negatives < 1:
        raise UserError(
            "split.negatives: the model's scores would be corrected; prepare the log with all rows"
        )


def _check_sizes(
    source: _Source, schema: Schema, tables: Mapping[str, str], numbers: Sequence[str]
) -> None:
    """Check that every layer fits the columns and the layer before it."""
    for name in numbers:
        if name not in schema.numbers or numbers.count(name) > 1:
            raise UserError(
                f"dense: {name!r} is named twice or no numeric"
                f" column{suggest(name, schema.numbers)}"
            )
    inputs = source.bottom[0][0].shape[1]
    if len(numbers) != inputs:
        reason = (
            f"the model reads {inputs} numbers, and there are {len(numbers)}:"
            f" {', '.join(numbers) or 'none'}"
        )
        raise UserError(f"dense: {reason}; name those that it reads, in its order")
    dim = len(source.bottom[-1][0])
    for table in tables.values():
        if source.shape(table)[1] != dim:
            raise UserError(
                f"{source.path}: table {table!r} has dim {source.shape(table)[1]}, the bottom MLP"
                f" ends in {dim}"
            )
    pairs = (len(tables) + 1) * len(tables) // 2
    labels = max(1, len(schema.labels))
    for layers, size in ((source.bottom, inputs), (source.top, dim + pairs)):
        for weight, bias in layers:
            if len(bias) != len(weight):
                reason = f"a layer of shape {tuple(weight.shape)} has a bias of {len(bias)}"
                raise UserError(f"{source.path}: {reason}; save the whole state dict")
            if weight.shape[1] != size:
                reason = f"a layer of shape {tuple(weight.shape)} where {size} inputs come"
                raise UserError(
                    f"{source.path}: {reason}; name all features of the model, and no others"
                )
            size = len(weight)
    if size != labels:
        raise UserError(
            f"{source.path}: {size} logits, and the log has {labels} labels; prepare it with as"
            " many"
        )


# -- their weights in our model --------------------------------------------------------------------


@torch.no_grad()
def _copy_weights(
    model: Any, source: _Source, schema: Schema, tables: Mapping[str, str], numbers: Sequence[str]
) -> None:
    """Put their weights into our DLRM."""
    model.offset_T.zero_()
    dlrm = model.model
    (rows,) = tables_of(model)
    for layer, (weight, bias) in zip(
        [*dlrm.bottom.layers, *dlrm.top.layers, dlrm.head],
        [*source.bottom, *source.top],
        strict=True,
    ):
        if layer is dlrm.bottom.layers[0]:
            layer.weight.zero_()
            layer.weight[:, [schema.numbers.index(name) for name in numbers]] = weight
        elif layer is (*dlrm.top.layers, dlrm.head)[0]:
            places = [0, *(1 + list(tables).index(name) for name in schema.sparse)]
            vector, pairs = weight.tensor_split([len(source.bottom[-1][0])], 1)
            layer.weight.copy_(torch.cat([vector, pairs[:, pair_order(places)]], 1))
        else:
            layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    for name, table in tables.items():
        weight_RD = rows.record(str(schema.columns[name].table)).fields["weight"]
        weight_RD[:FIRST] = 0
        weight_RD[FIRST:] = source.file.get_tensor(source.tables[table])
        _require_finite(weight_RD[FIRST:], source.path, source.tables[table])
    rows.changed()


def pair_order(places: Sequence[int]) -> list[int]:
    """Returns for each pair of our vectors, in the order of `DotInteraction`, which of torchrec's
    pairs it is.

    torchrec takes the upper triangle row by row: (0,1), (0,2), ...

    Args:
        places: of each of our vectors among torchrec's.
    """
    numbers = {
        pair: number for number, pair in enumerate(itertools.combinations(range(len(places)), 2))
    }
    pairs = [(places[i], places[j]) for i in range(len(places)) for j in range(i)]
    return [numbers[min(pair), max(pair)] for pair in pairs]
