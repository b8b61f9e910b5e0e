"""Serves a model folder until a signal ends it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from sparrow.core.errors import UserError, require
from sparrow.serving.scorer import load
from sparrow.serving.service import token
from sparrow.serving.service.app import Service, app
from sparrow.serving.service.connections import bounded
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
        grpc_port: of gRPC, if it is to be spoken.
        token_file: holds what callers have to send.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    control: Path | None = None
    grpc_port: int | None = None
    token_file: Path | None = None

    def __post_init__(self) -> None:
        require(least=0, most=65_535, port=self.port, grpc_port=self.grpc_port)


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
    with _listening(place) as sockets:
        service = Service(Versions(load(model, deltas)), limits, name, threads)
        service.token = token.read(place.token_file) if place.token_file else None
        config = uvicorn.Config(
            app(service),
            log_config=None,
            access_log=False,
            server_header=False,
            http=bounded(limits),
            timeout_graceful_shutdown=_FINISH_S,
        )
        host, port = sockets[0].getsockname()[:2]
        told(
            f"{model} at http://{host}:{port}, version {service.version.name}; requests take at most "
            f"{limits.memory_mb:,.0f} MB beside the model"
        )
        for ending in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises it again when all is answered
            signal.signal(ending, lambda number, frame: None)
        uvicorn.Server(config).run(sockets=sockets)


@contextmanager
def _listening(place: Place) -> Iterator[list[socket.socket]]:
    """Opens the sockets of a place: TCP, and then that of control. Takes the name of the latter away again."""
    with ExitStack() as opened:
        try:
            family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
            tcp = socket.create_server((place.host, place.port), family=family, backlog=2048)
        except OSError as error:
            raise UserError(f"{place.host}:{place.port}: cannot listen ({error}); choose another --port") from None
        found = [opened.enter_context(tcp)]
        if place.control is not None:
            found.append(opened.enter_context(socket.socket(socket.AF_UNIX)))
            before = os.umask(0o177)
            try:
                found[1].bind(str(place.control))
            except OSError as error:
                raise UserError(f"{place.control}: cannot listen ({error}); remove it, or choose another") from None
            finally:
                os.umask(before)
            opened.callback(place.control.unlink, missing_ok=True)
        yield found
