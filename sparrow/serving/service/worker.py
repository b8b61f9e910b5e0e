"""Processes of the service: one that answers requests, and one that checks a model.

A worker does what the supervisor says in lines of JSON. Signals are the supervisor's: it says when to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import uvicorn

from sparrow.core.errors import UserError
from sparrow.serving.scorer import load
from sparrow.serving.service.app import Service, app
from sparrow.serving.service.connections import bounded
from sparrow.serving.service.limits import Limits
from sparrow.serving.service.settings import Settings
from sparrow.serving.service.versions import Paths, Versions, touch

FINISH_S = 30  # for what was accepted
_SWITCH_S = 0.001  # how long a thread of Python keeps others waiting: a model that is loaded beside shall not
_NICE, _CHECK_BYTES_S = 19, 1e9  # of the process that checks a model: it shall not take disk and cores from requests
_log = logging.getLogger(__name__)


class Orders(NamedTuple):
    """What a worker begins with. paths: of the model, whose files were checked."""

    paths: Paths
    limits: Limits
    settings: Settings


def check(channel: socket.socket, paths: Paths) -> None:
    """In a process: load a model whole, which checks it, say so in a line, and end."""
    hear_no_signals()
    if sys.platform == "linux":
        os.nice(_NICE)
    try:
        scorer = load(paths[0], paths[1:])
        touch(scorer, _CHECK_BYTES_S)
        told: dict[str, Any] = {"version": scorer.folder.digest, "model": scorer.name, "step": scorer.step}
    except UserError as error:
        told = {"refused": str(error)}
    with contextlib.suppress(OSError):  # the supervisor has gone
        channel.sendall(_line(told))


def work(channel: socket.socket, listening: list[socket.socket], orders: Orders) -> None:
    """In a process: load the model, say so in a line, and answer requests when told to, until told to end.

    A supervisor that is gone has told it to end.
    """
    hear_no_signals()
    sys.setswitchinterval(_SWITCH_S)
    gc.freeze()  # modules stay: the collector need not look at them while requests wait
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        scorer = load(orders.paths[0], orders.paths[1:], checksums=False)
        touch(scorer)
        service = Service(Versions(scorer), orders.limits, orders.settings)
    except UserError as error:
        channel.sendall(_line({"refused": str(error)}))
        return
    config = uvicorn.Config(
        app(service),
        log_config=None,
        access_log=False,
        server_header=False,
        http=bounded(orders.limits),
        timeout_graceful_shutdown=FINISH_S,
    )
    channel.sendall(_line(service.version.told))
    asyncio.Runner(loop_factory=config.get_loop_factory()).run(_answer(service, channel, listening, config))


async def _answer(
    service: Service, channel: socket.socket, listening: list[socket.socket], config: uvicorn.Config
) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    server, serving = Server(config), None
    while line := await reader.readline():
        order = json.loads(line)
        if "listen" in order:
            serving = asyncio.ensure_future(server.serve(listening))
            told: dict[str, Any] = {}
        else:
            told = await _changed(service.versions, order)
        with contextlib.suppress(OSError):  # the supervisor has gone
            writer.write(_line(told))
            await writer.drain()
    server.should_exit = True
    if serving is not None:
        await serving


class Server(uvicorn.Server):
    """One that leaves signals to others."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield


def hear_no_signals() -> None:
    """Leave signals that end a service to its supervisor, also when all of its processes get them."""
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, signal.SIG_IGN)


async def _changed(versions: Versions, order: dict[str, Any]) -> dict[str, Any]:
    """Prepare a version, or answer with it from now on."""

    try:
        if "prepare" in order:
            await asyncio.to_thread(versions.prepare, tuple(order["prepare"]))
            return {}
        return (await asyncio.to_thread(versions.flip, tuple(order["flip"]))).told
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:
        _log.exception("a model could not be loaded")
        return {"refused": f"the service failed, and its log says why ({type(error).__name__})"}


def _line(told: dict[str, Any]) -> bytes:
    return json.dumps(told).encode() + b"\n"
