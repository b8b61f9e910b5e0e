"""Turn a raw click log into typed, split, fitted Parquet that training reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from sparrow.core.config import write_toml

if TYPE_CHECKING:
    from sparrow.data.batches.repeats import Repeats
    from sparrow.data.preparation.job import Prepared
    from sparrow.features.schema import Join


def prepare(
    inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")],
    /,
    out: Path | None = None,
    schema: Path | None = None,
    like: Path | None = None,
    grow: bool = False,
    label: str | None = None,
    split: Literal["time", "ratio", "file"] | None = None,
    split_by: str | None = None,
    valid: float | None = None,
    test: float | None = None,
    valid_files: tuple[str, ...] | None = None,
    test_files: tuple[str, ...] | None = None,
    negatives: float | None = None,
    seed: int | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    bad_rows: Literal["stop", "repair"] | None = None,
    candidates: str | None = None,
    clicked: str | None = None,
    parallel: tuple[str, ...] | None = None,
    join: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    on: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    cluster_by: str | None = None,
    order_by: str | None = None,
    cluster_hours: float | None = None,
    suggest_groups: bool = False,
    ray: str | None = None,
    overwrite: bool = False,
    infer_only: bool = False,
) -> None:
    """Turn a raw click log into typed, split, fitted Parquet that training reads.

    Without --schema the columns' meaning is inferred and written to OUT/schema.toml, to read, edit and pass back.

    Args:
        inputs: Files, globs, folders or addresses in object stores, in order: CSV, TSV, Parquet or Criteo's format, .gz and .zst too.
        out: The prepared log, a new directory; needed unless --infer-only.
        schema: A schema file to obey; fitted numbers may be left out of it.
        like: A run or a prepared log whose columns, fitted numbers and vocabularies are used as they are.
        grow: With --like: give ids that are new in this log table rows of their own, after the old ones.
        label: The column to predict, when it cannot be guessed.
        split: By time (the last rows are held out), by ratio (at random: whole groups or sessions where the log has them, else rows) or by file; by file when files are named, else by time when there is a time column.
        split_by: A column of ids, such as user_id: split by ratio, all rows with one id in one part.
        valid: Share of the rows for validation; 0.1 by default.
        test: Share of the rows for the test; 0.1 by default.
        valid_files: Files for validation; the others are for training.
        test_files: Files for the test.
        negatives: Share of the training rows without a click to keep; scores are corrected for it.
        seed: The seed of the split by ratio and of --negatives.
        delimiter: What separates the cells of text; by default it is found out.
        encoding: The encoding of text, such as latin-1 or cp1252; UTF-8 by default.
        bad_rows: stop ends at a line that cannot be read; repair leaves it out, takes bad cells for missing, and counts both.
        candidates: The column with a list of what was shown, each of which becomes a row; found out if its name says so. "" if there is none.
        clicked: With --candidates: the column with the list of the clicked ones, or what is before 0 and 1 in text such as N12-1: --clicked=-
        parallel: With --candidates: further columns with a list as long as that of the candidates; by default found by their lengths.
        join: A side table, such as items.csv, whose columns each row gets, by the column that --on names. May be given several times, each with its --on.
        on: With --join: the column that both tables have, or LOG_COLUMN=ITS_COLUMN.
        cluster_by: The column that names the session; its rows stand side by side, in the order of --order-by.
        order_by: The column that says when; by default the time column of the log.
        cluster_hours: Sessions stand together within so many hours; 1 by default, 0 for the whole log.
        suggest_groups: Measure which features repeat from row to row, and say which to name as [groups] in the schema.
        ray: Work on a Ray cluster: its address, auto for the one that Ray finds, or local to try it here. Its machines take a file each and must see the log and OUT.
        overwrite: Replace an existing OUT, once the new one is complete.
        infer_only: Print the schema that would be inferred, and stop.
    """  # noqa: E501 - a line of help each
    from sparrow import data
    from sparrow.cli import _show
    from sparrow.core.errors import UserError
    from sparrow.data.batches.repeats import repeats
    from sparrow.data.logs.read import open_log
    from sparrow.data.meaning.inference import infer_log
    from sparrow.features.schema import Schema, Source, Split, clustered_by
    from sparrow.features.transforms import Transforms

    if schema and like:
        raise UserError("--schema and --like: both say what the columns are; give one of them")
    given: Transforms | Schema | None = Schema.load(schema) if schema else None
    if like:
        given = Transforms.load(like)
    known = given.schema if isinstance(given, Transforms) else given
    before = known.split if known else Split()
    if like and before.by == "file":  # its files are not those of this log
        before = replace(before, by=None, valid_files=(), test_files=())
    if like:
        before = replace(before, until=None)  # nor are its times
    if split in ("time", "file") and not split_by:
        before = replace(before, key=None)
    by = split or ("ratio" if split_by else None)
    told: dict[str, Any] = {"by": by, "key": split_by, "valid": valid, "test": test}
    told |= {"negatives": negatives, "seed": seed}
    told |= {"valid_files": valid_files, "test_files": test_files}
    wanted = replace(before, **_told(told))
    if (valid_files or test_files) and split is None:
        wanted = replace(wanted, by="file")
    about_text = {"delimiter": delimiter, "encoding": encoding, "bad_rows": bad_rows}
    about_lists = {"candidates": candidates, "clicked": clicked, "parallel": parallel, "joins": _joins(join, on)}
    source = replace(known.source if known else Source(), **_told(about_text | about_lists))
    if cluster_by or order_by or cluster_hours is not None:
        if like:
            raise UserError(
                "--like with --cluster-by, --order-by or --cluster-hours: columns stay as they were; give --schema"
            )
        known = known or infer_log(open_log(inputs, source), label)
        source = replace(known.source, **_told(about_text | about_lists))
        given = clustered_by(known, cluster_by, order_by, cluster_hours)
    now = given.schema if isinstance(given, Transforms) else given
    if suggest_groups and not (now and now.cluster):
        raise UserError("--suggest-groups: sessions must stand together for it; say by what, with --cluster-by")
    if infer_only:
        print((now if now and cluster_by else infer_log(open_log(inputs, source), label)).to_toml(), end="")
        return
    if out is None:
        raise UserError("--out: missing; name the folder for the prepared log")
    with _show.progress_bar() as progress:
        made = data.prepare(
            inputs,
            out,
            schema=given,
            label=label,
            split=wanted,
            grow=grow,
            overwrite=overwrite,
            progress=progress,
            source=source,
            ray=ray,
        )
    _parts(made)
    if suggest_groups:
        _suggest(repeats(data.open(out)))
    _show.out.print(
        f"{out}/schema.toml says what each column is taken for; edit it and pass it back with --schema", soft_wrap=True
    )


def _parts(made: Prepared) -> None:
    """What to look at, and the parts with their rows and the means of their labels."""
    from sparrow.cli import _show

    _show.notes(made.notes)
    labels = made.schema.labels
    table = _show.Table("part", "rows", *(["positives"] if len(labels) == 1 else labels))
    for name, rows in made.rows.items():
        table.add_row(name, f"{rows:,}", *(f"{made.label_means[name][label]:.4f}" if rows else "" for label in labels))
    _show.out.print(table)


def _suggest(found: Repeats) -> None:
    """Print what repeats, and the lines for a schema."""
    from sparrow.cli import _show

    counted = f"{found.rows:,} rows of {found.sessions:,} sessions, {found.rows / max(found.sessions, 1):.1f} each"
    _show.out.print(f"what repeats from row to row: {counted}", soft_wrap=True)
    table = _show.Table("feature", "equal to the row before", "rows a run", "group")
    of = {name: group for group, names in found.groups.items() for name in names}
    for name, runs in sorted(found.runs.items(), key=lambda item: item[1]):
        table.add_row(name, f"{found.equal[name]:.1%}", f"{found.rows / runs:.2f}", of.get(name, ""))
    _show.out.print(table)
    if not found.groups:
        _show.out.print("no group pays: too little repeats")
        return
    _show.out.print("to store and look these up once for every run, put this in the schema and prepare again:")
    print(write_toml({"groups": {group: list(names) for group, names in found.groups.items()}}), end="")


def _joins(files: Sequence[str], on: Sequence[str]) -> tuple[Join, ...] | None:
    """Returns what --join and --on say."""
    from sparrow.core.errors import UserError
    from sparrow.features.schema import Join

    if len(files) != len(on):
        raise UserError(f"--join {len(files)} times and --on {len(on)} times; give each side table its column")
    both = [name.partition("=") for name in on]
    joins = (Join(file=file, on=a, key=b or None) for file, (a, _, b) in zip(files, both, strict=True))
    return tuple(joins) or None


def _told(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
