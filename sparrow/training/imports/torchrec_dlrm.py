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
from sparrow.training.loop import Trainer
from sparrow.training.preflight import threads_given_back
from sparrow.training.rundir import RunDir

TABLES = "sparse_arch.embedding_bag_collection.embedding_bags."
BOTTOM, TOP, HEAD = "dense_arch.model._mlp.{}._linear", "over_arch.model.0._mlp.{}._linear", "over_arch.model.1"
SAVE = "safetensors.torch.save_file({n: t.contiguous() for n, t in model.state_dict().items()}, 'dlrm.safetensors')"
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
    """Write the directory of a run that has learnt what a DLRM of torchrec has. Returns its settings.

    Row i of a table of theirs is the vector of the integer i. A missing or unknown id gets a vector of zeros, as an
    empty bag has there. Pairs are in another order in torchrec, so columns of the top MLP's first weight move.

    Args:
        state: its state dict, as a safetensors file.
        prepared: the prepared log. Its tables have encodings of kind "range".
        run_dir: the directory, which must not exist.
        features: its features, in the order of its EmbeddingBagCollection, which the file does not keep. Each is
            TABLE=COLUMN, or COLUMN where the table is called so or "t_COLUMN".
        dense: its numeric columns, in its order; by default those of the log. Others of the log get the weight 0.
        pooling: of its tables.

    Raises:
        UserError: when file, log and features do not fit together, or `run_dir` exists.
    """
    run_dir, dataset, theirs = Path(run_dir), data.open(prepared), _opened(Path(state))
    if run_dir.exists():
        raise UserError(f"{run_dir}: exists; choose another name")
    schema = dataset.schema
    tables, numbers = _columns(theirs, schema, features), tuple(dense) or schema.numbers
    _check_columns(theirs, schema, tables, pooling)
    _check_sizes(theirs, schema, tables, numbers)
    *bottom, dim = [len(weight) for weight, _ in theirs.bottom]
    sizes = {"model.dim": dim, "model.bottom": bottom, "model.top": [len(weight) for weight, _ in theirs.top[:-1]]}
    plain = {"model.name": "dlrm", "tables.addressing.name": "direct", "tables.format.name": "fp32"}
    with threads_given_back():
        trainer = Trainer(Run.of(prepared, {"run_dir": str(run_dir), **plain, **sizes}))
        _give(trainer.model, theirs, schema, tables, numbers)
        with workplace(run_dir) as (work, _):
            _write(trainer, dataset.transforms, work / "new")
            try:
                (work / "new").rename(run_dir)
            except OSError as error:
                raise cannot_write(run_dir, error) from error
    return trainer.run


def _write(trainer: Trainer, transforms: Transforms, made: Path) -> None:
    """Write a run of no steps. It knows every id of its tables, also those that the log's training part lacks."""
    made.mkdir()
    trainer.dir = RunDir(made)
    trainer.dir.begin(trainer.dataset, trainer.run.precision)
    known = {
        name: Range(of.low, np.full_like(of.counts_I, Range.KNOWN)) if isinstance(of, Range) else of
        for name, of in transforms.vocabularies.items()
    }
    replace(transforms, vocabularies=known).save(made)
    trainer.run.save(made / "run.toml")
    trainer.save()
    trainer.saver.finish()


# -- their file ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Theirs:
    """What a file holds. tables: name -> name in the file. bottom, top: their layers, the last one of `top` too."""

    path: Path
    tables: Mapping[str, str]
    bottom: list[Layer]
    top: list[Layer]
    file: Any

    def shape(self, table: str) -> tuple[int, int]:
        """Returns rows and dim of a table."""
        rows, dim = self.file.get_slice(self.tables[table]).get_shape()
        return rows, dim


