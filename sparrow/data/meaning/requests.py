"""What a log's lists of candidates and its side tables tell of its columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError, suggest
from sparrow.data.logs.read import Log
from sparrow.data.shaping.steps import CLICKED, REQUEST
from sparrow.features.schema import Column
from sparrow.features.types import is_list


def label_of(log: Log) -> str | None:
    """Returns the label that candidates make, or None where a log has none.

    Raises:
        UserError: when the log lacks the column of the clicked ones.
    """
    source = log.source
    if not source.candidates:
        return None
    if CLICKED not in log.types:
        known = suggest(str(source.clicked), [n for n in log.held if n != source.candidates])
        raise UserError(f"source.clicked: no column {source.clicked!r} in {log.name}{known}")
    return CLICKED


def ids_of(
    log: Log, columns: Mapping[str, Column], cells: Mapping[str, pa.Array]
) -> dict[str, Column]:
    """Returns the columns with what is known of candidates and keys: they are ids; and what numbers
    requests is not.

    Args:
        log: the log.
        columns: as they seem one by one.
        cells: the columns [N] of a sample.
    """
    source = log.source
    known = dict(columns)
    for name, column in columns.items():
        if (
            column.kind in ("numeric", "categorical")
            and source.candidates
            and _counts(cells[name], cells[REQUEST])
        ):
            known[name] = Column(kind="ignore", note="numbers the requests")
    for key in (source.candidates, *(join.on for join in source.joins or ())):
        if key and known[key].kind == "numeric":
            known[key] = Column(
                kind="categorical", table=key, note="ids, as candidates and keys are"
            )
    return known


def with_notes(
    log: Log, columns: Mapping[str, Column], cells: Mapping[str, pa.Array]
) -> dict[str, Column]:
    """Returns the columns with notes about how the rows were made. The arguments are those of
    `ids_of`.
    """
    source = log.source
    noted_columns = dict(columns)
    if not source.candidates:
        return noted_columns
    if columns[CLICKED].kind == "label":
        parallel = f"; {', '.join(source.parallel)} too" if source.parallel else ""
        how = (
            f"among {source.clicked}"
            if source.clicked in log.held
            else f"it ends in {source.clicked}1"
        )
        note = (
            f"each of {source.candidates} is a row, clicked if {how}{parallel}; see [source] of"
            " schema.toml"
        )
        noted_columns[CLICKED] = replace(columns[CLICKED], note=note)
    for name, column in columns.items():
        if is_list(cells[name].type) and _as_long(cells[name], cells[REQUEST]):
            flags = f"--candidates {source.candidates} --clicked={source.clicked}"
            flags += f" --parallel {' '.join((*(source.parallel or ()), name))}"
            along = (
                f"as long as the candidates in each row; if it goes along with them, add {flags}"
            )
            note = f"{column.note}; {along}" if column.note else along
            noted_columns[name] = replace(column, note=note)
    return noted_columns


def _counts(values: pa.Array, requests: pa.Array) -> bool:
    """Returns whether integers [N] count on with the rows of which candidates were made."""
    if any(not pa.types.is_integer(x.type) or x.null_count for x in (values, requests)):
        return False
    steps = np.diff(np.array(values).astype(np.int64))
    request_steps = np.diff(np.array(requests).astype(np.int64))
    within = request_steps < 1 << 32  # a file
    return bool(request_steps.any() and (steps == request_steps)[within].all())


def _as_long(lists: pa.Array, requests: pa.Array) -> bool:
    """Returns whether lists [N] have as many entries in each row as its request has candidates."""
    _, request_N, counts = np.unique(np.array(requests), return_inverse=True, return_counts=True)
    complete_N = request_N < request_N[-1]  # the sample may end within a request
    lengths_N = np.array(pc.list_value_length(lists).fill_null(0))
    return bool(complete_N.any() and (lengths_N == counts[request_N])[complete_N].all())
