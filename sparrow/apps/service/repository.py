"""The model repository extension of the Open Inference Protocol: index, load and unload, of folders
in one folder.

Source: Triton's `protocol/extension_model_repository.md`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from sparrow.apps.service.app import Answering, Call, Response, Routes, json
from sparrow.apps.service.limits import RefusedError
from sparrow.apps.service.request import decode_body
from sparrow.apps.service.stalls import in_thread
from sparrow.apps.service.supervisor import STALLED_S, Supervisor
from sparrow.core.errors import UserError
from sparrow.core.files import MANIFEST, manifest_file

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Repository:
    """Model folders, of which one answers. A name from a request is compared with theirs, and never
    made a path.

    Args:
        path: the folder with the model folders.
        supervisor: has one of them answer.
    """

    def __init__(self, path: Path, supervisor: Supervisor) -> None:
        self._path = path
        self._supervisor = supervisor

    def routes(self) -> Routes:
        """Returns the routes, for the listener of those who may change what is served."""
        model = "/v2/repository/models/{name}"
        return [
            ("POST", "/v2/repository/index", _from_this_machine(self.index)),
            ("POST", model + "/load", _from_this_machine(self.load)),
            ("POST", model + "/unload", _from_this_machine(self.unload)),
        ]

    def folders(self) -> dict[str, Path]:
        """Returns name -> folder of the models. A link that leads out of the repository is none of
        them.

        Raises:
            UserError: when the repository cannot be read.
        """
        root = self._path.resolve()
        try:
            paths = {path.name: Path(os.path.realpath(path)) for path in sorted(root.iterdir())}
        except OSError as error:
            raise UserError(
                f"{self._path}: cannot be read ({error.strerror}); give another --repository"
            ) from None
        return {
            name: path
            for name, path in paths.items()
            if path.parent == root and (path / MANIFEST).is_file()
        }

    async def index(self, call: Call) -> Response:
        """Tell of each model. Its version is the SHA-256 of its manifest."""
        answers = self._answering_folder()
        entries = []
        only_ready = _read(call.body).get("ready") is True
        for name, (path, version) in (await self._in_thread(self._versions)).items():
            if path == answers:
                entries.append({"name": name, "version": version, "state": "READY", "reason": ""})
            elif not only_ready:
                why = "another model answers; load this one to have it answer"
                entries.append(
                    {"name": name, "version": version, "state": "UNAVAILABLE", "reason": why}
                )
        return json(entries)

    async def load(self, call: Call) -> Response:
        """Have a model answer."""
        folder = await self._folder(call)
        if parameters := _read(call.body).get("parameters"):
            raise UserError(
                f"parameters {', '.join(map(repr, parameters))}: are not taken; export the model"
                " with them"
            )
        await self._supervisor.swap([folder], by="a client of --repository")
        return Response(b"")

    async def unload(self, call: Call) -> Response:
        """Do nothing with a model that does not answer, and refuse it for the one that does,
        because one has to.
        """
        if (folder := await self._folder(call)) == self._answering_folder():
            raise UserError(
                f"model {folder.name!r}: is the one that answers; load another one instead"
            )
        return Response(b"")

    def _answering_folder(self) -> Path:
        """Returns the folder that answers, or its last delta."""
        return Path(self._supervisor.model.paths[-1])

    def _versions(self) -> dict[str, tuple[Path, str]]:
        """Returns name -> folder and version of the models."""
        versions = {}
        for name, path in self.folders().items():
            try:
                text = manifest_file(path, MANIFEST, "export the model again").read_bytes()
            except OSError as error:
                raise UserError(
                    f"model {name!r}: cannot be read ({error.strerror}); try again"
                ) from None
            versions[name] = path, hashlib.sha256(text).hexdigest()
        return versions

    async def _in_thread(self, look: Callable[[], Any]) -> Any:
        return await in_thread(self._path, STALLED_S, look)

    async def _folder(self, call: Call) -> Path:
        name, folders = call.path["name"], await self._in_thread(self.folders)
        if name not in folders:
            raise RefusedError(
                404,
                f"model {name!r}: is not in the repository; POST /v2/repository/index names all",
            )
        return folders[name]


def _from_this_machine(answer: Answering) -> Answering:
    """Returns a route that refuses requests of pages in a browser, which reach the loopback address
    as any program.

    A page of another site names itself in `Origin`. One whose name was made to lead to this machine
    (DNS rebinding) has that name in `Host`.
    """

    async def guarded(call: Call) -> Response:
        origin = call.headers.get(b"origin")
        host = call.headers.get(b"host", b"localhost").decode("latin-1")
        if origin is not None:
            raise RefusedError(
                403,
                f"Origin: {origin.decode('latin-1')!r}: no page may do this; use another program",
            )
        if not _is_loopback(host):
            raise RefusedError(
                403, f"Host: {host!r} is no name of this machine for itself; ask localhost"
            )
        return await answer(call)

    return guarded


def _is_loopback(host: str) -> bool:
    """Returns whether a header `Host` names the loopback address."""
    if set(host) & set("@#/?\\"):  # a browser sends none of these
        return False
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name.rstrip(".") == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _read(body: bytes) -> dict[str, Any]:
    """Decode a body, which may be empty."""
    return decode_body(_decode, body, "a JSON object, or nothing") if body else {}