def _opened(path: Path) -> _Theirs:
    try:
        file = safe_open(path, "pt")
        left = set(file.keys())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the state dict of a torchrec DLRM") from None
    except (OSError, SafetensorError):
        why = "no safetensors file, and to read others, such as .pt, is to run code"
        raise UserError(f"{path}: {why}; where the model is, run {SAVE}") from None
    other = f"{path}: not the state dict of torchrec's models.dlrm.DLRM"
    for name in sorted(left):
        if (kind := file.get_slice(name).get_dtype()) not in ("F64", "F32", "F16", "BF16"):
            raise UserError(f"{other}: {name} is {kind}; save the model as it was trained, not a quantised one")
    prefix = next((name.partition(TABLES)[0] for name in sorted(left) if TABLES in name), None)  # of a wrapper
    if prefix is None:
        raise UserError(f"{other}: nothing in it is called {TABLES}*; other models cannot be imported")
    table_names = re.compile(re.escape(prefix + TABLES) + r"(.+)\.weight")
    tables = {match[1]: match[0] for name in sorted(left) if (match := table_names.fullmatch(name))}
    left -= set(tables.values())

    def layer(name: str) -> Layer:
        parts = f"{prefix}{name}.weight", f"{prefix}{name}.bias"
        for part in parts:
            if part not in left:
                raise UserError(f"{other}: {part} is not in it; save the whole state dict")
            left.remove(part)
        return file.get_tensor(parts[0]), file.get_tensor(parts[1])

    def layers(names: str) -> list[Layer]:
        pattern = re.compile(re.escape(prefix + names).replace(r"\{\}", r"\d+") + r"\.weight")
        count = sum(bool(pattern.fullmatch(name)) for name in left)
        return [layer(names.format(number)) for number in range(max(count, 1))]

    found = _Theirs(path=path, tables=tables, bottom=layers(BOTTOM), top=[*layers(TOP), layer(HEAD)], file=file)
    if left:
        raise UserError(f"{other}: it has {listed(sorted(left))}; DLRM_DCN and DLRM_Projection cannot be imported")
    return found


# -- their features and our columns ------------------------------------------------------------------------------------


def _columns(theirs: _Theirs, schema: Schema, features: Sequence[str]) -> dict[str, str]:
    """Returns our column -> their table, in the order of their features."""
    found: dict[str, str] = {}
    for feature in features:
        table, _, column = feature.rpartition("=")
        if not table:
            table = next((name for name in (column, f"t_{column}") if name in theirs.tables), column)
        if table not in theirs.tables:
            raise UserError(f"features: {theirs.path} has no table {table!r}{suggest(table, theirs.tables)}")
        if column not in schema.sparse:
            raise UserError(f"features: the log has no id column {column!r}{suggest(column, schema.sparse)}")
        if column in found:
            raise UserError(f"features: column {column!r} is named twice; name each once")
        found[column] = table
    remedy = "name all features in the order of the EmbeddingBagCollection (DLRM.sparse_arch.sparse_feature_names)"
    for name in theirs.tables:
        if name not in found.values():
            raise UserError(f"features: none reads table {name!r} of {theirs.path}; {remedy}")
    for name in schema.sparse:
        if name not in found:
            raise UserError(f"features: the model has none for column {name!r}; prepare the log with it as 'ignore'")
    return found


def _check_columns(theirs: _Theirs, schema: Schema, tables: Mapping[str, str], pooling: str) -> None:
    """Check that ids mean the same rows there, and that bags are pooled alike."""
    used: dict[str, str] = {}  # our table -> theirs
    for name, table in tables.items():
        column, (rows, _) = schema.columns[name], theirs.shape(table)
        ours, remedy = str(column.table), "prepare the log with another schema"
        if used.setdefault(ours, table) != table:
            what = f"shares table {ours!r} with a column of table {used[ours]!r} there"
            raise UserError(
                f"columns.{name}: {what}, and its own is {table!r}; give it a table of its own in the schema"
            )
        encoding = schema.encodings[ours]
        if (encoding.kind, encoding.low, encoding.high) != ("range", 0, rows - 1):
            has = f"{encoding.kind} {encoding.low}..{encoding.high}" if encoding.kind == "range" else encoding.kind
            what = f"ids are numbered by {has}, and rows of {table!r} are those of the integers 0..{rows - 1}"
            says = f'prepare the log with kind = "range", low = 0, high = {rows - 1} in its schema'
            raise UserError(f"encodings.{ours}: {what}; {says}")
        if column.kind == "list" and (column.pooling or "mean") != pooling:
            what = f"{column.pooling or 'mean'!r} in the log, and {pooling!r} in the model"
            raise UserError(f"columns.{name}.pooling: {what}; {remedy}, or say --pooling")
        if column.weights:
            raise UserError(f"columns.{name}.weights: the model's ids have none; {remedy}")
    if schema.split.negatives < 1:
        raise UserError("split.negatives: the model's scores would be corrected; prepare the log with all rows")


