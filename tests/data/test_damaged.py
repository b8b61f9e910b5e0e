"""Valid files damaged at random: an error that a user can read, or every row given or reported; never less."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import data
from sparrow.core import UserError
from sparrow.data.read import Log, open_log, types_for
from sparrow.data.schema import Column, Schema, Source, Split, Table

Mode = Literal["stop", "repair"]
MODES: tuple[Mode, ...] = ("stop", "repair")
SCHEMA = Schema(
    columns={
        "label": Column(kind="label"),
        "user": Column(kind="categorical", table="user"),
        "price": Column(kind="numeric"),
        "tags": Column(kind="list", table="tags", separator="|"),
        "title": Column(kind="categorical", table="title"),
    },
    tables={"user": Table(), "tags": Table(), "title": Table(encoding="hash")},
    split=Split(by="ratio"),
)


def rows_of(rng: np.random.Generator) -> list[list[str]]:
    n = int(rng.integers(20, 200))
    titles = ["plain", "with, comma", 'with "quotes"', "two\nlines", "café", ""]

    def one_of(values: list[str]) -> str:
        return values[rng.integers(0, len(values))]

    def row(i: int) -> list[str]:
        tags = "|".join(one_of(["a", "b", "c"]) for _ in range(2))
        return [str(i % 2), str(rng.integers(0, 50)), f"{rng.normal():.3f}", tags, one_of(titles)]

    return [row(i) for i in range(n)]


def text_of(rows: list[list[str]], delimiter: str, quoting: Literal[0, 1]) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter, quoting=quoting, lineterminator="\n").writerows([list(SCHEMA.columns), *rows])
    return out.getvalue().encode()


def damage(rng: np.random.Generator, content: bytes) -> bytes:
    """One to four random injuries."""
    for _ in range(int(rng.integers(1, 5))):
        at, kind = int(rng.integers(0, max(len(content), 1))), rng.integers(0, 7)
        if kind == 0:  # a byte becomes another
            content = content[:at] + bytes([rng.integers(0, 256)]) + content[at + 1 :]
        elif kind == 1:  # the end is lost
            content = content[: max(at, len(content) // 2)]
        elif kind == 2:  # bytes come in between, often ones that mean something
            signs = [b'"', b"\n", b",", b"\t", b"\r", b"\0", b"\xff", b'"\n', b"\r\n", rng.bytes(3)]
            content = content[:at] + signs[rng.integers(0, len(signs))] + content[at:]
        elif kind == 3:  # some bytes are lost
            content = content[:at] + content[at + int(rng.integers(1, 20)) :]
        else:  # a line is lost, comes twice, or changes its place
            lines = content.splitlines(keepends=True)
            i, j = (int(x) for x in rng.integers(0, len(lines), 2)) if lines else (0, 0)
            piece = lines[i : i + 1]
            if kind == 4:
                del lines[i : i + 1]
            lines[j:j] = piece * int(kind != 4)
            content = b"".join(lines)
    return content


def swap_columns(rng: np.random.Generator, rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    order = rng.permutation(len(SCHEMA.columns))
    names = list(SCHEMA.columns)
    return [names[i] for i in order], [[row[i] for i in order] for row in rows]


def counted(content: bytes, source: Source) -> int:
    """Rows of a CSV file, as Python's own module sees them."""
    delimiter = source.delimiter or ("," if source.format == "csv" else "\t")
    text = io.StringIO(content.decode("utf-8-sig", errors="replace"), newline="")
    return sum(1 for row in csv.reader(text, delimiter=delimiter) if row) - source.header


def one_line(error: UserError) -> None:
    assert "\n" not in str(error), str(error)


def read(path: Path, mode: Mode) -> Log | None:
    """The log, read to its end; None when that is refused."""
    try:
        log = open_log([path], Source(bad_rows=mode))
        schema = replace(SCHEMA, columns={n: c for n, c in SCHEMA.columns.items() if n in log.types})
        given = sum(batch.num_rows for batch in log.batches(types_for(schema, log)))
    except UserError as error:
        one_line(error)
        return None
    assert given == log.repairs.rows
    assert mode == "repair" or not log.repairs.left_out
    for note in log.notes():
        assert "\n" not in note
    return log


