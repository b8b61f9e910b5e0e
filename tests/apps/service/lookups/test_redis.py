from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("redis", reason="needs the extra [redis]")

import redis

from sparrow.apps.service.lookups import Lookups
from sparrow.apps.service.lookups import users as module
from sparrow.apps.service.lookups.redis import Redis, push
from sparrow.apps.service.lookups.users import FAILURES, Users
from sparrow.apps.service.metrics import Metrics
from sparrow.cli import main
from sparrow.core.errors import UserError
from sparrow.serving import Scorer
from tests.apps.service.asking import asked as ask
from tests.apps.service.lookups.conftest import USERS, RedisServer
from tests.apps.service.lookups.test_users import asked, counts
from tests.apps.service.test_batcher import CLOSE, OF_USER, request
from tests.apps.service.test_run import Server
from tests.pace import Deadline


def users(url: str, ms: float = 10_000.0) -> Users:
    return Users.from_settings(Lookups(users=url, user_key="user", users_ms=ms), Metrics())


async def states(of: Users, count: int = 1, key: Any = 7) -> list[str | None]:
    """What the store has at some requests, one after another."""
    return [(await of.fill_columns(asked(user={"user": key})))[1] for _ in range(count)]


@pytest.fixture
def filled(redis_server: RedisServer, tmp_path: Path) -> RedisServer:
    """A server with users."""
    path = tmp_path / "users.parquet"
    pq.write_table(pa.Table.from_pylist([{"user": key, **row} for key, row in USERS.items()]), path)
    push(path, redis_server.url, "user")
    return redis_server


@pytest.mark.parametrize(
    "value", [b"", b"{", b"[1]", b"7", b'{"a": {"b": 1}}', b'{"a": [[1]]}', b"\xff", b"[" * 10**5]
)
def test_a_damaged_value_is_that_of_nobody(value: bytes, filled: RedisServer) -> None:
    with redis.Redis.from_url(filled.url) as client:
        client.set("sparrow:user:7", value)
        client.rpush("sparrow:user:9", "a list of Redis")

    async def run() -> None:
        of = users(filled.url)
        assert await states(of) == ["absent"] and counts(of) == {"damaged": 1}
        assert await states(of, key=8) == ["found"] and await states(of, key=9) == ["absent"]
        await of.close()

    asyncio.run(run())


