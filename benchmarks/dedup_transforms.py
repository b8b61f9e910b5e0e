"""Lists of text that repeat from row to row, converted once for a run of equal ones: CPU time with
and without.

    python benchmarks/dedup_transforms.py           # some three minutes
    python benchmarks/dedup_transforms.py --quick   # one log, few pairs, the same checks

The made log of dedup_storage.py with its lists as text, sessions side by side as a server writes
them, so many rows a run. Its transforms alone (`Transforms.transform`, what `predict` does to rows
before the model) and the whole of `prepare` from Parquet. Both forms take turns, in pairs, and must
give the same bits. Ratios are CPU time of all threads without over with, medians of pairs with the
lowest and highest: above 1 it is a gain.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import dedup_storage
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from _peers.tiny import sized
from dedup_storage import LENGTH, LISTS, MADE, made

from sparrow import data
from sparrow.core.memory import keep_freed_memory
from sparrow.features import lists
from sparrow.features.transforms import Transforms

FACTORS = (1.0, 2.0, 4.0, 8.0)  # rows a run
FORMS = {"plain": " ", "JSON": ","}
ONCE = lists.WORTH


def pairs(work: Callable[[], Any], count: int) -> tuple[list[float], list[float], list[Any]]:
    """CPU seconds of the work without and with, and what it gave at last."""
    took: dict[float, list[float]] = {inf: [], ONCE: []}
    gave = {}
    for turn in range(count + 1):
        for worth in (inf, ONCE) if turn % 2 else (ONCE, inf):
            lists.WORTH = worth
            begin = time.process_time()
            gave[worth] = work()
            took[worth].append(time.process_time() - begin)
    lists.WORTH = ONCE
    return took[inf][1:], took[ONCE][1:], [gave[inf], gave[ONCE]]  # the first pair warms up


def told(plain: list[float], once: list[float], rows: int) -> str:
    """Nanoseconds a row, and the ratio."""
    ratios = [a / b for a, b in zip(plain, once, strict=True)]
    ns = [1e9 * statistics.median(each) / rows for each in (plain, once)]
    return (
        f"{ns[0]:9,.0f}{ns[1]:9,.0f}{statistics.median(ratios):6.2f} ({min(ratios):.2f} to"
        f" {max(ratios):.2f})"
    )


def measure(form: str, factor: float, rows: int, count: int, folder: Path) -> None:
    """A line."""
    numbers = LISTS * LENGTH
    made(rows, folder / "ints.parquet", same=(1 - 1 / factor) * numbers / (numbers + 3))
    log = pq.read_table(folder / "ints.parquet").sort_by(
        [("session", "ascending"), ("ts", "ascending")]
    )
    schema = MADE
    for name in dedup_storage.MADE.groups["user"]:
        text = pc.binary_join(log[name].cast(pa.list_(pa.string())), FORMS[form])
        text = pc.binary_join_element_wise("[", text, "]", "") if form == "JSON" else text
        log = log.set_column(log.schema.get_field_index(name), name, text)
        column = replace(schema.columns[name], separator="json" if form == "JSON" else None)
        schema = replace(schema, columns={**schema.columns, name: column})
    pq.write_table(log, folder / "log.parquet")
    log = log.combine_chunks()
    transform = Transforms(schema=schema)
    plain, once, tables = pairs(lambda: transform.transform(log, training=True), count)
    assert tables[0].equals(tables[1]), f"{form}, {factor}: other bits"

    def prepared() -> str:
        data.prepare([folder / "log.parquet"], folder / "out", schema=schema, overwrite=True)
        return data.open(folder / "out").fingerprint

    plain_whole, once_whole, prints = pairs(prepared, max(count // 2, 1))
    assert prints[0] == prints[1], f"{form}, {factor}: other files"
    print(
        f"{form:<8}{factor:7.2f} |{told(plain, once, log.num_rows)}"
        f" |{told(plain_whole, once_whole, log.num_rows)}",
        flush=True,
    )


def main() -> None:
    """All logs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one log, few pairs")
    asked = parser.parse_args()
    keep_freed_memory()
    print(f"{LISTS} lists of {LENGTH} ids as text; CPU ns a row without, with, and their ratio")
    print(f"{'text':<8}{'factor':>7} |{'transforms alone':^39} |{'the whole of prepare':^39}")
    with tempfile.TemporaryDirectory() as folder:
        for form in FORMS if not asked.quick else ("plain",):
            for factor in FACTORS if not asked.quick else (4.0,):
                measure(
                    form,
                    factor,
                    sized(4_000, 200) if asked.quick else 10_000,
                    sized(2, 1) if asked.quick else 7,
                    Path(folder),
                )


if __name__ == "__main__":
    main()
