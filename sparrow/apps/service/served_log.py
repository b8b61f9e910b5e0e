"""The served log: a sample of what was scored, as Parquet that is read as any log."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.apps.service.batcher import Answer
from sparrow.apps.service.metrics import Metrics
from sparrow.apps.service.request import Request
from sparrow.core.errors import UserError
from sparrow.core.files import replace_file
from sparrow.features.ids import is_text
from sparrow.serving.scorer import SCORE

VERSION, REQUEST, TIME = ":version:", ":request:", ":time:"  # columns beside the log's own
ROWS, EVERY_S = 50_000, 60.0  # of a file
WAITING = 8_000_000  # bytes of requests that wait to be written, as they came
_ROW = 100  # bytes of a candidate of whom only an id came
_log = logging.getLogger(__name__)


class ServedLog:
    """Writes rows in a thread of its own. Where it cannot, rows are left out and counted, and
    serving goes on.

    Args:
        folder: gets the files. They appear whole, each with a name of its own.
        sample: the share of requests. Which ones is decided by their ids, so that all services
            choose alike.
        metrics: count rows.

    Raises:
        UserError: when the folder cannot be made.
    """

    def __init__(self, folder: Path, sample: float, metrics: Metrics) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be made ({error.strerror}); choose another --served-log"
            ) from None
        self._folder = folder
        self._below = sample * 2**32
        self._rows = metrics.served_log
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        # the first two in bytes, each changed by one thread only
        self._put = self._written_bytes = self._files = 0
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="served-log", daemon=True)
        self._thread.start()

    def put(self, id: str, request: Request, answer: Answer, size: int) -> None:
        """Take a request, if it is one of the sample. Only one thread may call it.

        Args:
            id: of the request.
            request, answer: what was scored, with all its raw columns, and how.
            size: bytes of its body.
        """
        if not request.count or zlib.crc32(id.encode()) >= self._below:
            return
        size += _ROW * request.count
        if self._put + size - self._written_bytes > WAITING:
            self._leave_out("full", request.count, "more is served than can be written")
        else:
            self._put += size
            self._queue.put((size, id, request, answer, time.time()))

    def close(self) -> None:
        """Write what waits, and end."""
        self._queue.put(None)
        self._thread.join()

    # -- in the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        tables: list[pa.Table] = []
        ends = 0.0
        going = True
        while going:
            rows, going = self._next(max(ends - time.monotonic(), 0) if tables else None)
            is_new_schema = rows is not None and tables and rows.schema != tables[0].schema
            if tables and (is_new_schema or not going or time.monotonic() >= ends):
                self._write(pa.concat_tables(tables))
                tables = []
            if rows is not None:
                ends = ends if tables else time.monotonic() + EVERY_S
                tables.append(rows)
                if sum(part.num_rows for part in tables) >= ROWS:
                    ends = 0.0

    def _next(self, wait_s: float | None) -> tuple[pa.Table | None, bool]:
        """Returns the rows of a request, if one has come and fits, and whether more may come."""
        try:
            item = self._queue.get(timeout=wait_s)
        except queue.Empty:
            return None, True
        if item is None:
            return None, False
        size, *scored = item
        try:
            return table(*scored), True
        except Exception as error:  # Arrow has many
            self._leave_out(
                "unfit", scored[1].count, f"a request does not fit the log's columns ({error})"
            )
            return None, True
        finally:
            self._written_bytes += size

    def _write(self, rows: pa.Table) -> None:
        self._files += 1
        moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        try:
            with replace_file(
                self._folder / f"served-{moment}-{os.getpid()}-{self._files:06d}.parquet"
            ) as partial:
                pq.write_table(rows, partial)
        except Exception as error:
            self._leave_out("failed", rows.num_rows, str(error))
        else:
            self._rows.labels("written").inc(rows.num_rows)
            self._warned.discard("failed")

    def _leave_out(self, outcome: str, rows: int, why: str) -> None:
        """Count rows that are left out, and say so once."""
        self._rows.labels(outcome).inc(rows)
        if outcome not in self._warned:
            self._warned.add(outcome)
            _log.warning(
                "served log: %s; rows are left out and counted in sparrow_served_log_rows_total",
                why,
            )


def table(id: str, request: Request, answer: Answer, moment: float) -> pa.Table:
    """Returns a request's rows: the log's own columns, its scores, version, id and time.

    Args:
        id: of the request.
        request, answer: it, and its scores.
        moment: seconds since 1970.

    Raises:
        ValueError: for a value that its column cannot hold as it is.
    """
    request = (
        request if answer.version.items is None else answer.version.items.fill_columns(request)
    )
    scorer = answer.version.scorer
    columns = {}
    first = pa.array([0] * request.count)
    read = scorer.schema.columns.items()
    separators = {}
    for name, column in read:
        for source in (column.source, column.weights):
            separators[source or name] = column.separator
    for name, kind in scorer.log_types.items():
        is_user = name in request.user
        values = _column(
            [request.user[name]] if is_user else request.candidates[name],
            kind,
            separators.get(name),
        )
        columns[name] = values.take(first) if is_user else values
    for label, scores_N in zip(scorer.labels, answer.scores_NT.T, strict=True):
        columns[SCORE + label] = pa.array(scores_N.copy())
    marks = pa.table(
        {VERSION: [answer.version.name], REQUEST: [id], TIME: [datetime.fromtimestamp(moment, UTC)]}
    )
    return pa.table(columns | {name: marks[name].take(first) for name in marks.column_names})


def _column(values: list[Any], kind: pa.DataType, separator: str | None) -> pa.Array:
    """Returns values in a type that holds each as it was: no number is rounded to an integer."""
    values = [None if value != value else value for value in values]  # NaN
    if is_text(kind):
        values = [_join(value, separator) if isinstance(value, list) else value for value in values]
    inner = _inner(kind)
    if pa.types.is_floating(inner):
        # as the model has it
        values = _map_values(values, lambda value: float(value) if type(value) is int else value)
    elif pa.types.is_decimal(inner):
        values = _map_values(values, lambda value: Decimal(value) if type(value) is int else value)
    elif is_text(inner):  # Arrow takes no integers beside text in a list, nor for bytes
        values = _map_values(values, lambda value: str(value) if type(value) is int else value)
    try:
        return _cast(values, kind)
    except (pa.ArrowException, OverflowError):  # text and numbers are mixed, perhaps
        return pa.concat_arrays([_cast([value], kind) for value in values])


def _cast(values: list[Any], kind: pa.DataType) -> pa.Array:
    array = _array(values)
    cast = array.cast(kind)
    was = _inner(array.type)
    now = _inner(kind)
    # true is not the id 1
    is_other_id = pa.types.is_boolean(was) != pa.types.is_boolean(now) and not is_text(now)
    if pa.types.is_integer(now) and is_text(was):
        is_other_id = not cast.cast(array.type).equals(array)  # nor is 07 the id 7
    if is_other_id and not (pa.types.is_null(was) or pa.types.is_floating(now)):
        raise pa.ArrowInvalid(f"{was} is another id as {now}")
    return cast


def _array(values: list[Any]) -> pa.Array:
    """Returns values as an array. Integers that are no int64 are uint64, or else text, as where a
    log is read.

    Raises:
        OverflowError: for such an integer beside what is none.
    """
    try:
        return pa.array(values)
    except OverflowError:
        is_list = any(isinstance(value, list) for value in values)
        elements = [
            inner for value in values for inner in (value if isinstance(value, list) else [value])
        ]
        integers = [value for value in elements if value is not None]
        if any(type(value) is not int for value in integers):
            raise
        if min(integers) >= 0 and max(integers) < 1 << 64:
            return pa.array(values, pa.list_(pa.uint64()) if is_list else pa.uint64())
        return pa.array(_map_values(values, str), pa.list_(pa.string()) if is_list else pa.string())


def _map_values(values: list[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Returns values with each of them, and each element of a list, changed, but for those that are
    missing.
    """
    return [
        (
            None
            if value is None
            else _map_values(value, change)
            if isinstance(value, list)
            else change(value)
        )
        for value in values
    ]


def _inner(kind: pa.DataType) -> pa.DataType:
    """Returns the type of the elements of a list, or of a value."""
    return kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind


def _join(values: list[Any], separator: str | None) -> str:
    """Returns a list as text that is cut into its values."""
    if separator == "json":
        return json.dumps(values)
    scalars = (int(v) if type(v) is float and v.is_integer() else v for v in values)
    texts = [str(value) for value in scalars if type(value) in (int, str, float)]
    if len(texts) < len(values) or any(
        text.split(separator) != [text] or text.strip() != text for text in texts
    ):
        raise ValueError(f"{values!r} as text cannot be cut at {separator or 'white space'!r}")
    return (separator or " ").join(texts)
