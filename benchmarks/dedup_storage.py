"""What storing equal rows once saves on disk and in the reader, and what of it is due to sessions
side by side.

    python benchmarks/dedup_storage.py GLOBO_REQUESTS.parquet   # three minutes with one session in five
    python benchmarks/dedup_storage.py --quick                  # a small made log alone, the same checks

A log is prepared plainly, clustered by session within the hour, and clustered with groups of
features stored once for every run of equal rows. The plain rows are also written permuted within
the hour (seed 0), which is how a log of many servers comes in. All by the same writer: columns,
codec (lz4), row groups. Nothing is printed unless all four hold the same rows. Globo: the request
log of its recipe, ids hashed. Made: sessions of 16.5 rows (geometric), ten lists of ids that change
together, two ids and a number of the candidate, 80 % of all numbers as in the row before of the
session, which are the statistics that RecD reports (arXiv 2211.05239, section 3). A small log's
hour fits into the codec's window (64 KiB), so that --quick shows no ratio worth having.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from _peers.targets import print_target
from _peers.tiny import sized

from sparrow import data
from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.parts import PartWriter, open_files, read_groups
from sparrow.data.batches.repeats import repeats
from sparrow.features.runs import bits, fingerprints
from sparrow.features.schema import Cluster, Column, Encoding, Schema, Split

HOUR_MS, BATCH, ROUNDS = 3_600_000, 4096, 3
GLOBO = Path(__file__).parents[1] / "recipes" / "globo.schema.toml"
GLOBO_GROUPS = {
    "clicks": ("last_click", "session_clicks"),
    "user": (
        "user_history",
        "user",
        "environment",
        "device",
        "os",
        "country",
        "region",
        "referrer",
        "hour",
    ),
}
LISTS, LENGTH, SESSION_ROWS, SAME = 10, 12, 16.5, 0.8
MADE = Schema(
    columns={
        "label": Column(kind="label"),
        "ts": Column(kind="time"),
        "session": Column(kind="session"),
        "request": Column(kind="group", source="session"),
        **{f"user_{i}": Column(kind="list", table="user", pooling="mean") for i in range(LISTS)},
        "item": Column(kind="categorical", table="item"),
        "shop": Column(kind="categorical", table="item"),
        "age": Column(kind="numeric", transform="none"),
    },
    encodings={name: Encoding(kind="hash", rows=sized(1 << 20, 1000)) for name in ("user", "item")},
    split=Split(by="time", valid=0, test=0),
    groups={"user": tuple(f"user_{i}" for i in range(LISTS))},
)


def made(
    rows: int, out: Path, session_rows: float = SESSION_ROWS, same: float = SAME, seed: int = 0
) -> None:
    """The made log, in the order of time. same: share of all numbers that are as in the session's
    row before.
    """
    random = np.random.default_rng(seed)
    sizes = random.geometric(1 / session_rows, int(1.2 * rows / session_rows))
    sizes = sizes[np.cumsum(sizes) <= rows]
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    count, session = len(first), np.repeat(np.arange(len(sizes)), sizes)
    numbers = LISTS * LENGTH / (LISTS * LENGTH + 3)  # share of a row's numbers that may repeat
    repeats = (np.arange(count) != first) & (
        random.random(count) < same / numbers / (1 - len(sizes) / count)
    )
    run = np.cumsum(~repeats) - 1
    ts = np.repeat(random.integers(0, 24 * HOUR_MS, len(sizes)), sizes) + 1000 * (
        np.arange(count) - first
    )
    ts += 1_700_000_000_000
    columns = {
        "label": pa.array((random.random(count) < 0.2).astype(np.int8)),
        "ts": pa.array(ts),
        "session": pa.array(session),
        "item": pa.array(random.integers(0, 1 << 20, count)),
        "shop": pa.array(random.integers(0, 1 << 16, count)),
        "age": pa.array(random.random(count)),
    }
    for i in range(LISTS):
        values = random.integers(0, 1 << 30, (run[-1] + 1, LENGTH))[run]
        ids = pa.array(values.ravel())
        lists = pa.FixedSizeListArray.from_arrays(ids, LENGTH).cast(pa.list_(pa.int64()))
        columns[f"user_{i}"] = lists if LENGTH > 1 else ids
    pq.write_table(pa.table(columns).take(pa.array(np.argsort(ts, kind="stable"))), out)


def everything(dataset: Dataset) -> pa.Table:
    """All training rows."""
    with open_files(dataset.path / "train", dataset.schema) as files:
        groups = range(files[None].parquet.num_row_groups)
        return pa.concat_tables(dataset.rows_of(read_groups(files, [i])) for i in groups)


def prints(table: pa.Table) -> np.ndarray:
    """What rows a table has, whatever their order."""
    return np.sort(
        fingerprints([bits(table[name]) for name in sorted(table.column_names)], table.num_rows)
    )


def size(folder: Path) -> int:
    """Bytes of a part."""
    return sum(path.stat().st_size for path in folder.iterdir())


def readers(plain: Dataset, stored_once: Dataset, name: str) -> None:
    """Nanoseconds a row from Parquet to batches of BATCH rows, the forms taking turns."""
    for one, other in zip(
        *(stored_once.loader(BATCH, dedup=d) for d in ("on", "off")), strict=True
    ):  # type: ignore[arg-type]
        a, b = one.ids.expanded(), other.ids
        assert torch.equal(a.values_N, b.values_N) and torch.equal(a.lengths, b.lengths), (
            "batches differ"
        )  # type: ignore[arg-type]
        assert torch.equal(one.dense_BC, other.dense_BC)
    forms = {
        "in the order of the log": (plain, "off"),
        "groups stored once, repeated": (stored_once, "off"),
        "groups once in a batch": (stored_once, "on"),
    }
    took: dict[str, list[float]] = {form: [] for form in forms}
    ids = dict.fromkeys(forms, 0)
    for _ in range(ROUNDS):
        for form, (dataset, dedup) in forms.items():
            ids[form], begin = 0, time.perf_counter()
            for batch in dataset.loader(BATCH, dedup=dedup):  # type: ignore[arg-type]
                ids[form] += batch.ids.values_N.numel()
            took[form].append(1e9 * (time.perf_counter() - begin) / dataset.rows())
    print(
        f"{'batches of ' + str(BATCH) + ' rows':<32}{'ns a row':>14}{'lowest':>8}{'highest':>9}{'ids a row':>11}"
    )
    for form, each in took.items():
        count = ids[form] / plain.rows()
        print(
            f"{form:<32}{statistics.median(each):14,.0f}{min(each):8,.0f}{max(each):9,.0f}{count:11.1f}"
        )
    pairs = [
        a / b
        for a, b in zip(
            took["in the order of the log"], took["groups once in a batch"], strict=True
        )
    ]
    ratio = statistics.median(pairs)
    print_target(
        f"reader of {name}",
        f"{ratio:.2f}, pairs {min(pairs):.2f} to {max(pairs):.2f}",
        "1.8",
        ratio >= 1.8,
    )


def measure(name: str, log: Path, schema: Schema, work: Path, goal: float) -> None:
    """A log in its four forms."""
    forms = {
        "in the order of the log": replace(schema, cluster=None, groups={}),
        "clustered": replace(schema, groups={}),
        "clustered, groups stored once": schema,
    }
    found, seconds, rows = {}, {}, {}
    for i, (form, chosen) in enumerate(forms.items()):
        begin = time.perf_counter()
        data.prepare([log], work / f"{i}", schema=chosen)
        seconds[form] = time.perf_counter() - begin
        dataset = data.open(work / f"{i}")
        found[form], rows[form] = size(work / f"{i}" / "train"), everything(dataset)
    plain = rows["in the order of the log"]
    hour_N = plain["ts"].to_numpy() // HOUR_MS
    order = np.lexsort((np.random.default_rng(0).random(len(hour_N)), hour_N))
    permuted = plain.take(pa.array(order))
    writer = PartWriter(work / "permuted", data.open(work / "0").schema)
    writer.add(permuted)
    writer.close(is_complete=True)
    found = {"permuted within the hour": size(work / "permuted"), **found}
    want = prints(permuted)
    for form, table in rows.items():
        assert np.array_equal(prints(table.select(permuted.column_names)), want), (
            f"{form}: other rows"
        )
    what = repeats(data.open(work / "2"))
    numbers = {
        n: (
            1.0
            if schema.columns[n].kind != "list"
            else pa.compute.list_value_length(plain[n]).to_numpy().mean()
        )
        for n in what.equal
    }
    same = sum(what.equal[n] * numbers[n] for n in numbers) / sum(numbers.values())
    per_session = what.rows / what.sessions
    factor = 1 / (1 - (per_session - 1) / per_session * same)
    print(
        f"\n{name}: {plain.num_rows:,} rows, {per_session:.1f} a session and hour; behind another"
        f" row of the session {same:.1%} of the features' numbers are as before"
    )
    print(f"{'rows':<32}{'bytes':>14}{'a row':>8}{'permuted / this':>17}{'prepare, s':>12}")
    most = found["permuted within the hour"]
    for form, count in found.items():
        took = f"{seconds[form]:12.1f}" if form in seconds else ""
        print(f"{form:<32}{count:14,}{count / plain.num_rows:8.1f}{most / count:17.2f}{took}")
    ratio = most / found["clustered, groups stored once"]
    print(f"by the formula 1 / (1 - (S - 1) / S * d) for features alone: {factor:.2f}")
    print_target(f"storage of {name}", f"{ratio:.2f}", goal, ratio >= goal)
    readers(data.open(work / "0"), data.open(work / "2"), name)


def main() -> None:
    """Both logs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "globo", nargs="?", type=Path, help="the request log that globo_requests.py makes"
    )
    parser.add_argument("--rows", type=int, default=500_000, help="of the made log")
    parser.add_argument("--quick", action="store_true", help="20,000 rows of the made log alone")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if asked.globo and not asked.quick:
            schema = Schema.load(GLOBO)
            columns = {**schema.columns, "session_id": Column(kind="session")}
            tables = {
                name: replace(table, kind="hash", rows=1 << 20)
                for name, table in schema.encodings.items()
            }
            schema = replace(
                schema,
                columns=columns,
                encodings=tables,
                cluster=Cluster(by="session_id"),
                groups=GLOBO_GROUPS,
            )
            measure("Globo", asked.globo, schema, work / "globo", 2.2)
        made(sized(20_000, 600) if asked.quick else asked.rows, work / "made.parquet")
        measure(
            "made log",
            work / "made.parquet",
            replace(MADE, cluster=Cluster(by="session")),
            work / "made",
            3.7,
        )


if __name__ == "__main__":
    main()
