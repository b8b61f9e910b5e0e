"""Raw log -> prepared log: read once, fitted on the training part, transformed, cut in parts and written as Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa

from sparrow.core.errors import UserError, suggest
from sparrow.core.files import cannot_write, refuse_existing
from sparrow.core.progress import Progress
from sparrow.core.workplace import workplace
from sparrow.data.batches.parts import PARTS, PAYS, VERSION, PartWriter, files, pays, sha256
from sparrow.data.logs.files import find
from sparrow.data.logs.read import Log, Repairs, open_again, open_log, with_candidates
from sparrow.data.meaning.inference import OUTCOME, infer_log
from sparrow.data.meaning.vectors import sized
from sparrow.data.preparation.earlier import with_defaults
from sparrow.data.preparation.engine import Engine, Local
from sparrow.data.preparation.fit import Cutter, Fitter, time_cuts
from sparrow.features.clipped import Clipped
from sparrow.features.encodings import MISSING, UNKNOWN
from sparrow.features.quantile import Ordered
from sparrow.features.schema import Schema, Source, Split
from sparrow.features.times import ticks_per_second
from sparrow.features.transforms import Transforms, fitted_files, is_numbered, weights_of

Unknown = dict[str, dict[str, tuple[int, int]]]  # part -> column -> ids that its table does not know, and all


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What prepare made.

    out: its folder. schema: the fitted schema. rows: part -> rows as written. left_out: rows that split.negatives or
    split.until left out. label_means: part -> label -> mean, NaN for a part without rows. notes: what a person
    should look at, a line each.
    """

    out: Path
    schema: Schema
    rows: dict[str, int]
    left_out: int
    label_means: dict[str, dict[str, float]]
    notes: tuple[str, ...]


def prepare(
    inputs: Sequence[str | Path] | Log,
    out: str | Path,
    *,
    schema: Schema | Transforms | None = None,
    label: str | None = None,
    split: Split | None = None,
    source: Source | None = None,
    grow: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    ray: str | None = None,
) -> Prepared:
    """Turns a raw log into a prepared log: {train,valid,test}/part-00000.parquet, schema.toml, manifest.json.

    Only the training rows that are kept are fitted on, because the model sees no others. Where there is a time, the
    rows of a part are in time order. The folder appears at once or not at all. It takes about 450 MiB of memory with
    `return_freed_memory`, and 48 bytes for each id of the vocabularies. While it runs, the disk of `out` must have room
    for the log as numbers.

    Args:
        inputs: what `open_log` takes, or a log that is open, such as a `table_log`.
        out: the folder to make.
        schema: a Schema, Transforms, or None to infer a schema. A Schema is obeyed: what is fitted in it stays, but
            vocabularies are made anew. Transforms, of a prepared log or of a run, are used as they are, so that their
            model can be evaluated on these rows or trained on.
        label: the label's column, for inference.
        split: instead of the schema's.
        source: instead of the schema's.
        grow: whether the vocabularies and ranges of given Transforms get new rows for this log's new ids. They come
            after the old ones.
        overwrite: whether to replace a prepared log at `out`. It is replaced after success.
        progress: see `Progress`.
        ray: the address of a Ray cluster, "auto" for the one that Ray finds, or "local" for one of this machine. Its
            machines read, transform and sort, a file each at a time. They must see the log and `out` under the same
            names. The result is the same to the bit.

    Returns:
        What was made.

    Raises:
        UserError: when something is wrong with the log or the schema, or when the folder cannot be written. Then
            nothing is left on disk.
    """
    out = Path(out)
    given = schema if isinstance(schema, Transforms) else Transforms(schema=schema) if schema else None
    split = split or (given.schema.split if given else Split())
    if grow and not isinstance(schema, Transforms):
        raise UserError("grow: there is nothing to grow; give the transforms of a prepared log or of a run (--like)")
    with workplace(out) as (work, notes):
        _check_out(out, overwrite)
        source = source or (given.schema.source if given else None)
        logs = _logs(inputs, source, split, given.schema if given and isinstance(schema, Transforms) else None)
        if given is None:
            first = with_candidates(logs[0])
            logs = [log.like(first) for log in logs]
        if any(out.resolve() in file.resolve().parents for log in logs for file in log.files):
            raise UserError(f"{out}: holds the log that is to be prepared; choose another folder")
        if given and isinstance(schema, Transforms):
            given = _measured(given, logs[0])
        given = _complete(given, logs[0], label, split)
        try:
            with ThreadPoolExecutor(pa.cpu_count(), thread_name_prefix="sparrow-prepare") as pool:
                told = progress or (lambda *step: None)
                is_like = isinstance(schema, Transforms)
                job = _Job(logs=logs, given=given, work=work, pool=pool, told=told, ray=ray, is_like=is_like)
                made = job.run(work / "new", grow)
            if out.exists():
                out.rename(work / "old")
            (work / "new").rename(out)
        except BaseException as error:
            if (work / "old").exists() and not out.exists():
                (work / "old").rename(out)
            if isinstance(error, OSError):
                raise cannot_write(out, error) from error
            raise
    return replace(made, out=out, notes=(*notes, *made.notes))


