"""Serve an exported model over HTTP: raw requests in, scores out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro


def serve(
    model: tyro.conf.Positional[Path],
    /,
    deltas: tuple[Path, ...] = (),
    port: int = 8080,
    host: str = "127.0.0.1",
    control: Path | None = None,
    name: str = "model",
    threads: int = 1,
    items: Path | None = None,
    key: str | None = None,
    users: str | None = None,
    user_key: str | None = None,
    users_ms: float = 3.0,
    users_absent: Literal["missing", "refuse"] = "missing",
    deadline_ms: float = 100.0,
    body_mb: float = 4.0,
    held_mb: float = 32.0,
    candidates: int = 5_000,
    queue: int = 256,
    connections: int = 1_000,
    extra: Literal["refuse", "ignore"] = "refuse",
) -> None:
    """Serve an exported model over HTTP, until SIGTERM or SIGINT. What was accepted before is answered.

    Args:
        model: The folder of `sparrow export`.
        deltas: Folders of `sparrow export --base`, in their order.
        port: 0 takes any that is free, and the first line says which.
        host: The address to listen at. By default only this machine can reach it. There is no password: put what checks
            callers before it.
        control: Path of a unix socket for `sparrow swap`, which only this user may open.
        name: Of the model, in the Open Inference Protocol.
        threads: How many batches are scored at a time.
        items: A Parquet file with columns of candidates, in the log's names. A request may then have --key alone.
        key: The column of candidates by which their columns are found in --items.
        users: Where columns of users are: Redis or Valkey, as redis://127.0.0.1:6379 or unix:///run/redis.sock, or a
            Parquet file. `sparrow features push` writes them.
        user_key: The column of a request by which its user is found in --users.
        users_ms: A request waits so long for --users.
        users_absent: Whether a request whose user is not found is scored with "missing" columns, or refused with 503.
        deadline_ms: A request is answered within this time of its arrival, or refused with 503.
        body_mb: The most that a request may have; else 413.
        held_mb: The most that all requests at a time may have; else 429.
        candidates: The most that a request may have; else 413.
        queue: The most requests that may wait; else 429.
        connections: The most that may be open; else 503.
        extra: "refuse" answers 400 to a column that the model does not read, "ignore" names it in the answer.
    """
    from sparrow.cli import _show
    from sparrow.serving.service.limits import Limits
    from sparrow.serving.service.lookups import Lookups
    from sparrow.serving.service.run import Place
    from sparrow.serving.service.run import serve as run

    limits = Limits(
        deadline_ms=deadline_ms,
        body_mb=body_mb,
        held_mb=held_mb,
        candidates=candidates,
        queue=queue,
        connections=connections,
        extra=extra,
    )
    lookups = Lookups(
        items=items, key=key, users=users, user_key=user_key, users_ms=users_ms, users_absent=users_absent
    )
    place = Place(host=host, port=port, control=control)
    run(
        model,
        deltas,
        place=place,
        limits=limits,
        name=name,
        threads=threads,
        lookups=lookups,
        told=lambda line: _show.out.print(line, soft_wrap=True),
    )
