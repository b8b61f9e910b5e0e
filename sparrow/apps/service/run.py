"""Serves a model folder until a signal ends it."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparrow.apps.service import logs, token
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.settings import Settings
from sparrow.core.errors import UserError, listed, require
from sparrow.extensions.tiers.serving.settings import MB

if TYPE_CHECKING:  # it imports prometheus_client
    from sparrow.apps.service.supervisor import Supervisor
    from sparrow.apps.service.worker import Server

_log = logging.getLogger(__name__)
_FINISH_S = 5  # for what operators have asked
# of a folder, and the file in it that its service has locked
_PREFIX = "sparrow-serve-"
_OWNER = "owner"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a service listens.

    Args:
        port: where requests come in. 0 takes any that is free, and the first line says which.
        host: the address to listen at. By default only this machine can reach it.
        grpc_port: where the Open Inference Protocol is spoken over gRPC too. It needs the extra
            [grpc].
        admin_host: the address of `admin_port`. Who reaches it needs no token.
        admin_port: for operators: /metrics. 0 takes any that is free.
        control: path of a unix socket for `sparrow swap`, which only this user may open.
        watch: a folder. Models and deltas that appear in it are answered with.
        repository: a folder of models. Whoever reaches `admin_port` may have one of them answer, by
            its name.
    """

    port: int = 8080
    host: str = "127.0.0.1"
    grpc_port: int | None = None
    admin_host: str = "127.0.0.1"
    admin_port: int = 8082
    control: Path | None = None
    watch: Path | None = None
    repository: Path | None = None

    def __post_init__(self) -> None:
        require(
            least=0,
            most=65_535,
            port=self.port,
            admin_port=self.admin_port,
            grpc_port=self.grpc_port,
        )
        for flag, folder in (("--watch", self.watch), ("--repository", self.repository)):
            if folder is not None and not folder.is_dir():
                raise UserError(f"{folder}: no folder; make it, or give another {flag}")
        if self.repository is not None and self.admin_host not in ("127.0.0.1", "::1", "localhost"):
            raise UserError(
                f"--admin-host {self.admin_host}: it lets others load models; leave out"
                " --repository"
            )


