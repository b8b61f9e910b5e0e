"""A delta beside a full model folder: bytes and seconds, after a part of a day of training, and by
changed rows.

    python benchmarks/delta.py --globo GLOBO_REQUESTS.parquet   # fifteen minutes
    python benchmarks/delta.py --quick                          # a small generated log alone, under a minute

A day. A model learns all of a log but its last day, and is exported. Then it goes on with the first
1, 10 and 100 % of the rows of that day, whose new ids get rows. Each of these is exported in full
and as a delta. Before anything is timed the delta is compacted: that must be the full export, to
the byte. Seconds are medians. Those of an export are without the card, which both write alike: its
rows are scored. A server loads a full folder (`load`), or goes on from the base with a delta
(`updated`). Both check every byte and 256 rows. Loads and scores of the two take turns, with the
same rows: medians, and the median ratio of neighbours.

Changed rows. A table of rows of 16 numbers, of which a share is other than in its base, spread at
random: the bytes and the seconds of both ways of writing it, and of lookups in it with and without
the level of the delta. The share from which a delta has more bytes is that of its row numbers,
which take 8 bytes each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from _peers.targets import print_target
from _peers.tiny import sized
from row_formats import processor
from torch import Tensor

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.core import KeyedJagged
from sparrow.core.memory import keep_freed_memory
from sparrow.embeddings import Direct, EmbeddingTables, Feature, Placement, TableSpec
from sparrow.embeddings.stores.mapped import LeveledRows, MappedStore
from sparrow.features.schema import Schema, Split
from sparrow.features.transforms import Transforms
from sparrow.kernels.formats import fp32, int8
from sparrow.kernels.rules import sgd
from sparrow.serving import Scorer, load
from sparrow.serving.deltas import compact
from sparrow.serving.export import export
from sparrow.serving.folder import Digest, Folder, open_folder
from sparrow.serving.rows import ROW, changed_rows, tensors_of, write_rows
from sparrow.trained.run import Run
from sparrow.training import train

RECIPES = Path(__file__).parents[1] / "recipes"
DAY_MS = 24 * 3_600_000
SHARES = sized((0.01, 0.1, 1.0), (1.0,))  # of a day's rows
CHANGED = sized((0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0), (0.0, 0.5))  # of a table's rows
FORMATS: dict[str, Any] = {"fp32": fp32.Config(), "int8": int8.Config(rounding="nearest")}


def in_turns(
    one: Callable[[], Any], other: Callable[[], Any], times: int
) -> tuple[float, float, float]:
    """Median seconds of two ways that take turns, and the median ratio of neighbours: the second
    over the first.
    """
    taken: tuple[list[float], list[float]] = [], []
    for _ in range(sized(times, 1)):
        for way, into in zip((one, other), taken, strict=True):
            begun = time.perf_counter()
            way()
            into.append(time.perf_counter() - begun)
    ratio = statistics.median(two / one for one, two in zip(*taken, strict=True))
    return statistics.median(taken[0]), statistics.median(taken[1]), ratio


# -- a day -----------------------------------------------------------------------------------------


class Writer:
    """Exports under ever new names, and tells the time that the card took apart."""

    def __init__(self, place: Path, run: Path, log: Path, base: Sequence[Path]) -> None:
        self.place, self.run, self.log, self.base = place, run, log, base
        self.seconds: list[float] = []
        self.out = place

    def __call__(self) -> None:
        """Write one more."""
        self.out = (
            self.place / f"{'delta' if self.base else 'full'}-{self.run.name}-{len(self.seconds)}"
        )
        ends: dict[str, float] = {}

        def told(what: str, done: int, total: int) -> None:
            ends["card" if "scored" in what else what] = time.perf_counter()

        begun = time.perf_counter()
        export(self.run, self.out, [self.log], base=self.base, progress=told)
        card = ends["card"] - ends["tables written"]
        self.seconds.append(time.perf_counter() - begun - card)


def learn(
    place: Path,
    name: str,
    log: Path,
    settings: dict[str, Any],
    like: Path | None,
    schema: Schema | None,
) -> Path:
    """Prepare a log and train on it; like: the run to go on from."""
    split = Split(by="time", valid=0, test=0)
    if like is None:
        made = data.prepare([log], place / f"{name}-log", schema=schema, split=split).out
        before: dict[str, Any] = {}
    else:
        made = data.prepare(
            [log], place / f"{name}-log", schema=Transforms.load(like), grow=True, split=split
        ).out
        before = {"init_from": str(like)}
    told = {
        "data.path": str(made),
        "run_dir": str(place / name),
        "threads": 1,
        "log.tensorboard": False,
    }
    train(
        Run.load(RECIPES / "globo.toml", {**told, "checkpoint.every": 10**6, **before, **settings})
    )
    return place / name


def parts(folder: Folder) -> dict[str, int]:
    """Bytes of its tables, of its vocabularies, and of all."""
    sizes = {"tables": 0, "vocabulary": 0, "all": folder.bytes}
    for name, of in folder.manifest["files"].items():
        part = name.partition("/")[0]
        if part in sizes:
            sizes[part] += of["bytes"]
    return sizes


def day(
    what: str, log: Path, schema: Schema | None, place: Path, settings: dict[str, Any], times: int
) -> list[Any]:
    """One log. Returns for each share the ratios of bytes and of seconds to load, and of scores."""
    table = pq.read_table(log).sort_by("ts")
    cut = int(np.searchsorted(table["ts"].to_numpy(), table["ts"][-1].as_py() - DAY_MS))
    before, last = table.slice(0, cut), table.slice(cut)
    pq.write_table(before, place / "before.parquet")
    print(f"\n{what}: {before.num_rows:,} rows, and {last.num_rows:,} of the last day", flush=True)
    base_run = learn(place, "before", place / "before.parquet", settings, None, schema)
    base = place / "base"
    export(base_run, base, [place / "before.parquet"])
    print(
        f"{'of the day':>10} {'changed':>8} {'new':>7} {'bytes of tables':>24} {'vocabularies':>13}"
        f" {'of all':>24} {'export s':>14} {'load s':>14} {'':4} {'us, 1 x 1':>15} {'':4}"
        f" {'us, 1 x 500':>16}"
    )
    found = []
    for share in SHARES:
        rows = last.slice(0, max(1, round(share * last.num_rows)))
        part = place / f"part-{share}.parquet"
        pq.write_table(rows, part)
        run = learn(place, f"day-{share}", part, settings, base_run, None)
        found.append(beside(share, place, run, part, base, times))
    return found


def beside(
    share: float, place: Path, run: Path, log: Path, base: Path, times: int
) -> tuple[float, float, float]:
    """A delta beside the full folder of the same step."""
    full, delta = Writer(place, run, log, ()), Writer(place, run, log, (base,))
    full()
    delta()
    made = compact(base, [delta.out], place / f"compact-{share}")
    assert made.digest == open_folder(full.out).digest, "a compaction differs from the full export"
    old, whole = load(base), load(full.out)
    scorer = old.updated(delta.out)
    rows = pq.read_table(log).slice(0, 500).select(list(whole.encoder.sources)).to_pylist()
    assert np.array_equal(whole.score(rows), scorer.score(rows)), "a delta scores otherwise"
    for _ in range(times):
        full()
        delta()
    loads = in_turns(lambda: load(full.out), lambda: old.updated(delta.out), 7 * times)
    stack = scorer.stack
    changed = sum(len(of.rows_U) for of in stack.rows.values())
    count = sum(of.count for of in stack.rows.values())
    grown = sum(of.count - of.below for of in stack.rows.values())
    sizes = [parts(open_folder(of.out)) for of in (delta, full)]
    slower = []
    for some, repeats in ((rows[:1], 200), (rows, 30)):
        found = in_turns(partial(twice, whole, some), partial(twice, scorer, some), repeats * times)
        slower.append([found[0] * 5e5, found[1] * 5e5, found[2]])
    cells = [f"{sizes[0][of]:,} / {sizes[1][of]:,}" for of in ("tables", "all")]
    words = sizes[0]["vocabulary"]
    # the first were for the checks
    exports = [statistics.median(of.seconds[1:]) for of in (delta, full)]
    print(
        f"{share:>10.0%} {changed / count:>8.1%} {grown:>7,} {cells[0]:>24} {words:>13,}"
        f" {cells[1]:>24} {exports[0]:>6.2f} / {exports[1]:<5.2f} {loads[1]:>6.3f} /"
        f" {loads[0]:<5.3f} {loads[2]:.2f} {slower[0][1]:>7,.0f} / {slower[0][0]:<5,.0f}"
        f" {slower[0][2]:.2f} {slower[1][1]:>7,.0f} / {slower[1][0]:<6,.0f} {slower[1][2]:.2f}",
        flush=True,
    )
    return sizes[0]["all"] / sizes[1]["all"], loads[2], slower[0][2]


def twice(scorer: Scorer, rows: list[dict[str, Any]]) -> None:
    """Score two times, so that half of it is with code and tables in the processor's caches."""
    scorer.score(rows)
    scorer.score(rows)


