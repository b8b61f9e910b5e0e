"""Write columns of users to the store that a service looks them up in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro


def features(
    action: tyro.conf.Positional[Literal["push"]],
    path: tyro.conf.Positional[Path],
    /,
    to: str,
    key: str,
    ttl: int | None = None,
) -> None:
    """Write columns of users to the store that a service looks them up in.

    Args:
        action: "push" writes each row of a Parquet file under its key, in the place of what is
            there.
        path: The file. Its columns have the names of the log's.
        to: A server of Redis or Valkey, such as redis://127.0.0.1:6379 or unix:///run/redis.sock.
        key: The column of the keys, as in `sparrow serve --user-key`.
        ttl: Seconds after which the server forgets what was written; by default never.
    """
    from sparrow.apps.service.lookups.redis import push
    from sparrow.cli import _show
    from sparrow.core.errors import require

    require(least=1, ttl=ttl)
    with _show.progress_bar() as progress:
        count = push(path, to, key, ttl, progress)
    _show.out.print(f"{count:,} users written", soft_wrap=True)
