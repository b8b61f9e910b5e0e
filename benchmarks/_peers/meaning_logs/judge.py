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

    A log whose label is refused is tried again with the label told, and its label counts as wrong. If it is refused
    again, all of it is wrong.
    """
    log = made(name)
    path = log.write(folder, name)
    label = next(name for name, meant in log.meanings.items() if meant.startswith("label") and " or " not in meant)
    meanings, told = log.meanings, {}
    try:
        schema = infer([path])
    except UserError as error:
        told = {label: str(error)}
        try:
            schema = infer([path], label)
        except UserError as again:
            schema, told = Schema(columns={}), dict.fromkeys(meanings, str(again))
    return [_verdict(name, column, meant, schema, told.get(column)) for column, meant in meanings.items()]


def is_right(meant: str, column: Column) -> bool:
    """Returns whether a column is what a person says that it is."""
    details = {"time": column.format, "label": column.positive, "list": column.separator}
    for each in meant.split(" or "):
        kind, _, detail = each.partition(" ")
        if column.kind == kind and (details.get(kind) or "") == detail:
            return True
    return False


def _verdict(log: str, name: str, meant: str, schema: Schema, refused: str | None) -> Verdict:
    column = schema.columns.get(name)
    if refused is not None or column is None:
        found = "absent" if refused is None else "refused"
        return Verdict(log=log, column=name, meant=meant, found=found, note=refused, right=False)
    details = [column.format, column.positive, column.separator]
    found = " ".join([column.kind, *(repr(detail) for detail in details if detail)])
    return Verdict(log=log, column=name, meant=meant, found=found, note=column.note, right=is_right(meant, column))
