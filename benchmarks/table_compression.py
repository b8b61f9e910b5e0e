"""What tables of fewer rows cost in quality at equal bytes, and in time.

    python benchmarks/table_compression.py --cells CELLS --picture OUT.png      # a generated log: 90 minutes, resumable
    python benchmarks/table_compression.py --log globo GLOBO_REQUESTS.parquet --cells CELLS      # another log instead
    python benchmarks/table_compression.py --log movielens ml-100k.inter --cells CELLS
    python benchmarks/table_compression.py --steps --dlrm CHECKOUT              # steps, beside the public modules
    python benchmarks/table_compression.py --quick                              # a small made log, and small steps

Quality. A log of 2 M rows is generated, whose users and items, 50,000 each, follow Zipf's law with
exponent 1.05.
DLRM and settings of `recipes/globo.toml`; every row is predicted before it is trained on, and the
last fifth of the stream counts. Two tables are made smaller: users, and items, articles or films.
Each method is given the largest sizes that keep to a budget of bytes. Bytes are weights, the rule's
state, maps, and dense weights of a method's own with their optimizer's state. Budgets are "c4", the
bytes that quotient and remainder take at 4 ids a row, and "m20", those of a learned map onto a
twentieth of the rows. Every method runs at three learning rates of tables and has its best. Seeds
are paired. Ids are numbered by how often the whole stream has them, the last fifth among it. All
methods but hashing and a learned map gain by that.

"hashed m" has as many rows as the learned map, and fewer bytes. A "permuted" map is that of both
signals, with shared rows exchanged among ids that the fit saw equally often: it has no vectors.

Steps. 26 tables of 100,000 rows, one id a bag, batches of 4096, one thread: lookup, backward and
update. CHECKOUT is that of facebookresearch/dlrm, whose modules run with torch's sparse Adagrad.
Ratios are of neighbouring turns, by the thread's own time.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _peers.cells import kept
from _peers.stats import paired
from _peers.targets import print_target
from _peers.tiny import sized
from torch import Tensor

from sparrow import data
from sparrow.apps.generate import generate
from sparrow.apps.smaller.learned_hash import fit
from sparrow.core import KeyedJagged
from sparrow.core.memory import keep_freed_memory
from sparrow.data.meaning.inference import infer
from sparrow.embeddings import Direct, EmbeddingTables, Feature, LogTable, Numbering, TableSpec
from sparrow.embeddings.addressing import mixed_dimension, quotient_remainder
from sparrow.features.schema import Column, Encoding, Schema, Split
from sparrow.trained.build import tables_of
from sparrow.trained.run import Run
from sparrow.training.loop import Trainer

RECIPES = Path(__file__).parents[1] / "recipes"
MADE = {
    "rows": 2_000_000,
    "users": 50_000,
    "items": 50_000,
    "zipf": 1.05,
    "categorical": 4,
    "numeric": 2,
    "history": 0,
}
QUICK = MADE | {"rows": sized(24_000, 600), "users": 10_000, "items": 10_000}
DIM = 16
ROW = 4 * DIM + 5  # bytes of a row with row-wise AdaGrad's sum and the touched byte
DENSE = 12  # bytes of a dense weight with Adam's two moments
BUDGETS = ("c4", "c60", "m20", "c16")
RATES = (0.03, 0.1, 0.3)
BLOCKS = 8
ALPHAS = (0.0, 0.15, 0.3, 0.45, 0.6)
SHARES = 10_000  # how finely a mixed dimension is fitted to its bytes
LEARNED = 20  # ids a row of a learned map


# -- methods at equal bytes ------------------------------------------------------------------------


def largest(least: int, most: int, bytes_of: Callable[[int], float], budget: float) -> int | None:
    """The largest size whose bytes keep to the budget; they grow with it."""
    if bytes_of(least) > budget:
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if bytes_of(middle) <= budget else (least, middle - 1)
    return least


def split_bytes(ids: int, each: int) -> Callable[[int], float]:
    """Of a component of m rows, and of one for the quotients, which has few; `each` is the bytes of
    a row.
    """
    return lambda m: each * (m + -(-ids // m))


def coprime_to(m: int, ids: int) -> int:
    """The least second modulus."""
    other = max(2, -(-ids // m))
    while math.gcd(m, other) > 1:
        other += 1
    return other


def bytes_mixed(dims: Sequence[int], edges: Sequence[int], ids: int) -> int:
    """Of blocks with so many columns, with their projections."""
    rows = [b - a for a, b in pairwise((0, *edges, ids))]
    size = sum(n * (4 * d + 5) for n, d in zip(rows, dims, strict=True))
    return size + DENSE * DIM * sum(d for d in dims if d < DIM)


def mixed(table: LogTable, alpha: float, budget: float) -> dict[str, Any] | None:
    """Blocks whose dims use the bytes up."""

    def settled(share: int) -> mixed_dimension.Config:
        return mixed_dimension.Config(alpha=alpha, blocks=BLOCKS, budget=share / SHARES).settled(
            [table]
        )[0]

    def bytes_of(share: int) -> int:
        one = settled(share)
        return bytes_mixed(one.dims, one.edges, table.ids.rows)

    share = largest(SHARES // DIM + 1, SHARES, bytes_of, budget)
    if share is None:
        return None
    return {
        "name": "mixed_dimension",
        "dims": list(settled(share).dims),
        "edges": list(settled(share).edges),
    }


def addressing_of(method: str, table: LogTable, budget: float) -> dict[str, Any] | None:
    """The addressing of a table with so many bytes, or None where the method has none so small."""
    name, _, extra = method.partition(" ")
    ids = table.ids.rows
    top, middle = ids, math.isqrt(ids) + 1
    if name == "hashed":
        return {"name": "hashed", "rows": ids // LEARNED if extra else int(budget // ROW)}
    if name == "cut":
        return {"name": "cut", "rows": int(budget // ROW)}
    # concat: half the columns and a whole state a row
    if name in ("mult", "add", "features", "concat"):
        each = 2 * DIM + 5 if name == "concat" else ROW
        m = largest(middle, top, split_bytes(ids, each), budget)
        return (
            None
            if m is None
            else {"name": "quotient_remainder", "operation": name, "sizes": [m], "parts": 2}
        )
    if name == "coprime":
        m = largest(middle, top, lambda m: ROW * (m + coprime_to(m, ids)), budget)
        return None if m is None else {"name": "coprime", "sizes": [m, coprime_to(m, ids)]}
    if name == "path":
        hidden = int(extra)
        mlp = DENSE * (2 * DIM * hidden + hidden)
        rows = (
            int((budget - mlp * buckets) // ROW) for buckets in range(1, int(budget // mlp) + 1)
        )
        # few MLPs, many rows
        m = next((m for buckets, m in enumerate(rows, 1) if m * buckets >= ids), None)
        return None if m is None else {"name": "path", "rows": m, "hidden": hidden}
    if name == "mixed":
        return mixed(table, float(extra), budget)
    assert name == "learned"
    return {"name": "learned", "by": extra, "rows": int((budget - 2 * ids) // ROW)}


def bytes_at(at: str, ids: int) -> int:
    """The budget of a table of so many ids."""
    number = int(at[1:])
    return ROW * (-(-ids // number) + number) if at[0] == "c" else ROW * (ids // LEARNED) + 2 * ids


def methods(at: str) -> list[str]:
    """The methods with these bytes."""
    if at[0] == "m":
        return [
            "hashed",
            "hashed m",
            "cut",
            *(f"learned {by}" for by in ("both", "counts", "vectors", "permuted")),
        ]
    names = ["hashed", "mult", "cut", "features", "add", "concat", "coprime", "path 16", "path 64"]
    return names + ([f"mixed {alpha:g}" for alpha in ALPHAS] if at == "c4" else [])


@dataclass(frozen=True)
class Log:
    """A prepared log, its tables that are made smaller, and settings of its runs."""

    path: Path
    tables: dict[str, LogTable]
    settings: dict[str, Any]


def overrides(log: Log, method: str, at: str, work: Path) -> list[dict[str, Any]] | None:
    """What a run says of the tables that are made smaller."""
    found = []
    for name, table in log.tables.items():
        how = addressing_of(method, table, bytes_at(at, table.ids.rows))
        if how is None:
            return None
        if how["name"] == "learned":
            how = {
                "name": "learned",
                "file": str(mapped(log.path, name, how["by"], how["rows"], work)),
            }
        found.append({"names": [name], "addressing": how})
    return found


def mapped(log: Path, table: str, by: str, rows: int, work: Path) -> Path:
    """A file with a learned map.

    "permuted": that of both, with shared rows exchanged among ids that the fit saw equally often.
    It says what vectors are worth.
    """
    path = work / f"{table}-{by}-{rows}.map"
    if not path.exists():
        dataset = data.open(log)
        found = fit(
            dataset,
            table,
            rows,
            lambda what, done, total: None,
            by="both" if by == "permuted" else by,
        )  # type: ignore[arg-type]
        if by == "permuted":
            count_S = counted(dataset, table, found.fitted)
            row_S = found.row_S.clone()
            random = torch.Generator().manual_seed(0)
            shared = torch.arange(len(row_S))[(row_S >= found.private) & (count_S > 0)]
            for part in shared[count_S[shared].argsort(stable=True)].split(64):
                row_S[part] = row_S[part[torch.randperm(len(part), generator=random)]]
            found = replace(found, row_S=row_S)
        found.save(path)
    return path


def counted(dataset: Any, table: str, rows: int) -> Tensor:
    """How often the first training rows have each id of a table."""
    schema = dataset.schema
    count_S = torch.zeros(schema.encodings[table].rows, dtype=torch.int64)
    for batch in dataset.loader(1 << 12, split="train", dedup="off"):
        batch = batch.part(0, min(rows, batch.batch_size))
        rows -= batch.batch_size
        for name in schema.sparse:
            if schema.columns[name].table == table:
                count_S += torch.bincount(batch.ids[name].values_N.long(), minlength=len(count_S))
        if rows <= 0:
            break
    return count_S


def cell(log: Log, work: Path, method: str, at: str, rate: float, seed: int) -> Any:
    """One run: metrics of the last fifth, and the bytes of the log's large tables; None without
    such a size.
    """
    made = [] if method == "full" else overrides(log, method, at, work)
    if made is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "data.path": str(log.path),
            "run_dir": folder,
            "model.dim": DIM,
            "seed": seed,
            "threads": 1,
        }
        changes |= {
            "log.tensorboard": False,
            "checkpoint.every": 1_000_000,
            "tables.rule.lr": rate,
            **log.settings,
        }
        trainer = Trainer(Run.load(RECIPES / "globo.toml", {**changes, "tables.overrides": made}))
        results = trainer.fit()
    assert results["stopped_by"] is None, "stopped by a signal: the rest of the stream was not seen"
    last = results["progressive"][-1]
    return {
        **{name: last[name] for name in ("ne", "auc")},
        "bytes": bytes_of(trainer.job.model, log.tables),
    }


def bytes_of(model: Any, of: Container[str]) -> int:
    """Of these tables: what was allocated, with dense weights and maps."""
    size = 0
    for tables in tables_of(model):
        mine = [spec for spec in tables.specs if spec.name in of]
        names = [component.name for spec in mine for component in spec.components]
        records = [record for record in tables.all_records() if record.component.name in names]
        size += sum(t.nbytes for record in records for t in record.fields.values())
        size += sum(spec.addressing.traits.bytes_map for spec in mine)
        size += sum(DENSE * weight.numel() for weight in tables.combines.parameters())
    return size


# budget, method -> the seeds at the best rate
Found = dict[tuple[str, str], list[dict[str, float]]]


def at_best(runs: dict[float, list[Any]]) -> list[dict[str, float]] | None:
    """The seeds at the learning rate with the least mean NE."""
    whole = {rate: each for rate, each in runs.items() if all(each)}
    if not whole:
        return None
    rate = min(whole, key=lambda r: statistics.mean(one["ne"] for one in whole[r]))
    return [{**one, "rate": rate} for one in whole[rate]]


def show(found: Found) -> None:
    """A table for each budget."""
    full = found["", "full"]
    for at in sorted({at for at, _ in found if at}, key=lambda at: (at[0], int(at[1:]))):
        mine = {method: runs for (of, method), runs in found.items() if of in ("", at)}
        hashed = [one["ne"] for one in mine["hashed"]]
        print(f"\n{at}: {len(full)} seeds, each method at its best rate")
        print(
            f"{'method':<18}{'MB':>8}{'rate':>7}{'NE':>9}{'sd':>8}{'- hashed':>10}{'error':>9}{'AUC':>9}"
        )
        for method, runs in sorted(
            mine.items(), key=lambda item: statistics.mean(one["ne"] for one in item[1])
        ):
            ne = [one["ne"] for one in runs]
            gap, error = paired(ne, hashed)
            spread = statistics.stdev(ne) if len(ne) > 1 else 0.0
            print(
                f"{method:<18}{runs[0]['bytes'] / 1e6:8.3f}{runs[0]['rate']:7g}{statistics.mean(ne):9.4f}{spread:8.4f}"
                f"{gap:+10.5f}{error:9.5f}{statistics.mean(one['auc'] for one in runs):9.4f}"
            )
        verdicts(at, mine)


def verdicts(at: str, mine: dict[str, list[dict[str, float]]]) -> None:
    """The TARGET lines of a budget."""
    for method in (
        "mult",
        "add",
        "concat",
        "features",
        "coprime",
        "path 16",
        "path 64",
        "learned both",
    ):
        below(at, mine, method, "hashed")
    for control in ("learned counts", "learned vectors", "learned permuted"):
        below(at, mine, "learned both", control)
    below(at, mine, "learned permuted", "hashed", goal=False)
    mixes = [method for method in mine if method.startswith("mixed")]
    if len(mixes) > 2:
        best = min(mixes, key=lambda m: statistics.mean(one["ne"] for one in mine[m]))
        is_inside = best not in (mixes[0], mixes[-1])
        print_target(f"{at}, the best of {', '.join(mixes)}", best, "inside", is_inside)
        below(at, mine, best, mixes[0])


def below(
    at: str, mine: dict[str, list[dict[str, float]]], one: str, other: str, goal: bool = True
) -> None:
    """A TARGET line: by three standard errors, or not."""
    if one in mine and other in mine and one != other:
        gap, error = paired([r["ne"] for r in mine[one]], [r["ne"] for r in mine[other]])
        claim = f"{at}, {one} {'' if goal else 'not '}below {other}"
        by = "3 errors" if goal else "not 3 errors"
        print_target(claim, f"NE {gap:+.5f} +- {error:.5f}", by, (gap < -3 * error) == goal)


def generated(asked: argparse.Namespace, work: Path) -> Path:
    """The log whose true probabilities are known."""
    made = work / "made.parquet"
    what = (QUICK if asked.quick else MADE) | {"drift": asked.drift}
    truth = generate(made, **what).truth["last_20"]
    print(
        f"the true probabilities have NE {truth['ne']:.4f}, AUC {truth['auc']:.4f} in the last"
        " fifth"
    )
    return made


def movielens() -> Schema:
    """Of ML-100k's ratings: who gives a film four stars or more."""
    ids = {"user": "user_id:token", "film": "item_id:token"}
    columns = {
        name: Column(kind="categorical", source=source, table=name) for name, source in ids.items()
    }
    columns["label"] = Column(kind="label", source="rating:float", threshold=4)
    columns["time"] = Column(kind="time", source="timestamp:float")
    return Schema(columns=columns, encodings={name: Encoding() for name in ids})


