"""Ways that take turns, so that other programs slow all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from _peers.tiny import sized

TURN_S = 0.01


def turns(
    ways: Mapping[str, Callable[[], Any]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    turn_s: float = TURN_S,
) -> dict[str, list[float]]:
    """Microseconds of a call. A turn is some calls in a row, as in a server that is asked; one
    where turn_s is 0.
    """
    calls = {}
    for name, way in ways.items():
        way()
        begun = clock()
        way()
        calls[name] = sized(max(1, round(turn_s / (clock() - begun))), 1)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + sized(seconds, 0)
    while time.perf_counter() < end or len(next(iter(taken.values()))) < sized(5, 1):
        for name, way in ways.items():
            way()  # brings its code, tables and weights back into the processor's caches
            begun = clock()
            for _ in range(calls[name]):
                way()
            taken[name].append(1e6 * (clock() - begun) / calls[name])
    return taken
