"""The model repository extension of the Open Inference Protocol: index, load and unload, of folders in one folder.

Source: Triton's `protocol/extension_model_repository.md`.
"""

from __future__ import annotations

import hashlib
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
        swap: has the service answer with a folder.
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
            found = {path.name: path.resolve() for path in sorted(root.iterdir())}
        except OSError as error:
            raise UserError(f"{self._path}: cannot be read ({error.strerror}); give another --repository") from None
        return {name: path for name, path in found.items() if path.parent == root and (path / MANIFEST).is_file()}

    def index(self) -> list[dict[str, str]]:
        """Returns what the protocol tells of each model. Its version is the SHA-256 of its manifest."""
        answers, found = self._answering().resolve(), []
        for name, path in self.folders().items():
            version = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
            state = {"state": "READY", "reason": ""}
            if path != answers:
                state = {"state": "UNAVAILABLE", "reason": "another model answers; load this one to have it answer"}
            found.append({"name": name, "version": version, **state})
        return found

    async def load(self, name: str) -> None:
        """Have a model answer. When it returns, the one before does not answer any more.

        Raises:
            RefusedError: for a name that is none of them.
            UserError: when the folder is refused, see `Versions.swap`.
        """
        await self._swap(self._folder(name))

    async def unload(self, name: str) -> None:
        """Do nothing with a model that does not answer.

        Raises:
            RefusedError: for a name that is none of them.
            UserError: for the model that answers, because one has to.
        """
        if self._folder(name) == self._answering().resolve():
            raise UserError(f"model {name!r}: is the one that answers; load another one instead")

    def _folder(self, name: str) -> Path:
        folders = self.folders()
        if name not in folders:
            raise RefusedError(404, f"model {name!r}: is not in the repository; POST /v2/repository/index names all")
        return folders[name]


def routes(repository: Repository) -> list[Route]:
    """Returns the routes, for the listener of those who may change what is served."""

    async def index(request: Request) -> Response:
        only_ready = (await _parameters(request)).get("ready") is True
        return JSONResponse([one for one in repository.index() if one["state"] == "READY" or not only_ready])

    async def load(request: Request) -> Response:
        if given := (await _parameters(request)).get("parameters"):
            raise UserError(f"parameters {', '.join(map(repr, given))}: are not taken; export the model with them")
        await repository.load(request.path_params["name"])
        return Response()

    async def unload(request: Request) -> Response:
        await repository.unload(request.path_params["name"])
        return Response()

    def guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return await answer(request)
            except RefusedError as error:
                return JSONResponse({"error": str(error)}, error.status)
            except UserError as error:
                return JSONResponse({"error": str(RefusedError(400, str(error)))}, 400)

        return endpoint

    model = "/v2/repository/models/{name}"
    each = (("/v2/repository/index", index), (model + "/load", load), (model + "/unload", unload))
    return [Route(path, guarded(answer), methods=["POST"]) for path, answer in each]


async def _parameters(request: Request) -> dict[str, Any]:
    """Returns the body, which may be empty."""
    body = await request.body()
    try:
        return msgspec.json.decode(body, type=dict[str, Any]) if body else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"body: {error}; send a JSON object, or nothing") from None
