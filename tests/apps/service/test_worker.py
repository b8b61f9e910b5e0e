from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette

from sparrow.apps.service import child as children
from sparrow.apps.service import worker
from sparrow.apps.service.child import Child
from sparrow.apps.service.limits import Limits
from sparrow.apps.service.settings import Settings
from sparrow.apps.service.versions import Model
from sparrow.core.errors import UserError

SERVER = worker.Server(Starlette(), Limits(), 1)


@contextmanager
def obeys(monkeypatch: pytest.MonkeyPatch, **versions: Callable[[Model], Any]) -> Iterator[Child]:
    """A worker that obeys in a thread of this process. versions: what it does."""
    service: Any = SimpleNamespace(
        versions=SimpleNamespace(
            **{name: lambda model, _, does=does: does(model) for name, does in versions.items()}
        ),
        metrics=SimpleNamespace(flush=lambda: None),
        batcher=SimpleNamespace(is_stuck=lambda: False),
    )
    threads: list[threading.Thread] = []

    def work(channel: socket.socket) -> None:
        channel.sendall(worker.line({}))
        SERVER.loop().run(worker._answer(service, channel, [], SERVER, None))

    def process(target: Any, args: tuple[socket.socket], daemon: bool) -> threading.Thread:
        threads.append(threading.Thread(target=target, args=[args[0].dup()], daemon=daemon))
        return threads[0]

    monkeypatch.setattr(children, "_processes", SimpleNamespace(Process=process))
    yield Child(work)
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_an_order_names_all_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is longer than what a socket takes at once, and than asyncio reads at once unless told."""
    got: list[Model] = []
    model = Model(
        tuple(f"/models/{'long' * 25}-{number}" for number in range(4000)), "items", "version"
    )

    async def steps(child: Child) -> None:
        await child.open()
        assert await child.ask({"prepare": model}) == {}
        child.close()

    with obeys(monkeypatch, prepare=got.append) as child:
        SERVER.loop().run(steps(child))
    assert got == [model] and len(json.dumps(model)) > 400_000


def test_to_obey_for_long_is_not_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that waits for the last answer of the old one, longer than a worker may be silent."""
    monkeypatch.setattr(children, "TICK_S", 0.05)
    monkeypatch.setattr(worker, "BEAT_S", 0.01)

    end = threading.Event()

    def flip(model: Model) -> Any:
        time.sleep(1) if model.paths == ("one",) else end.wait(60)
        return SimpleNamespace(description={"version": "new"})

    async def steps(child: Child) -> None:
        await child.open()
        assert await child.ask({"flip": Model(("one",))}) == {"version": "new"}
        asked = asyncio.ensure_future(child.ask({"flip": Model(("two",))}))
        await asyncio.wait([asked], timeout=0.2)
        assert not asked.done()
        child.close()  # the supervisor goes while the worker obeys, which then ends as ever
        end.set()
        await asyncio.gather(asked, return_exceptions=True)

    with obeys(monkeypatch, flip=flip) as child:
        SERVER.loop().run(steps(child))


@pytest.mark.multi
def test_a_port_of_grpc_that_cannot_be_had_is_said_in_a_line(
    models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tritonclient.grpc", reason="needs the extra [grpc]")

    async def start() -> None:
        with socket.create_server(("127.0.0.1", 0)) as opened:
            model = Model((str(models / "one"),))
            child = Child(worker.work, model, {}, [opened], ("192.0.2.1", 1), Limits(), Settings())
            try:
                await child.open()
                with pytest.raises(
                    UserError, match=r"192.0.2.1:1: cannot listen .*; choose another --grpc-port"
                ):
                    await asyncio.wait_for(child.ask({"listen": True}), 30)
                child.close()
                await asyncio.wait_for(child.gone(), 30)
            finally:
                child.process.kill()

    asyncio.run(start())
    assert "Traceback" not in capfd.readouterr().err
