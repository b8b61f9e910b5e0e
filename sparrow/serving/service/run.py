"""Serves a model folder until a signal ends it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from sparrow.core.errors import UserError
from sparrow.serving.scorer import load
from sparrow.serving.service.app import Service, app
from sparrow.serving.service.limits import Limits
from sparrow.serving.service.versions import Versions

_FINISH_S = 30  # for what was accepted
_SWITCH_S = 0.001  # how long a thread of Python keeps others waiting: a model that is loaded beside shall not


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a service listens.

    Args:
        host, port: of TCP. Port 0 takes any that is free.
        control: path of a unix socket, which only this user may open.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    control: Path | None = None


def serve(
    model: str | Path,
    deltas: Sequence[str | Path] = (),
    *,
    place: Place | None = None,
    limits: Limits | None = None,
    name: str = "model",
    threads: int = 1,
    told: Callable[[str], None] = print,
) -> None:
    """Serve a model until SIGTERM or SIGINT. What was accepted before is answered.

    Args:
        model, deltas: see `load`.
        place: where it listens.
        limits: what it takes.
        name: of the model, in the Open Inference Protocol.
        threads: how many batches are scored at a time.
        told: is told, in a line, where the service is and what bounds it.

    Raises:
        UserError: as `load`, and when a socket cannot be opened.
    """
    place, limits = place or Place(), limits or Limits()
    sys.setswitchinterval(_SWITCH_S)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with _Listening(place) as sockets:
        service = Service(Versions(load(model, deltas)), limits, name, threads)
        config = uvicorn.Config(
            app(service),
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=limits.connections,
            timeout_graceful_shutdown=_FINISH_S,
        )
        host, port = sockets.each[0].getsockname()[:2]
        told(
            f"{model} at http://{host}:{port}, version {service.version.name}; requests take at most "
            f"{limits.memory_mb:,.0f} MB beside the model"
        )
        for ending in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises it again when all is answered
            signal.signal(ending, lambda number, frame: None)
        uvicorn.Server(config).run(sockets=sockets.each)


class _Listening:
    """Opens the sockets of a place, and takes the control socket's name away again."""

    def __init__(self, place: Place) -> None:
        self._place, self.each = place, list[socket.socket]()

    def __enter__(self) -> _Listening:
        place = self._place
        try:
            family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
            self.each.append(socket.create_server((place.host, place.port), family=family, backlog=2048))
        except (OSError, OverflowError) as error:
            raise UserError(f"{place.host}:{place.port}: cannot listen ({error}); choose another --port") from None
        if place.control is not None:
            control = socket.socket(socket.AF_UNIX)
            before = os.umask(0o177)
            try:
                control.bind(str(place.control))
                control.listen()
            except OSError as error:
                raise UserError(f"{place.control}: cannot listen ({error}); remove it, or choose another") from None
            finally:
                os.umask(before)
            self.each.append(control)
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.each:
            one.close()
        if self._place.control is not None and len(self.each) > 1:
            self._place.control.unlink(missing_ok=True)
