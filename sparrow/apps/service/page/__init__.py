"""A page to look at one request, and requests to look at."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from sparrow.apps.service.limits import RefusedError
from sparrow.serving.scorer import Scorer
from sparrow.serving.values import json_value

HTML = (Path(__file__).parent / "index.html").read_bytes()
TYPE = b"text/html; charset=utf-8"


def _only(element: bytes) -> bytes:
    """Returns a source that allows one element of the page, by what is in it, and no other."""
    (content,) = re.findall(b"<%s>(.*?)</%s>" % (element, element), HTML, re.DOTALL)
    return b"'sha256-%s'" % base64.b64encode(hashlib.sha256(content).digest())


HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none';"
        b" frame-ancestors 'none'; script-src %s; style-src %s"
        % (_only(b"script"), _only(b"style")),
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


def example(scorer: Scorer, first: int, most: int = 8) -> bytes:
    """Returns a request for `/rank`, of rows that are kept with the model: JSON with one candidate
    in each line.

    Args:
        scorer: the model.
        first: the first row.
        most: how many rows there are, but at the end. Columns in which they are equal become the
            user's.

    Raises:
        RefusedError: when there is no such row.
    """
    golden_rows = scorer.golden_rows()[1]
    if first >= len(golden_rows):
        raise RefusedError(
            404, f"row {first}: {len(golden_rows)} are kept with the model; the first one is 0"
        )
    rows = [
        {name: json_value(value) for name, value in row.items()}
        for row in golden_rows[first : first + most]
    ]
    user = {
        name: value for name, value in rows[0].items() if all(row[name] == value for row in rows)
    }
    user = user if len(user) < len(rows[0]) else {}  # a candidate needs a column
    lines = [
        _json({name: value for name, value in row.items() if name not in user}) for row in rows
    ]
    candidates = ",\n  ".join(lines)
    return f'{{"user": {_json(user)},\n "candidates": [\n  {candidates}]}}'.encode()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
