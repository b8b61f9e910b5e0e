"""The served log: a sample of what was scored, as Parquet that is read as any log."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.core.errors import UserError
from sparrow.core.files import whole
from sparrow.features.ids import is_text
from sparrow.serving.scorer import SCORE
from sparrow.serving.service.asked import Asked
from sparrow.serving.service.batcher import Answer
from sparrow.serving.service.metrics import Metrics

VERSION, REQUEST, TIME = ":version:", ":request:", ":time:"  # columns beside the log's own
ROWS, EVERY_S = 50_000, 60.0  # of a file
WAITING = 8_000_000  # bytes of requests that wait to be written, as they came
_ROW = 100  # bytes of a candidate of whom only an id came
_log = logging.getLogger(__name__)


class ServedLog:
    """Writes rows in a thread of its own. Where it cannot, rows are left out and counted, and serving goes on.

    Args:
        folder: gets the files. They appear whole, each with a name of its own.
        sample: the share of requests. Which ones is decided by their ids, so that all services choose alike.
        metrics: count rows.

    Raises:
        UserError: when the folder cannot be made.
    """

    def __init__(self, folder: Path, sample: float, metrics: Metrics) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another --served-log") from None
        self._folder, self._below, self._rows = folder, sample * 2**32, metrics.served_log
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._put = self._taken = self._files = 0  # the first two in bytes, each changed by one thread only
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="served-log", daemon=True)
        self._thread.start()

    def put(self, id: str, asked: Asked, answer: Answer, size: int) -> None:
        """Take a request, if it is one of the sample. Only one thread may call it.

        Args:
            id: of the request.
            asked, answer: what was scored, with all its raw columns, and how.
            size: bytes of its body.
        """
        if not asked.count or zlib.crc32(id.encode()) >= self._below:
            return
        size += _ROW * asked.count
        if self._put + size - self._taken > WAITING:
            self._leave_out("full", asked.count, "more is served than can be written")
        else:
            self._put += size
            self._queue.put((size, id, asked, answer, time.time()))

    def close(self) -> None:
        """Write what waits, and end."""
        self._queue.put(None)
        self._thread.join()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        kept: list[pa.Table] = []
        ends, going = 0.0, True
        while going:
            made, going = self._next(max(ends - time.monotonic(), 0) if kept else None)
            is_other = made is not None and kept and made.schema != kept[0].schema
            if kept and (is_other or not going or time.monotonic() >= ends):
                self._write(pa.concat_tables(kept))
                kept = []
            if made is not None:
                ends = ends if kept else time.monotonic() + EVERY_S
                kept.append(made)
                if sum(part.num_rows for part in kept) >= ROWS:
                    ends = 0.0

    def _next(self, wait_s: float | None) -> tuple[pa.Table | None, bool]:
        """Returns the rows of a request, if one has come and fits, and whether more may come."""
        try:
            one = self._queue.get(timeout=wait_s)
        except queue.Empty:
            return None, True
        if one is None:
            return None, False
        size, *request = one
        try:
            return table(*request), True
        except Exception as error:  # Arrow has many
            self._leave_out("unfit", request[1].count, f"a request does not fit the log's columns ({error})")
            return None, True
        finally:
            self._taken += size

    def _write(self, rows: pa.Table) -> None:
        self._files += 1
        moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        try:
            with whole(self._folder / f"served-{moment}-{os.getpid()}-{self._files:06d}.parquet") as partial:
                pq.write_table(rows, partial)
        except Exception as error:
            self._leave_out("failed", rows.num_rows, str(error))
        else:
            self._rows.labels("written").inc(rows.num_rows)
            self._told.discard("failed")

    def _leave_out(self, outcome: str, rows: int, why: str) -> None:
        """Count rows that are left out, and say so once."""
        self._rows.labels(outcome).inc(rows)
        if outcome not in self._told:
            self._told.add(outcome)
            _log.warning("served log: %s; rows are left out and counted in sparrow_served_log_rows_total", why)


def table(id: str, asked: Asked, answer: Answer, moment: float) -> pa.Table:
    """Returns a request's rows: the log's own columns, its scores, version, id and time.

    Args:
        id: of the request.
        asked, answer: it, and its scores.
        moment: seconds since 1970.

    Raises:
        ValueError: for a value that its column cannot hold as it is.
    """
    asked = asked if answer.version.items is None else answer.version.items.whole(asked)
    scorer, first, columns = answer.version.scorer, pa.array([0] * asked.count), {}
    read = scorer.schema.columns.items()
    separators = {source or name: of.separator for name, of in read for source in (of.source, of.weights)}
    for name, kind in scorer.log_types.items():
        of_user = name in asked.user
        made = _column([asked.user[name]] if of_user else asked.candidates[name], kind, separators.get(name))
        columns[name] = made.take(first) if of_user else made
    for label, scores_N in zip(scorer.labels, answer.scores_NT.T, strict=True):
        columns[SCORE + label] = pa.array(scores_N.copy())
    told = pa.table({VERSION: [answer.version.name], REQUEST: [id], TIME: [datetime.fromtimestamp(moment, UTC)]})
    return pa.table(columns | {name: told[name].take(first) for name in told.column_names})


def _column(values: list[Any], kind: pa.DataType, separator: str | None) -> pa.Array:
    """Returns values in a type that holds each as it was: no number is rounded to an integer."""
    values = [None if value != value else value for value in values]  # NaN
    if is_text(kind):
        values = [_joined(value, separator) if isinstance(value, list) else value for value in values]
    try:
        return _cast(values, kind)
    except (pa.ArrowException, OverflowError):  # text and numbers are mixed, perhaps
        return pa.concat_arrays([_cast([value], kind) for value in values])


def _cast(values: list[Any], kind: pa.DataType) -> pa.Array:
    made = pa.array(values)
    cast = made.cast(kind)
    was, now = (of.value_type if pa.types.is_list(of) else of for of in (made.type, kind))
    other_id = pa.types.is_boolean(was) != pa.types.is_boolean(now) and not is_text(now)  # true is not the id 1
    if pa.types.is_integer(now) and is_text(was):
        other_id = not cast.cast(made.type).equals(made)  # nor is 07 the id 7
    if other_id and not (pa.types.is_null(was) or pa.types.is_floating(now)):
        raise pa.ArrowInvalid(f"{was} is another id as {now}")
    return cast


def _joined(values: list[Any], separator: str | None) -> str:
    """Returns a list as text that is cut into its values."""
    if separator == "json":
        return json.dumps(values)
    whole = (int(v) if type(v) is float and v.is_integer() else v for v in values)
    texts = [str(value) for value in whole if type(value) in (int, str, float)]
    if len(texts) < len(values) or any(text.split(separator) != [text] or text.strip() != text for text in texts):
        raise ValueError(f"{values!r} as text cannot be cut at {separator or 'white space'!r}")
    return (separator or " ").join(texts)
