"""Raw log -> prepared log: fitted on the training part, transformed, cut in parts and written as Parquet."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.core.errors import UserError
from sparrow.core.files import cannot_write, refuse_existing
from sparrow.core.progress import Progress
from sparrow.data.fit import PARTS, Cutter, cutter, fit
from sparrow.data.inferred import infer_log
from sparrow.data.read import Log, open_log, types_for
from sparrow.data.schema import Schema, Split
from sparrow.data.transformed import transform

VERSION = 1
GROUP_ROWS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What prepare made: the folder, its fitted schema, rows and mean label per part, and what to look at."""

    out: Path
    schema: Schema
    rows: dict[str, int]
    label_mean: dict[str, float]
    notes: tuple[str, ...]


def prepare(
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    schema: Schema | None = None,
    label: str | None = None,
    split: Split | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Turn raw logs into a folder to train on: {train,valid,test}/part-00000.parquet, schema.toml, manifest.json.

    inputs: see `open_log`. schema: inferred when None; given, it is obeyed and only unfitted values are filled.
    label: the label's column, for inference. split: instead of the schema's. overwrite: replace a prepared log at
    `out`, after success. progress: told rows, of 0 while the number is not known.
    Memory: a few batches, the distinct ids, 8 bytes per row for a split by time, and the whole transformed log when
    it is to be split by time but is not in time order. The folder appears at once or not at all.
    Raises UserError for what is wrong with the log or the schema, and, with nothing left behind, when it cannot be
    written.
    """
    out, told = Path(out), progress or (lambda what, done, total: None)
    _check_out(out, overwrite)
    log = open_log(inputs, schema.source if schema else None)
    if any(out.resolve() in file.resolve().parents for file in log.files):
        raise UserError(f"{out}: holds the log that is to be prepared; choose another folder")
    schema = _complete(schema, log, label, split)
    cut = cutter(schema, log)
    fitter = fit(schema, log, cut, lambda rows: told("fit", rows, log.rows))
    fitted = replace(fitter.fitted(), source=log.source)
    rows = {part: int(n) for part, n in zip(PARTS, fitter.rows, strict=True)}
    means = {part: float(p / n) if n else None for part, p, n in zip(PARTS, fitter.positives, fitter.rows, strict=True)}
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        new = work / "new"
        new.mkdir()
        _write_parts(new, fitted, log, cut, told, sum(rows.values()))
        fitted.save(new / "schema.toml")
        manifest = {
            "version": VERSION,
            "rows": rows,
            "label_mean": means,
            "schema_sha256": sha256(new / "schema.toml"),
            "parts_sha256": {part: sha256(new / part / "part-00000.parquet") for part in PARTS},
        }
        (new / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        if out.exists():
            out.rename(work / "old")
        new.rename(out)
    except BaseException as error:
        if (work / "old").exists() and not out.exists():
            (work / "old").rename(out)
        if isinstance(error, OSError):
            raise cannot_write(out, error) from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    notes = [f"{name}: {column.note}" for name, column in fitted.columns.items() if column.note]
    by = {"time": f"by time (column {fitted.role('time')})", "ratio": "at random"}[fitted.split.by or "ratio"]
    notes.append(f"split {by}" + ("" if fitted.role("time") else "; no column is known to be a time"))
    asked = {"valid": fitted.split.valid, "test": fitted.split.test}
    notes += [
        f"{part}: no rows, though the split asks for {share}"
        for part, share in asked.items()
        if share and not rows[part]
    ]
    label_mean = {part: float("nan") if mean is None else mean for part, mean in means.items()}
    return Prepared(out=out, schema=fitted, rows=rows, label_mean=label_mean, notes=tuple(notes))


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_out(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / "manifest.json").is_file():
        raise UserError(f"{out}: exists and is not a prepared log; choose another folder")
    refuse_existing(out, overwrite)


def _complete(schema: Schema | None, log: Log, label: str | None, split: Split | None) -> Schema:
    """The schema to fit: inferred if need be, with its split, and checked against the log's columns."""
    schema = schema or infer_log(log, label)
    for name, column in schema.columns.items():
        source = column.source or name
        if column.kind != "ignore" and source not in log.types:
            has = f"it has {', '.join(log.types)}"
            raise UserError(f"columns.{name}: no column {source!r} in {log.files[0]}; {has}")
    named = schema.role("label")
    if named is None or (label is not None and label != named):
        raise UserError(f"label: the schema's is {named}, {label or 'one'} is needed; give a column kind = 'label'")
    if not (schema.dense or schema.sparse):
        raise UserError("columns: no feature to learn from; make some numeric, categorical or list")
    split = split or schema.split
    by = split.by or ("ratio" if schema.role("time") is None else "time")
    return replace(schema, split=replace(split, by=by))


class _PartWriter:
    """Writes one part in row groups of GROUP_ROWS; time: a column to sort by first, holding all rows until close."""

    def __init__(self, folder: Path, time: str | None) -> None:
        folder.mkdir()
        self._path, self._time = folder / "part-00000.parquet", time
        self._writer: pq.ParquetWriter | None = None
        self._held: list[pa.Table] = []
        self._rows = 0

    def add(self, table: pa.Table) -> None:
        """Take in rows; the first call fixes the columns, also when it brings none."""
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="lz4", write_page_checksum=True)
        self._held.append(table)
        self._rows += table.num_rows
        if self._time is None and self._rows >= GROUP_ROWS:
            self._flush(self._rows - self._rows % GROUP_ROWS)

    def _flush(self, rows: int) -> None:
        assert self._writer is not None
        table = pa.concat_tables(self._held)
        if rows:
            self._writer.write_table(table.slice(0, rows), row_group_size=GROUP_ROWS)
        self._held, self._rows = [table.slice(rows).combine_chunks()], table.num_rows - rows

    def close(self, *, whole: bool) -> None:
        """Write what is held, if the log came `whole`, and close the file."""
        if self._writer is None:
            return
        try:
            if whole:
                if self._time is not None:
                    table = pa.concat_tables(self._held)
                    self._held = [table.take(np.argsort(table[self._time].to_numpy(), kind="stable"))]
                self._flush(self._rows)
        finally:
            self._writer.close()


def _write_parts(folder: Path, schema: Schema, log: Log, cut: Cutter, told: Progress, total: int) -> None:
    time = None if cut.sorted else schema.role("time")
    writers = [_PartWriter(folder / part, time) for part in PARTS]
    row0, whole = 0, False
    try:
        for batch in log.batches(types_for(schema, log)):
            table = transform(schema, batch, training=True, row0=row0)
            parts_N = cut.parts(batch, row0)
            for part, writer in enumerate(writers):
                writer.add(table.filter(pa.array(parts_N == part)))
            row0 += batch.num_rows
            told("write", row0, total)
        whole = True
    finally:
        for writer in writers:
            writer.close(whole=whole)
