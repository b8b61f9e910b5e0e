"""Processes of the service: one that answers requests, and one that checks a model.

A worker does what the supervisor says in lines of JSON. Signals are the supervisor's: it says when to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Iterator
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sparrow.core.errors import UserError
from sparrow.serving.scorer import Scorer, load
from sparrow.serving.service import logs
from sparrow.serving.service.app import Service, app
from sparrow.serving.service.connections import bounded
from sparrow.serving.service.limits import Limits
from sparrow.serving.service.lookups import Lookups
from sparrow.serving.service.lookups.items import Items
from sparrow.serving.service.settings import Settings
from sparrow.serving.service.versions import Model, Version, Versions, touch
from sparrow.serving.ssd import Ssd

FINISH_S = 30  # for what was accepted
_LAST_S = 0.2  # in which who has just connected may send a request
LINE = 1 << 24  # bytes of an order: it names all folders of a model
BEAT, _BEAT_S = b"\n", 1.0  # what a worker says, and how often, while it obeys
_SWITCH_S = 0.001  # how long a thread of Python keeps others waiting: a model that is loaded beside shall not
_NICE, _CHECK_BYTES_S = 19, 1e9  # of the process that checks a model: it shall not take disk and cores from requests
_log = logging.getLogger(__name__)


def check(channel: socket.socket, model: Model, lookups: Lookups, ssd: Ssd | None = None) -> None:
    """In a process: load a model whole, which checks it, say so and what it reads in a line, and end.

    Its items are encoded, and its tables are written to an SSD, which workers then need not do.
    """
    hear_no_signals()
    if sys.platform == "linux":
        os.nice(_NICE)
    try:
        small = None if ssd is None else replace(ssd, cache_mb=0.0, pooled_mb=0.0, shared=None)
        scorer = load(model.paths[0], model.paths[1:], ssd=small)
        touch(scorer, _CHECK_BYTES_S)
        told = Version(scorer, _items(model, lookups)).told | {"columns": scorer.encoder.sources}
        told["notes"] = [] if ssd is None or scorer.on_ssd else [_not_on(ssd, scorer)]
    except UserError as error:
        told = {"refused": str(error)}
    with contextlib.suppress(OSError):  # the supervisor has gone
        channel.sendall(line(told))


def _not_on(ssd: Ssd, scorer: Scorer) -> str:
    sizes = [sum(of.nbytes for of in rows.fields.values()) for rows in scorer.stack.rows.values()]
    told = f"the largest takes {max(sizes, default=0) / 1e6:,.1f} MB, and --ssd-least-mb is {ssd.least_mb:g}"
    return f"no table is on --ssd {ssd.folder}: {told}; tables in --in-memory, and ids that come and go, stay in memory"


def work(
    channel: socket.socket,
    model: Model,
    listening: list[socket.socket],
    grpc: tuple[str, int] | None,
    limits: Limits,
    settings: Settings,
) -> None:
    """In a process: load the model, say so in a line, and answer requests when told to, until told to end.

    A supervisor that is gone has told it to end. Files of the model were checked. `grpc` is the host and port of gRPC,
    if it is to be spoken.
    """
    hear_no_signals()
    sys.setswitchinterval(_SWITCH_S)
    gc.freeze()  # modules stay: the collector need not look at them while requests wait
    logs.start(settings.logs)
    try:
        ssd = None if settings.ssd is None else settings.ssd.divided(settings.workers)
        scorer = load(model.paths[0], model.paths[1:], checksums=False, ssd=ssd)
        versions = Versions(scorer, _items(model, settings.lookups))
        service = Service(versions, limits, settings)
    except UserError as error:
        channel.sendall(line({"refused": str(error)}))
        return
    channel.sendall(line(service.version.told))
    server = Server(app(service), limits, FINISH_S)
    server.loop().run(_answer(service, channel, listening, server, grpc))


async def _answer(
    service: Service,
    channel: socket.socket,
    listening: list[socket.socket],
    server: Server,
    grpc: tuple[str, int] | None,
) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=channel, limit=LINE)
    ending = list[Awaitable[Any]]()

    def tell(what: bytes) -> None:
        if not writer.is_closing():  # else the supervisor has gone
            writer.write(what)

    async def listen() -> dict[str, Any]:
        if grpc is not None:
            from sparrow.serving.service.rpc import serve_grpc  # an extra of its own

            try:
                calls, _ = await serve_grpc(service, *grpc)
            except UserError as error:
                return {"refused": str(error)}
            ending.append(calls.stop(FINISH_S))
        ending.append(asyncio.ensure_future(server.serve(listening)))
        return {}

    async def obey(order: dict[str, Any]) -> None:
        obeyed = asyncio.ensure_future(listen() if "listen" in order else _changed(service, order))
        while not (await asyncio.wait([obeyed], timeout=_BEAT_S))[0]:
            tell(BEAT)
        tell(line(obeyed.result()))

    obeying = None
    with contextlib.suppress(ConnectionError):  # a supervisor that ends with lines unread resets the connection
        while order := await reader.readline():  # it is read while an order is obeyed, so that its end is seen
            obeying = asyncio.ensure_future(obey(json.loads(order)))
    if server.started:
        await server.take_no_more(listening)
    server.should_exit = True
    await asyncio.gather(*ending)
    if obeying is not None:
        await obeying
    writer.close()


class Server(uvicorn.Server):
    """One that leaves signals and logs to others.

    Args:
        app: answers.
        limits: of requests.
        finish_s: at the end, for what was accepted.
    """

    def __init__(self, app: ASGIApp, limits: Limits, finish_s: int) -> None:
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
        given: dict[str, Any] = {"proxy_headers": False, "ws": "none", "http": bounded(limits)}
        super().__init__(uvicorn.Config(app, **quiet, **given, timeout_graceful_shutdown=finish_s))

    def loop(self) -> asyncio.Runner:
        """Returns what it is to run in."""
        return asyncio.Runner(loop_factory=self.config.get_loop_factory())

    async def take_no_more(self, listening: list[socket.socket]) -> None:
        """Close the sockets at which it listens. Who has connected before is answered, and later ones are refused."""
        http: Any = self.config.http_protocol_class
        made = functools.partial(http, self.config, self.server_state, self.lifespan.state)
        connect, taken = asyncio.get_running_loop().connect_accepted_socket, list[Awaitable[Any]]()
        for listener in listening:  # what is in its queue when it is closed would be cut off
            with contextlib.suppress(BlockingIOError):
                while True:
                    taken.append(connect(made, listener.accept()[0]))
        opened: list[Any] = [*self.servers, *listening]
        for one in opened:
            one.close()
        await asyncio.gather(*taken)
        await asyncio.sleep(_LAST_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield


def _items(model: Model, lookups: Lookups) -> Items | None:
    return None if model.items is None else Items(model.items, str(lookups.key), lookups.folder)


def hear_no_signals() -> None:
    """Leave signals that end a service to its supervisor, also when all of its processes get them."""
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, signal.SIG_IGN)


async def _changed(service: Service, order: dict[str, Any]) -> dict[str, Any]:
    """Prepare a version, or answer with it from now on."""

    try:
        if "prepare" in order:
            await asyncio.to_thread(service.versions.prepare, _model(order["prepare"]))
            return {}
        version = await asyncio.to_thread(service.versions.flip, _model(order["flip"]))
        service.metrics.flush()  # so that what the old version has scored can be told apart
        return version.told
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:
        _log.exception("a model could not be loaded")
        return {"refused": f"the service failed, and its log says why ({type(error).__name__})"}


def _model(told: list[Any]) -> Model:
    paths, *others = told
    return Model(tuple(paths), *others)


def line(told: dict[str, Any]) -> bytes:
    """Returns what a process says to another one."""
    return json.dumps(told).encode() + b"\n"
