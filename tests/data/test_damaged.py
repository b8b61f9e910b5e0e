"""Valid files damaged at random: an error that a user can read, or every row given or reported;
never less.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import re
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
from sparrow.data.logs.read import Log, open_log
from sparrow.data.logs.text_types import types_for
from sparrow.features.schema import Column, Encoding, Schema, Source, Split

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
    encodings={"user": Encoding(), "tags": Encoding(), "title": Encoding(kind="hash")},
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


def text_of(
    rows: list[list[str]], delimiter: str, quoting: Literal[0, 1], names: list[str] | None = None
) -> bytes:
    out, names = io.StringIO(newline=""), names or list(SCHEMA.columns)
    csv.writer(out, delimiter=delimiter, quoting=quoting, lineterminator="\n").writerows(
        [names, *rows]
    )
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


def swap_columns(
    rng: np.random.Generator, rows: list[list[str]]
) -> tuple[list[str], list[list[str]]]:
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
        schema = replace(
            SCHEMA, columns={n: c for n, c in SCHEMA.columns.items() if n in log.types}
        )
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
    content = damage(
        rng, text_of(rows, delimiter, (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)[rng.integers(0, 2)])
    )
    packed = bool(rng.integers(0, 3) == 0)
    path = folder / f"log.{'tsv' if delimiter == chr(9) else 'csv'}{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    done = ""
    for mode in MODES:
        if log := read(path, mode):
            assert log.repairs.rows + log.repairs.left_out == counted(content, log.source), (
                mode,
                content,
            )
            done += mode
    return done


def check_packed(rng: np.random.Generator, folder: Path) -> str:
    rows = rows_of(rng)
    whole = gzip.compress(text_of(rows, ",", csv.QUOTE_MINIMAL))
    path = folder / "log.csv.gz"
    path.write_bytes(damage(rng, whole))
    for mode in MODES:
        if path.read_bytes().startswith(b"\x1f\x8b") and (log := read(path, mode)):
            # its checksum holds: it is whole, or there several times, with its header as a row
            again = len(rows) + 1
            assert (log.repairs.rows + 1) % again == 0
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


def table_of(names: list[str], rows: list[list[str]]) -> pa.Table:
    """The rows with types, as a program would write them."""
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    types = {"label": int, "user": int, "price": float, "tags": lambda text: text.split("|")}
    table = pa.table(
        {name: [types.get(name, str)(cell) for cell in columns[name]] for name in names}
    )
    return table.set_column(names.index("title"), "title", table["title"].dictionary_encode())


def write_damaged(rng: np.random.Generator, folder: Path, kind: str) -> list[Path]:
    """A log of one or two files, the columns of each in an order of its own, one of them
    damaged.
    """
    paths = [folder / f"{i}.{kind}" for i in range(int(rng.integers(1, 3)))]
    for path in paths:
        names, rows = swap_columns(rng, rows_of(rng))
        if kind == "parquet":
            pq.write_table(
                table_of(names, rows),
                path,
                row_group_size=50,
                write_page_checksum=bool(rng.integers(0, 2)),
            )
            content = path.read_bytes()
        else:
            content = text_of(
                rows, "\t" if kind.startswith("tsv") else ",", csv.QUOTE_MINIMAL, names
            )
        hurt, packed = path == paths[0], ("." in kind)
        inside = hurt and rng.integers(0, 2) == 0
        if hurt and (inside or not packed):
            content = damage(rng, content)
        if packed:
            content = (
                gzip.compress(content, 1)
                if kind.endswith("gz")
                else pa.compress(content, "zstd", asbytes=True)
            )
            content = damage(rng, content) if hurt and not inside else content
        path.write_bytes(content)
    return paths[:: int(rng.choice([-1, 1]))]


def rows_in(path: Path, source: Source) -> int:
    """Rows of a file, as other programs see them."""
    if path.suffix == ".parquet":
        groups = pq.ParquetFile(path).metadata
        return sum(groups.row_group(i).num_rows for i in range(groups.num_row_groups))
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    elif path.suffix == ".zst":
        with pa.CompressedInputStream(io.BytesIO(content), "zstd") as stream:
            content = stream.read()
    return counted(content, source)


def check_prepare(rng: np.random.Generator, folder: Path) -> str:
    """The whole of it: what went in is in the parts, or the notes and the manifest say how much of
    it is not.
    """
    kind = str(rng.choice(["csv", "tsv", "csv.gz", "tsv.zst", "parquet"]))
    mode = MODES[rng.integers(0, 2)]
    paths, out = write_damaged(rng, folder, kind), folder / "out"
    by_file = len(paths) == 2 and rng.integers(0, 2)
    split = Split(by="ratio", negatives=float(rng.choice([0.5, 1])))
    if by_file:
        split = replace(split, by="file", valid_files=(str(paths[1]),))
    known = SCHEMA if rng.integers(0, 3) else None
    inputs, source = paths[:1] if by_file else paths, Source(bad_rows=mode)
    try:
        made = data.prepare(inputs, out, schema=known, split=split, source=source, overwrite=True)
    except UserError as error:
        one_line(error)
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        return ""
    left_out = [re.search(r"([\d,]+) lines left out", note) for note in made.notes]
    reported = sum(int(found[1].replace(",", "")) for found in left_out if found) + made.left_out
    log, manifest = open_log(paths, source), json.loads((out / "manifest.json").read_text())
    assert mode == "repair" or reported == made.left_out
    assert sum(made.rows.values()) + reported == sum(rows_in(path, log.source) for path in paths), (
        kind,
        mode,
    )
    assert manifest["rows"] == made.rows
    for part, rows in made.rows.items():
        assert (
            pq.read_table(out / part / "part-00000.parquet").num_rows
            == rows
            == data.open(out).rows(part)
        )
    return mode


@pytest.mark.parametrize(
    ("check", "cases"),
    [(check_text, 75), (check_packed, 30), (check_parquet, 30), (check_prepare, 60)],
)
def test_damaged_files(tmp_path: Path, check, cases: int) -> None:  # type: ignore[no-untyped-def]
    done = [check(np.random.default_rng(seed), tmp_path) for seed in range(cases)]
    if check in (check_text, check_prepare):  # the test is not one of refusals alone
        assert sum("repair" in d for d in done) > cases / 8
        assert any("stop" in d for d in done)


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_text, check_packed, check_parquet, check_prepare])
def test_damaged_files_for_a_quarter_minute_each(tmp_path: Path, check) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + 15
    for seed in itertools.count(1000):
        check(np.random.default_rng(seed), tmp_path)
        if time.monotonic() > end:
            break


@pytest.mark.parametrize("bit", [1, 16])
def test_any_byte_of_a_parquet_footer_may_be_wrong(tmp_path: Path, bit: int) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(
        pa.table({"label": [0, 1] * 10, "tags": [["a", "b"], ["c"]] * 10}), path, row_group_size=10
    )
    whole, refused = path.read_bytes(), 0
    for at in range(len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
        refused += read(path, "stop") is None
    assert refused > 100


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
        tables.append(
            pa.Table.from_batches(log.batches(types_for(SCHEMA, log))).select(list(SCHEMA.columns))
        )
    assert tables[0].equals(tables[1])
