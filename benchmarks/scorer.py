"""From a raw request to scores: a model folder's scorer beside `Restored.score_rows`, which goes
through Arrow.

    python benchmarks/scorer.py              # five minutes
    python benchmarks/scorer.py --threads 2
    python benchmarks/scorer.py --quick      # the DLRM alone, under a minute

Each model is trained for some steps, exported and loaded; what it weighs does not matter for time.
Before anything is timed, scores of both ways are compared. Then the ways take turns of some
milliseconds, with the same rows: `score_rows` of a table, `score` of a list of dicts, `rank` of a
user with her candidates. What of `score` is encoding, lookup and the rest is timed apart. Printed
are medians in microseconds with their quartiles, and the median ratio of neighbouring turns. Then
the products of DCNv2 of `vs_fuxictr.py` are timed alone, after its lookups, with the same inputs:
as a stack of torch's layers, as the same stack in onnxruntime, as the model that we serve, and as
that model when every second column is a user's. With one thread that is its CPU time, since other
programs change it less. Last, a model with 1 GB of tables is loaded by fresh processes: the time to
the first answer, and the memory of four of them at once (PSS).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from _peers import products
from _peers.targets import print_target
from _peers.tiny import sized
from _peers.turns import turns
from row_formats import processor

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.core.memory import keep_freed_memory
from sparrow.embeddings import TableChoices
from sparrow.embeddings.choices import Override
from sparrow.models import History, dcnv2, din, dlrm
from sparrow.models.dcnv2 import DCNv2
from sparrow.serving import Scorer, load
from sparrow.serving.export import export
from sparrow.trained.run import Data, Log, Loop, Run
from sparrow.trained.scorer import Restored, restore
from sparrow.training import train

SIZES = (1, 100, 500)
# half of the columns
OF_USER = {"user", "history", "num_0", "num_1", "num_2", "cat_0", "cat_1", "cat_2", "cat_3"}
MODELS: dict[str, Any] = {
    "dlrm (demo)": dlrm.Config(dim=16, bottom=(64,), top=(128, 64)),
    "dcnv2 (vs_fuxictr)": dcnv2.Config(dim=16, cross_layers=3, deep=(512, 256)),
    "din": din.Config(dim=16),
    "dlrm, history read": dlrm.Config(
        dim=16, bottom=(64,), top=(128, 64), history=History(lists=("history",))
    ),
}
CLOSE = 1e-6
BIG_ROWS = 15_600_000  # of 16 numbers: 1 GB


def made(
    folder: Path, name: str, config: Any, rows: int, tables: TableChoices | None = None
) -> tuple[Restored, Scorer]:
    """A model of the generated log, as its run and as its folder."""
    log, prepared = folder / "log.parquet", folder / "prepared"
    if not log.exists():
        generate(log, rows=rows, seed=7)
        data.prepare([log], prepared)
    place = folder / name.replace(" ", "_")
    run = Run(
        run_dir=str(place / "run"),
        data=Data(path=str(prepared), batch_size=1024),
        model=config,
        threads=1,
        tables=tables or TableChoices(),
        loop=Loop(max_steps=30),
        log=Log(tensorboard=False),
    )
    train(run)
    export(place / "run", place / "model", [log])
    return restore(place / "run"), load(place / "model")


def told(values: Sequence[float]) -> str:
    """Median and quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:7,.0f} ({low:,.0f}-{high:,.0f})"


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """The median of neighbouring turns."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def measure(
    name: str, run: Restored, scorer: Scorer, table: Any, seconds: float
) -> dict[tuple[int, str], float]:
    """One model: compare, then time. Returns ratios and nanoseconds a value."""
    sources = list(scorer.encoder.sources)
    rows = table.select(sources).to_pylist()
    values = sum(len(v) if isinstance(v, list) else 1 for row in rows for v in row.values()) / len(
        rows
    )
    of_user = {column for column in sources if column in OF_USER}
    user = {column: rows[0][column] for column in of_user}
    found = {}
    for size in SIZES:
        some = rows[:size]
        candidates = [
            {column: v for column, v in row.items() if column not in of_user} for row in some
        ]
        crossed = [user | row for row in candidates]
        assert np.abs(scorer.score(some) - run.score_rows(table.slice(0, size))).max() <= CLOSE
        assert np.abs(scorer.rank(user, candidates) - scorer.score(crossed)).max() <= CLOSE
        raw, batch = table.slice(0, size), scorer.encoder.batch(some)
        model = scorer.model.model
        ids = getattr(model, "ids", None) or getattr(getattr(model, "vectors", None), "ids", None)
        tables = getattr(ids, "tables", None)
        ways: dict[str, Callable[[], Any]] = {
            "score_rows": lambda raw=raw: run.score_rows(raw),
            "score": lambda some=some: scorer.score(some),
            "rank": lambda candidates=candidates: scorer.rank(user, candidates),
            "encode": lambda some=some: scorer.encoder.batch(some),
            "scores": lambda batch=batch: scorer.scores(batch),
        }
        if tables is not None:
            ways["lookup"] = torch.no_grad()(lambda batch=batch, tables=tables: tables(batch.ids))
        taken = turns(ways, seconds)
        cells = "  ".join(f"{way} {told(times)}" for way, times in taken.items())
        print(f"{name:20} 1 x {size:<4} {cells}")
        for way in ("score", "rank"):
            found[size, way] = ratio(taken["score_rows"], taken[way])
        found[size, "ns"] = 1e3 * statistics.median(taken["encode"]) / (size * values)
        print(
            f"{'':20} {'':8} score_rows / score {found[size, 'score']:.1f}, / rank"
            f" {found[size, 'rank']:.1f}; encoding {found[size, 'ns']:.0f} ns a value"
        )
    return found


@torch.inference_mode()
def measure_products(model: DCNv2, threads: int, seconds: float) -> dict[str, float]:
    """DCNv2 alone: compare, then time. Returns ratios."""
    found: dict[str, float] = {}
    plain = products.Plain(model)
    try:
        peer = products.in_onnxruntime(model, threads)
    except ImportError as error:
        print(f"no onnxruntime: {error}; pip install onnx onnxruntime")
        peer = None
    (written, folded), shared = products.multiply_adds(model)
    print(
        f"products of DCNv2: {written:,} multiply-adds a row as its paper writes it, {folded:,}"
        f" with folded vectors of numbers; {shared:,} of these are for every second column:"
        f" {folded / (folded - shared):.3f} times at most"
    )
    for rows in SIZES:
        dense_BC, ids_BX, whose = products.inputs(rows, users=1)
        ways: dict[str, Callable[[], Any]] = {"eager": lambda d=dense_BC, i=ids_BX: plain(d, i)}
        if peer is not None:
            ways["onnxruntime"] = peer(dense_BC, ids_BX)
        ways["ours"] = products.ours(model, dense_BC, ids_BX, None)
        if rows > 1:
            ways["half a user's"] = products.ours(model, dense_BC, ids_BX, whose)
        want = np.asarray(ways["eager"]())
        # logits
        assert all(np.abs(np.asarray(way()) - want).max() <= 10 * CLOSE for way in ways.values())
        taken = turns(ways, seconds, time.thread_time if threads == 1 else time.perf_counter)
        print(
            f"{rows:5} rows  " + "  ".join(f"{way} {told(times)}" for way, times in taken.items())
        )
        found |= {f"{way} {rows}": ratio(times, taken["ours"]) for way, times in taken.items()}
        if rows > 1:
            found[f"shared {rows}"] = ratio(taken["ours"], taken["half a user's"])
    return found


def tell_products(found: dict[str, float]) -> None:
    """Say which goals of products are met."""
    for rows in SIZES:
        if f"onnxruntime {rows}" in found:
            times = found[f"onnxruntime {rows}"]
            figure = f"{times:.2f}, eager over ours {found[f'eager {rows}']:.2f}"
            print_target(f"products of {rows} rows, onnxruntime over ours", figure, 1, times >= 1)
    for rows in SIZES[1:]:
        times, beside = found[f"shared {rows}"], ""
        if f"onnxruntime {rows}" in found:
            beside = f", onnxruntime over it {times * found[f'onnxruntime {rows}']:.2f}"
        claim = f"products of {rows} rows, ours over half the columns a user's"
        print_target(claim, f"{times:.2f}{beside}", 1.15, times >= 1.15)


FIRST = """
import sys, time
import torch
begun = time.perf_counter()
from sparrow.serving import load
scorer = load(sys.argv[1])
rows = [dict.fromkeys(scorer.encoder.sources)]
scorer.score(rows)
print(time.perf_counter() - begun, flush=True)
scorer.score(rows)
sys.stdin.readline()
"""


def pss(pid: int) -> tuple[int, int]:
    """Bytes of a process's proportional share of memory, and of what it alone has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines[1:]}
    return sizes["Pss"], sizes["Private_Dirty"] + sizes["Private_Clean"]


