"""What tables cost whose ids come and go, in time, memory and quality.

    python benchmarks/dynamic_tables.py --steps --globo GLOBO_REQUESTS.parquet   # ten minutes, on a quiet machine
    python benchmarks/dynamic_tables.py --drift                                   # 50 M ids through a million rows
    python benchmarks/dynamic_tables.py --quality GLOBO_REQUESTS.parquet --cells CELLS --picture OUT.png    # resumable
    python benchmarks/dynamic_tables.py --quick                                   # the same checks, under a minute

Steps. A table of a million rows, one id a bag, batches of 4096, two threads: lookup, backward and
update. The static table has as many rows, and is given rows where the dynamic one is given ids. Ids
follow Zipf's law with exponent 1.05: as many as nearly all rows, and twice as many as there are
rows. Globo's are its articles, in the order of the log. Ratios are of neighbouring turns. The
module of torchrec (`MCHManagedCollisionModule`, where it is installed) maps the same ids, at the
best of four eviction intervals. It maps alone; ours gives rows their first values too.

Quality. DLRM and settings of `recipes/globo.toml` on Globo's log; every row is predicted before it
is trained on, and the last fifth of the stream counts. Articles have a row each, in a vocabulary
that knew the future; or a row each if the first fifth of the stream had them; or a dynamic table;
or a hashed table of as many bytes. Each way has the best of three learning rates of tables. Seeds
are paired.
"""

from __future__ import annotations

import argparse
import itertools
import math
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from _peers.cells import kept
from _peers.stats import paired, spread
from _peers.tiny import sized
from torch import Tensor

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.core import KeyedJagged
from sparrow.core.memory import keep_freed_memory
from sparrow.embeddings import Direct, EmbeddingTables, Feature, Numbering, TableSpec, admission
from sparrow.embeddings.addressing.learned import Map
from sparrow.embeddings.records import RowRecords
from sparrow.embeddings.spec import OF_IDS
from sparrow.extensions.dynamic_ids import addressing as dynamic
from sparrow.features.schema import Schema, Split
from sparrow.kernels import row_index
from sparrow.trained.run import Run
from sparrow.training.loop import Trainer

RECIPES = Path(__file__).parents[1] / "recipes"
BATCH, DIMS = 4096, (16, 64)
SIZES = (1024, 2048, 4096, 8192)
RATES = (0.03, 0.1, 0.3)
POLICIES: dict[str, dict[str, Any]] = {
    "lru": {},
    "lru after 2": {"after": 2},
    "lfu": {"evict": "lfu", "half_life": 100_000.0},
    "ttl": {"ttl": 400_000},
    "by chance": {"probability": 0.5},
}
TABLE, ROW = "article", 4 * 16 + 5  # bytes of a plain row of 16 numbers
Ids = Callable[[int], Tensor]


# -- steps -----------------------------------------------------------------------------------------


def zipf(ids: int, seed: int = 0) -> Ids:
    """Returns a function that draws ids 1 <= id <= `ids` by Zipf's law. Frequent ones are spread
    over the numbers.
    """
    random = np.random.default_rng(seed)
    weights = np.cumsum(1.0 / np.arange(1, ids + 1) ** 1.05)
    spread_over = random.permutation(ids) + 1
    return lambda n: torch.from_numpy(
        spread_over[np.searchsorted(weights, random.random(n) * weights[-1])]
    )


def of_log(log: Path) -> Ids:
    """Returns a function that gives the articles of a prepared log in their order, and begins again
    at its end.
    """
    ids_N = torch.cat([batch.ids[TABLE].values_N for batch in data.open(log).loader(100_000)])
    at = iter(range(0, 1 << 62))

    def take(n: int) -> Tensor:
        start = next(at) * n % (len(ids_N) - n)
        return ids_N[start : start + n]

    return take


def tables(addressing: Any, dim: int) -> EmbeddingTables:
    """One table, looked up by one feature."""
    spec = TableSpec(name="t", dim=dim, addressing=addressing, init_scale=0.01)
    return EmbeddingTables([spec], [Feature(name="f", table="t")])