def prepared(asked: argparse.Namespace, work: Path) -> Log:
    """The log that was asked for. It is a stream: nothing is held out of it."""
    name, file = asked.log or ("generated", generated(asked, work))
    if name == "globo":
        schema, tables, batch_size = (
            Schema.load(RECIPES / "globo.schema.toml"),
            ("user", "article"),
            1000,
        )
    elif name == "movielens":
        schema, tables, batch_size = movielens(), ("user", "film"), 200
    else:
        schema, tables, batch_size = (
            infer([Path(file)]),
            ("user", "item"),
            200 if asked.quick else 2000,
        )
    encodings = schema.encodings | {
        table: Encoding(kind="vocabulary", min_count=1) for table in tables
    }
    schema = replace(schema, encodings=encodings, split=Split(by="time", valid=0, test=0))
    path = data.prepare([file], work / "log", schema=schema).out
    dataset = data.open(path)
    large = {}
    for table in tables:
        count_S = counted(dataset, table, dataset.rows("train"))
        large[table] = LogTable(
            Numbering.of(dataset.schema.encodings[table]), DIM, partial(torch.clone, count_S)
        )
    return Log(path, large, {"data.batch_size": batch_size})


def quality(asked: argparse.Namespace, work: Path) -> Found:
    """Every method, a seed after the other."""
    log = prepared(asked, work)
    cells, of = asked.cells or work / "cells", data.open(log.path).fingerprint
    rates = RATES[1:2] if asked.quick else RATES
    found: Found = {}
    jobs = [("", "full"), *((at, method) for at in asked.budgets for method in methods(at))]
    for at, method in jobs:
        if method != "full" and asked.only and method not in asked.only:
            continue
        runs: dict[float, list[Any]] = {rate: [] for rate in rates}
        for seed in range(sized(2, 1) if asked.quick else asked.seeds):
            for rate in rates:
                key = f"{at}-{method.replace(' ', '-')}-{rate:g}-{seed}"
                # their place says nothing about a result, the fingerprint does
                job = partial(cell, log, work)
                runs[rate].append(
                    kept(cells, key, job, method, at, rate, seed, of=(of, log.settings))
                )
                print(f"{key}: {runs[rate][-1]}", file=sys.stderr, flush=True)
        best = at_best(runs)
        if best is not None:
            found[at, method] = best
            budget = (
                sum(bytes_at(at, table.ids.rows) for table in log.tables.values())
                if at
                else math.inf
            )
            assert best[0]["bytes"] <= budget, f"{method}: {best[0]['bytes']} bytes, {budget} given"
        else:
            print(f"{at}, {method}: no size with so few bytes")
    return found