def large(folder: Path, rows: int) -> tuple[float, float, float]:
    """Seconds from `import torch` to the first answer; bytes of tables; bytes that four processes
    have together.
    """
    choices = TableChoices(
        overrides=(Override(names=("user",), addressing={"name": "hashed", "rows": BIG_ROWS}),)
    )
    _, scorer = made(folder, "large", MODELS["dlrm (demo)"], rows, choices)
    path, size = scorer.folder.path, scorer.folder.bytes
    del scorer
    command = [sys.executable, "-c", FIRST, str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    firsts = []
    for _ in range(3):
        done = subprocess.run(
            command, input="\n", capture_output=True, text=True, check=True, env=environment
        )
        firsts.append(float(done.stdout))
    four = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(4)
    ]
    try:
        for one in four:
            assert one.stdout is not None
            one.stdout.readline()
        together = sum(pss(one.pid)[0] for one in four)
    finally:
        for one in four:
            one.communicate("\n")
    print(
        f"1 GB of tables ({size / 1e9:.2f} GB on disk): first answer {min(firsts):.2f} to"
        f" {max(firsts):.2f} s after import torch; four processes have {together / 1e9:.2f} GB"
        " together"
    )
    return statistics.median(firsts), size, together


def main() -> None:
    """Measure, and say which goals are met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the DLRM alone, and no large tables")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    arguments = parser.parse_args()
    keep_freed_memory()  # as a program that serves does at its start
    rows, seconds = (sized(20_000, 600), 1.0) if arguments.quick else (200_000, 12.0)
    print(
        f"{processor()}; torch {torch.__version__}, {arguments.threads} threads; microseconds,"
        " median (quartiles)"
    )
    found = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in list(MODELS)[: 1 if arguments.quick else None]:
            run, scorer = made(folder, name, MODELS[name], rows)
            scorer = replace(scorer, threads=arguments.threads)
            torch.set_num_threads(arguments.threads)
            table = pq.read_table(folder / "log.parquet").slice(rows - 500)
            found[name] = measure(name, run, scorer, table, seconds)
        of_products = measure_products(products.model(), arguments.threads, seconds)
        first, size, together = large(folder, rows) if not arguments.quick else (0.0, 0, 0)
    demo = found["dlrm (demo)"]
    one, many = demo[1, "score"], max(demo[500, "score"], demo[500, "rank"])
    ns = max(of[500, "ns"] for of in found.values())
    print_target("1 x 1, score_rows over score", f"{one:.1f}", "10", one >= 10)
    print_target("1 x 500, score_rows over rank", f"{many:.1f}", "4", many >= 4)
    print_target("encoding 500 rows", f"{ns:.0f} ns a value", "under 100", ns < 100)
    tell_products(of_products)
    if first:
        print_target("first answer of 1 GB", f"{first:.2f} s", "2", first <= 2)
        share = together / size
        is_met = share < 2
        print_target(
            "four processes hold one copy", f"{share:.2f} times the folder", "below 2", is_met
        )


if __name__ == "__main__":
    main()