def bags(ids_N: Tensor) -> KeyedJagged:
    """A batch of one id a bag."""
    return KeyedJagged(
        keys=("f",), values_N=ids_N, lengths=torch.ones(len(ids_N), dtype=torch.int64)
    )


def step(of: EmbeddingTables, batch: KeyedJagged, up: Tensor) -> float:
    """Seconds of lookup, backward and update."""
    begin = time.perf_counter()
    of.pooled(batch).backward(up)
    return time.perf_counter() - begin


def check(rows: int) -> None:
    """A dynamic table with room for all ids has the bits of one with a row for each."""
    both = (
        tables(dynamic.Config(rows=rows, bucket=rows).build(Numbering(rows)), 16),
        tables(Direct(rows), 16),
    )
    for seed in range(5):
        batch = bags(
            torch.randint(0, rows, (BATCH,), generator=torch.Generator().manual_seed(seed))
        )
        outputs = [of.pooled(batch) for of in both]
        assert torch.equal(*outputs), "a dynamic table differs from a table of all its ids"
        for out in outputs:
            out.sum().backward()
    print("checked: with room for all ids, the bits are those of a table with a row for each")


def compared(
    dim: int, ids: Ids, known: int, rows: int, turns: int, warm: int
) -> tuple[list[float], list[float], dict[str, int]]:
    """Times of steps with the dynamic and the static table, turn by turn, and what became of
    ids.
    """
    live, static = (
        tables(dynamic.Config(rows=rows).build(Numbering(rows)), dim),
        tables(Direct(rows), dim),
    )
    up = torch.ones(BATCH, dim)
    # the table is full, where there are as many ids
    for part_N in (torch.randperm(known) + 1).split(16 * BATCH):
        step(live, bags(part_N), torch.ones(len(part_N), dim))
    for _ in range(warm):
        step(live, bags(ids(16 * BATCH)), torch.ones(16 * BATCH, dim))
    batches = [ids(BATCH) for _ in range(turns)]
    before, ours, theirs = live.record("t").id_counts.copy(), [], []
    for ids_N in batches:
        ours.append(step(live, bags(ids_N), up))
        theirs.append(step(static, bags(row_index.keys_of(ids_N) % rows), up))
    told = {name: count - before[name] for name, count in live.record("t").id_counts.items()}
    return ours, theirs, told