def draw(found: Found, out: Path) -> None:
    """NE against bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    names = sorted({method for _, method in found} - {"full"})
    for number, method in enumerate(names):
        points = [
            (runs[0]["bytes"] / 1e6, [r["ne"] for r in runs])
            for (_, of), runs in found.items()
            if of == method
        ]
        points.sort()
        axis.errorbar(
            [x for x, _ in points],
            [statistics.mean(ne) for _, ne in points],
            [statistics.stdev(ne) if len(ne) > 1 else 0 for _, ne in points],
            label=method,
            capsize=2,
            linewidth=1,
            marker="os^Dv"[number // 10 % 5],
            color=pyplot.colormaps["tab10"](number % 10),
        )
    full = statistics.mean(one["ne"] for one in found["", "full"])
    axis.axhline(full, color="black", linestyle=":", linewidth=1, label="a row for each id")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_xlabel("MB of the two tables, all that training keeps of them")
    axis.set_ylabel("NE of the last fifth")
    axis.legend(fontsize=8, bbox_to_anchor=(1.01, 1), loc="upper left")
    figure.tight_layout()
    figure.savefig(out, dpi=130)


# -- steps -----------------------------------------------------------------------------------------

COUNT, SAMPLES = 26, 4096


def ours(rows: int, dim: int, method: str) -> EmbeddingTables:
    """26 tables."""
    numbered = Numbering(rows)
    keys = [f"t{i}" for i in range(COUNT)]
    if method == "mixed":  # as popularity gives dims to the 26 tables of a log, whose sizes differ
        sizes = [int(10 * 1.6**i) for i in range(COUNT)]
        made = [LogTable(Numbering(n), dim, partial(torch.ones, 1)) for n in sizes]
        dims = [config.dims for config in mixed_dimension.Config(alpha=0.3).settled(made)]
        addressings: list[Any] = [mixed_dimension.Config(dims=d).build(numbered) for d in dims]
    elif method == "mult":
        addressings = [quotient_remainder.Config(collisions=4).build(numbered)] * COUNT
    else:
        addressings = [Direct(rows)] * COUNT
    specs = [
        TableSpec(name=key, dim=dim, addressing=a) for key, a in zip(keys, addressings, strict=True)
    ]
    return EmbeddingTables(specs, [Feature(name=key, table=key) for key in keys], seed=1)


def criteo() -> None:
    """What popularity gives the tables of a public log, in numbers and in bytes."""
    rows = [
        1460,
        583,
        10131227,
        2202608,
        305,
        24,
        12517,
        633,
        3,
        93145,
        5683,
        8351593,
        3194,
        27,
        14992,
        5461306,
        10,
        5652,
        2173,
        4,
        7046547,
        18,
        15,
        286181,
        105,
        142572,
    ]
    dims = mixed_dimension.popularity_dims(
        [1 / n for n in rows], rows, [16] * len(rows), 0.3, power_of_two=True
    )
    numbers = [sum(n * d for n, d in zip(rows, of, strict=True)) for of in ([16] * len(rows), dims)]
    # with a number of row-wise AdaGrad and touched
    held = [4 * of + 5 * sum(rows) for of in numbers]
    print(
        f"Criteo Kaggle, alpha 0.3, powers of two: {numbers[1]:,} numbers,"
        f" {numbers[0] / numbers[1]:.1f} times fewer"
    )
    print(f"  with the rule's state: {held[1] / 1e6:.0f} MB, {held[0] / held[1]:.1f} times fewer")


def theirs(checkout: Path, name: str) -> Any:
    """A module of the public repository."""
    spec = importlib.util.spec_from_file_location(name, checkout / "tricks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Public:
    """The public modules for the same tables, with torch's sparse Adagrad."""

    def __init__(
        self, checkout: Path, rows: int, dim: int, tables: EmbeddingTables, method: str
    ) -> None:
        self.modules: list[Any] = []
        if method == "mult":
            make = theirs(checkout, "qr_embedding_bag").QREmbeddingBag
            self.modules = [
                make(rows, dim, 4, operation="mult", mode="sum", sparse=True) for _ in range(COUNT)
            ]
        else:
            make = theirs(checkout, "md_embedding_bag").PrEmbeddingBag
            dims = [spec.components[0].dim for spec in tables.specs]
            self.modules = [make(rows, d, dim) for d in dims]
        weights = [p for module in self.modules for p in module.parameters()]
        self.dense = [p for p in weights if p.shape[0] != rows or p.dim() != 2]
        self.optimizer = torch.optim.Adagrad(weights, lr=0.01)

    def step(self, parts: list[Tensor], offsets_B: Tensor, grad: Tensor) -> None:
        """Lookup, backward and update."""
        vectors = torch.cat(
            [m(part, offsets_B) for m, part in zip(self.modules, parts, strict=True)], 1
        )
        vectors.backward(grad)
        self.optimizer.step()
        self.optimizer.zero_grad()