@dataclass(kw_only=True)
class _Job:
    """One preparation. logs: one, or those of train, valid and test. is_like: columns are those of an earlier log."""

    logs: list[Log]
    given: Transforms
    work: Path
    pool: Executor
    told: Progress
    ray: str | None
    is_like: bool
    writers: list[PartWriter] = field(default_factory=list)

    def run(self, new: Path, grow: bool) -> Prepared:
        """Writes the whole folder `new`, and returns what it holds."""
        schema = self.given.schema
        engine = self._engine()
        engine.read()
        cuts: tuple[int, ...] = (0, 0)
        if schema.split.by == "time":
            cuts = time_cuts(schema, engine.times)
        elif schema.split.by == "file":
            cuts = (engine.ends[0], engine.ends[1])
        cutter = Cutter(schema=schema, cuts=cuts)
        given = engine.count(cutter, self.given, grow=grow)
        fitter = Fitter(given, self.work, grow=grow, pool=self.pool)
        engine.fit(cutter, fitter)
        fitted = fitter.fitted()
        schema = replace(fitted.transforms.schema, source=self.logs[0].source)
        fitted = replace(fitted, transforms=replace(fitted.transforms, schema=schema))
        assert fitter.rows.sum() + fitter.left_out == engine.ends[-1]
        new.mkdir()
        ordered = engine.ordered(fitted, cutter, _partition(schema, engine.times) if schema.cluster else 0)
        unknown = self._write(new, schema, ordered, int(fitter.rows.sum()))
        fitted.transforms.save(new)
        engine.words.save(new, schema)
        _write_manifest(new, schema, fitter, self.writers, unknown, engine.clipped)
        return Prepared(
            out=new,
            schema=schema,
            left_out=fitter.left_out,
            rows={part: int(n) for part, n in zip(PARTS, fitter.rows, strict=True)},
            label_means=_means(fitter, float("nan")),
            notes=(
                *engine.notes(),
                *_notes(schema, fitter, unknown, is_new=not self.is_like),
                *engine.clipped.notes(schema),
                *self._count_notes(engine.times, grow),
                *self._group_notes(int(fitter.rows[0])),
            ),
        )

    def _engine(self) -> Engine:
        if self.ray is None:
            return Local(self.given.schema, self.logs, self.work, self.told, self.pool)
        for name in self.given.schema.counted:
            told = "counts rows that are earlier in any file, for which one machine must see all"
            raise UserError(f"ray: columns.{name} {told}; leave out ray, or the column")
        from sparrow.data.preparation.on_ray import OnRay

        return OnRay(self.given.schema, self.logs, self.work, self.told, address=self.ray)

    def _count_notes(self, times: Ordered, grow: bool) -> Iterator[str]:
        """Yields a line for each column whose counts hold rows that are not before the log."""
        begins = int(times.at([0])[0]) if len(times) and not grow else None
        for name in self.given.counts:
            until = self.given.schema.columns[name].until
            if begins is not None and until is not None and begins <= until:
                told = f"rows up to time {until} were counted, and the log begins at {begins}"
                yield f"{name}: {told}: labels of its own rows may be in its numbers; train on later rows only"

    def _group_notes(self, rows: int) -> Iterator[str]:
        """Yields a line for each feature group: what storing its repeated training rows once is worth."""
        writer = self.writers[0]
        for group, runs in writer.runs.items():
            factor, saved = rows / max(runs, 1), writer.saved[group]
            how = "once" if factor >= PAYS else f"for every row, as it pays from {PAYS} on"
            if factor >= PAYS and not pays(self.given.schema, group, factor):
                how = "for every row in one process, where such ids are cheap to look up, and once between ranks"
            less = f"{saved / 2**20:.1f} MiB less in train, before compression"
            yield f"group {group}: {factor:.2f} rows a run, stored once: {less}; by default looked up {how}"

    def _write(self, new: Path, schema: Schema, ordered: Iterator[tuple[int, pa.Table]], total: int) -> Unknown:
        """Writes the files of the parts. Returns how many ids are unknown."""
        numbered = [name for name in schema.sparse if is_numbered(schema, str(schema.columns[name].table))]
        unknown = {part: dict.fromkeys(numbered, (0, 0)) for part in PARTS}
        rows = 0
        whole = False
        self.writers = [PartWriter(new / part, schema) for part in PARTS]
        try:
            for part, table in ordered:
                self.writers[part].add(table)
                _count_unknown(schema, table, unknown[PARTS[part]])
                if table.num_rows:
                    rows += table.num_rows
                    self.told("write", rows, total)
            whole = True
        finally:
            for writer in self.writers:
                writer.close(whole=whole)
        assert rows == total, "rows were lost while they were written"
        return unknown


