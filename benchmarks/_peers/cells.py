"""Results kept by name, so that a benchmark which was stopped goes on where it was."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from sparrow.core.memory import keep_freed_memory


def cells(folder: Path, make: Callable[..., Any], jobs: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Name -> what make(*arguments) gave, a file each; as many at once as there are cores, of a thread each.

    Not for what is timed. Results must be what JSON holds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name: arguments for name, arguments in jobs.items() if not (folder / f"{name}.json").exists()}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, initializer=_one_thread) as pool:
        waiting = {pool.submit(make, *arguments): name for name, arguments in missing.items()}
        for done, future in enumerate(as_completed(waiting), 1):
            place = folder / f"{waiting[future]}.json"
            partial = place.with_suffix(".partial")
            partial.write_text(json.dumps(future.result()))
            partial.replace(place)
            print(f"\r{done} of {len(waiting)} cells", end="", file=sys.stderr, flush=True)
    if missing:
        print(file=sys.stderr)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in jobs}


def _one_thread() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