def check(tables: EmbeddingTables, ids: KeyedJagged, parts: list[Tensor]) -> None:
    """That vectors are made of the components' rows as they should be, before anything is timed."""
    records = {record.component.name: record.weight for record in tables.all_records()}
    found = tables(ids)
    for (key, vectors), part_N, spec in zip(found.items(), parts, tables.specs, strict=True):
        rows = spec.addressing.rows_of(part_N)
        each = [records[c.name][r] for c, r in zip(spec.components, rows, strict=True)]
        want = each[0] * each[1] if len(each) > 1 else each[0]
        if want.shape[1] != spec.dim:
            want = tables.combine_of(spec.name)([want], None)
        assert isinstance(vectors, Tensor) and torch.allclose(vectors, want), key


def steps(asked: argparse.Namespace) -> None:
    """The time of steps, beside the plain tables' and the public modules'."""
    rows = sized(2_000, 300) if asked.quick else 100_000
    turns = sized(5, 1) if asked.quick else 40
    criteo()
    random = torch.Generator().manual_seed(0)
    parts = [(rows * torch.rand(SAMPLES, generator=random) ** 3).long() for _ in range(COUNT)]
    ids = KeyedJagged(
        keys=tuple(f"t{i}" for i in range(COUNT)), values_N=torch.cat(parts),
        lengths=torch.ones(COUNT * SAMPLES, dtype=torch.int64),
    )  # fmt: skip
    print(
        f"\nsteps of {COUNT} tables of {rows:,} ids, {SAMPLES} samples, one id each; torch"
        f" {torch.__version__}"
    )
    print(
        f"{'dim':>4}"
        f" {'tables':<8}{'ms':>8}{'/ plain':>9}{'quartiles':>16}{'public ms':>11}{'public / ours':>15}"
    )
    for dim in (16, 64):
        grad = torch.randn(SAMPLES, COUNT * dim, generator=random)
        plain = ours(rows, dim, "plain")
        for method, goal in (("mult", 1.6), ("mixed", 1.3)):
            tables = ours(rows, dim, method)
            check(tables, ids, parts)

            def step(of: EmbeddingTables, grad: Tensor = grad) -> None:
                of.pooled(ids).backward(grad)
                of.update()
                of.zero_grad()

            jobs: dict[str, Callable[[], None]] = {
                "ours": partial(step, tables),
                "plain": partial(step, plain),
            }
            if asked.dlrm:
                public = Public(asked.dlrm, rows, dim, tables, method)
                jobs["public"] = partial(public.step, parts, torch.arange(SAMPLES), grad)
            times = timed(jobs, turns)
            ratios = sorted(a / b for a, b in zip(times["ours"], times["plain"], strict=True))
            quarter = len(ratios) // 4
            middle, told = statistics.median(ratios), ""
            if asked.dlrm:
                gain = statistics.median(
                    a / b for a, b in zip(times["public"], times["ours"], strict=True)
                )
                told = f"{1e3 * statistics.median(times['public']):11.2f}{gain:15.2f}"
            spread = f"({ratios[quarter]:.2f} - {ratios[-1 - quarter]:.2f})"
            print(
                f"{dim:>4}"
                f" {method:<8}{1e3 * statistics.median(times['ours']):8.2f}{middle:9.2f}{spread:>16}{told}"
            )
            is_met = middle <= goal
            print_target(f"dim {dim}, {method} / plain", f"{middle:.2f}", goal, is_met)
            if asked.dlrm:
                print_target(f"dim {dim}, public / {method}", f"{gain:.2f}", "3", gain >= 3)


