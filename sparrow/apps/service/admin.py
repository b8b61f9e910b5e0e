"""What operators ask: metrics of all workers, and another model. It is apart from where requests
come in.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from sparrow.apps.service.app import Call, Response, Routes, json, make_router
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.metrics import Metrics
from sparrow.apps.service.repository import Repository
from sparrow.apps.service.request import decode_body
from sparrow.apps.service.scrape import Scrape
from sparrow.apps.service.supervisor import Supervisor

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

    def __init__(
        self, supervisor: Supervisor, limits: Limits, metrics: Metrics, scrape: Scrape
    ) -> None:
        self.supervisor = supervisor
        self._scrape = scrape
        self.limits = limits
        self.metrics = metrics
        self.held = 0

    async def read_metrics(self, call: Call) -> Response:
        """Give what Prometheus reads."""
        return Response(self._scrape.text(), 200, _TEXT)

    async def live(self, call: Call) -> Response:
        """Say that the service is there."""
        return json({"live": True})

    async def ready(self, call: Call) -> Response:
        """Say how many workers answer, and why others cannot start."""
        supervisor = self.supervisor
        answering = supervisor.answering
        content = {
            "ready": answering > 0,
            "version": supervisor.description.get("version"),
            "workers": answering,
        }
        if supervisor.trouble:
            content["error"] = supervisor.trouble
        return json(content, 200 if answering else 503)

    async def swap(self, call: Call) -> Response:
        """Put another model in the place of the one that answers."""
        order = decode_body(
            _decode, call.body, '{"folders": ["PATH"], "items": "PATH"}, or one of them'
        )
        return json(await self.supervisor.swap(order.folders, order.items))


def app(admin: Admin, repository: Path | None = None) -> ASGIApp:
    """Returns the ASGI application. Only the unix socket, which is one user's, changes the model by
    its path.

    Args:
        admin: answers.
        repository: a folder with models, which may be loaded by their names.
    """
    routes: Routes = [("GET", "/metrics", admin.read_metrics), ("GET", "/health/live", admin.live)]
    routes.append(("GET", "/health/ready", admin.ready))
    if repository is not None:
        routes += Repository(repository, admin.supervisor).routes()
    shared = make_router(admin, routes)
    control = make_router(admin, [("POST", "/control/swap", admin.swap)])

    async def choose(scope: Scope, receive: Receive, send: Send) -> None:
        is_unix = (
            scope["type"] == "http" and scope["server"] is not None and scope["server"][1] is None
        )
        await (control if is_unix and scope["path"].startswith("/control") else shared)(
            scope, receive, send
        )

    return choose