def _check_out(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / "manifest.json").is_file():
        raise UserError(f"{out}: exists and is not a prepared log; choose another folder")
    refuse_existing(out, overwrite)


def _logs(inputs: Sequence[str | Path] | Log, source: Source | None, split: Split, like: Schema | None) -> list[Log]:
    """Returns the log, or the logs of train, valid and test, which are all read alike. like: of an earlier log."""

    def opened(files: Sequence[str | Path]) -> Log:
        return open_again(files, source, like) if source and like else open_log(files, source)

    held_out = [split.valid_files, split.test_files]
    by_file = split.by == "file" or (split.by is None and any(held_out))
    if any(held_out) and not by_file:
        raise UserError(f"split.by: {split.by!r}, but files are named for valid or test; leave one of them out")
    if isinstance(inputs, Log):
        if by_file:
            raise UserError("split.by: 'file' needs a log in files; write the tables to files, or split otherwise")
        return [inputs]
    if not by_file:
        return [opened(inputs)]
    if not any(held_out):
        raise UserError("split.by: 'file', but no files are named; give valid_files or test_files")
    groups = [find(paths) if paths else () for paths in (inputs, *held_out)]
    elsewhere = {file.resolve() for group in groups[1:] for file in group}
    groups[0] = tuple(file for file in groups[0] if file.resolve() not in elsewhere)
    if not groups[0]:
        raise UserError("inputs: every file is named for valid or test; name others for training")
    whole = opened([file.name for group in groups for file in group])
    logs, first = [], 0
    for group in groups:
        last = first + len(group)
        beginning = whole.beginning if group else None  # a log without files, but with a table, is that table
        log = replace(whole, files=whole.files[first:last], columns=whole.columns[first:last], beginning=beginning)
        logs.append(replace(log, rows=0, repairs=Repairs()))
        first = last
    return logs


def _measured(given: Transforms, log: Log) -> Transforms:
    """Returns transforms without the baselines that a log lacks, as served rows do. No model reads them."""
    columns = given.schema.columns.items()
    kept = {name: of for name, of in columns if of.kind != "baseline" or (of.source or name) in log.types}
    return replace(given, schema=replace(given.schema, columns=kept))


