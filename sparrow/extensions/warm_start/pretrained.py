"""Tables that begin with given vectors, such as content embeddings of items: a file's ids -> the
rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from sparrow.core import UserError
from sparrow.core.arrays import Bools, Int64s
from sparrow.core.errors import complaint, listed
from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.parts import sha256
from sparrow.distributed import World, check_same
from sparrow.embeddings import EmbeddingTables, TableSpec
from sparrow.features.encodings import FIRST
from sparrow.features.schema import Schema
from sparrow.features.types import is_list
from sparrow.features.vectors import as_vectors, flat_vectors, unpacked
from sparrow.trained.build import tables_of
from sparrow.trained.run import Run

_ROWS = 1 << 14  # of a file, that are read at a time


def give_vectors(
    model: Any, run: Run, dataset: Dataset, say: Callable[[str], None], world: World | None = None
) -> None:
    """Let rows of the tables that `run.tables.init` names begin with the vectors that its files
    have for their ids.

    Rows of ids that a file lacks keep their random values, and so do those of missing and of
    unknown ids. On several ranks each reads the files, and takes what it has of the rows.

    Args:
        model: is changed.
        run: says which table begins with which Parquet file: a column of ids, each once, and one of
            vectors.
        dataset: its prepared log, which says which row an id has.
        say: is told how many ids there were.
        world: the ranks; by default one.

    Raises:
        UserError: for a file that cannot be read or does not fit its table, for a table whose ids
            share rows, and where ranks have other files.
    """
    digests = {}
    for name, file in run.tables.init.items():
        place = f"tables.init.{name}"
        tables, spec = _find_table(model, name)
        if not (spec.addressing.traits.is_identity and dataset.schema.encodings[name].is_numbered):
            remedy = (
                "give its encoding kind = 'vocabulary' when you prepare, and the table no other"
                " addressing"
            )
            raise UserError(f"{place}: several ids of this table may share a row; {remedy}")
        begun_R = np.zeros(spec.addressing.ids or 0, np.bool_)
        unknown = 0
        for row_N, x_ND in _rows(Path(file), place, spec, dataset):
            known_N = row_N >= FIRST
            unknown += int((~known_N).sum())
            _check_once(f"{place}: {file}", row_N[known_N], begun_R)
            for record in tables.all_records():
                if record.component.name == name:
                    record.begin_with(
                        torch.from_numpy(row_N[known_N]), torch.from_numpy(x_ND[known_N])
                    )
        tables.changed()
        digests[f"what {place} holds"] = sha256(Path(file))[:12]
        begun = int(begun_R.sum())
        say(
            f"{place}: {begun:,} of {len(begun_R) - FIRST:,} ids begin with vectors of {file}, the"
            f" others with random ones; {unknown:,} of its vectors are of ids that the log does not"
            " know"
        )
    if world is not None and digests:
        check_same(world, "tables.init", digests)


def _find_table(model: nn.Module, name: str) -> tuple[EmbeddingTables, TableSpec]:
    """Returns the table of a name, and the tables that it stands among."""
    for tables in tables_of(model):
        for spec in tables.specs:
            if spec.name == name:
                return tables, spec
    raise AssertionError(f"no table {name!r}")  # the settings were checked


def _rows(
    file: Path, place: str, spec: TableSpec, dataset: Dataset
) -> Iterator[tuple[Int64s, Any]]:
    """Yields the table's rows [N] of a file's ids and their vectors [N, D], some at a time."""
    row0 = 0
    size = None
    try:
        with pq.ParquetFile(file) as parquet:
            key, vector = _columns(
                parquet.schema_arrow, f"{place}: {file}", spec.name, dataset.schema
            )
            for batch in parquet.iter_batches(_ROWS, columns=[key, vector]):
                if size is None:
                    sizes = np.diff(flat_vectors(batch[vector], vector, row0, None)[1])
                    size = int(sizes[sizes > 0][0]) if sizes.any() else None
                if size not in (None, spec.dim):
                    raise UserError(
                        f"vectors of {size} numbers, and the table's have {spec.dim}; change"
                        f" model.dim, or give vectors of {spec.dim} numbers (by their PCA, say)"
                    )
                vectors = as_vectors(batch[vector], vector, row0, spec.dim)
                is_given_N = vectors.is_valid()
                row_N = dataset.transforms.rows_of(spec.name, batch[key].filter(is_given_N))
                yield row_N.astype(np.int64), unpacked(vectors.filter(is_given_N)).copy()
                row0 += batch.num_rows
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{place}: {file} cannot be read ({complaint(error)}); give a Parquet file"
        ) from None
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(place) else f"{place}: {file}: {text}") from None


def _columns(schema: pa.Schema, place: str, table: str, log: Schema) -> tuple[str, str]:
    """Returns the columns of ids and of vectors."""

    vectors = [
        f.name for f in schema if is_list(f.type) and pa.types.is_floating(f.type.value_type)
    ]
    if len(vectors) != 1:
        has = (
            f"columns of vectors (lists of floats): {listed(vectors)}"
            if vectors
            else "no column of lists of floats"
        )
        raise UserError(f"{place}: {has}; give a file with one")
    keys = [f.name for f in schema if f.name not in vectors]
    named = [table, *(name for name, c in log.columns.items() if c.table == table)]
    named += [log.columns[name].source or name for name in named if name in log.columns]
    keys = [name for name in keys if name in named][:1] if len(keys) > 1 else keys
    if not keys:
        raise UserError(f"{place}: no column of ids is known; name it {table!r}, as the table")
    return keys[0], vectors[0]


def _check_once(place: str, row_N: Int64s, begun_R: Bools) -> None:
    """Mark rows as begun, each once."""
    _, first_U, counts_U = np.unique(row_N, return_index=True, return_counts=True)
    twice = begun_R[row_N].any() or (counts_U > 1).any()
    if twice:
        raise UserError(f"{place}: an id has two vectors; keep one of them")
    begun_R[row_N[first_U]] = True
