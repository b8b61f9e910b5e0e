"""Raw log -> prepared log: read once, fitted on the training part, transformed, cut in parts and
written as Parquet.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sparrow import features
from sparrow.core.errors import UserError, is_lack_of_memory
from sparrow.core.extensions import engine_module, engine_texts
from sparrow.core.files import cannot_write, refuse_existing
from sparrow.core.keywords import keywords
from sparrow.core.progress import Progress
from sparrow.core.workplace import workplace
from sparrow.data import meaning, preparation
from sparrow.data.batches.parts import PARTS, PAYS, VERSION, PartWriter, files, pays, sha256
from sparrow.data.logs.files import find
from sparrow.data.logs.read import (
    Log,
    Repairs,
    open_like,
    open_log,
    refuse_left_out,
    with_candidates,
)
from sparrow.data.meaning.inference import infer_log
from sparrow.data.meaning.outcomes import FIRST_ROWS, check_outcomes, names_of, suspected, without
from sparrow.data.preparation.cutter import Cut, Cutter
from sparrow.data.preparation.engine import Engine, Local
from sparrow.data.preparation.fit import Fitter
from sparrow.data.preparation.matches import require_matches
from sparrow.data.preparation.notes import Unknown, notes, unlabelled
from sparrow.data.preparation.settings import Settings, engine_settings
from sparrow.features.encodings import MISSING, UNKNOWN
from sparrow.features.ids import is_text
from sparrow.features.schema import RULE, Schema, Source, Split, weights_of
from sparrow.features.skew import Skew, new_columns
from sparrow.features.transforms import Transforms, fitted_files, is_numbered


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What prepare made.

    out: its folder. schema: the fitted schema. rows: part -> rows as written. left_out: rows that
    split.negatives or split.until left out. label_means: part -> label -> mean, NaN for a part
    without rows. notes: what a person should look at, a line each.
    """

    out: Path
    schema: Schema
    rows: dict[str, int]
    left_out: int
    label_means: dict[str, dict[str, float]]
    notes: tuple[str, ...]