# -- changed rows ----------------------------------------------------------------------------------


def by_share(place: Path, count: int, times: int) -> None:
    """A table by the share of its rows that have changed."""
    print(
        f"\na table of {count:,} rows of 16 numbers: a delta / all of it, and lookups of 4,096 rows"
        " with it / without"
    )
    print(f"{'format':>8} {'changed':>8} {'bytes':>27} {'write s':>14} {'ns a row':>14}")
    for name, format in FORMATS.items():
        random = torch.Generator().manual_seed(0)
        fields = format.encode(torch.randn(count, 16, generator=random), None)
        order = torch.randperm(count, generator=random)
        for share in CHANGED:
            told = of_share(
                place, format, fields, order[: round(share * count)].sort().values, times
            )
            print(f"{name:>8} {share:>8.0%} {told}", flush=True)
        size = sum(of.bytes_row for of in format.fields(16).values())
        print(
            f"{name}: a row has {size} bytes, so a delta has more bytes from"
            f" {size / (size + 8):.0%} of the rows on"
        )


def of_share(
    place: Path, format: Any, fields: dict[str, Tensor], rows_U: Tensor, times: int
) -> str:
    """Change a bit of every byte of some rows, and measure."""
    newer = {field: of.clone() for field, of in fields.items()}
    for of in newer.values():
        of[rows_U] = of[rows_U].view(torch.uint8).bitwise_xor(1).view(of.dtype)
    old, new, files = (
        LeveledRows(fields=fields),
        LeveledRows(fields=newer),
        (place / "delta", place / "full"),
    )
    whole, part, _ = in_turns(
        lambda: full_to(files[1], new), lambda: delta_to(files[0], old, new), times
    )
    above = tensors_of(files[0])
    assert torch.equal(above[ROW], rows_U), "other rows than were changed"
    sizes = [file.stat().st_size for file in files]
    # both in the same memory
    one, two = compared(format, new, new.updated(above.pop(ROW), above), times)
    return (
        f"{f'{sizes[0]:,} / {sizes[1]:,}':>27} {part:>6.2f} / {whole:<5.2f} {two:>6.0f} /"
        f" {one:<5.0f}"
    )


