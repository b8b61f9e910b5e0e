"""Results kept by name, so that a benchmark which was stopped goes on where it was."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from _peers.tiny import TINY

import sparrow
from sparrow.core.memory import keep_freed_memory


def kept(folder: Path, name: str, make: Callable[..., Any], *arguments: Any, of: Any = None) -> Any:
    """What make(*arguments) gave, from its file where there is one. of: what it depends on besides.

    A file belongs to its arguments and to the package's sources: of other ones nothing is taken.
    """
    place = _place(folder, name, arguments, of)
    if not place.exists():
        _write(place, make(*arguments))
    return json.loads(place.read_text())


def cells(
    folder: Path, make: Callable[..., Any], jobs: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Name -> what make(*arguments) gave; as many at once as there are cores, of a thread each: not
    for what is timed.

    Results must be what JSON holds.
    """
    places = {name: _place(folder, name, arguments) for name, arguments in jobs.items()}
    if TINY:  # processes would take longer to begin than the cells
        return {name: kept(folder, name, make, *arguments) for name, arguments in jobs.items()}
    with ProcessPoolExecutor(
        os.cpu_count(), multiprocessing.get_context("spawn"), initializer=_one_thread
    ) as pool:
        waiting = {
            pool.submit(make, *jobs[name]): place
            for name, place in places.items()
            if not place.exists()
        }
        for done, future in enumerate(as_completed(waiting), 1):
            _write(waiting[future], future.result())
            print(f"{done} of {len(waiting)} cells", file=sys.stderr, flush=True)
    return {name: json.loads(place.read_text()) for name, place in places.items()}


def _place(folder: Path, name: str, *what: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return (
        folder / f"{name}-{hashlib.sha256(f'{_sources()} {what!r}'.encode()).hexdigest()[:8]}.json"
    )


def _write(place: Path, found: Any) -> None:
    partial = place.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.replace(place)


@functools.cache
def _sources() -> str:
    """A hash of the package."""
    found = hashlib.sha256()
    root = Path(sparrow.__file__).parent
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _one_thread() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
