"""What a command says to a service that runs, through its control socket."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any

from sparrow.core.errors import UserError

_TIMEOUT_S = 3600.0  # a large model takes long to load and to check


def swap(
    control: str | Path, *folders: str | Path, items: str | Path | None = None
) -> dict[str, Any]:
    """Have a service answer with another model. Returns its version, name and step.

    When it returns, no answer is of the old one any more.

    Args:
        control: the service's socket.
        folders: what `sparrow export` wrote, on the machine of the service: a full folder and
            deltas of it, or deltas of what answers, or none for the same model.
        items: a Parquet file in the place of that of --items.

    Raises:
        UserError: when the service cannot be reached, or refuses the folder. Then the old model
            goes on.
    """
    if not Path(control).is_socket():
        raise UserError(
            f"{control}: no socket; give the path of a service's --control first, and then folders"
        )
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(_TIMEOUT_S)
    try:
        connection.sock.connect(str(control))
        paths = [str(Path(folder).resolve()) for folder in folders]
        body = {"folders": paths, "items": None if items is None else str(Path(items).resolve())}
        connection.request("POST", "/control/swap", json.dumps(body))
        answer = connection.getresponse()
        reply: dict[str, Any] = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UserError(f"{control}: no answer ({error}); is its service still there?") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise UserError(str(reply.get("error", reply)))
    return reply