def delta_to(path: Path, old: LeveledRows, new: LeveledRows) -> None:
    """What an export with a base does for a table: compare, write, and say what the whole would
    be.
    """
    with path.open("wb") as file:
        write_rows(file, new, changed_rows(old, new))
    write_rows(Digest(), new)


def full_to(path: Path, new: LeveledRows) -> None:
    """What an export without a base does for a table: write, and read for the manifest."""
    with path.open("wb") as file:
        write_rows(file, new)
    digest = Digest()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.write(block)


def compared(
    format: Any, plain: LeveledRows, leveled: LeveledRows, times: int
) -> tuple[float, float]:
    """Nanoseconds a row of lookups with one level, and with two, whose vectors are compared."""

    def tables(rows: LeveledRows) -> EmbeddingTables:
        spec = TableSpec(
            name="t", dim=16, addressing=Direct(plain.count), format=format, rule=sgd.Config()
        )
        placement = Placement(store=lambda component, *_: MappedStore(component, rows))
        return EmbeddingTables(
            [spec], [Feature(name="f", table="t")], mode="off", placement=placement
        ).eval()

    random, ways = torch.Generator().manual_seed(0), (tables(plain), tables(leveled))

    def ids() -> KeyedJagged:
        values_N = torch.randint(0, plain.count, (4096,), generator=random)
        return KeyedJagged(
            keys=("f",), values_N=values_N, lengths=torch.ones(4096, dtype=torch.int64)
        )

    taken: tuple[list[float], list[float]] = [], []
    with torch.inference_mode():
        for _ in range(sized(100, 5) * times):
            batch = ids()
            assert torch.equal(*(of.pooled(batch) for of in ways)), "a level changes a vector"
            for of, into in zip(ways, taken, strict=True):
                batch = ids()  # others for each, whose rows are not yet in the processor's caches
                begun = time.perf_counter()
                of.pooled(batch)
                into.append(1e9 * (time.perf_counter() - begun) / 4096)
    return statistics.median(taken[0]), statistics.median(taken[1])


# -- all of it -------------------------------------------------------------------------------------


def logs(
    asked: argparse.Namespace, place: Path
) -> Iterator[tuple[str, Path, Schema | None, dict[str, Any]]]:
    """The generated log and Globo's."""
    rows = sized(20_000, 1_000) if asked.quick else 1_000_000
    made = place / "generated.parquet"
    generate(made, rows=rows, users=rows // 5, items=rows // 20, seed=7)
    yield "a generated log", made, None, {}
    if asked.globo is not None:
        yield "Globo", asked.globo, Schema.load(RECIPES / "globo.schema.toml"), {}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small generated log, each time once"
    )
    parser.add_argument("--globo", type=Path, help="Globo's log of requests")
    asked = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    times = 1 if asked.quick else 3
    print(
        f"{processor()}; torch {torch.__version__}, 1 thread; a delta / a full folder everywhere,"
        f" medians of {times}"
    )
    results: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (what, log, schema, settings) in enumerate(logs(asked, Path(folder))):
            place = Path(folder) / str(number)
            place.mkdir()
            results += day(what, log, schema, place, settings, times)
        by_share(Path(folder), sized(20_000, 1_000) if asked.quick else 2_000_000, times)
    print()
    for name, at, goal in (
        ("bytes", 0, 1.0),
        ("seconds to load", 1, 1.0),
        ("microseconds of a score of one row", 2, 1.1),
    ):
        worst = max(of[at] for of in results)
        is_met = worst <= goal
        print_target(
            f"{name}, a delta over a full folder, highest",
            f"{worst:.2f}",
            f"at most {goal}",
            is_met,
        )


if __name__ == "__main__":
    main()