@keywords(Settings, engine_settings())
def prepare(
    inputs: Sequence[str | Path] | Log,
    out: str | Path,
    *,
    schema: Schema | Transforms | None = None,
    split: Split | None = None,
    source: Source | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Prepared:
    """Turns a raw log into a prepared log: {train,valid,test}/part-00000.parquet, schema.toml,
    manifest.json.

    Only the training rows that are kept are fitted on, because the model sees no others. Where
    there is a time, the rows of a part are in time order. The folder appears at once or not at all.
    It takes about 450 MiB of memory with `return_freed_memory`, and 48 bytes for each id of the
    vocabularies. While it runs, the disk of `out` must have room for the log as numbers.

    Args:
        inputs: what `open_log` takes, or a log that is open, such as a `table_log`.
        out: the folder to make.
        schema: a Schema, Transforms, or None to infer a schema. A Schema is obeyed: what is fitted
            in it stays, but vocabularies are made anew. Transforms, of a prepared log or of a run,
            are used as they are, so that their model can be evaluated on these rows or trained on.
        split: instead of the schema's.
        source: instead of the schema's.
        progress: see `Progress`.
        **settings: see `Settings`; and an engine of an extension by its name, with where it works,
            see `engine_settings`. By default it is this machine.

    Returns:
        What was made.

    Raises:
        UserError: when something is wrong with the log or the schema, or when the folder cannot be
            written. Then nothing is left on disk.
    """
    out = Path(out)
    engine = _take_engine(settings)
    config = Settings(**settings)
    is_like = isinstance(schema, Transforms)
    transforms = schema if isinstance(schema, Transforms) else None
    if isinstance(schema, Schema):
        transforms = Transforms(schema=schema)
    like = transforms.schema if transforms and is_like else None
    split = split or (transforms.schema.split if transforms else Split())
    if config.grow and not is_like:
        raise UserError(
            "grow: there is nothing to grow; give the transforms of a prepared log or of a run"
            " (--like)"
        )
    with _within_memory(), workplace(out) as (work, notes):
        _check_out(out, config.overwrite)
        source = _with_rule(source or (transforms.schema.source if transforms else Source()), like)
        logs = _logs(inputs, source, split, like)
        logs = _shape(logs, transforms)
        _require_apart(out, logs)
        require_matches(logs)
        if transforms and is_like:
            transforms = _without_absent_baselines(transforms, logs[0])
        outcomes = names_of(config.outcomes)
        if outcomes and is_like:
            raise UserError(
                "outcomes: columns stay as they were with --like; give --schema, or neither"
            )
        names = names_of(config.label)
        transforms = _say_columns(transforms, logs[0], config)
        transforms = _complete(transforms, logs[0], split)
        _check_named(transforms.schema, names, config.impressions)
        if isinstance(schema, Schema):
            transforms = replace(transforms, schema=_with_suspects(transforms.schema, logs[0]))
        with (
            _replaced(out, work) as new,
            ThreadPoolExecutor(pa.cpu_count(), thread_name_prefix="sparrow-prepare") as pool,
        ):
            job = _Job(
                logs=logs,
                transforms=transforms,
                work=work,
                pool=pool,
                progress=progress or (lambda *step: None),
                engine=engine,
                is_like=is_like,
            )
            prepared = job.run(new, config.grow)
    return replace(prepared, out=out, notes=(*notes, *prepared.notes))


@contextmanager
def _replaced(out: Path, work: Path) -> Iterator[Path]:
    """A context that gives the place of a new folder, which takes that of `out` at the end. Where
    something fails, `out` is as it was.

    Raises:
        UserError: when the folder cannot be written.
    """
    try:
        yield work / "new"
        if out.exists():
            out.rename(work / "old")
        (work / "new").rename(out)
    except BaseException as error:
        if (work / "old").exists() and not out.exists():
            (work / "old").rename(out)
        if isinstance(error, OSError) and not is_lack_of_memory(error):
            raise cannot_write(out, error) from error
        raise


@dataclass(kw_only=True)
class _Job:
    """One preparation. logs: one, or those of train, valid and test. engine: see `_take_engine`.
    is_like: columns are those of an earlier log.
    """

    logs: list[Log]
    transforms: Transforms
    work: Path
    pool: Executor
    progress: Progress
    engine: tuple[str, str] | None
    is_like: bool
    writers: list[PartWriter] = field(default_factory=list)

    def run(self, new: Path, grow: bool) -> Prepared:
        """Writes the whole folder `new`, and returns what it holds."""
        schema = self.transforms.schema
        engine = self._engine()
        engine.read()
        cuts: tuple[Cut, ...] = (Cut(0), Cut(0))
        if schema.split.by == "time":
            assert engine.times is not None
            cuts = preparation.cuts.time_cuts(schema.split, engine.times)
        elif schema.split.by == "file":
            cuts = (Cut(engine.ends[0]), Cut(engine.ends[1]))
        cutter = Cutter(schema=schema, cuts=cuts)
        counted = engine.count(cutter, self.transforms, grow=grow)
        fitter = Fitter(counted, self.work, grow=grow, addition=self.is_like, pool=self.pool)
        engine.fit(cutter, fitter)
        fitted = fitter.fitted()
        schema = replace(fitted.transforms.schema, source=self.logs[0].source)
        fitted = replace(fitted, transforms=replace(fitted.transforms, schema=schema))
        assert fitter.rows.sum() + fitter.left_out == engine.ends[-1]
        new.mkdir()
        partition = 0
        if schema.cluster:
            partition = preparation.sessions.partition_length(schema, engine.times)
        ordered = engine.ordered(fitted, cutter, partition)
        unknown = self._write(new, schema, ordered, int(fitter.rows.sum()))
        skew = engine.skew
        if self.is_like:
            skew.new = new_columns(schema, self.logs[0].types)
            skew_notes = list(skew.notes(schema, grown=grow))
        else:
            skew_notes = list(skew.clipped.notes(schema))
        schema = self._timed(schema, engine.times, grow)
        replace(fitted.transforms, schema=schema).save(new)
        engine.words.save(new, schema)
        _write_manifest(new, schema, fitter, self.writers, unknown, skew, is_like=self.is_like)
        return Prepared(
            out=new,
            schema=schema,
            left_out=fitter.left_out,
            rows={part: int(n) for part, n in zip(PARTS, fitter.rows, strict=True)},
            label_means=_means(fitter, float("nan")),
            notes=(
                *engine.notes(),
                *notes(schema, cutter.cuts, fitter, unknown, is_new=not self.is_like),
                *skew_notes,
                *self._count_notes(engine.times, grow),
                *self._group_notes(int(fitter.rows[0])),
            ),
        )

    def _engine(self) -> Engine:
        log = self.transforms.schema, self.logs, self.work, self.progress
        if self.engine is None:
            return Local(*log, self.pool)
        name, place = self.engine
        engine: Engine = engine_module(name).open_engine(place, *log)
        return engine

    def _timed(self, schema: Schema, times: features.quantile.Ordered | None, grow: bool) -> Schema:
        """Returns the schema with the first and the last time of the log; growing goes on with
        those it has.
        """
        name = schema.role("time")
        if name is None or not times or (self.is_like and not grow):
            return schema
        column = schema.columns[name]
        kind = self.logs[0].types[column.source or name]
        # text may spell integers
        unit = None if is_text(kind) else features.times.unit_of(kind, column.format)
        ends = features.times.seconds_of(times.at([0, len(times) - 1]), unit).astype(float)
        if self.is_like:
            known = schema.times_of(column.source or name)
            if known is None:  # an older schema does not say where earlier logs begin
                return schema
            ends = np.append(ends[~features.times.far_times(ends, *known)], known)
        column = replace(column, low=float(ends.min()), high=float(ends.max()))
        return replace(schema, columns=schema.columns | {name: column})

    def _count_notes(self, times: features.quantile.Ordered | None, grow: bool) -> Iterator[str]:
        """Yields a line for each column whose counts hold rows that are not before the log."""
        begins = int(times.at([0])[0]) if times and not grow else None
        for name in self.transforms.counts:
            until = self.transforms.schema.columns[name].until
            if begins is not None and until is not None and begins <= until:
                reason = f"rows up to time {until} were counted, and the log begins at {begins}"
                yield (
                    f"{name}: {reason}: labels of its own rows may be in its numbers; train on"
                    " later rows only"
                )

    def _group_notes(self, rows: int) -> Iterator[str]:
        """Yields a line for each feature group: what storing its repeated training rows once is
        worth.
        """
        writer = self.writers[0]
        for group, runs in writer.runs.items():
            factor, saved = rows / max(runs, 1), writer.saved[group]
            how = "once" if factor >= PAYS else f"for every row, as it pays from {PAYS} on"
            if factor >= PAYS and not pays(self.transforms.schema, group, factor):
                how = (
                    "for every row in one process, where such ids are cheap to look up, and once"
                    " between ranks"
                )
            less = f"{saved / 2**20:.1f} MiB less in train, before compression"
            yield (
                f"group {group}: {factor:.2f} rows a run, stored once: {less}; by default looked up"
                f" {how}"
            )

    def _write(
        self, new: Path, schema: Schema, ordered: Iterator[tuple[int, pa.Table]], total: int
    ) -> Unknown:
        """Writes the files of the parts. Returns how many ids are unknown."""
        numbered = [
            name for name in schema.sparse if is_numbered(schema, str(schema.columns[name].table))
        ]
        unknown = {part: dict.fromkeys(numbered, (0, 0)) for part in PARTS}
        rows = 0
        is_complete = False
        self.writers = [PartWriter(new / part, schema) for part in PARTS]
        try:
            for part, table in ordered:
                self.writers[part].add(table)
                _count_unknown(schema, table, unknown[PARTS[part]])
                if table.num_rows:
                    rows += table.num_rows
                    self.progress("write", rows, total)
            is_complete = True
        finally:
            for writer in self.writers:
                writer.close(is_complete=is_complete)
        assert rows == total, "rows were lost while they were written"
        return unknown


def _take_engine(settings: dict[str, Any]) -> tuple[str, str] | None:
    """Remove the engines from the settings, and return the name of the one that is wanted and where
    it works; None for this machine.
    """
    places = {name: settings.pop(name, None) for name in engine_texts()}
    wanted = [(name, place) for name, place in places.items() if place is not None]
    if len(wanted) > 1:
        names = ", ".join(dict(wanted))
        raise UserError(f"{names}: one alone can go through the rows; leave the others out")
    return wanted[0] if wanted else None


@contextmanager
def _within_memory() -> Iterator[None]:
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_lack_of_memory(error):
            raise
        raise UserError(
            "prepare: out of memory; it takes about 450 MB, and 48 bytes for each id of a"
            " vocabulary: leave it more (end other programs, raise ulimit -v or the container's"
            " limit), or give tables of many ids kind = 'hash' in a schema"
        ) from error


def _check_out(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / "manifest.json").is_file():
        raise UserError(f"{out}: exists and is not a prepared log; choose another folder")
    refuse_existing(out, overwrite)


def _logs(
    inputs: Sequence[str | Path] | Log, source: Source, split: Split, like: Schema | None
) -> list[Log]:
    """Returns the log, or the logs of train, valid and test, which are all read alike. like: of an
    earlier log.
    """

    def open_files(files: Sequence[str | Path]) -> Log:
        return open_like(files, source, like) if like else open_log(files, source)

    held_out = [split.valid_files, split.test_files]
    by_file = split.by == "file" or (split.by is None and any(held_out))
    if any(held_out) and not by_file:
        raise UserError(
            f"split.by: {split.by!r}, but files are named for valid or test; leave one of them out"
        )
    if isinstance(inputs, Log):
        if inputs.source.cells != source.cells:
            read = replace(inputs.source, cells=source.cells)
            inputs = replace(inputs, source=read).shaped(read)
        if by_file:
            raise UserError(
                "split.by: 'file' needs a log in files; write the tables to files, or split"
                " otherwise"
            )
        return [inputs]
    if not by_file:
        return [open_files(inputs)]
    if not any(held_out):
        raise UserError("split.by: 'file', but no files are named; give valid_files or test_files")
    groups = [find(paths) if paths else () for paths in (inputs, *held_out)]
    elsewhere = {file.resolve() for file in itertools.chain(*groups[1:])}
    groups[0] = tuple(file for file in groups[0] if file.resolve() not in elsewhere)
    if not groups[0]:
        raise UserError("inputs: every file is named for valid or test; name others for training")
    combined = open_files([file.name for file in itertools.chain(*groups)])
    logs = []
    first = 0
    for group in groups:
        last = first + len(group)
        # a log without files, but with a table, is that table
        beginning = combined.beginning if group else None
        log = replace(
            combined,
            files=combined.files[first:last],
            columns=combined.columns[first:last],
            beginning=beginning,
        )
        logs.append(replace(log, rows=0, repairs=Repairs()))
        first = last
    return logs


def _with_rule(source: Source, like: Schema | None) -> Source:
    """Returns the source with the rule by which cells are read: that of an earlier log, or else
    today's.
    """
    return replace(source, cells=like.source.cells if like else source.cells or RULE)


def _without_absent_baselines(transforms: Transforms, log: Log) -> Transforms:
    """Returns transforms without the baselines that a log lacks, as served rows do. No model reads
    them.
    """
    columns = {
        name: column
        for name, column in transforms.schema.columns.items()
        if column.kind != "baseline" or (column.source or name) in log.types
    }
    return replace(transforms, schema=replace(transforms.schema, columns=columns))


def _without_outcomes(schema: Schema, log: Log, outcomes: Sequence[str]) -> Schema:
    """Returns a given schema without some columns, none of which is a label."""
    check_outcomes(
        outcomes, log, [source for name in schema.labels for source in schema.sources(name)]
    )
    return without(schema, outcomes)


def _with_suspects(schema: Schema, log: Log) -> Schema:
    """Returns a given schema with notes at the columns that may know the outcome."""
    cells = log.sample(FIRST_ROWS)
    return suspected(schema, {name: cells[name].combine_chunks() for name in cells.column_names})


def _check_named(schema: Schema, names: Sequence[str], impressions: str | None) -> None:
    """Check that a schema has the labels and the column of impressions that are asked for."""
    if not schema.labels or not set(names) <= set(schema.labels):
        named, needed = ", ".join(schema.labels) or None, ", ".join(names) or "one"
        raise UserError(
            f"label: the schema's is {named}, {needed} is needed; give a column kind = 'label'"
        )
    role = schema.role("impressions")
    if impressions is not None and impressions not in (
        role,
        schema.columns[role].source if role else None,
    ):
        remedy = "give the column kind = 'impressions' in it"
        raise UserError(f"impressions: the schema's is {role}, {impressions} is needed; {remedy}")


def _complete(transforms: Transforms, log: Log, split: Split) -> Transforms:
    """Returns the schema to be fitted, with its split, once it was checked against the log."""
    source = replace(transforms.schema.source, cells=log.source.cells)
    schema = replace(transforms.schema, source=source)
    read = [name for name, column in schema.columns.items() if column.kind != "ignore"]
    refuse_left_out(log, schema, read)
    for name, column in schema.columns.items():
        for log_column in schema.sources(name) if name in read else ():
            if log_column not in log.types:
                has = f"it has {', '.join(log.types)}"
                raise UserError(f"columns.{name}: no column {log_column!r} in {log.name}; {has}")
        if column.weights and weights_of(name) in schema.columns:
            raise UserError(
                f"columns.{name}: its weights are kept as {weights_of(name)!r}, which is taken;"
                " rename it"
            )
    if not (schema.dense or schema.sparse):
        raise UserError("columns: no feature to learn from; make some numeric, categorical or list")
    by = split.by
    if by is None and (split.valid_files or split.test_files):
        by = "file"
    elif by is None:
        by = "time" if schema.role("time") else "ratio"
    if split.key is not None:
        by = "ratio"
        split = replace(split, key=preparation.split_key.find_split_key(schema, split.key))
    if by == "time" and schema.role("time") is None:
        raise UserError(
            "split.by: 'time' needs a column of kind time; declare one, or split by 'ratio'"
        )
    if by != "time" and split.until is not None:
        raise UserError(
            f"split.until: {split.until} is a share of the time, and the split is by {by}; leave"
            " it out"
        )
    if schema.of_kind("vector"):
        schema = meaning.vectors.sized(schema, log)
    if schema.counted:
        schema = preparation.earlier.with_defaults(schema)
    return replace(transforms, schema=replace(schema, split=replace(split, by=by)))


def _write_manifest(
    folder: Path,
    schema: Schema,
    fitter: Fitter,
    writers: Sequence[PartWriter],
    unknown: Unknown,
    skew: Skew,
    *,
    is_like: bool,
) -> None:
    """Writes manifest.json: what the folder holds, and the digests of its files."""
    manifest = {
        "version": VERSION,
        "rows": {part: int(n) for part, n in zip(PARTS, fitter.rows, strict=True)},
        "label_mean": _means(fitter, None),
        "unknown_ids": unknown,
        "clipped": dict(sorted(skew.clipped.counts.items())),
        # of what was fitted on it, it tells nothing
        **({"skew": skew.to_dict()} if is_like else {}),
        "base_rate": fitter.base_rates(),
        **({"unlabelled": missing} if (missing := unlabelled(fitter)) else {}),
        **({"impressions": shown} if (shown := fitter.impressions()) else {}),
        "schema_sha256": sha256(folder / "schema.toml"),
        "runs": {part: writer.runs for part, writer in zip(PARTS, writers, strict=True)},
        "saved_bytes": {part: writer.saved for part, writer in zip(PARTS, writers, strict=True)},
        "parts_sha256": {
            f"{part}/{file}": sha256(folder / part / file)
            for part in PARTS
            for file in files(schema)
        },
        "vocabulary_sha256": {name: sha256(folder / name) for name in fitted_files(schema)},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _means(fitter: Fitter, nothing: Any) -> dict[str, dict[str, Any]]:
    """Returns part -> label -> mean of the rows that have it, or `nothing` where none has."""
    labels = fitter.initial.schema.labels
    means: dict[str, dict[str, Any]] = {}
    for p, part in enumerate(PARTS):
        means[part] = {}
        for t, label in enumerate(labels):
            positives, known = fitter.counts(p, t)
            means[part][label] = positives / known if known else nothing
    return means


def _count_unknown(schema: Schema, table: pa.Table, unknown: dict[str, tuple[int, int]]) -> None:
    for name, (bad, total) in unknown.items():
        values = table[name].combine_chunks()
        ids = (values.flatten() if schema.columns[name].kind == "list" else values).to_numpy()
        unknown[name] = bad + int((ids == UNKNOWN).sum()), total + int((ids != MISSING).sum())


def _require_apart(out: Path, logs: Sequence[Log]) -> None:
    """Check that the folder is not where the log is."""
    if any(out.resolve() in file.resolve().parents for log in logs for file in log.files):
        raise UserError(f"{out}: holds the log that is to be prepared; choose another folder")


def _shape(logs: Sequence[Log], transforms: Transforms | None) -> list[Log]:
    """Returns logs whose cells are shaped alike, as they are known or as the first one looks."""
    if transforms is None:
        first = with_candidates(logs[0])
        return [log.like(first) for log in logs]
    for log in logs:
        meaning.separators.require_separators(log, transforms.schema)
    return [*logs]


def _say_columns(transforms: Transforms | None, log: Log, config: Settings) -> Transforms:
    """Returns transforms with what columns are: as it is known, without outcomes, or inferred."""
    outcomes = names_of(config.outcomes)
    if transforms is None:
        names = names_of(config.label)
        inferred = infer_log(log, names, impressions=config.impressions, outcomes=outcomes)
        return Transforms(schema=inferred)
    if not outcomes:
        return transforms
    return replace(transforms, schema=_without_outcomes(transforms.schema, log, outcomes))
