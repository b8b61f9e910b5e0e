"""The model repository extension of the Open Inference Protocol: index, load and unload, of folders in one folder.

Source: Triton's `protocol/extension_model_repository.md`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sparrow.core.errors import UserError
from sparrow.serving.folder import MANIFEST
from sparrow.serving.service.limits import RefusedError


class Repository:
    """Model folders, of which one answers. A name from a request is compared with theirs, and never made a path.

    Args:
        path: the folder with the model folders.
        swap: has the service answer with a folder. When it returns, the one before does not answer any more.
        answering: says which folder answers, or the last delta of it.
    """

    def __init__(self, path: Path, swap: Callable[[Path], Awaitable[Any]], answering: Callable[[], Path]) -> None:
        self._path, self._swap, self._answering = path, swap, answering

    def folders(self) -> dict[str, Path]:
        """Returns name -> folder of the models. A link that leads out of the repository is none of them.

        Raises:
            UserError: when the repository cannot be read.
        """
        root = self._path.resolve()
        try:
            found = {path.name: Path(os.path.realpath(path)) for path in sorted(root.iterdir())}
        except OSError as error:
            raise UserError(f"{self._path}: cannot be read ({error.strerror}); give another --repository") from None
        return {name: path for name, path in found.items() if path.parent == root and (path / MANIFEST).is_file()}

    async def index(self, request: Request) -> Response:
        """Tell of each model. Its version is the SHA-256 of its manifest."""
        answers, found = self._answering().resolve(), []
        only_ready = (await _body(request)).get("ready") is True
        for name, path in self.folders().items():
            version = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
            if path == answers:
                found.append({"name": name, "version": version, "state": "READY", "reason": ""})
            elif not only_ready:
                why = "another model answers; load this one to have it answer"
                found.append({"name": name, "version": version, "state": "UNAVAILABLE", "reason": why})
        return JSONResponse(found)

    async def load(self, request: Request) -> Response:
        """Have a model answer."""
        folder = self._folder(request)
        if given := (await _body(request)).get("parameters"):
            raise UserError(f"parameters {', '.join(map(repr, given))}: are not taken; export the model with them")
        await self._swap(folder)
        return Response()

    async def unload(self, request: Request) -> Response:
        """Do nothing with a model that does not answer, and refuse it for the one that does, because one has to."""
        if (folder := self._folder(request)) == self._answering().resolve():
            raise UserError(f"model {folder.name!r}: is the one that answers; load another one instead")
        return Response()

    def _folder(self, request: Request) -> Path:
        name, folders = request.path_params["name"], self.folders()
        if name not in folders:
            raise RefusedError(404, f"model {name!r}: is not in the repository; POST /v2/repository/index names all")
        return folders[name]

    def routes(self) -> list[Route]:
        """Returns the routes, for the listener of those who may change what is served."""
        model = "/v2/repository/models/{name}"
        each = (("/v2/repository/index", self.index), (model + "/load", self.load), (model + "/unload", self.unload))
        return [Route(path, _guarded(answer), methods=["POST"]) for path, answer in each]


_Answer = Callable[[Request], Awaitable[Response]]


def _guarded(answer: _Answer) -> _Answer:
    """Returns an endpoint that says in a line why something was refused."""

    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request)
        except (RefusedError, UserError, OSError) as error:
            refused = error if isinstance(error, RefusedError) else RefusedError(400, str(error))
            return JSONResponse({"error": str(refused)}, refused.status)

    return endpoint


async def _body(request: Request) -> dict[str, Any]:
    """Returns the body, which may be empty."""
    body = await request.body()
    try:
        return msgspec.json.decode(body, type=dict[str, Any]) if body else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"body: {error}; send a JSON object, or nothing") from None
