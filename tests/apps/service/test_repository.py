from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp

from sparrow.apps.service.admin import Admin, app
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.metrics import Metrics
from sparrow.apps.service.scrape import Scrape
from sparrow.apps.service.versions import Model
from sparrow.serving.folder import open_folder


class Swapped:
    """A service that answers with whatever it is given."""

    def __init__(self, folder: Path) -> None:
        self.model = Model((str(folder),))

    @property
    def folder(self) -> Path:
        return Path(self.model.paths[-1])

    async def swap(self, folders: list[Path], by: str) -> None:
        open_folder(folders[0])
        self.model = Model((str(folders[0]),))


@pytest.fixture
def place(models: Path, tmp_path: Path) -> Path:
    """A repository with two models, and what is none: a file, an empty folder, a link that leads
    out of it.
    """
    for name in ("one", "two"):
        shutil.copytree(models / name, tmp_path / "models" / name)
    (tmp_path / "models" / "file").write_text("")
    (tmp_path / "models" / "empty").mkdir()
    shutil.copytree(models / "one", tmp_path / "outside")
    (tmp_path / "models" / "loop").symlink_to(tmp_path / "models" / "loop")
    (tmp_path / "models" / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "models"


@pytest.fixture
def swapped(place: Path) -> Swapped:
    return Swapped(place / "one")


@pytest.fixture
def repository(place: Path, swapped: Swapped) -> ASGIApp:
    return operators(place, swapped)


def operators(place: Path, swapped: Any) -> ASGIApp:
    metrics = Metrics()
    return app(Admin(swapped, Limits(), metrics, Scrape(metrics.registry)), place)


def post(address: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    connection = HTTPConnection(address, timeout=60)
    try:
        connection.request("POST", path, body)
        answer = connection.getresponse()
        told = answer.read()
        return answer.status, (
            json.loads(told) if answer.headers["content-type"] == "application/json" else told
        )
    finally:
        connection.close()


@contextmanager
def listening(repository: ASGIApp) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        server = uvicorn.Server(uvicorn.Config(repository, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"127.0.0.1:{opened.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def address(repository: ASGIApp) -> Iterator[str]:
    with listening(repository) as found:
        yield found


def test_the_public_client_works_as_it_is(address: str, place: Path, swapped: Swapped) -> None:
    http = pytest.importorskip("tritonclient.http")
    client = http.InferenceServerClient(address)
    before = client.get_model_repository_index()
    assert [(one["name"], one["state"]) for one in before] == [
        ("one", "READY"),
        ("two", "UNAVAILABLE"),
    ]
    assert [one["version"] for one in before] == [
        open_folder(place / name).digest for name in ("one", "two")
    ]
    client.load_model("two")
    assert swapped.folder == place / "two"
    assert [one["state"] for one in client.get_model_repository_index()] == ["UNAVAILABLE", "READY"]
    client.unload_model("one")
    with pytest.raises(
        Exception, match="model 'two': is the one that answers; load another one instead"
    ):
        client.unload_model("two")
    with pytest.raises(Exception, match="parameters 'config': are not taken"):
        client.load_model("one", config="{}")
    with pytest.raises(Exception, match="model 'three': is not in the repository"):
        client.load_model("three")
    (place / "one" / "dense.safetensors").write_bytes(b"x")
    with pytest.raises(Exception, match="dense.safetensors: damaged"):
        client.load_model("one")
    assert swapped.folder == place / "two"
    client.close()


NAMES = [
    "..",
    ".",
    "",
    "link",
    "loop",
    "file",
    "empty",
    "one/",
    "../outside",
    "%2e%2e",
    "..%2foutside",
    "%00",
    "one%00",
    "%ff",
]


@pytest.mark.parametrize("what", ["load", "unload"])
@pytest.mark.parametrize(
    "name", [*NAMES, "/etc", "%2fetc", "a" * 5000, "One", "one%20", "outside", "%5c..%5coutside"]
)
def test_names_that_are_none(
    name: str, what: str, address: str, swapped: Swapped, place: Path
) -> None:
    """Names that lead elsewhere never reach the disk: only the repository itself is read."""
    before, seen = swapped.folder, []
    was = Path.is_file

    def is_file(path: Path, **named: Any) -> bool:
        seen.append(path)
        return was(path, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "is_file", is_file)
        status, _ = post(address, f"/v2/repository/models/{name}/{what}")
    assert status == 404 and swapped.folder == before
    assert {path.parent.name for path in seen} <= {"one", "two", "file", "empty", "loop"}
    assert {path.parents[1] for path in seen} <= {place}


def test_bodies_that_are_none(address: str, swapped: Swapped) -> None:
    for body in (b"[]", b"{", b"\xff", b"[" * 100_000):
        status, told = post(address, "/v2/repository/models/two/load", body)
        assert status == 400 and "body: " in told["error"]
    _, told = post(address, "/v2/repository/index", b'{"ready": true}')
    assert [one["name"] for one in told] == [swapped.folder.name]


@pytest.mark.parametrize("what", ["index", "models/two/load", "models/one/unload"])
@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("origin", "https://elsewhere.example", 403),
        ("origin", "null", 403),
        ("origin", "http://localhost:{port}", 403),
        ("host", "elsewhere.example", 403),
        ("host", "elsewhere.example:{port}", 403),
        ("host", "localhost.elsewhere.example", 403),
        ("host", "10.0.0.1", 403),
        ("host", "[", 403),
        ("host", "localhost@elsewhere.example", 403),
        ("host", "elsewhere.example@localhost", 403),
        ("host", "127.0.0.1#elsewhere.example", 403),
        ("host", "", 403),
        ("host", "localhost", 200),
        ("host", "LOCALHOST:{port}", 200),
        ("host", "127.0.0.1:{port}", 200),
        ("host", "[::1]:{port}", 200),
    ],
)
def test_pages_in_a_browser_are_refused(
    header: str, value: str, status: int, what: str, address: str, swapped: Swapped
) -> None:
    """Those of other sites, and those whose name was made to lead to this machine."""
    before, connection = swapped.folder, HTTPConnection(address, timeout=60)
    connection.request(
        "POST", f"/v2/repository/{what}", headers={header: value.format(port=connection.port)}
    )
    answer = connection.getresponse()
    told = answer.read().decode()
    connection.close()
    if status == 200 and what != "models/one/unload":  # the one that answers
        assert answer.status == 200
    else:
        assert answer.status == (400 if status == 200 else 403), told
    assert (header.capitalize() in told) == (status == 403)
    assert (swapped.folder == before) == (status == 403 or what != "models/two/load")


def test_a_repository_that_vanished(tmp_path: Path, swapped: Swapped) -> None:
    with listening(operators(tmp_path / "gone", swapped)) as address:
        status, told = post(address, "/v2/repository/models/one/load")
    assert (
        status == 400
        and "gone: cannot be read" in told["error"]
        and "--repository" in told["error"]
    )
