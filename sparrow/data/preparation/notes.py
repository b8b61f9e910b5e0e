"""What a person should look at once a log is prepared, a line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from sparrow.data import preparation
from sparrow.data.batches.parts import PARTS
from sparrow.data.meaning.labels import OUTCOME
from sparrow.data.meaning.outcomes import REMEDY, flag_of
from sparrow.data.preparation.cutter import Cut
from sparrow.data.preparation.fit import Fitter
from sparrow.features.encodings import FIRST
from sparrow.features.schema import Schema
from sparrow.features.skew import first_names, unknown_words

# part -> column -> ids that its table does not know, and all
Unknown = dict[str, dict[str, tuple[int, int]]]


def notes(
    schema: Schema, cuts: Sequence[Cut], fitter: Fitter, unknown: Unknown, *, is_new: bool
) -> Iterator[str]:
    """Yields what a person should look at, a line each; of the columns only if they are new."""
    if is_new:
        yield from _header_notes(schema)
    yield from _column_notes(schema, is_new)
    yield from _split_notes(schema, cuts, fitter)
    yield from _missing_notes(fitter)
    yield from _impression_notes(schema, fitter)
    yield from _outcome_notes(schema, fitter)
    if is_new or fitter.grow:  # else those of all parts are told
        words = unknown_words((name, *counts) for name, counts in unknown["valid"].items())
        if words:
            yield f"ids of valid that their tables do not know: {words}"
    if is_new:
        yield from _range_notes(schema)
    yield from _unknown_notes(schema, unknown["train"], is_new)


def _header_notes(schema: Schema) -> Iterator[str]:
    names, source = schema.source.names, schema.source
    if names and not source.header and source.format != "criteo":
        yield (
            f"no header was found, so the columns are called {names[0]} to {names[-1]}; write one"
            " to name them"
        )


def _column_notes(schema: Schema, is_new: bool) -> Iterator[str]:
    """Yields what columns are taken for, where that may be wrong."""
    suspects = schema.suspects
    for name, note in suspects.items():
        yield f"{name}: {note if is_new else note.partition(REMEDY)[0]}"
    if is_new and len(suspects) > 1:
        yield f"to leave all of these out: {flag_of(schema.sources(name)[0] for name in suspects)}"
    for name, column in schema.columns.items() if is_new else ():
        # what the note advises
        is_done = column.kind == "label" and str(column.note).startswith(OUTCOME)
        if column.note and name not in suspects and not is_done:
            yield f"{name}: {column.note}"


def _missing_notes(fitter: Fitter) -> Iterator[str]:
    for label, lacks in unlabelled(fitter).items():
        missing, rows = sum(lacks.values()), int(fitter.rows.sum())
        yield (
            f"{label}: missing in {missing:,} of {rows:,} rows, which have no loss and are in no"
            " metric of this label"
        )


def _impression_notes(schema: Schema, fitter: Fitter) -> Iterator[str]:
    """Yields how many rows a row stands for."""
    if impressions := schema.role("impressions"):
        counted = ", ".join(name for name in schema.labels if not schema.columns[name].probability)
        among = f"; ones among them: {counted}" if counted else ""
        yield f"a row stands for as many rows as {impressions} says{among}"
        if fitter.empty:
            yield (
                f"{impressions}: 0 in {fitter.empty:,} rows, which stand for nothing and are"
                " left out"
            )


def _outcome_notes(schema: Schema, fitter: Fitter) -> Iterator[str]:
    """Yields which parts have rows of one outcome alone."""
    for (p, part), (t, label) in product(enumerate(PARTS), enumerate(schema.labels)):
        rows = int(fitter.labelled[p, t])
        positives, known = fitter.counts(p, t)
        if rows and positives in (0, known):
            remedy = f"give it more rows (--{part}), or divide the log in another way (--split)"
            counts = [fitter.counts(q, t) for q in range(len(PARTS))]
            if sum(count[0] for count in counts) in (0, sum(count[1] for count in counts)):
                remedy = "so it is in the whole log; judge by rows with both outcomes"
            so = "so AUC and NE have no value there"
            if part == "train":  # of a log that is an addition to others
                so = "so a model that begins with it learns nothing"
                remedy = "go on with one that knows other rows"
            yield f"{part}: all {rows:,} rows have {label} {min(positives, 1)}, {so}; {remedy}"


def _range_notes(schema: Schema) -> Iterator[str]:
    """Yields of which values training has no rows, though their tables do."""
    for name, part in schema.parts.items():
        table = schema.encodings[name]
        known = (table.rows or 0) - FIRST
        if table.kind == "range" and table.distinct is not None and table.distinct < known:
            values = f"training has {table.distinct} of the {known} values of {part}"
            yield (
                f"{name}: {values}; the rows of the others stay as they begin, at random, until a"
                " log has them"
            )


def _unknown_notes(
    schema: Schema, unknown: dict[str, tuple[int, int]], is_new: bool
) -> Iterator[str]:
    """Yields which tables learn nothing for ids that they do not know, and which columns know none.

    unknown: column -> ids of training that its table does not know, and all.
    """
    learn = {schema.columns[name].table for name, (bad, _) in unknown.items() if bad}
    tables = dict.fromkeys(str(schema.columns[name].table) for name in unknown)
    tables = {name: None for name in tables if name not in schema.parts}  # whose ids are all known
    if never := [name for name in tables if name not in learn]:
        reason = "so that the row of unknown ids never learns"
        yield f"tables without an unknown id in training, {reason}: {first_names(never)}"
    lost = [name for name, (bad, ids) in unknown.items() if ids and bad == ids]
    if lost and is_new:
        reason = "an id is known after its first moment, and rows of one time can be one"
        yield (
            f"all ids of training are unknown in {', '.join(lost)}: {reason}; give their tables"
            " min_count = 1"
        )


def _split_notes(schema: Schema, cuts: Sequence[Cut], fitter: Fitter) -> Iterator[str]:
    """Yields how the rows were divided, and what of it is not as the split asks."""
    split, rows = schema.split, fitter.rows.tolist()
    by = {
        "time": f"by time (column {schema.role('time')})",
        "file": "by file",
        "ratio": "at random",
    }
    if schema.split_key:
        by["ratio"] += f", all rows of one {schema.split_key} in one part"
    words = "" if schema.role("time") else "; no column is known to be a time"
    if split.by == "time":
        words += preparation.cuts.drawn_words(schema, cuts)
    if split.negatives == 1 and (split.by == "time" or (split.by == "ratio" and schema.split_key)):
        words += preparation.cuts.share_words(split, rows)
    yield f"split {by[split.by or 'ratio']}{words}"
    if split.until is not None:
        yield f"the first {split.until:.1%} of the rows in time are taken"
    elif split.negatives < 1:
        text = f"{fitter.left_out:,} of {fitter.left_out + rows[0]:,} training rows left out"
        yield (
            f"{text}, rows without a click, of which {split.negatives:g} are kept; scores are"
            " corrected for it"
        )
    wanted = {"valid": split.valid, "test": split.test} if split.by != "file" else {}
    for p, part in enumerate(PARTS):
        if wanted.get(part) and not rows[p]:
            few = (
                f"the log is too small for it; name files for it (--{part}-files), or ask for none"
                f" (--{part} 0)"
            )
            yield f"{part}: no rows, though the split asks for {wanted[part]}; {few}"


def unlabelled(fitter: Fitter) -> dict[str, dict[str, int]]:
    """Returns label -> part -> how many rows lack it, for labels that some row lacks."""
    lacks = fitter.rows[:, None] - fitter.labelled
    labels = [(t, name) for t, name in enumerate(fitter.initial.schema.labels) if lacks[:, t].any()]
    return {name: {part: int(lacks[p, t]) for p, part in enumerate(PARTS)} for t, name in labels}
