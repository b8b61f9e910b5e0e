"""The model repository extension of the Open Inference Protocol: index, load and unload, of folders in one folder.

Source: Triton's `protocol/extension_model_repository.md`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from sparrow.core.errors import UserError
from sparrow.serving.folder import MANIFEST
from sparrow.serving.service.app import Call, Reply, Routes, json
from sparrow.serving.service.asked import decoded
from sparrow.serving.service.limits import RefusedError
from sparrow.serving.service.supervisor import Supervisor

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class Repository:
    """Model folders, of which one answers. A name from a request is compared with theirs, and never made a path.

    Args:
        path: the folder with the model folders.
        supervisor: has one of them answer.
    """

    def __init__(self, path: Path, supervisor: Supervisor) -> None:
        self._path, self._supervisor = path, supervisor

    def routes(self) -> Routes:
        """Returns the routes, for the listener of those who may change what is served."""
        model = "/v2/repository/models/{name}"
        return [
            ("POST", "/v2/repository/index", self.index),
            ("POST", model + "/load", self.load),
            ("POST", model + "/unload", self.unload),
        ]

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

    async def index(self, call: Call) -> Reply:
        """Tell of each model. Its version is the SHA-256 of its manifest."""
        answers, found = self._answering(), []
        only_ready = _read(call.body).get("ready") is True
        for name, path in self.folders().items():
            try:
                version = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
            except OSError as error:
                raise UserError(f"model {name!r}: cannot be read ({error.strerror}); try again") from None
            if path == answers:
                found.append({"name": name, "version": version, "state": "READY", "reason": ""})
            elif not only_ready:
                why = "another model answers; load this one to have it answer"
                found.append({"name": name, "version": version, "state": "UNAVAILABLE", "reason": why})
        return json(found)

    async def load(self, call: Call) -> Reply:
        """Have a model answer."""
        folder = self._folder(call)
        if given := _read(call.body).get("parameters"):
            raise UserError(f"parameters {', '.join(map(repr, given))}: are not taken; export the model with them")
        await self._supervisor.swap([folder], by="a client of --repository")
        return Reply(b"")

    async def unload(self, call: Call) -> Reply:
        """Do nothing with a model that does not answer, and refuse it for the one that does, because one has to."""
        if (folder := self._folder(call)) == self._answering():
            raise UserError(f"model {folder.name!r}: is the one that answers; load another one instead")
        return Reply(b"")

    def _answering(self) -> Path:
        """Returns the folder that answers, or its last delta."""
        return Path(self._supervisor.model.paths[-1])

    def _folder(self, call: Call) -> Path:
        name, folders = call.path["name"], self.folders()
        if name not in folders:
            raise RefusedError(404, f"model {name!r}: is not in the repository; POST /v2/repository/index names all")
        return folders[name]


def _read(body: bytes) -> dict[str, Any]:
    """Returns what a body says, which may be empty."""
    return decoded(_decode, body, "a JSON object, or nothing") if body else {}