def _check_sizes(theirs: _Theirs, schema: Schema, tables: Mapping[str, str], numbers: Sequence[str]) -> None:
    """Check that every layer fits the columns and the layer before it."""
    for name in numbers:
        if name not in schema.numbers or numbers.count(name) > 1:
            raise UserError(f"dense: {name!r} is named twice or no numeric column{suggest(name, schema.numbers)}")
    inputs = theirs.bottom[0][0].shape[1]
    if len(numbers) != inputs:
        told = f"the model reads {inputs} numbers, and there are {len(numbers)}: {', '.join(numbers) or 'none'}"
        raise UserError(f"dense: {told}; name those that it reads, in its order")
    dim = len(theirs.bottom[-1][0])
    for table in tables.values():
        if theirs.shape(table)[1] != dim:
            raise UserError(
                f"{theirs.path}: table {table!r} has dim {theirs.shape(table)[1]}, the bottom MLP ends in {dim}"
            )
    pairs, labels = (len(tables) + 1) * len(tables) // 2, max(1, len(schema.labels))
    for layers, size in ((theirs.bottom, inputs), (theirs.top, dim + pairs)):
        for weight, bias in layers:
            if weight.shape[1] != size or len(bias) != len(weight):
                told = f"a layer of shape {tuple(weight.shape)} where {size} inputs come"
                raise UserError(f"{theirs.path}: {told}; name all features of the model, and no others")
            size = len(weight)
    if size != labels:
        raise UserError(f"{theirs.path}: {size} logits, and the log has {labels} labels; prepare it with as many")


# -- their weights in our model ----------------------------------------------------------------------------------------


@torch.no_grad()
def _give(model: Any, theirs: _Theirs, schema: Schema, tables: Mapping[str, str], numbers: Sequence[str]) -> None:
    """Put their weights into our DLRM."""
    model.offset_T.zero_()
    ours, (rows,) = model.model, tables_of(model)
    for layer, (weight, bias) in zip(
        [*ours.bottom.layers, *ours.top.layers, ours.head], [*theirs.bottom, *theirs.top], strict=True
    ):
        if layer is ours.bottom.layers[0]:
            layer.weight.zero_()
            layer.weight[:, [schema.numbers.index(name) for name in numbers]] = weight.float()
        elif layer is (*ours.top.layers, ours.head)[0]:
            places = [0, *(1 + list(tables).index(name) for name in schema.sparse)]
            vector, pairs = weight.float().tensor_split([len(theirs.bottom[-1][0])], 1)
            layer.weight.copy_(torch.cat([vector, pairs[:, pair_order(places)]], 1))
        else:
            layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    for name, table in tables.items():
        weight_RD = rows.record(str(schema.columns[name].table)).fields["weight"]
        weight_RD[:FIRST] = 0
        weight_RD[FIRST:] = theirs.file.get_tensor(theirs.tables[table])
    rows.changed()


def pair_order(places: Sequence[int]) -> list[int]:
    """Returns for each pair of our vectors, in the order of `DotInteraction`, which of torchrec's pairs it is.

    torchrec takes the upper triangle row by row: (0,1), (0,2), ...

    Args:
        places: of each of our vectors among torchrec's.
    """
    theirs = {pair: number for number, pair in enumerate(itertools.combinations(range(len(places)), 2))}
    pairs = [(places[i], places[j]) for i in range(len(places)) for j in range(i)]
    return [theirs[min(pair), max(pair)] for pair in pairs]
