"""Logs of the service: a line of JSON for each event, and by which names a request is found in
them.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparrow.core.errors import require

access = logging.getLogger("sparrow.access")
_USUAL = {*vars(logging.makeLogRecord({})), "message", "asctime", "color_message"}
_SANE = re.compile(rb"[!-~](?:[ -~]{0,126}[!-~])?")
_TRACE = re.compile(  # of version 00 nothing may follow; later ones may add fields
    rb"(?!ff)(?!00.{54})[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)


@dataclass(frozen=True, kw_only=True)
class Logs:
    """What a service writes down.

    Args:
        access_log: write a line of JSON to standard error for each answer.
        served_log: a folder for Parquet files with rows that were scored, in the log's own columns,
            and their scores.
        sample: the share of requests in the served log.

    Raises:
        UserError: for a share that is none.
    """

    access_log: bool = False
    served_log: Path | None = None
    sample: float = 0.01

    def __post_init__(self) -> None:
        require(above=0, most=1, sample=self.sample)


class Lines(logging.Formatter):
    """Makes an event a line of JSON. What is given as `extra` has its own names."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def start(logs: Logs) -> None:
    """Write events to standard error, for all loggers of this process."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("sparrow").setLevel(logging.INFO)
    access.setLevel(logging.INFO if logs.access_log else logging.WARNING)


def request_id(*proposals: bytes | None) -> str:
    """Returns the first id that is 1 to 128 printable characters of ASCII, or else a new one."""
    sane = (value.decode() for value in proposals if value is not None and _SANE.fullmatch(value))
    return next(sane, None) or secrets.token_hex(8)


def trace_id(traceparent: bytes | None) -> str | None:
    """Returns the trace id of a header, or None where it is absent or not as it should be.

    Source: W3C Trace Context, https://www.w3.org/TR/trace-context/#traceparent-header.
    """
    match = _TRACE.fullmatch(traceparent or b"")
    return match[1].decode() if match else None
