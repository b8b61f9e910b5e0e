"""Turn a raw click log into typed, split, fitted Parquet that training reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from sparrow.cli._flags import Changes
from sparrow.data.preparation.settings import Settings, engine_settings
from sparrow.features.schema import Cluster, Join, Source, Split

if TYPE_CHECKING:
    from sparrow.data.preparation.job import Prepared


def prepare(
    inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT...")],
    /,
    *,
    out: Path | None = None,
    schema: Path | None = None,
    like: Path | None = None,
    settings: Settings,
    split: Annotated[Mapping[str, Any], Changes(Split)],
    reading: Annotated[Mapping[str, Any], Changes(Source)],
    join: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    on: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    prefix: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    cluster: Annotated[Mapping[str, Any], Changes(Cluster)],
    order_by: str | None = None,
    suggest_groups: bool = False,
    engine: Annotated[Mapping[str, Any], Changes(engine_settings())],
    infer_only: bool = False,
) -> None:
    """Turn a raw click log into typed, split, fitted Parquet that training reads.

    Without --schema the columns' meaning is inferred and written to OUT/schema.toml, to read, edit and pass back.
    What is given here counts more than what a schema says.

    Args:
        inputs: Files, globs, folders or addresses in object stores, in order: CSV, TSV, Parquet or Criteo's format, packed too; columns in the names of folders (dt=2026-03-01) are read.
        out: The prepared log, a new directory; needed unless --infer-only.
        schema: A schema file to obey; fitted numbers may be left out of it.
        like: A run or a prepared log whose columns, fitted numbers and vocabularies are used as they are.
        join: A side table, such as items.csv, whose columns each row gets, by the column that --on names. May be given several times, each with its --on.
        on: With --join: the column that both tables have, or LOG_COLUMN=ITS_COLUMN.
        prefix: With --join, as often: what the names of its columns begin with, such as user_; by default only names that are taken get one, the file's own name.
        order_by: The column that says when; by default the time column of the log.
        suggest_groups: Measure which features repeat from row to row, and say which to name as [groups] in the schema.
        infer_only: Print the schema that would be inferred, and stop.
    """  # noqa: E501 - a line of help each
    from sparrow import data, features
    from sparrow.cli import _show
    from sparrow.core.errors import UserError
    from sparrow.data.logs.read import open_log
    from sparrow.data.meaning.inference import infer_log
    from sparrow.data.preparation.matches import require_matches
    from sparrow.features.schema import Schema
    from sparrow.features.transforms import Transforms

    if schema and like:
        raise UserError("--schema and --like: both say what the columns are; give one of them")
    fitted: Transforms | Schema | None = Schema.load(schema) if schema else None
    if like:
        fitted = Transforms.load(like)
    known = fitted.schema if isinstance(fitted, Transforms) else fitted
    before = known.split if known else Split()
    if like:
        before = _without_places(before)
    wanted = _changed_split(before, split)
    if joins := _joins(join, on, prefix):
        reading = {**reading, "joins": joins}
    source = replace(known.source if known else Source(), **reading)
    named = {name: getattr(settings, name) for name in ("label", "impressions", "outcomes")}
    if cluster.get("by") or order_by or "hours" in cluster:
        if like:
            raise UserError(
                "--like with --cluster-by, --order-by or --cluster-hours: columns stay as they"
                " were; give --schema"
            )
        known = known or infer_log(open_log(inputs, source), **named)
        source = replace(known.source, **reading)
        fitted = features.clusters.clustered_by(
            known, cluster.get("by"), order_by, cluster.get("hours")
        )
    now = fitted.schema if isinstance(fitted, Transforms) else fitted
    if suggest_groups and not (now and now.cluster):
        raise UserError(
            "--suggest-groups: sessions must stand together for it; say by what, with --cluster-by"
        )
    if infer_only:
        log = open_log(inputs, source)
        require_matches([log])
        now = now if now and cluster.get("by") else infer_log(log, **named)
        print(now.to_toml(), end="")
        return
    if out is None:
        raise UserError("--out: missing; name the folder for the prepared log")
    with _show.progress_bar() as progress:
        prepared = data.prepare(
            inputs,
            out,
            schema=fitted,
            split=wanted,
            progress=progress,
            source=source,
            **vars(settings),
            **engine,
        )
    _parts(prepared)
    if suggest_groups:
        from sparrow.cli import _groups

        _groups.suggest(data.open(out))
    _show.out.print(
        f"{out}/schema.toml says what each column is taken for; edit it and pass it back with"
        " --schema",
        soft_wrap=True,
    )


def _without_places(split: Split) -> Split:
    """Returns the split of an earlier log without its files and times, which are not of this
    one.
    """
    if split.by == "file":
        split = replace(split, by=None, valid_files=(), test_files=())
    return replace(split, until=None)


def _changed_split(before: Split, changes: Mapping[str, Any]) -> Split:
    """Returns a split with what was given for it, and the way of splitting that this asks for."""
    if "by" in changes:
        if changes["by"] != "ratio" and not changes.get("key"):
            before = replace(before, key=None)
        return replace(before, **changes)
    by: dict[str, Any] = {"by": "ratio"} if changes.get("key") else {}
    changed = replace(before, **by, **changes)
    has_files = changes.get("valid_files") or changes.get("test_files")
    return replace(changed, by="file") if has_files else changed


def _parts(prepared: Prepared) -> None:
    """What to look at, and the parts with their rows and the means of their labels."""
    from sparrow.cli import _show

    _show.notes(prepared.notes)
    labels = prepared.schema.labels
    table = _show.Table("part", "rows", *(["positives"] if len(labels) == 1 else labels))
    for name, rows in prepared.rows.items():
        table.add_row(
            name,
            f"{rows:,}",
            *(f"{prepared.label_means[name][label]:.4f}" if rows else "" for label in labels),
        )
    _show.out.print(table)


def _joins(
    files: Sequence[str], on: Sequence[str], prefixes: Sequence[str]
) -> tuple[Join, ...] | None:
    """Returns what --join, --on and --prefix say."""
    from sparrow.core.errors import UserError

    if len(files) != len(on):
        raise UserError(
            f"--join {len(files)} times and --on {len(on)} times; give each side table its column"
        )
    if prefixes and len(files) != len(prefixes):
        raise UserError(
            f"--join {len(files)} times and --prefix {len(prefixes)} times; give each side"
            " table one"
        )
    joins = []
    side_prefixes: Sequence[str | None] = prefixes or [None] * len(files)
    for file, pair, prefix in zip(files, on, side_prefixes, strict=True):
        column, _, key = pair.partition("=")
        joins.append(Join(file=file, on=column, key=key or None, prefix=prefix))
    return tuple(joins) or None