def timed(jobs: dict[str, Callable[[], None]], turns: int) -> dict[str, list[float]]:
    """Seconds of this thread, in turns."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(turns + 3):
        for name, job in jobs.items():
            begun = time.thread_time()
            job()
            if turn >= 3:
                times[name].append(time.thread_time() - begun)
    return times


def main() -> None:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", action="store_true", help="time steps instead")
    parser.add_argument("--dlrm", type=Path, help="a checkout of facebookresearch/dlrm")
    parser.add_argument(
        "--cells", type=Path, help="where results are kept; a folder of its own unless told"
    )
    parser.add_argument("--picture", type=Path, help="where to draw NE against bytes")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument(
        "--log",
        nargs=2,
        metavar=("NAME", "FILE"),
        help="globo or movielens, instead of a generated log",
    )
    parser.add_argument(
        "--budgets", nargs="*", default=list(BUDGETS), help="of bytes: c4, c16, c60, m20"
    )
    parser.add_argument(
        "--drift",
        type=float,
        default=1.0,
        help="how fast items of the generated log change, 0 to 1",
    )
    parser.add_argument(
        "--only", nargs="*", help='methods beside the full tables, such as mult "path 16"'
    )
    parser.add_argument(
        "--quick", action="store_true", help="24,000 rows of a made log, two seeds; small steps"
    )
    asked = parser.parse_args()
    if asked.log and asked.log[0] not in ("globo", "movielens"):
        parser.error("--log: a name is globo or movielens")
    torch.set_num_threads(1)
    keep_freed_memory()
    if asked.steps or asked.quick:
        steps(asked)
    if asked.steps:
        return
    if asked.quick:
        asked.budgets = sized(["c4", "m20"], ["m20"])
    with tempfile.TemporaryDirectory() as folder:
        found = quality(asked, Path(folder))
        show(found)
    if asked.picture:
        draw(found, asked.picture)


if __name__ == "__main__":
    main()
