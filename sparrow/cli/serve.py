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
    grpc_port: int | None = None,
    admin_host: str = "127.0.0.1",
    admin_port: int = 8082,
    control: Path | None = None,
    watch: Path | None = None,
    repository: Path | None = None,
    token_file: Path | None = None,
    name: str = "model",
    workers: int = 1,
    threads: int = 1,
    batching: Literal["on", "off"] = "on",
    items: Path | None = None,
    key: str | None = None,
    users: str | None = None,
    user_key: str | None = None,
    users_ms: float = 3.0,
    users_absent: Literal["missing", "refuse"] = "missing",
    ssd: Path | None = None,
    ssd_cache_mb: float = 1024.0,
    ssd_least_mb: float = 64.0,
    ssd_decoded: bool = False,
    in_memory: tuple[str, ...] = (),
    pooled_mb: float = 0.0,
    pooled_length: int = 32,
    pooled_order: Literal["exact", "any"] = "exact",
    deadline_ms: float = 100.0,
    body_mb: float = 4.0,
    held_mb: float = 32.0,
    candidates: int = 5_000,
    queue: int = 256,
    columns: int = 1_000,
    list_values: int = 10_000,
    all_values: int = 200_000,
    connections: int = 1_000,
    extra: Literal["refuse", "ignore"] = "refuse",
    access_log: bool = False,
    served_log: Path | None = None,
    sample: float = 0.01,
) -> None:
    """Serve an exported model over HTTP, until SIGTERM or SIGINT. What was accepted before is answered.

    Args:
        model: The folder of `sparrow export`.
        deltas: Folders of `sparrow export --base`, in their order.
        port: 0 takes any that is free, and the first line says which.
        host: The address to listen at. By default only this machine can reach it.
        grpc_port: Where the Open Inference Protocol is spoken over gRPC too. It needs the extra [grpc].
        admin_host: The address of --admin-port. Who reaches it needs no token.
        admin_port: For operators: /metrics. 0 takes any that is free.
        control: Path of a unix socket for `sparrow swap`, which only this user may open.
        watch: A folder. Models and deltas that appear in it are answered with.
        repository: A folder of models. Whoever reaches --admin-port may have one of them answer, by its name.
        token_file: Holds the token that callers have to send as `Authorization: Bearer TOKEN`, for all but health.
        name: Of the model, in the Open Inference Protocol.
        workers: Processes that answer. They share the memory of the model's tables.
        threads: How many batches each of them scores at a time.
        batching: "off" scores each request alone.
        items: A Parquet file with columns of candidates, in the log's names. A request may then have --key alone.
        key: The column of candidates by which their columns are found in --items.
        users: Where columns of users are: Redis or Valkey, as redis://127.0.0.1:6379 or unix:///run/redis.sock.
            `sparrow features push` writes them.
        user_key: The column of a request by which its user is found in --users.
        users_ms: A request waits so long for --users.
        users_absent: Whether a request whose user is not found is scored with "missing" columns, or refused with 503.
        ssd: A folder on an SSD. Large tables are written there as blocks, once, and their rows are read from there.
        ssd_cache_mb: Of rows of --ssd in memory, for all workers together.
        ssd_least_mb: Smaller tables stay in memory.
        ssd_decoded: Write rows in fp32, whatever their format is: less work for each read, more room in both places.
        in_memory: Tables that stay in memory, as those of candidates should.
        pooled_mb: Of vectors of whole lists of --ssd in memory, for all workers together. 0 keeps none.
        pooled_length: Lists with fewer ids have no such vector.
        pooled_order: "any" takes the vector of a list for one with the same ids and weights in another order, whose sum
            may differ in the last bit.
        deadline_ms: A request is answered within this time of its arrival, or refused with 503.
        body_mb: The most that a request may have; else 413.
        held_mb: The most that all requests of a worker at a time may have; else 429.
        candidates: The most that a request may have; else 413.
        queue: The most requests that may wait in a worker; else 429.
        columns: The most that a request may have; else 413.
        list_values: The most that a list may have; else 413.
        all_values: The most that all lists of a request may have; else 413.
        connections: The most that a worker may have open; else 503.
        extra: "refuse" answers 400 to a column that the model does not read, "ignore" names it in the answer.
        access_log: Write a line of JSON to standard error for each answer.
        served_log: A folder for Parquet files with rows that were scored, in the log's own columns, and their scores.
        sample: The share of requests in the served log.
    """
    from sparrow.cli import _show
    from sparrow.serving.service import token
    from sparrow.serving.service.limits import Limits
    from sparrow.serving.service.logs import Logs
    from sparrow.serving.service.lookups import Lookups
    from sparrow.serving.service.run import Place
    from sparrow.serving.service.run import serve as run
    from sparrow.serving.service.settings import Settings
    from sparrow.serving.ssd import Ssd

    settings = Settings(
        name=name,
        workers=workers,
        threads=threads,
        is_batching=batching == "on",
        ssd=None
        if ssd is None
        else Ssd(
            folder=ssd,
            cache_mb=ssd_cache_mb,
            in_memory=in_memory,
            least_mb=ssd_least_mb,
            decoded=ssd_decoded,
            pooled_mb=pooled_mb,
            pooled_length=pooled_length,
            any_order=pooled_order == "any",
        ),
        token=token.read(token_file) if token_file else None,
        logs=Logs(access=access_log, served=served_log, sample=sample),
        lookups=Lookups(
            items=items, key=key, users=users, user_key=user_key, users_ms=users_ms, users_absent=users_absent
        ),
    )
    limits = Limits(
        deadline_ms=deadline_ms,
        body_mb=body_mb,
        held_mb=held_mb,
        candidates=candidates,
        queue=queue,
        columns=columns,
        list_values=list_values,
        all_values=all_values,
        connections=connections,
        extra=extra,
    )
    place = Place(
        host=host,
        port=port,
        grpc_port=grpc_port,
        admin_host=admin_host,
        admin_port=admin_port,
        control=control,
        watch=watch,
        repository=repository,
    )
    run(
        model,
        deltas,
        place=place,
        limits=limits,
        settings=settings,
        told=lambda line: _show.out.print(line, soft_wrap=True),
    )
