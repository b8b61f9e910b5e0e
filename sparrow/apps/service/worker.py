"""Processes of the service: one that answers requests, and one that checks a model.

A worker does what the supervisor says in lines of JSON. Signals are the supervisor's: it says when
to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sparrow.apps.service import logs
from sparrow.apps.service.app import Service, app
from sparrow.apps.service.connections import protocol_class
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.lookups import Lookups
from sparrow.apps.service.lookups.items import Items
from sparrow.apps.service.settings import Settings
from sparrow.apps.service.stalls import BEAT_S, working
from sparrow.apps.service.versions import Model, Version, Versions, touch
from sparrow.core.errors import UserError
from sparrow.extensions.tiers.serving import Ssd
from sparrow.serving.folder import Checked, reread
from sparrow.serving.scorer import Scorer, load

FINISH_S = 30  # for what was accepted
LAST_S = 0.2  # in which who has just connected may send a request
LINE = 1 << 24  # bytes of an order: it names all folders of a model
BEAT = b"\n"  # what a process says that goes on
# how long a thread of Python keeps others waiting: a model that is loaded beside shall not
_SWITCH_S = 0.001
# of the process that checks a model: it shall not take disk and cores from requests
_NICE = 19
_CHECK_BYTES_S = 1e9
_log = logging.getLogger(__name__)


def check(
    channel: socket.socket,
    model: Model,
    lookups: Lookups,
    ssd: Ssd | None = None,
    items: Path | None = None,
) -> None:
    """In a process: load a model whole, which checks it, say so and what it reads in a line, and
    end.

    Its items are encoded, and its tables are written to an SSD, which workers then need not do.
    `items` is a file of them, which is copied to where the model says.
    """
    _step_back()
    try:
        with working(lambda: channel.sendall(BEAT)):
            if items is not None:
                _copy(items, Path(str(model.items)))
            small = None if ssd is None else replace(ssd, cache_mb=0.0, pooled_mb=0.0, shared=None)
            scorer = load(model.paths[0], model.paths[1:], ssd=small)
            touch(scorer, _CHECK_BYTES_S)
            report = Version(scorer, _items(model, lookups)).description | {
                "columns": scorer.encoder.sources
            }
        report["notes"] = [] if ssd is None or scorer.on_ssd else [_not_on(ssd, scorer)]
        report["notes"] += (
            [f"{scorer.mixing}; each request is scored alone"] if scorer.mixing else []
        )
        report["checked"] = scorer.stack.checked
    except UserError as error:
        report = {"refused": str(error)}
    with contextlib.suppress(OSError):  # the supervisor has gone
        channel.sendall(line(report))


def recheck(channel: socket.socket, checked: Mapping[str, Checked]) -> None:
    """In a process: read files that may have been written to, say in a line what they are, and end:
    `reread`.
    """
    _step_back()
    with working(lambda: channel.sendall(BEAT)):
        same, changed = reread(checked)
    with contextlib.suppress(OSError):
        channel.sendall(line({"checked": same, "changed": changed}))


def _step_back() -> None:
    """Leave the processors to who answers requests."""
    hear_no_signals()
    if sys.platform == "linux":
        os.nice(_NICE)


def _copy(items: Path, to: Path) -> None:
    """Copy items to where workers that start later find the same."""
    if items.exists() and not items.is_file():
        raise UserError(f"{items}: no regular file; give a Parquet file")
    try:
        shutil.copyfile(items, to)
    except OSError as error:
        raise UserError(
            f"{items}: cannot be read ({error.strerror}); give a Parquet file"
        ) from None


def _not_on(ssd: Ssd, scorer: Scorer) -> str:
    largest = 0
    for rows in scorer.stack.rows.values():
        largest = max(largest, sum(tensor.nbytes for tensor in rows.fields.values()))
    sizes = f"the largest takes {largest / 1e6:,.1f} MB, and --ssd-least-mb is {ssd.least_mb:g}"
    return (
        f"no table is on --ssd {ssd.folder}: {sizes}; tables in --in-memory, and ids that come and"
        " go, stay in memory"
    )


def work(
    channel: socket.socket,
    model: Model,
    checked: Mapping[str, Checked],
    listening: list[socket.socket],
    grpc: tuple[str, int] | None,
    limits: Limits,
    settings: Settings,
) -> None:
    """In a process: load the model, say so in a line, and answer requests when told to, until told
    to end.

    A supervisor that is gone has told it to end. `checked` are the model's files. Those that have
    changed since they were are read again. `grpc` is the host and port of gRPC, if it is to be
    spoken.
    """
    hear_no_signals()
    sys.setswitchinterval(_SWITCH_S)
    gc.freeze()  # modules stay: the collector need not look at them while requests wait
    logs.start(settings.logs)
    try:
        with working(lambda: channel.sendall(BEAT)):
            ssd = None if settings.ssd is None else settings.ssd.divided(settings.workers)
            scorer = load(model.paths[0], model.paths[1:], checked=checked, ssd=ssd)
            versions = Versions(scorer, _items(model, settings.lookups))
            service = Service(versions, limits, settings)
    except UserError as error:
        channel.sendall(line({"refused": str(error)}))
        return
    channel.sendall(line(service.version.description))
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

    def tell(data: bytes) -> None:
        if not writer.is_closing():  # else the supervisor has gone
            writer.write(data)

    async def listen() -> dict[str, Any]:
        if grpc is not None:
            # to import it may take longer than a beat
            serve_grpc = await asyncio.to_thread(_serve_grpc)
            try:
                calls, _ = await serve_grpc(service, *grpc)
            except UserError as error:
                return {"refused": str(error)}
            ending.append(calls.stop(FINISH_S))
        ending.append(asyncio.ensure_future(server.serve(listening)))
        return {}

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if not service.batcher.is_stuck():
                tell(BEAT)

    async def obey(order: dict[str, Any]) -> None:
        tell(line(await (listen() if "listen" in order else _change_version(service, order))))

    beating = asyncio.ensure_future(beat())
    obeying = None
    # a supervisor that ends with lines unread resets the connection
    with contextlib.suppress(ConnectionError):
        # it is read while an order is obeyed, so that its end is seen
        while order := await reader.readline():
            obeying = asyncio.ensure_future(obey(json.loads(order)))
    if server.started:
        await server.take_no_more(listening)
    server.should_exit = True
    await asyncio.gather(*ending)
    if obeying is not None:
        await obeying
    beating.cancel()
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
        options: dict[str, Any] = {
            "proxy_headers": False,
            "ws": "none",
            "http": protocol_class(limits),
        }
        super().__init__(
            uvicorn.Config(app, **quiet, **options, timeout_graceful_shutdown=finish_s)
        )

    def loop(self) -> asyncio.Runner:
        """Returns the runner of its event loop."""
        return asyncio.Runner(loop_factory=self.config.get_loop_factory())

    async def take_no_more(self, listening: list[socket.socket]) -> None:
        """Close the sockets at which it listens. Who has connected before is answered, and later
        ones are refused.
        """
        http: Any = self.config.http_protocol_class
        make_connection = functools.partial(
            http, self.config, self.server_state, self.lifespan.state
        )
        connect = asyncio.get_running_loop().connect_accepted_socket
        connections = list[Awaitable[Any]]()
        for listener in listening:  # what is in its queue when it is closed would be cut off
            with contextlib.suppress(BlockingIOError):
                while True:
                    connections.append(connect(make_connection, listener.accept()[0]))
        opened: list[Any] = [*self.servers, *listening]
        for server in opened:
            server.close()
        await asyncio.gather(*connections)
        await asyncio.sleep(LAST_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield


def _items(model: Model, lookups: Lookups) -> Items | None:
    return None if model.items is None else Items(model.items, str(lookups.key), lookups.folder)


def _serve_grpc() -> Any:
    from sparrow.apps.service.rpc import serve_grpc  # an extra of its own

    return serve_grpc


def hear_no_signals() -> None:
    """Leave signals that end a service to its supervisor, also when all of its processes get
    them.
    """
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, signal.SIG_IGN)


async def _change_version(service: Service, order: dict[str, Any]) -> dict[str, Any]:
    """Prepare a version, or answer with it from now on."""
    try:
        if "prepare" in order:
            await asyncio.to_thread(
                service.versions.prepare, _model(order["prepare"]), checked_files(order)
            )
            return {}
        version = await asyncio.to_thread(
            service.versions.flip, _model(order["flip"]), checked_files(order)
        )
        service.metrics.flush()  # so that what the old version has scored can be told apart
        return version.description
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:
        _log.exception("a model could not be loaded")
        return {"refused": f"the service failed, and its log says why ({type(error).__name__})"}


def _model(fields: list[Any]) -> Model:
    paths, *rest = fields
    return Model(tuple(paths), *rest)


def checked_files(message: dict[str, Any]) -> dict[str, Checked]:
    """Returns files that were checked, from a line."""
    return {
        path: Checked(sha256, tuple(identity))
        for path, (sha256, identity) in message.get("checked", {}).items()
    }


def line(message: dict[str, Any]) -> bytes:
    """Returns a message of a process to another one."""
    return json.dumps(message).encode() + b"\n"
