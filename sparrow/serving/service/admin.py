"""What operators ask: metrics of all workers, and another model. It is apart from where requests come in."""

from __future__ import annotations

from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Gauge, generate_latest, multiprocess
from starlette.types import ASGIApp, Receive, Scope, Send

from sparrow.core.errors import UserError
from sparrow.serving.service.app import Call, Reply, json, made
from sparrow.serving.service.limits import Limits
from sparrow.serving.service.metrics import Metrics
from sparrow.serving.service.supervisor import Supervisor

_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


class Admin:
    """Answers operators.

    Args:
        supervisor: of the workers.
        limits: of requests.
        metrics: where workers leave their counters.
    """

    token: bytes | None = None  # the loopback address and the control socket have none

    def __init__(self, supervisor: Supervisor, limits: Limits, metrics: Path) -> None:
        self._supervisor, self._folder = supervisor, metrics
        self.limits, self.metrics, self.held = limits, Metrics(), 0

    async def counted(self, call: Call) -> Reply:
        """Give what Prometheus reads."""
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry, path=str(self._folder))
        told = {name: str(value) for name, value in self._supervisor.told.items()}
        Gauge("sparrow_version_info", "The model that answers", tuple(told), registry=registry).labels(**told).set(1)
        return Reply(generate_latest(registry) + self.metrics.text(), 200, _TEXT)

    async def live(self, call: Call) -> Reply:
        """Say that the service is there."""
        return json({"live": True})

    async def swap(self, call: Call) -> Reply:
        """Put another model in the place of the one that answers."""
        try:
            folders = msgspec.json.decode(call.body, type=dict[str, list[str]])["folders"]
        except (msgspec.MsgspecError, KeyError) as error:
            raise UserError(f'body: {error}; send {{"folders": ["PATH"]}}') from None
        if not folders:
            raise UserError("folders: none; give one")
        return json(await self.swapped([Path(folder) for folder in folders]))

    async def swapped(self, folders: list[Path]) -> dict[str, object]:
        """Returns what is told of another model that answers from now on.

        Raises:
            UserError: when it is refused.
        """
        try:
            told = await self._supervisor.swap(folders)
        except UserError:
            self.metrics.swaps.labels("refused").inc()
            raise
        self.metrics.swaps.labels("done").inc()
        return told


def app(admin: Admin) -> ASGIApp:
    """Returns the ASGI application. Only the unix socket, which is one user's, changes the model by its path."""
    shared = made(admin, [("GET", "/metrics", admin.counted), ("GET", "/health/live", admin.live)])
    control = made(admin, [("POST", "/control/swap", admin.swap)])

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        is_unix = scope["type"] == "http" and scope["server"] is not None and scope["server"][1] is None
        await (control if is_unix and scope["path"].startswith("/control") else shared)(scope, receive, send)

    return choose
