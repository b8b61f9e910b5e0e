"""The model that answers, and how another one takes its place while requests come in."""

from __future__ import annotations

import json
import math
import mmap
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from sparrow.apps.service.lookups.items import Encoded, Items
from sparrow.apps.service.request import Sources
from sparrow.core.chunk import as_bytes
from sparrow.core.errors import UserError
from sparrow.core.files import MANIFEST, manifest_file
from sparrow.serving.folder import Checked
from sparrow.serving.scorer import CHECK, Scorer, load, table_file

_SIZES, _REPEATS = (1, 32, 256), 5  # batches of the warm-up
_WEIGHT = 0.1  # of the last batch in the correction
_STEP = 1 << 22  # bytes of tables that are touched at a time

Paths = tuple[str, ...]  # of a full folder, and of the deltas above it in their order


class Model(NamedTuple):
    """What a version is made of: folders, and the file of a catalogue of items.

    version: its name, where that is known. Other files may lie at the same paths later.
    """

    paths: Paths
    items: str | None = None
    version: str = ""


class Cost:
    """Predicts the seconds of a batch of n candidates: (a + b n) times a correction. Scorer threads
    may share it.

    Args:
        fixed_s: a.
        candidate_s: b.
    """

    def __init__(self, fixed_s: float, candidate_s: float) -> None:
        self.fixed_s = fixed_s
        self.candidate_s = candidate_s
        self.correction = 1.0

    def __call__(self, n: int) -> float:
        """Returns seconds."""
        return self.correction * (self.fixed_s + self.candidate_s * n)

    def correct(self, n: int, seconds: float) -> None:
        """Correct the prediction by what a batch took."""
        # a stall is no trend
        ratio = min(max(seconds / (self.fixed_s + self.candidate_s * n), 0.25), 10.0)
        self.correction += _WEIGHT * (ratio - self.correction)

    def is_worth(self, n: int) -> bool:
        """Whether n candidates gain by sharing a batch: the fixed part is a tenth of their time.

        Else they would wait for each other and save little.
        """
        return 10 * self.fixed_s >= self.fixed_s + self.candidate_s * n


class Version:
    """A scorer, what it costs, its name, and items as it reads them.

    Args:
        scorer: it. It has its name from the SHA-256 of its folder's manifest, and of the items'
            file.
        items: a catalogue, if there is one.
    """

    def __init__(self, scorer: Scorer, items: Items | None = None) -> None:
        self.items = None if items is None else Encoded(items, scorer)
        self.scorer = scorer
        self.name = (
            scorer.folder.digest if items is None else f"{scorer.folder.digest}-{items.digest[:12]}"
        )
        self.cost = _measure_cost(scorer)
        self.sources = Sources(frozenset(scorer.encoder.sources))
        self.held = 0
        if items is not None:
            self.sources = self.sources._replace(key=items.key, items=items.columns)
        self.lists = [name for name, kind in scorer.encoder.kinds.items() if kind == "list"]

    @property
    def model(self) -> Model:
        """What it is made of."""
        paths = tuple(str(folder.path) for folder in self.scorer.stack.folders)
        return Model(paths, None if self.items is None else str(self.items.items.path), self.name)

    def is_of(self, model: Model) -> bool:
        """Whether it is made of a model."""
        return self.model == model._replace(version=model.version or self.name)

    @property
    def description(self) -> dict[str, Any]:
        """Its version, model and step, for people."""
        return {"version": self.name, "model": self.scorer.name, "step": self.scorer.step}


