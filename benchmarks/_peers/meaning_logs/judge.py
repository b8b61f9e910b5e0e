"""Compares what is inferred of a log with what a person would say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparrow.core.errors import UserError
from sparrow.data.meaning.inference import infer
from sparrow.features.schema import Column, Schema

from . import made


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a person says of a column, what was found, and the note that it carries (or the error that refuses it)."""

    log: str
    column: str
    meant: str
    found: str
    note: str | None
    right: bool


def judged(name: str, folder: Path) -> list[Verdict]:
    """Writes the log of that name into a folder, infers its schema and returns a verdict for each column.

    A log whose label is refused is tried again with the label told, and its label counts as wrong.
    """
    log = made(name)
    path = log.write(folder, name)
    label = next(column for column, meant in log.meanings.items() if meant.split()[0] == "label" and " or " not in meant)
    refused = None
    try:
        schema = infer([path])
    except UserError as error:
        refused = str(error)
        schema = infer([path], label)
    verdicts = [_verdict(name, column, meant, schema) for column, meant in log.meanings.items()]
    if refused is None:
        return verdicts
    told = Verdict(
        log=name, column=label, meant=log.meanings[label], found="refused", note=refused, right=False
    )
    return [told if verdict.column == label else verdict for verdict in verdicts]


def is_right(meant: str, column: Column) -> bool:
    """Returns whether a column is what a person says that it is."""
    details = {"time": column.format, "label": column.positive, "list": column.separator}
    for each in meant.split(" or "):
        kind, _, detail = each.partition(" ")
        if column.kind == kind and (details.get(kind) or "") == detail:
            return True
    return False


def _verdict(log: str, name: str, meant: str, schema: Schema) -> Verdict:
    column = schema.columns.get(name)
    if column is None:
        return Verdict(log=log, column=name, meant=meant, found="absent", note=None, right=False)
    details = [column.format, column.positive, column.separator]
    found = " ".join([column.kind, *(repr(detail) for detail in details if detail)])
    return Verdict(log=log, column=name, meant=meant, found=found, note=column.note, right=is_right(meant, column))
