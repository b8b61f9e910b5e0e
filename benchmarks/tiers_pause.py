"""How long training waits for a checkpoint of a table on an SSD: a part of tiers.py."""

from __future__ import annotations

import hashlib
import mmap
import os
import statistics
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from _peers.targets import print_target
from tiers_train import BATCH, PIECE, QUICK, WINDOW, Case, Side, filled_file

from sparrow import checkpoint
from sparrow.checkpoint.removal import removed
from sparrow.core import Chunk
from sparrow.core.memory import keep_freed_memory
from sparrow.embeddings import Placement, RowRecords
from sparrow.embeddings.stores import External
from sparrow.kernels.formats import bf16

STEPS = 8  # of training between two checkpoints
KEEP = 2


def digest(fields: Iterable[dict[str, torch.Tensor]]) -> str:
    """Returns a digest of rows that come in pieces."""
    sums: dict[str, Any] = {}
    for piece in fields:
        for name, of in piece.items():
            sums.setdefault(name, hashlib.sha256()).update(
                of.contiguous().view(torch.uint8).numpy().data
            )
    return str({name: sum.hexdigest() for name, sum in sorted(sums.items())})


def check(side: Side, directory: Path, folder: Path) -> None:
    """Check that the last checkpoint has all rows as they are now, in their order and for a run
    that goes on.
    """
    (store,) = side.stores
    now = digest(
        store.read(slice(n, min(n + PIECE, store.rows))) for n in range(0, store.rows, PIECE)
    )
    saved = checkpoint.load(directory)
    place = [(store.component.name, (0, store.rows), (0, store.dim))]
    assert digest(chunk.fields for chunk in saved.chunks(place)) == now, (
        "the checkpoint has other rows"
    )
    (part,) = saved.external()
    store.close()  # else the file is in use
    again: Any = RowRecords(
        store.component, part.seed, placement=Placement(folder=folder, window=WINDOW)
    )
    again.store.name_file(folder)
    assert again.go_on(part), "a run cannot go on with it"
    rows = (
        again.store.read(slice(n, min(n + PIECE, store.rows))) for n in range(0, store.rows, PIECE)
    )
    assert digest(rows) == now, "a run goes on with other rows"
    again.store.close()
    print(f"all {store.rows:,} rows are in the checkpoint, to the bit")


def pause(side: Side, directory: Path, step: int) -> tuple[float, int]:
    """Write a checkpoint as the loop of training does. Returns the seconds and the bytes of it."""
    (store,) = side.stores
    start = time.perf_counter()
    saved: Iterable[Chunk | External] = (part for of in side.tables for part in of.saved())
    parts = {"dense": side.model.state_dict()}
    made = checkpoint.save(
        directory, step, identity={}, state={}, parts=parts, chunks=saved, keep=KEEP
    )
    store.keep_only(checkpoint.steps(directory), step)
    return time.perf_counter() - start, sum(path.stat().st_size for path in made.iterdir())


def background(side: Side, directory: Path, step: int) -> tuple[float, float]:
    """Write a checkpoint beside training, as the loop does with `checkpoint.background`.

    Returns the seconds that training waits, and those that it loses by all of it, beside as many
    steps alone.
    """
    (store,) = side.stores
    alone = side.steps(STEPS)[0] / STEPS
    start = time.perf_counter()
    saved = [part.copied() for of in side.tables for part in of.saved()]
    parts = {"dense": {name: of.clone() for name, of in side.model.state_dict().items()}}
    kwargs: dict[str, Any] = {
        "identity": {},
        "state": {},
        "parts": parts,
        "chunks": saved,
        "keep": KEEP,
    }
    writer = threading.Thread(target=checkpoint.save, args=(directory, step), kwargs=kwargs)
    writer.start()
    waited, trained, made = time.perf_counter() - start, 0.0, 0
    while writer.is_alive():
        trained += side.steps(1)[0]  # without the time in which its batch is made
        made += 1
    writer.join()
    last = time.perf_counter()
    store.keep_only(checkpoint.steps(directory), step)
    waited += time.perf_counter() - last
    return waited, waited + trained - made * alone


def plain(path: Path, data: memoryview, flags: int) -> float:
    """Returns the seconds in which a file of these bytes is written, from its beginning to its end,
    and synced.

    flags: os.O_DIRECT to write past the page cache, as a checkpoint does.
    """
    start = time.perf_counter()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    for first in range(0, len(data), 16 << 20):
        os.write(file, data[first : first + (16 << 20)])
    os.fsync(file)
    os.close(file)
    taken = time.perf_counter() - start
    path.unlink()
    return taken


def random_bytes(size: int) -> memoryview:
    """Returns so many random bytes, rounded up to whole pages, in memory from which O_DIRECT can
    write.
    """
    made = memoryview(mmap.mmap(-1, -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE))
    torch.frombuffer(made, dtype=torch.uint8).random_(generator=torch.Generator().manual_seed(3))
    return made


def run(folder: Path, quick: bool) -> None:
    """Measure and print.

    Args:
        folder: on the SSD.
        quick: a small table.
    """
    keep_freed_memory()  # as `sparrow train` does
    rows, frames, turns, rest_s = (
        (500_000, 15_000_000, 2, 0.0) if quick else (20_000_000, 300_000_000, 12, 0.3)
    )
    near, batch = bf16.Config(rounding="nearest"), QUICK if quick else BATCH
    case = Case(rows=rows, frames=frames, lookups=1, skew=1.05, format=near, batch=batch)
    print(
        f"\na checkpoint each {STEPS} steps, beside a plain write of as many bytes; {case}",
        flush=True,
    )
    side, directory = Side(case, folder), folder / "checkpoints"
    store = filled_file(case, folder).under(side)
    store.folder, store.has_name = folder, True
    taken, beside, size = [], [], 0
    for turn in range(turns + KEEP):  # from then on each checkpoint removes one
        side.steps(STEPS)
        data, before = random_bytes(size), 0.0
        for one in ("plain", "own") if turn % 2 else ("own", "plain"):
            removed()
            os.sync()
            time.sleep(rest_s)  # the disk discards what was removed
            if one == "own":
                own, size = pause(side, directory, 2 * turn)
            else:
                before = min(
                    plain(folder / "plain", data, flags)
                    for flags in (0, getattr(os, "O_DIRECT", 0))
                )
        if turn >= KEEP:
            taken.append((own, before))
            beside.append(
                [seconds / before for seconds in background(side, directory, 2 * turn + 1)]
            )
    pause(side, directory, 2 * (turns + KEEP))
    check(side, directory, folder)
    low, middle, high = statistics.quantiles([own / other for own, other in taken], n=4)
    of_medians = statistics.median(own for own, _ in taken) / statistics.median(
        other for _, other in taken
    )
    each = [statistics.median(side) for side in zip(*taken, strict=True)]
    told = (
        f"pause {each[0]:.3f} s, a plain write {each[1]:.3f} s, with the page cache or past it,"
        " whichever was faster"
    )
    print(f"{size / 1e6:,.0f} MB: {told} (medians of {turns} turns)")
    print(
        f"ratio of turns {middle:.2f} ({low:.2f} to {high:.2f}), of medians {of_medians:.2f}; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    waits, loses = (statistics.quantiles(of, n=4) for of in zip(*beside, strict=True))
    for what, (few, half, most) in (("waits", waits), ("loses in all", loses)):
        print(
            f"written in the background: training {what} {half:.2f} ({few:.2f} to {most:.2f}) of a"
            " plain write"
        )
    met = middle <= 1.5
    print_target("pause over a plain write of its bytes", f"{middle:.2f}", "1.5", met)
