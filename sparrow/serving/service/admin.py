"""What operators ask: metrics of all workers, and another model. It is apart from where requests come in."""

from __future__ import annotations

from pathlib import Path

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from sparrow.serving.service.app import Call, Reply, Routes, json, made
from sparrow.serving.service.asked import decoded
from sparrow.serving.service.limits import Limits
from sparrow.serving.service.metrics import Metrics
from sparrow.serving.service.repository import Repository
from sparrow.serving.service.scrape import Scrape
from sparrow.serving.service.supervisor import Supervisor

_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


class _Swap(msgspec.Struct, forbid_unknown_fields=True):
    folders: list[str] = []
    items: str | None = None


_decode = msgspec.json.Decoder(_Swap).decode


class Admin:
    """Answers operators.

    Args:
        supervisor: of the workers.
        limits: of requests.
        metrics: count what operators ask.
        scrape: of all processes.
    """

    token: bytes | None = None  # the loopback address and the control socket have none

    def __init__(self, supervisor: Supervisor, limits: Limits, metrics: Metrics, scrape: Scrape) -> None:
        self.supervisor, self._scrape = supervisor, scrape
        self.limits, self.metrics, self.held = limits, metrics, 0

    async def counted(self, call: Call) -> Reply:
        """Give what Prometheus reads."""
        return Reply(self._scrape.text(), 200, _TEXT)

    async def live(self, call: Call) -> Reply:
        """Say that the service is there."""
        return json({"live": True})

    async def swap(self, call: Call) -> Reply:
        """Put another model in the place of the one that answers."""
        asked = decoded(_decode, call.body, '{"folders": ["PATH"], "items": "PATH"}, or one of them')
        return json(await self.supervisor.swap(asked.folders, asked.items))


def app(admin: Admin, repository: Path | None = None) -> ASGIApp:
    """Returns the ASGI application. Only the unix socket, which is one user's, changes the model by its path.

    Args:
        admin: answers.
        repository: a folder with models, which may be loaded by their names.
    """
    routes: Routes = [("GET", "/metrics", admin.counted), ("GET", "/health/live", admin.live)]
    if repository is not None:
        routes += Repository(repository, admin.supervisor).routes()
    shared = made(admin, routes)
    control = made(admin, [("POST", "/control/swap", admin.swap)])

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        is_unix = scope["type"] == "http" and scope["server"] is not None and scope["server"][1] is None
        await (control if is_unix and scope["path"].startswith("/control") else shared)(scope, receive, send)

    return choose
