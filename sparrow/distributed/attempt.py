"""Which ranks form one attempt at a job that torchrun has started, perhaps not for the first
time.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from sparrow.core.errors import UserError, listed


def agree(store: dist.Store, rank: int, size: int, timeout: timedelta) -> int:
    """Returns a number for this attempt that no other attempt had, the same on all ranks; UserError
    when not all come.

    torchrun's own count does not help: an agent counts only the failures of its own ranks, and an
    agent that was started again begins at 0. The store may still hold what earlier attempts left.
    So rank 0 takes a new number, every rank answers with a word of its own, and rank 0 repeats the
    words that it heard. A rank that does not find its own among them has met an attempt that is
    over, and waits for the next number.
    """
    store = dist.PrefixStore("sparrow/attempt", store)
    asking = _asking(timeout.total_seconds())
    if rank == 0:
        number = store.add("number", 1)
        missing = list(range(1, size))
        for _ in asking:
            missing = [r for r in missing if not store.check([f"{number}/{r}"])]
            if not missing:
                words = store.multi_get([f"{number}/{r}" for r in range(1, size)])
                store.set(f"{number}/heard", json.dumps([word.decode() for word in words]))
                return number
        who = f"rank{'s' if len(missing) > 1 else ''} {listed([*map(str, missing)])}"
        raise UserError(
            f"not all of {size} ranks came within {timeout.total_seconds():g} s: {who} did not"
        )
    word = uuid.uuid4().hex
    answered = 0
    for _ in asking:
        number = store.add("number", 0)
        if number > answered:
            store.set(f"{number}/{rank}", word)
            answered = number
        elif (
            number
            and store.check([f"{number}/heard"])
            and word in json.loads(store.get(f"{number}/heard"))
        ):
            return number
    raise UserError(
        f"not all of {size} ranks came within {timeout.total_seconds():g} s: rank 0 did not"
    )


def _asking(limit_s: float) -> Iterator[None]:
    """Yields again and again, with longer and longer pauses, because hundreds of ranks ask one
    store.
    """
    end = time.monotonic() + limit_s
    pause = 0.01
    while time.monotonic() < end:
        yield
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
