from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow.apps.service.lookups import Lookups
from sparrow.apps.service.lookups.users import Users
from sparrow.apps.service.metrics import Metrics
from sparrow.core.errors import UserError
from tests.apps.service.lookups.conftest import USERS, RedisServer


def test_a_store_gives_the_columns_that_were_put_there(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """In the order of the keys, which are numbers or their text."""
    from sparrow.apps.service.lookups.redis import push

    path = tmp_path / "users.parquet"
    pq.write_table(pa.Table.from_pylist([{"user": key, **row} for key, row in USERS.items()]), path)
    assert push(path, redis_server.url, "user") == 2
    users = Users.from_settings(Lookups(users=redis_server.url, user_key="user"), Metrics())

    async def get() -> Any:
        try:
            return await users._store.get(["8", "9", "7", 8])
        finally:
            await users.close()

    eight = {"user": 8, **USERS[8]}
    assert asyncio.run(get()) == [eight, None, {"user": 7, **USERS[7]}, eight]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"items": Path("x")}, "give --items FILE --key COLUMN"),
        ({"key": "x"}, "give --items FILE --key COLUMN"),
        ({"users": "redis://x"}, "give --users URL --user-key COLUMN"),
        ({"user_key": "x"}, "give --users URL --user-key COLUMN"),
        ({"users_ms": 0.0}, "users_ms: 0.0 is out of range"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Lookups(**settings)
