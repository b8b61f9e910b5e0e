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
from typing import Any, NamedTuple

import uvicorn

from sparrow.core.errors import UserError
from sparrow.serving.scorer import load
from sparrow.serving.service import logs
from sparrow.serving.service.app import Service, app
from sparrow.serving.service.connections import bounded
from sparrow.serving.service.limits import Limits
from sparrow.serving.service.lookups import Lookups
from sparrow.serving.service.lookups.items import Items
from sparrow.serving.service.settings import Settings
from sparrow.serving.service.versions import Model, Version, Versions, touch

FINISH_S = 30  # for what was accepted
_LAST_S = 0.2  # in which who has just connected may send a request
LINE = 1 << 24  # bytes of an order: it names all folders of a model
_SWITCH_S = 0.001  # how long a thread of Python keeps others waiting: a model that is loaded beside shall not
_NICE, _CHECK_BYTES_S = 19, 1e9  # of the process that checks a model: it shall not take disk and cores from requests
_log = logging.getLogger(__name__)


class Orders(NamedTuple):
    """What a worker begins with. model: its files were checked. grpc: host and port of gRPC, if it is to be spoken."""

    model: Model
    grpc: tuple[str, int] | None
    limits: Limits
    settings: Settings


def check(channel: socket.socket, model: Model, lookups: Lookups) -> None:
    """In a process: load a model whole, which checks it, say so and what it reads in a line, and end.

    Its items are encoded, which workers then need not do.
    """
    hear_no_signals()
    if sys.platform == "linux":
        os.nice(_NICE)
    try:
        scorer = load(model.paths[0], model.paths[1:])
        touch(scorer, _CHECK_BYTES_S)
        told = Version(scorer, _items(model, lookups)).told | {"columns": scorer.encoder.sources}
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
    logs.start(orders.settings.logs)
    try:
        scorer = load(orders.model.paths[0], orders.model.paths[1:], checksums=False)
        versions = Versions(scorer, _items(orders.model, orders.settings.lookups))
        service = Service(versions, orders.limits, orders.settings)
    except UserError as error:
        channel.sendall(_line({"refused": str(error)}))
        return
    config = uvicorn.Config(
        app(service),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        http=bounded(orders.limits),
        timeout_graceful_shutdown=FINISH_S,
    )
    channel.sendall(_line(service.version.told))
    asyncio.Runner(loop_factory=config.get_loop_factory()).run(
        _answer(service, channel, listening, config, orders.grpc)
    )


async def _answer(
    service: Service,
    channel: socket.socket,
    listening: list[socket.socket],
    config: uvicorn.Config,
    grpc: tuple[str, int] | None,
) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=channel, limit=LINE)
    server, ending = Server(config), list[Awaitable[Any]]()

    async def obey(order: dict[str, Any]) -> None:
        told: dict[str, Any] = {}
        if "listen" not in order:
            told = await _changed(service, order)
        else:
            if grpc is not None:
                from sparrow.serving.service.rpc import serve_grpc  # an extra of its own

                calls, _ = await serve_grpc(service, *grpc)
                ending.append(calls.stop(FINISH_S))
            ending.append(asyncio.ensure_future(server.serve(listening)))
        writer.write(_line(told))

    obeying = None
    while line := await reader.readline():  # it is read while an order is obeyed, so that its end is seen
        obeying = asyncio.ensure_future(obey(json.loads(line)))
    if server.started:
        await server.take_no_more(listening)
    server.should_exit = True
    await asyncio.gather(*ending)
    if obeying is not None:
        await obeying


class Server(uvicorn.Server):
    """One that leaves signals to others."""

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


def _line(told: dict[str, Any]) -> bytes:
    return json.dumps(told).encode() + b"\n"