def check_text(rng: np.random.Generator, folder: Path) -> str:
    rows, delimiter = rows_of(rng), str(rng.choice([",", "\t", ";"]))
    content = damage(rng, text_of(rows, delimiter, (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)[rng.integers(0, 2)]))
    packed = bool(rng.integers(0, 3) == 0)
    path = folder / f"log.{'tsv' if delimiter == chr(9) else 'csv'}{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    done = ""
    for mode in MODES:
        if log := read(path, mode):
            assert log.repairs.rows + log.repairs.left_out == counted(content, log.source), (mode, content)
            done += mode
    return done


def check_packed(rng: np.random.Generator, folder: Path) -> str:
    rows = rows_of(rng)
    whole = gzip.compress(text_of(rows, ",", csv.QUOTE_MINIMAL))
    path = folder / "log.csv.gz"
    path.write_bytes(damage(rng, whole))
    for mode in MODES:
        if path.read_bytes().startswith(b"\x1f\x8b") and (log := read(path, mode)):
            assert log.repairs.rows % len(rows) == 0  # its checksum holds, so it is whole, or there several times
    return ""


def check_parquet(rng: np.random.Generator, folder: Path) -> str:
    names, rows = swap_columns(rng, rows_of(rng))
    table = pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    path = folder / "log.parquet"
    pq.write_table(table, path, row_group_size=50, write_page_checksum=bool(rng.integers(0, 2)))
    path.write_bytes(damage(rng, path.read_bytes()))
    for mode in MODES:
        if path.read_bytes().startswith(b"PAR1") and (log := read(path, mode)):
            assert log.repairs.rows == pq.ParquetFile(path).metadata.num_rows == log.rows
    return ""


def check_prepare(rng: np.random.Generator, folder: Path) -> str:
    rows = rows_of(rng)
    content = damage(rng, text_of(rows, ",", csv.QUOTE_MINIMAL))
    path, done = folder / "log.csv", ""
    path.write_bytes(content)
    for mode in MODES:
        for schema in (replace(SCHEMA, source=Source(bad_rows=mode)), None):
            if schema is None and mode == "repair":
                continue  # only a schema can ask for it
            try:
                made = data.prepare([path], folder / "out", schema=schema, overwrite=True)
            except UserError as error:
                one_line(error)
                continue
            log = read(path, mode)
            assert log is not None
            left_out = log.repairs.left_out
            assert sum(made.rows.values()) + left_out == counted(content, log.source), (mode, content)
            done += mode
    return done


@pytest.mark.parametrize(
    ("check", "cases"), [(check_text, 150), (check_packed, 30), (check_parquet, 60), (check_prepare, 6)]
)
def test_damaged_files(tmp_path: Path, check, cases: int) -> None:  # type: ignore[no-untyped-def]
    done = [check(np.random.default_rng(seed), tmp_path) for seed in range(cases)]
    if check is check_text:  # the test is not one of refusals alone
        assert sum("repair" in d for d in done) > cases / 4
        assert any("stop" in d for d in done)


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_text, check_packed, check_parquet, check_prepare])
def test_damaged_files_for_a_quarter_minute_each(tmp_path: Path, check) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + 15
    for seed in itertools.count(1000):
        check(np.random.default_rng(seed), tmp_path)
        if time.monotonic() > end:
            break


@pytest.mark.parametrize("mode", MODES)
def test_columns_in_another_order_are_the_same_log(tmp_path: Path, mode: Mode) -> None:
    rng = np.random.default_rng(5)
    rows = rows_of(rng)
    (tmp_path / "1.csv").write_bytes(text_of(rows, ",", csv.QUOTE_MINIMAL))
    names, swapped = swap_columns(rng, rows)
    with (tmp_path / "2.csv").open("w", newline="") as file:
        csv.writer(file).writerows([names, *swapped])
    tables = []
    for name in ("1.csv", "2.csv"):
        log = open_log([tmp_path / name], Source(bad_rows=mode))
        tables.append(pa.Table.from_batches(log.batches(types_for(SCHEMA, log))).select(list(SCHEMA.columns)))
    assert tables[0].equals(tables[1])
