"""What a fitter took in as numbers, which another one takes in: the rows of a log are fitted in
parts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sparrow.core.arrays import Int64s
from sparrow.data.preparation.fit import Fitter
from sparrow.features.numeric import Statistics


def fitter_state(fitter: Fitter) -> Iterator[tuple[str, str, Int64s, Int64s]]:
    """Yields what a fitter took in, for `absorb`: kind, column or table, and numbers of two
    sorts.
    """
    label_counts = np.stack([fitter.positives, fitter.labelled]).reshape(-1)
    yield "rows", "", np.append(fitter.rows, [fitter.left_out, fitter.empty]), label_counts
    for kind, by_name in (
        ("statistics", fitter.statistics),
        ("sums", fitter.sums.moments if fitter.sums else {}),
    ):
        for name, moments in by_name.items():
            limits = np.array([moments.low, moments.high]).view(np.int64)
            yield (
                kind,
                name,
                np.array([moments.count, *limits, *_limbs(moments.total)]),
                _limbs(moments.squares),
            )
    for name, values in fitter.values.items():
        yield from (
            ("values", name, run.view(np.int64), np.empty(0, np.int64)) for run in values.runs()
        )
    for name, ids in fitter.ids.items():
        yield "range", name, np.array([ids.low, ids.high]), np.array([ids.hashed], np.int64)
        yield from (
            ("ids", name, entries[0], entries[1:].reshape(-1)) for entries in ids.counts.merged()
        )


def absorb(fitter: Fitter, kind: str, name: str, a: Int64s, b: Int64s) -> None:
    """Lets a fitter take in an item of the state of another one, of other rows. The order of items
    does not matter.
    """
    if kind == "rows":
        fitter.rows = fitter.rows + a[:-2]
        fitter.left_out += int(a[-2])
        fitter.empty += int(a[-1])
        positives, labelled = b.reshape(2, *fitter.positives.shape)
        fitter.positives = fitter.positives + positives
        fitter.labelled = fitter.labelled + labelled
    elif kind in ("statistics", "sums"):
        moments = Statistics(
            int(a[0]), _integer(a[3:]), _integer(b), *a[1:3].view(np.float64).tolist()
        )
        if kind == "sums":
            assert fitter.sums is not None
            fitter.sums.moments[name].merge(moments)
        else:
            fitter.statistics[name].merge(moments)
    elif kind == "values":
        fitter.values[name].add(a.view(np.float64))
    elif kind == "range":
        fitter.ids[name].widen(int(a[0]), int(a[1]), bool(b[0]))
    else:
        fitter.ids[name].counts.add(np.vstack([a, b.reshape(3, -1)]))


def _limbs(x: int) -> Int64s:
    """Returns an integer of any size as some of 64 bits."""
    return np.frombuffer(x.to_bytes(x.bit_length() // 64 * 8 + 8, "little", signed=True), np.int64)


def _integer(limbs: Int64s) -> int:
    return int.from_bytes(limbs.tobytes(), "little", signed=True)