class Versions:
    """Gives the version that answers. All of it may be called from any thread.

    Args:
        scorer: of the first one.
        items: see `Version`.
    """

    def __init__(self, scorer: Scorer, items: Items | None = None) -> None:
        self.current = Version(scorer, items)
        self._next: Version | None = None
        self._free = threading.Condition()

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

    def prepare(self, model: Model, checked: Mapping[str, Checked] | None = None) -> None:
        """Load a model and make it ready to answer.

        Args:
            model: it.
            checked: see `open_folder`.

        Raises:
            UserError: when it is refused; see `load`.
        """
        self._next, old = None, self.current
        if old.is_of(model):
            return
        paths = model.paths
        scorer = old.scorer
        encoded = old.items
        if paths[:-1] == old.model.paths:
            scorer = scorer.updated(paths[-1], checked=checked)
        elif paths != old.model.paths or not model.version.startswith(scorer.folder.digest):
            scorer = load(
                paths[0], paths[1:], threads=scorer.threads, checked=checked, ssd=scorer.ssd
            )
        items = None if encoded is None else encoded.items
        if items is not None and model.items is not None and model.items != old.model.items:
            items = items.replaced(model.items)
        version = Version(scorer, items)
        if not version.is_of(model):
            raise UserError(
                f"{paths[-1]}: has changed since it was checked; leave folders as they are, and"
                " swap again"
            )
        self._next = version

    def flip(self, model: Model, checked: Mapping[str, Checked] | None = None) -> Version:
        """Answer with a model from now on. Returns it when no other answers any more.

        Args:
            model, checked: as for `prepare`, which is done if it was not.
        """
        old = self.current
        if old.is_of(model):
            return old
        if self._next is None or not self._next.is_of(model):
            self.prepare(model, checked)
        assert self._next is not None
        with self._free:
            self.current = self._next
            self._next = None
            self._free.wait_for(lambda: not old.held)
        return self.current


def touch(scorer: Scorer, bytes_s: float) -> None:
    """Read a byte of each page of a model's tables in memory, so that the first requests need not
    wait for a disk.

    Only the process that checks a model does so. In a worker it would fill tables of pages, and to
    give those of the old model back keeps all of its threads waiting: 25 to 40 ms for 1 GB.

    Args:
        scorer: the model.
        bytes_s: the most bytes in a second.
    """
    on_ssd = set[str]()
    for rows in scorer.on_ssd:
        on_ssd |= set(map(table_file, rows.names))
    for name, stacked in scorer.stack.rows.items():
        if name in on_ssd:
            continue
        for tensor in (*stacked.fields.values(), *stacked.above.values()):
            for part in as_bytes(tensor).split(_STEP):
                part[:: mmap.PAGESIZE].sum()  # torch lets other threads go on meanwhile
                time.sleep(len(part) / bytes_s)


def is_delta(folder: str | Path) -> bool:
    """Whether a folder says that it follows another. A damaged one says nothing, and `load` words
    the error.
    """
    try:
        return (
            json.loads(manifest_file(Path(folder), MANIFEST, "").read_bytes())["parent"] is not None
        )
    except (OSError, ValueError, LookupError, TypeError):
        return False


def stack_paths(current: Paths, folders: Sequence[str]) -> Paths:
    """Returns the paths of a model: folders that begin with a full one stand alone, deltas follow
    what is there.
    """
    if folders and not is_delta(folders[0]):
        return tuple(folders)
    return (*current, *(folder for folder in folders if folder not in current))


def _measure_cost(scorer: Scorer) -> Cost:
    """Measure what a batch costs, with the golden rows of the model.

    Other programs only add to a time, so the least counts. Sizes take turns, so that a stall does
    not meet all tries of one size: with small batches slower than large ones, candidates would seem
    to cost nothing.
    """
    rows = pq.ParquetFile(scorer.folder.path / CHECK).read()
    columns = rows.select(list(scorer.encoder.sources)).to_pydict()
    batches = [
        {name: (values * size)[:size] for name, values in columns.items()} for size in _SIZES
    ]
    times = [math.inf] * len(_SIZES)
    for _ in range(_REPEATS):
        for i, batch in enumerate(batches):
            begun = time.perf_counter()
            scorer.score(batch)
            times[i] = min(times[i], time.perf_counter() - begun)
    candidate_s = max((times[-1] - times[0]) / (_SIZES[-1] - _SIZES[0]), 1e-9)
    return Cost(max(times[0] - candidate_s, 1e-6), candidate_s)