def test_a_server_that_stops_and_comes_again(
    filled: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REST_S", 3600.0)

    async def run() -> None:
        of = users(filled.url)
        assert await states(of, 2) == ["found"] * 2
        filled.stop()
        assert await states(of, FAILURES + 2) == ["failed"] * (FAILURES + 2)
        assert counts(of) == {"found": 2, "failed": FAILURES, "skipped": 2}
        filled.start()  # without what it had
        assert await states(of) == ["failed"]
        of._retry_at = 0.0
        assert await states(of, 2) == ["absent"] * 2
        await of.close()

    asyncio.run(run())


def test_an_answer_that_is_late_is_nobodys(
    filled: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stalls costs the share of the deadline; afterwards no request gets what another
    had asked for.
    """
    monkeypatch.setattr(module, "REST_S", 0.0)

    async def run() -> None:
        of = users(filled.url)
        assert await states(of) == ["found"]
        filled.hold(True)
        of._lookups = Lookups(users=filled.url, user_key="user", users_ms=30)
        begun, deadline = time.perf_counter(), Deadline(5)
        assert await asyncio.gather(*(states(of) for _ in range(8))) == [["failed"]] * 8
        assert time.perf_counter() - begun > 0.029 and not deadline.over, deadline
        filled.hold(False)
        of._lookups = Lookups(users=filled.url, user_key="user", users_ms=10_000)
        for _ in range(20):
            found, state = await of.fill_columns(asked(user={"user": 8}))
            assert state == "found" and found.user["cat_0"] == "c0_2"
        await of.close()

    asyncio.run(run())


def test_a_server_that_takes_connections_and_never_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"redis://127.0.0.1:{listening.getsockname()[1]}"

        async def run() -> None:
            of = users(url, ms=30)
            assert await states(of, FAILURES + 1) == ["failed"] * (FAILURES + 1)
            assert counts(of) == {"failed": FAILURES, "skipped": 1}
            await of.close()

        asyncio.run(run())


def test_other_urls() -> None:
    with pytest.raises(UserError, match=r"http://x: .*; give redis://HOST:PORT or unix:///PATH"):
        Redis("http://user:secret@x", "user")


def test_users_that_were_pushed_score_as_in_the_request(
    redis_server: RedisServer,
    rows: list[dict[str, Any]],
    scorer: Scorer,
    serve: Callable[..., Any],
    tmp_path: Path,
) -> None:
    stored = {row["user"]: {name: row[name] for name in OF_USER} for row in rows}
    pq.write_table(pa.Table.from_pylist(list(stored.values())), tmp_path / "users.parquet")
    assert (
        main(
            [
                "features",
                "push",
                str(tmp_path / "users.parquet"),
                "--to",
                redis_server.url,
                "--key",
                "user",
            ]
        )
        == 0
    )
    service = serve(lookups=Lookups(users=redis_server.url, user_key="user", users_ms=60_000))

    async def run() -> None:
        for row in rows[:4]:
            one = request([row], [0])
            got = await ask(service, "/rank", one | {"user": {"user": row["user"], "num_1": 0.5}})
            want = scorer.rank(stored[row["user"]] | {"num_1": 0.5}, one["candidates"])
            assert got.status == 200 and got.json["users"] == "found"
            assert np.abs(np.array(got.json["scores"]["label"]) - want[:, 0]).max() <= CLOSE
        await service.users.close()

    asyncio.run(run())


@pytest.mark.multi
def test_a_service_that_looks_up_both(
    redis_server: RedisServer,
    models: Path,
    rows: list[dict[str, Any]],
    scorer: Scorer,
    tmp_path: Path,
) -> None:
    """As a person starts it. A request has two keys alone."""
    stored, items = {row["user"]: row for row in rows}, {row["item"]: row for row in rows}
    of_items = [name for name in rows[0] if name not in OF_USER]
    for name, of, columns in (("users", stored, OF_USER), ("items", items, of_items)):
        table = pa.Table.from_pylist(
            [{column: row[column] for column in columns} for row in of.values()]
        )
        pq.write_table(table, tmp_path / f"{name}.parquet")
    push(tmp_path / "users.parquet", redis_server.url, "user")
    options = [
        "--items",
        str(tmp_path / "items.parquet"),
        "--key",
        "item",
        "--users",
        redis_server.url,
    ]
    options += ["--user-key", "user", "--users-ms", "60000", "--deadline-ms", "60000"]
    server = Server(models / "one", *options)
    try:
        for user, keys in zip(
            list(stored)[:5], ([1, 2], [3], list(items), [2, 1], [1]), strict=True
        ):
            keys = [key for key in keys if key in items]
            got = server.ask("/rank", {"user": {"user": user}, "candidates": {"item": keys}})
            assert got.status == 200, got.body
            candidates = [{name: items[key][name] for name in of_items} for key in keys]
            want = scorer.rank({name: stored[user][name] for name in OF_USER}, candidates)
            assert (
                np.abs(np.array(got.json["scores"]["label"]) - want[:, 0]).max(initial=0) <= CLOSE
            )
        assert server.end() == (0, "")
    finally:
        server.process.kill()


# -- sparrow features push -------------------------------------------------------------------------


def test_push_writes_json_that_goes_in_time(redis_server: RedisServer, tmp_path: Path) -> None:
    columns = {
        "id": ["a", "b"],
        "x": [float("nan"), 2.5],
        "n": [2**60, None],
        "l": [["ü"], None],
        "f": [True, False],
    }
    table = pa.table({name: values * 1500 for name, values in columns.items()})
    table = table.append_column("d", table["id"].dictionary_encode())
    pq.write_table(table, tmp_path / "users.parquet")
    told: list[Any] = []
    count = push(
        tmp_path / "users.parquet", redis_server.url, "id", 100, lambda *of: told.append(of)
    )
    assert count == 3000 and told == [("users written", done, 3000) for done in (1000, 2000, 3000)]
    with redis.Redis.from_url(redis_server.url) as client:
        value = client.get("sparrow:id:a")
        assert value == f'{{"id":"a","x":null,"n":{2**60},"l":["ü"],"f":true,"d":"a"}}'.encode()
        assert 90 < client.ttl("sparrow:id:a") <= 100 and client.dbsize() == 2


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"users": [1]}, "users.parquet: no column 'user'; did you mean 'users'?"),
        ({"user": [1, None]}, "users.parquet: 'user' of row 1 is missing; give each row a key"),
        ({"user": [0.5]}, "column 'user', row 0: 0.5 .* is not an id"),
        (
            {"user": [1], "x": [b"x"]},
            "column 'x' is binary; make it numbers, text or lists of them",
        ),
        ({"user": [1], "x": [[[1]]]}, "column 'x' is list<.*list.*; make it numbers"),
        ({"user": [1], "x": [{"a": 1}]}, "column 'x' is struct<a: int64>; make it numbers"),
        ({"user": [1], "x": pa.array([0], pa.timestamp("s"))}, "column 'x' is timestamp"),
    ],
)
def test_push_refuses(
    columns: dict[str, Any], says: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "users.parquet")
    with pytest.raises(UserError, match=says):
        push(tmp_path / "users.parquet", redis_server.url, "user")
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.dbsize() == 0


def test_push_without_a_server_or_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"user": [1]}), tmp_path / "users.parquet")
    nobody = f"unix://user:secret@{tmp_path}/none.sock"
    assert (
        main(["features", "push", str(tmp_path / "users.parquet"), "--to", nobody, "--key", "user"])
        == 2
    )
    said = capsys.readouterr().err
    assert (
        "check that a server is there and takes writes" in said
        and "secret" not in said
        and said.count("\n") == 1
    )
    assert (
        main(["features", "push", str(tmp_path / "none.parquet"), "--to", nobody, "--key", "user"])
        == 2
    )
    assert "none.parquet" in capsys.readouterr().err
    with pytest.raises(UserError, match="give a Parquet file and redis://HOST:PORT"):
        push(tmp_path / "users.parquet", "http://x", "user")
    assert main(["features", "push", "x", "--to", nobody, "--key", "user", "--ttl", "0"]) == 2