def _complete(given: Transforms | None, log: Log, label: str | None, split: Split) -> Transforms:
    """Returns the schema to be fitted, with its split. Infers it if need be, and checks it against the log."""
    given = given or Transforms(schema=infer_log(log, label))
    schema = given.schema
    for name, column in schema.columns.items():
        for source in schema.sources(name) if column.kind != "ignore" else ():
            if source not in log.types:
                has = f"it has {', '.join(log.types)}"
                raise UserError(f"columns.{name}: no column {source!r} in {log.name}; {has}")
        if column.weights and weights_of(name) in schema.columns:
            raise UserError(f"columns.{name}: its weights are kept as {weights_of(name)!r}, which is taken; rename it")
    if not schema.labels or (label is not None and label not in schema.labels):
        named = ", ".join(schema.labels) or None
        raise UserError(f"label: the schema's is {named}, {label or 'one'} is needed; give a column kind = 'label'")
    if not (schema.dense or schema.sparse):
        raise UserError("columns: no feature to learn from; make some numeric, categorical or list")
    by = split.by or ("file" if split.valid_files or split.test_files else "time" if schema.role("time") else "ratio")
    if split.key is not None:
        by, split = "ratio", replace(split, key=_key(schema, split.key))
    if by == "time" and schema.role("time") is None:
        raise UserError("split.by: 'time' needs a column of kind time; declare one, or split by 'ratio'")
    if by != "time" and split.until is not None:
        raise UserError(f"split.until: {split.until} is a share of the time, and the split is by {by}; leave it out")
    return replace(given, schema=replace(with_defaults(sized(schema, log)), split=replace(split, by=by)))


def _key(schema: Schema, key: str) -> str:
    """Returns the column of ids that is called `key`, or else is made of the log's column of that name."""
    kinds = ("categorical", "group", "session")
    named = {name: column for name, column in schema.columns.items() if key in (name, column.source)}
    for name, column in sorted(named.items(), key=lambda item: item[0] != key):
        if column.kind in kinds and not column.quantiles and not column.part:
            return name
    if not named:
        raise UserError(f"split.key: no column {key!r}{suggest(key, schema.columns)}")
    kind = next(iter(named.values())).kind
    raise UserError(f"split.key: {key!r} is of kind {kind}, which names no ids; make it categorical, group or session")


def _partition(schema: Schema, times: Ordered) -> int:
    """Returns the length of a partition in the time column's unit; 0 for one partition, or where there is no time."""
    assert schema.cluster is not None
    if not schema.cluster.hours or not len(times):
        return 0
    time, last = schema.role("time"), float(times.at([len(times) - 1])[0])
    if not (unit := ticks_per_second(last)):
        looks = f"column {time!r} ends with {last:g}, which is no time since 1970"
        raise UserError(f"cluster.hours: {looks}; give the column a format, or 0 hours")
    return max(1, int(schema.cluster.hours * 3600 * unit))