def ratio_of(ours: list[float], theirs: list[float]) -> str:
    """The median of neighbours' ratios, and the middle half of them."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    quarter = len(ratios) // 4
    return f"{statistics.median(ratios):.2f} ({ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f})"


def steps(asked: argparse.Namespace, log: Path | None) -> None:
    """Times of steps."""
    rows, turns, warm = (
        sized((20_000, 12, 3), (1_000, 2, 1)) if asked.quick else (1_000_000, 400, 60)
    )
    check(rows // 10)
    counts = {"Zipf, ids fit": rows * 9 // 10, "Zipf, twice as many ids": 2 * rows}
    draws = {name: (zipf(count), count) for name, count in counts.items()}
    if log is not None:
        draws["Globo's articles"] = of_log(log), 0
    print(
        f"\nsteps of {BATCH} ids, {rows:,} rows, {torch.get_num_threads()} threads: medians in us"
    )
    print(
        f"{'ids':<26}{'dim':>4}{'dynamic':>9}{'static':>8} "
        f" {'ratio, middle half':<22}{'admitted':>9}{'evicted':>9}"
    )
    for name, (ids, known) in draws.items():
        for dim in DIMS:
            ours, theirs, told = compared(dim, ids, known, rows, turns, warm)
            medians = [statistics.median(times) * 1e6 for times in (ours, theirs)]
            moves = [told[of] / turns for of in ("admitted", "evicted")]
            print(
                f"{name:<26}{dim:>4}{medians[0]:>9.0f}{medians[1]:>8.0f} "
                f" {ratio_of(ours, theirs):<22}{moves[0]:>9.1f}{moves[1]:>9.1f}",
                flush=True,
            )
    beside_torchrec(*draws["Zipf, twice as many ids"], rows, turns, warm)
    whole_steps(sized(2, 1) if asked.quick else 9, sized(20_000, 1_000) if asked.quick else 200_000)


def whole_steps(pairs: int, rows: int) -> None:
    """Examples a second of a DLRM with dynamic tables, over the same with a row for each id."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.parquet"
        generate(made, rows=rows, users=rows // 4, items=rows // 8)
        log = data.prepare(
            [made], Path(folder) / "log", split=Split(by="time", valid=0, test=0)
        ).out
        times: dict[str, list[float]] = {"direct": [], "dynamic": []}
        for turn in range(pairs):
            for name in times:
                changes = {
                    "data.path": str(log),
                    "run_dir": f"{folder}/{turn}{name}",
                    "tables.addressing.name": name,
                }
                changes |= {
                    "threads": torch.get_num_threads(),
                    "log.tensorboard": False,
                    "checkpoint.every": 10**6,
                }
                trainer = Trainer(Run.load(RECIPES / "globo.toml", changes))
                begin = time.perf_counter()
                trainer.fit()
                times[name].append(time.perf_counter() - begin)
    print(
        "a DLRM's run over one with a row for each id:"
        f" {ratio_of(times['dynamic'], times['direct'])}"
    )


def beside_torchrec(ids: Ids, known: int, rows: int, turns: int, warm: int) -> None:
    """Nanoseconds for an id: ours to rows, with their first values, and torchrec's to slots."""
    try:
        from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule
        from torchrec.sparse.jagged_tensor import JaggedTensor
    except ImportError:
        print("torchrec is not installed: its module is left out")
        return
    record = tables(dynamic.Config(rows=rows).build(Numbering(rows)), 16).record("t")
    batch, found = 1, {}
    record.admit(row_index.keys_of(torch.randperm(known) + 1), 1, 1, 0)
    for count, size in ((warm, 16 * BATCH), (turns, BATCH)):
        spent = []
        for _ in range(count):
            ids_N, batch = ids(size), batch + 1
            begin = time.perf_counter()
            record.admit(row_index.keys_of(ids_N), batch, batch, batch - 1)
            spent.append((time.perf_counter() - begin) / size * 1e9)
        found["Sparrow"] = statistics.mean(spent)
    for interval in (1, 10, 100, 1000) if turns > 100 else (1, 10):
        module = MCHManagedCollisionModule(
            rows, torch.device("cpu"), LRU_EvictionPolicy(), interval
        )
        module.train()
        spent = []
        for _ in range(max(2 * interval, 6)):
            given = {"f": JaggedTensor(ids(BATCH), lengths=torch.ones(BATCH, dtype=torch.int64))}
            begin = time.perf_counter()
            module.remap(module.profile(module.preprocess(given)))
            spent.append((time.perf_counter() - begin) / BATCH * 1e9)
        found[f"torchrec, evicting every {interval}"] = statistics.mean(spent[len(spent) // 2 :])
    best = min(value for name, value in found.items() if name != "Sparrow")
    print("\n" + "; ".join(f"{name} {value:,.0f} ns an id" for name, value in found.items()))
    print(f"torchrec's best over ours: {best / found['Sparrow']:.1f}")


# -- memory ----------------------------------------------------------------------------------------


def drift(asked: argparse.Namespace) -> None:
    """Ids that drift through a table: when the first one leaves, and whether memory grows."""
    rows, total = (
        sized((50_000, 500_000), (2_000, 20_000)) if asked.quick else (1_000_000, 50_000_000)
    )
    of, held, first = tables(dynamic.Config(rows=rows).build(Numbering(rows)), 16), [], 0
    record, up = of.record("t"), torch.ones(1 << 16, 16)
    for low in range(0, total, 1 << 16):
        ids_N = torch.arange(low, min(low + (1 << 16), total)) + 1
        step(of, bags(ids_N), up[: len(ids_N)])
        if not first and record.id_counts["evicted"]:
            first = record.id_counts["admitted"] - record.id_counts["evicted"]
        held.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    quarter = held[len(held) // 4]
    print(
        f"{total:,} ids through {rows:,} rows: the first left when {first / rows:.1%} of the rows"
        " were in use"
    )
    print(
        f"memory at most {held[-1] / 1024:,.0f} MiB, {(held[-1] - quarter) / 1024:+.1f} MiB since a"
        " quarter of the ids"
    )
    ids_R = record.index.ids_R
    wrong = int(((ids_R > 0) & (ids_R <= total - rows - (1 << 16))).sum())
    assert wrong < rows * 0.01, "rows belong to ids of long ago"


# -- quality ---------------------------------------------------------------------------------------


def state_stays() -> Any:
    """A row that is given to another id keeps what the rule kept, here alone."""

    def keep_state(record: RowRecords, rows_L: Tensor, ids_L: Tensor) -> None:
        state = {
            name: record.store.read(rows_L)[name].clone()
            for name in record.component.rule.fields(record.dim)
        }
        begin_rows(record, rows_L, ids_L)
        record.store.write(rows_L, state)

    begin_rows = admission.begin_rows
    return mock.patch.object(admission, "begin_rows", keep_state)


def cell(
    log: Path, addressing: dict[str, Any], seed: int, keep: bool, rate: float
) -> dict[str, float]:
    """One run: AUC and NE of the last fifth, share of lookups that found a row."""
    with tempfile.TemporaryDirectory() as folder, state_stays() if keep else nullcontext():
        changes = {
            "data.path": str(log),
            "run_dir": folder,
            "seed": seed,
            "threads": 1,
            "log.tensorboard": False,
        }
        changes |= {"checkpoint.every": 10**6, "tables.rule.lr": rate}
        run = Run.load(
            RECIPES / "globo.toml",
            changes | {"tables.overrides": [{"names": [TABLE], "addressing": addressing}]},
        )
        results = Trainer(run).fit()
    assert results["stopped_by"] is None, "stopped by a signal"
    last, ids = results["progressive"][-1], results["tables"].get("ids", {}).get(TABLE)
    return {
        "auc": last["auc"],
        "ne": last["ne"],
        "live": ids["live"] / ids["looked_up"] if ids else math.nan,
    }


def first_fifth(log: Path, folder: Path) -> Path:
    """A map that gives a row to each article of the first fifth of the stream, and one row to all
    others.
    """
    opened = data.open(log)
    seen, rows = [], 0
    for batch in opened.loader(10_000):
        if rows < opened.rows("train") // 5:
            seen.append(batch.ids[TABLE].values_N.unique())
        rows += batch.batch_size
    known = torch.cat(seen).unique()
    encoding = opened.schema.encodings[TABLE]
    row_S = torch.full((encoding.rows or 0,), len(known), dtype=torch.int32)
    row_S[known] = torch.arange(len(known), dtype=torch.int32)
    made = folder / "first_fifth.map"
    Map(row_S, len(known) + 1, len(known), 0, encoding.digest or "").save(made)
    return made


def quality(asked: argparse.Namespace, log: Path, work: Path) -> None:
    """AUC and NE of the last fifth of a log, each way of giving rows to articles."""
    sizes, rates = ((256,), RATES[1:2]) if asked.quick else (asked.sizes, RATES)
    # bytes of a row, of plain ones
    share = 1 + (sum(field.bytes_row for field in OF_IDS.values()) + 26) / ROW
    ways: dict[str, dict[str, Any]] = {"all, known before": {"name": "direct"}}
    ways["those of the first fifth"] = {"name": "learned", "file": str(first_fifth(log, work))}
    for size in sizes:
        for name, policy in POLICIES.items():
            ways[f"{size:,} {name}"] = {"name": "dynamic", "rows": size, **policy}
        ways[f"{size:,} lru, state kept"] = {"name": "dynamic", "rows": size}
        ways[f"{size:,} hashed, as many bytes"] = {"name": "hashed", "rows": round(size * share)}
    seeds = range(1 if asked.quick else asked.seeds)
    every: dict[tuple[str, float], list[dict[str, float]]] = {}
    fingerprint = data.open(log).fingerprint
    for seed, rate in itertools.product(seeds, rates):
        for name, addressing in ways.items():
            told = {key: value for key, value in addressing.items() if key != "file"}
            make = partial(cell, log, addressing, seed, "kept" in name, rate)
            place = f"{seed}-{rate}-{name.replace(' ', '_')}"
            one = kept(asked.cells or work, place, make, of=(told, fingerprint, rate))
            every.setdefault((name, rate), []).append(one)
            print(
                f"{name}, rate {rate}, seed {seed}: AUC {one['auc']:.4f}",
                file=sys.stderr,
                flush=True,
            )
    best = {
        n: max(rates, key=lambda rate: statistics.mean(one["auc"] for one in every[n, rate]))
        for n in ways
    }
    found = {name: every[name, best[name]] for name in ways}
    print(
        f"\nGlobo, the last fifth of the stream, {len(seeds)} seeds: differences are paired, with"
        " their standard errors"
    )
    print(
        f"{'articles':<30}{'rate':<6}{'AUC':<18}{'- all known':<20}{'- first fifth':<20}{'NE':<18}{'with a row':>10}"
    )
    base, early = (found[name] for name in list(ways)[:2])
    for name, of in found.items():
        auc = [one["auc"] for one in of]
        gaps = [paired(auc, [one["auc"] for one in other]) for other in (base, early)]
        gaps_told = "".join(f"{f'{mean:+.4f} +- {error:.4f}':<20}" for mean, error in gaps)
        live = statistics.mean(one["live"] for one in of)
        print(
            f"{name:<30}{best[name]:<6}{spread(auc):<18}{gaps_told}{spread([one['ne'] for one in of]):<18}{live:>10.1%}"
        )
    if asked.picture:
        draw(asked.picture, found, sizes)


def draw(to: Path, found: dict[str, list[dict[str, float]]], sizes: Sequence[int]) -> None:
    """AUC against rows."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for way in [*POLICIES, "lru, state kept", "hashed, as many bytes"]:
        each = [[one["auc"] for one in found[f"{size:,} {way}"]] for size in sizes]
        errors = [statistics.stdev(auc) / len(auc) ** 0.5 if len(auc) > 1 else 0 for auc in each]
        axis.errorbar(
            sizes,
            [statistics.mean(auc) for auc in each],
            errors,
            marker="o",
            markersize=3,
            label=way,
        )
    for name, style in zip(list(found)[:2], ("--", ":"), strict=True):
        mean = statistics.mean(one["auc"] for one in found[name])
        axis.axhline(mean, linestyle=style, linewidth=1.2, color="gray", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.set_xlabel("rows for articles")
    axis.set_ylabel("AUC of the last fifth of the stream")
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(to, dpi=150)


def prepared(log: Path | None, work: Path) -> Iterator[Path]:
    """Globo's log as a stream: nothing is held out of it."""
    if log is not None:
        schema = Schema.load(RECIPES / "globo.schema.toml")
        yield data.prepare([log], work / "globo", schema=schema).out


def main() -> None:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="small, and all of it; the log of clicks is made"
    )
    parser.add_argument("--steps", action="store_true", help="times of steps")
    parser.add_argument("--globo", type=Path, help="Globo's log, for --steps")
    parser.add_argument("--drift", action="store_true", help="memory, where ids drift")
    parser.add_argument("--quality", type=Path, metavar="LOG", help="Globo's log")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="rows of the tables")
    parser.add_argument("--cells", type=Path, help="a folder that keeps what was measured")
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if asked.steps or asked.quick:
            steps(asked, next(prepared(asked.globo, work), None))
        if asked.drift or asked.quick:
            drift(asked)
        if asked.quality:
            quality(asked, next(prepared(asked.quality, work / "q")), work)
        elif asked.quick:
            quality(asked, small(work), work)


def small(work: Path) -> Path:
    """A made log with the column of articles."""
    made = work / "small.parquet"
    generate(
        made, rows=sized(8000, 2000), users=500, items=600, categorical=2, numeric=2, history=0
    )
    import pyarrow.parquet as pq

    table = pq.read_table(made)
    names = [TABLE if name == "item" else name for name in table.column_names]
    pq.write_table(table.rename_columns(names), made)
    return data.prepare([made], work / "small", split=Split(by="time", valid=0, test=0)).out


if __name__ == "__main__":
    main()
