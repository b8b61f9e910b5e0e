"""The model that answers, and how another one takes its place while requests come in."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from sparrow.core.errors import UserError
from sparrow.serving.folder import MANIFEST
from sparrow.serving.scorer import CHECK, Scorer, load

_SIZES, _REPEATS = (1, 32, 256), 5  # batches of the warm-up
_WEIGHT = 0.1  # of the last batch in the correction


class Cost:
    """Predicts the seconds of a batch of n candidates: (a + b n) times a correction. Scorer threads may share it.

    Args:
        fixed_s: a.
        candidate_s: b.
    """

    def __init__(self, fixed_s: float, candidate_s: float) -> None:
        self.fixed_s, self.candidate_s, self.correction = fixed_s, candidate_s, 1.0

    def __call__(self, n: int) -> float:
        """Returns seconds."""
        return self.correction * (self.fixed_s + self.candidate_s * n)

    def seen(self, n: int, seconds: float) -> None:
        """Correct the prediction by what a batch took."""
        ratio = min(max(seconds / (self.fixed_s + self.candidate_s * n), 0.25), 10.0)  # a stall is no trend
        self.correction += _WEIGHT * (ratio - self.correction)

    def is_worth(self, n: int) -> bool:
        """Whether n candidates gain by sharing a batch: the fixed part is a tenth of their time.

        Else they would wait for each other and save little.
        """
        return 10 * self.fixed_s >= self.fixed_s + self.candidate_s * n


class Version:
    """A scorer, what it costs, and its name: the SHA-256 of its folder's manifest."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, self.name, self.cost = scorer, scorer.folder.digest, _warmed(scorer)
        self.sources, self.held = frozenset(scorer.encoder.sources), 0
        self.lists = [name for name, kind in scorer.encoder.kinds.items() if kind == "list"]


class Versions:
    """Gives the version that answers. All of it may be called from any thread.

    Args:
        scorer: of the first one.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.current = Version(scorer)
        self._free = threading.Condition()
        self._one = threading.Lock()

    def hold(self, requests: int) -> Version:
        """Returns the version to answer some requests with. `release` it for each of them."""
        with self._free:
            self.current.held += requests
            return self.current

    def release(self, version: Version) -> None:
        """Say that an answer of a version has been written, or will never be."""
        with self._free:
            version.held -= 1
            if not version.held:
                self._free.notify_all()

    def swap(self, folder: str | Path) -> Version:
        """Put another model, or a delta of the current one, in its place. Returns it when no other answers any more.

        It is loaded, checked and warmed up by this thread, which `in_background` should have made. When it is refused,
        the old one stays.

        Args:
            folder: what `sparrow export` wrote.

        Raises:
            UserError: when another swap is under way, or when the folder is refused; see `load`, `Scorer.updated`.
        """
        if not self._one.acquire(blocking=False):
            raise UserError(f"{folder}: another model is being loaded; try again when it has answered")
        try:
            old, scorer = self.current, self.current.scorer
            made = scorer.updated(folder) if _is_delta(folder) else load(folder, threads=scorer.threads)
            if made is scorer:
                return old
            new = Version(made)
            with self._free:
                self.current = new
                self._free.wait_for(lambda: not old.held)
            return new
        finally:
            self._one.release()


def in_background(work: Callable[[], None]) -> None:
    """Do work in a thread of the lowest priority, and so in threads that it starts."""

    def run() -> None:
        if sys.platform == "linux":  # elsewhere a priority is of the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        work()

    threading.Thread(target=run, daemon=True).start()


def _is_delta(folder: str | Path) -> bool:
    """Whether a folder says that it follows another. A damaged one says nothing, and `load` words the error."""
    try:
        return json.loads((Path(folder) / MANIFEST).read_bytes())["parent"] is not None
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _warmed(scorer: Scorer) -> Cost:
    """Returns what a batch costs, of the rows that are kept with the model, in the middle of some tries."""
    kept = pq.ParquetFile(scorer.folder.path / CHECK).read()
    columns = kept.select(list(scorer.encoder.sources)).to_pydict()
    times = []
    for size in _SIZES:
        some = {name: (values * size)[:size] for name, values in columns.items()}
        taken = []
        for _ in range(_REPEATS):
            begun = time.perf_counter()
            scorer.score(some)
            taken.append(time.perf_counter() - begun)
        times.append(float(np.median(taken)))
    candidate_s = max((times[-1] - times[0]) / (_SIZES[-1] - _SIZES[0]), 1e-9)
    return Cost(max(times[0] - candidate_s, 1e-6), candidate_s)
