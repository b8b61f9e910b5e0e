"""How all ranks of a job agree: rank 0 says something to all, or all compare what they have."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sparrow.core.errors import UserError
from sparrow.distributed.world import Lobby, World

T = TypeVar("T")


def run_on_rank0(world: World | Lobby, purpose: str, find: Callable[[], T]) -> T:
    """Returns on every rank what `find` returns on rank 0; it runs only there.

    Args:
        world: the ranks.
        purpose: what it is about, for errors.
        find: returns plain data.

    Raises:
        UserError: on every rank, when `find` raises one.
    """
    if world.size == 1:
        return find()
    outcome: dict[str, Any] = {}
    if world.rank == 0:
        try:
            outcome["result"] = find()
        except UserError as error:
            outcome["error"] = str(error)
    outcome = world.broadcast(purpose, outcome, slow=True)
    if "error" in outcome:
        raise UserError(outcome["error"])
    result: T = outcome["result"]
    return result


def everywhere(world: World, purpose: str, find: Callable[[], T], name_rank: bool = False) -> T:
    """Returns what `find` returns on this rank. If it raises UserError on some ranks, all raise the
    first of these.

    name_rank: whether the error is to begin with the rank and its host.
    """
    if world.size == 1:
        return find()
    error = ""
    try:
        result = find()
    except UserError as raised:
        error = (
            f"rank {world.rank} on {socket.gethostname()}: {raised}" if name_rank else str(raised)
        )
    if first := next(filter(None, world.gathered(purpose, error)), ""):
        raise UserError(first)
    return result


def check_same(world: World, purpose: str, values: Mapping[str, Any]) -> None:
    """Raise UserError, the same on every rank, when ranks have different values; it names keys,
    ranks and values.

    values: name -> plain data. Only digests are sent, and the values only if the digests differ.
    """
    if world.size == 1:
        return
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    if len(set(world.gathered(purpose, digest))) == 1:
        return
    from sparrow.distributed.disagreement import describe  # rarely needed, and then the job ends

    raise UserError(describe(world.gathered(purpose, values)))