def _write_manifest(
    folder: Path, schema: Schema, fitter: Fitter, writers: Sequence[PartWriter], unknown: Unknown, clipped: Clipped
) -> None:
    """Writes manifest.json: what the folder holds, and the digests of its files."""
    manifest = {
        "version": VERSION,
        "rows": {part: int(n) for part, n in zip(PARTS, fitter.rows, strict=True)},
        "label_mean": _means(fitter, None),
        "unknown_ids": unknown,
        "clipped": dict(sorted(clipped.found.items())),
        "base_rate": fitter.base_rates(),
        **({"unlabelled": missing} if (missing := _unlabelled(fitter)) else {}),
        "schema_sha256": sha256(folder / "schema.toml"),
        "runs": {part: writer.runs for part, writer in zip(PARTS, writers, strict=True)},
        "saved_bytes": {part: writer.saved for part, writer in zip(PARTS, writers, strict=True)},
        "parts_sha256": {f"{part}/{file}": sha256(folder / part / file) for part in PARTS for file in files(schema)},
        "vocabulary_sha256": {name: sha256(folder / name) for name in fitted_files(schema)},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _means(fitter: Fitter, nothing: Any) -> dict[str, dict[str, Any]]:
    """Returns part -> label -> mean of the rows that have it, or `nothing` where none has."""
    return {
        part: {
            label: float(fitter.positives[p, t] / fitter.labelled[p, t]) if fitter.labelled[p, t] else nothing
            for t, label in enumerate(fitter.given.schema.labels)
        }
        for p, part in enumerate(PARTS)
    }


def _unlabelled(fitter: Fitter) -> dict[str, dict[str, int]]:
    """Returns label -> part -> how many rows lack it, for labels that some row lacks."""
    lacks = fitter.rows[:, None] - fitter.labelled
    labels = [(t, name) for t, name in enumerate(fitter.given.schema.labels) if lacks[:, t].any()]
    return {name: {part: int(lacks[p, t]) for p, part in enumerate(PARTS)} for t, name in labels}


def _count_unknown(schema: Schema, table: pa.Table, unknown: dict[str, tuple[int, int]]) -> None:
    for name, (bad, all_ids) in unknown.items():
        values = table[name].combine_chunks()
        ids = (values.flatten() if schema.columns[name].kind == "list" else values).to_numpy()
        unknown[name] = bad + int((ids == UNKNOWN).sum()), all_ids + int((ids != MISSING).sum())


def _notes(schema: Schema, fitter: Fitter, unknown: Unknown, *, is_new: bool) -> Iterator[str]:
    """Yields what a person should look at, a line each; of the columns only if they are new."""
    names, source = schema.source.names, schema.source
    if is_new and names and not source.header and source.format != "criteo":
        yield f"no header was found, so the columns are called {names[0]} to {names[-1]}; write one to name them"
    for name, column in schema.columns.items() if is_new else ():
        if column.note and not (column.kind == "label" and column.note.startswith(OUTCOME)):  # done what it advises
            yield f"{name}: {column.note}"
    split = schema.split
    by = {"time": f"by time (column {schema.role('time')})", "file": "by file", "ratio": "at random"}
    if schema.split_key:
        by["ratio"] += f", all rows of one {schema.split_key} in one part"
    yield f"split {by[split.by or 'ratio']}" + ("" if schema.role("time") else "; no column is known to be a time")
    for label, lacks in _unlabelled(fitter).items():
        missing, rows = sum(lacks.values()), int(fitter.rows.sum())
        yield f"{label}: missing in {missing:,} of {rows:,} rows, which have no loss and are in no metric of this label"
    if split.until is not None:
        yield f"the first {split.until:.1%} of the rows in time are taken"
    elif split.negatives < 1:
        text = f"{fitter.left_out:,} of {fitter.left_out + int(fitter.rows[0]):,} training rows left out"
        yield f"{text}, rows without a click, of which {split.negatives:g} are kept; scores are corrected for it"
    if split.by != "file":
        asked = {"valid": split.valid, "test": split.test}
        for p, part in enumerate(PARTS):
            if asked.get(part) and not fitter.rows[p]:
                yield f"{part}: no rows, though the split asks for {asked[part]}"
    for (p, part), (t, label) in product(list(enumerate(PARTS))[1:], enumerate(schema.labels)):
        rows, ones = int(fitter.rows[p]), int(fitter.positives[p, t])
        if rows and ones in (0, rows):
            remedy = f"give it more rows (--{part}), or divide the log in another way (--split)"
            yield f"{part}: all {rows:,} rows have {label} {min(ones, 1)}, so AUC and NE have no value there; {remedy}"
    valid = [(bad / ids, name) for name, (bad, ids) in unknown["valid"].items() if ids and bad >= 0.01 * ids]
    if valid:
        most = ", ".join(f"{name} {share:.1%}" for share, name in sorted(valid, reverse=True)[:6])
        yield f"ids of valid that their tables do not know: {most}{', ...' if len(valid) > 6 else ''}"
    learn = {schema.columns[name].table for name, (bad, _) in unknown["train"].items() if bad}
    tables = dict.fromkeys(str(schema.columns[name].table) for name in unknown["train"])
    if never := [name for name in tables if name not in learn]:
        most = ", ".join(never[:6]) + (", ..." if len(never) > 6 else "")
        yield f"tables without an unknown id in training, so that the row of unknown ids never learns: {most}"
