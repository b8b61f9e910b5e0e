from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from sparrow.core.errors import UserError
from sparrow.serving.service import worker
from sparrow.serving.service.limits import Limits
from sparrow.serving.service.settings import Settings
from sparrow.serving.service.supervisor import Child
from sparrow.serving.service.versions import Model


@pytest.mark.multi
def test_a_port_of_grpc_that_cannot_be_had_is_said_in_a_line(models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tritonclient.grpc", reason="needs the extra [grpc]")

    async def start() -> None:
        with socket.create_server(("127.0.0.1", 0)) as opened:
            orders = worker.Orders(Model((str(models / "one"),)), ("192.0.2.1", 1), Limits(), Settings())
            child = Child(worker.work, [opened], orders)
            try:
                await child.open()
                with pytest.raises(UserError, match=r"192.0.2.1:1: cannot listen .*; choose another --grpc-port"):
                    await asyncio.wait_for(child.ask({"listen": True}), 30)
                child.close()
                await asyncio.wait_for(child.gone(), 30)
            finally:
                child.process.kill()

    asyncio.run(start())
    assert "Traceback" not in capfd.readouterr().err