def serve(
    model: str | Path,
    deltas: Sequence[str | Path] = (),
    *,
    place: Place | None = None,
    limits: Limits | None = None,
    settings: Settings | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Serve a model until SIGTERM or SIGINT. What was accepted before is answered.

    Args:
        model, deltas: see `load`.
        place: where it listens.
        limits: what it takes.
        settings: how it answers. The token in their file is read.
        report: is told, in a line, where the service is and what bounds it.

    Raises:
        UserError: as `load`, and when a socket cannot be opened.
    """
    place = place or Place()
    limits = limits or Limits()
    settings = settings or Settings()
    if settings.lookups.users is not None:
        _require_packages("--users", "redis", "redis")
    if settings.token_file is not None:
        settings = replace(settings, token=token.read(settings.token_file))
    logs.start(settings.logs)
    with (
        _listening(place) as (requests, grpc, operators),
        _folder() as work,
        _share_caches(settings) as settings,
    ):
        counters = work / "counters"
        items = work / "items"
        for folder in (counters, items):
            folder.mkdir()
        settings = replace(settings, lookups=replace(settings.lookups, folder=items))
        # read when prometheus_client is imported
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(counters)
        from sparrow.apps.service.admin import Admin, app
        from sparrow.apps.service.child import ready_processes
        from sparrow.apps.service.metrics import Metrics
        from sparrow.apps.service.scrape import Scrape, worker_registry
        from sparrow.apps.service.supervisor import Supervisor
        from sparrow.apps.service.worker import Server

        ready_processes()
        metrics = Metrics()
        scrape = Scrape(worker_registry(counters))
        supervisor = Supervisor([requests], grpc, limits, settings, metrics, scrape)
        server = Server(
            app(Admin(supervisor, limits, metrics, scrape), place.repository), limits, _FINISH_S
        )

        def ready() -> None:
            where = (
                f"{model} at http://{_address(requests)}, version"
                f" {supervisor.description['version']}"
            )
            metrics_at = f"metrics at http://{_address(operators[0])}/metrics"
            grpc_at = "" if grpc is None else f"gRPC at {_address(grpc)}; "
            memory_mb = f"{settings.workers * limits.memory_mb:,.0f} MB"
            report(
                f"{where}; {metrics_at}; {grpc_at}requests take at most {memory_mb} beside the"
                " model (--held-mb)"
            )

        server.loop().run(_run(supervisor, [model, *deltas], server, operators, place.watch, ready))


async def _run(
    supervisor: Supervisor,
    paths: Sequence[str | Path],
    server: Server,
    operators: list[socket.socket],
    watched: Path | None,
    ready: Callable[[], None],
) -> None:
    """Start the workers, and answer operators until a signal comes. Then have the workers end."""
    from sparrow.apps.service.watch import models, watch

    loop = asyncio.get_running_loop()
    known_models = models(watched) if watched else {}
    if left := [
        path.name
        for path in known_models
        if path.resolve() not in {Path(path).resolve() for path in paths}
    ]:
        warning = (
            "--watch %s: %s: there already, and not loaded; put models there later, or start with"
            " one of them"
        )
        _log.info(warning, watched, listed(left))
    starting = asyncio.create_task(supervisor.start(paths))

    def stop() -> None:
        server.should_exit = True
        starting.cancel()

    for ending in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(ending, stop)
    try:
        await starting
        ready()
        watching = (
            asyncio.create_task(watch(watched, known_models, supervisor)) if watched else None
        )
        await server.serve(operators)
        if watching is not None:
            watching.cancel()
    except asyncio.CancelledError:  # stopped while it was starting
        pass
    finally:
        await supervisor.end()


@contextmanager
def _folder(within: Path | None = None) -> Iterator[Path]:
    """Makes a folder of this service. Removes those of services that were killed: the lock ends
    with its process.

    within: by default, where temporary files are.
    """
    for left in (within or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
        with suppress(OSError), (left / _OWNER).open() as lock:  # it answers, or is another user's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=within) as name,
        (Path(name) / "new").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        (Path(name) / "new").rename(Path(name) / _OWNER)  # nobody sees it before it is locked
        yield Path(name)


@contextmanager
def _share_caches(settings: Settings) -> Iterator[Settings]:
    """Gives workers a folder in memory for caches that they share, if it has room for those of two
    models.

    Else they divide them: a container may have little memory there.
    """
    ssd = settings.ssd
    memory = Path("/dev/shm")
    if ssd is None or settings.workers == 1 or not memory.is_dir():
        yield settings
        return
    if (free := shutil.disk_usage(memory).free) < 2 * ssd.cache_mb * MB:
        warning = (
            "%s has %.0f MB free, and caches of two models take %.0f: workers divide"
            " --ssd-cache-mb, and read more"
        )
        _log.warning(warning, memory, free / MB, 2 * ssd.cache_mb)
        yield settings
        return
    with _folder(memory) as folder:
        yield replace(settings, ssd=replace(ssd, shared=folder))


@contextmanager
def _listening(
    place: Place,
) -> Iterator[tuple[socket.socket, socket.socket | None, list[socket.socket]]]:
    """Opens the sockets of a place: for requests, for gRPC, and those of operators.

    That of gRPC keeps the port: workers listen there themselves. Takes the control socket away
    again.
    """
    with ExitStack() as opened:
        requests = opened.enter_context(_tcp(place.host, place.port, "--port"))
        grpc = None
        if place.grpc_port is not None:
            _require_packages("--grpc-port", "grpc", "tritonclient", "grpc")
            grpc = opened.enter_context(_reserve_port(place.host, place.grpc_port, "--grpc-port"))
        operators = [opened.enter_context(_tcp(place.admin_host, place.admin_port, "--admin-port"))]
        if place.control is not None:
            operators.append(opened.enter_context(socket.socket(socket.AF_UNIX)))
            before = os.umask(0o177)
            try:
                _forget_dead(place.control)
                operators[1].bind(str(place.control))
                operators[1].listen()
            except OSError as error:
                raise UserError(
                    f"{place.control}: cannot listen ({error}); choose another --control"
                ) from None
            finally:
                os.umask(before)
            opened.callback(place.control.unlink, missing_ok=True)
        yield requests, grpc, operators


def _address(at: socket.socket) -> str:
    host, port = at.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _require_packages(flag: str, extra: str, *packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{flag}: needs {package}; pip install 'sparrow-rec[{extra}]'")


def _tcp(host: str, port: int, flag: str) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(f"{host}:{port}: cannot listen ({error}); choose another {flag}") from None


def _reserve_port(host: str, port: int, flag: str) -> socket.socket:
    """Returns a socket that other processes may listen beside. A port that another program has is
    refused.
    """
    with _tcp(host, port, flag) as free:
        family = free.family
        address = free.getsockname()
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(address)
    return listener


def _forget_dead(control: Path) -> None:
    """Remove a socket that a service has left which was killed. Nobody answers there."""
    if control.exists() and not control.is_socket():
        raise UserError(f"{control}: is there, and no socket; choose another --control")
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(str(control))
        except (ConnectionRefusedError, FileNotFoundError):
            control.unlink(missing_ok=True)
        else:
            raise UserError(f"{control}: another service answers there; choose another --control")
