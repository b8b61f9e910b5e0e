"""Compares what is inferred of a log with what a person would say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sparrow.core.errors import UserError
from sparrow.data.logs.read import open_log
from sparrow.data.meaning.inference import infer
from sparrow.features.labels import labels
from sparrow.features.schema import Column, Schema

from . import made
from .maker import Log

PLANTED = ("later_seconds", "later_bit", "later_code", "later_level")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a person says of a column, what was found, and the note that it carries (or the error
    that refuses it).
    """

    log: str
    column: str
    meant: str
    found: str
    note: str | None
    right: bool


def judged(name: str, folder: Path) -> list[Verdict]:
    """Writes the log of that name into a folder, infers its schema and returns a verdict for each
    column.

    A log whose label is refused is tried again with the label told, and its label counts as wrong.
    If it is refused again, all of it is wrong.
    """
    log = made(name)
    path = log.write(folder, name)
    label, meanings, told = _label(log), log.meanings, {}
    try:
        schema = infer([path])
    except UserError as error:
        told = {label: str(error)}
        try:
            schema = infer([path], label)
        except UserError as again:
            schema, told = Schema(columns={}), dict.fromkeys(meanings, str(again))
    return [
        _verdict(name, column, meant, schema, told.get(column))
        for column, meant in meanings.items()
    ]


def alarms(name: str, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Writes the log of that name, as it is and with the columns `PLANTED`, which know its label.

    They are seconds that are 0 unless the label is 1, a bit that is 1 in a fifth of the rows where
    it is, a code that others lack, and a number that is higher by 2.5 standard deviations (an AUC
    of 0.96).

    Returns:
        Column -> note of those that may know the outcome in the log as it is, and with the columns.
    """
    log = made(name)
    label = _label(log)
    plain = log.write(folder, f"{name}_plain")
    schema = infer([plain], label)
    cells = open_log([plain]).sample(len(log.columns[label]))[label].combine_chunks()
    y_N = labels(cells, label, schema.columns[label], training=True, row0=0)
    random = np.random.default_rng(7)
    seconds = np.where(y_N == 1, 1 + random.exponential(30, len(y_N)).astype(int), 0)
    bits = ((y_N == 1) & (random.random(len(y_N)) < 0.2)).astype(int)
    codes = [
        f"v{code}" if y else None
        for code, y in zip(random.integers(0, 10**6, len(y_N)), y_N, strict=True)
    ]
    levels = np.round(2.5 * y_N + random.normal(0, 1, len(y_N)), 3)
    planted = dict(
        zip(PLANTED, (seconds.tolist(), bits.tolist(), codes, levels.tolist()), strict=True)
    )
    path = replace(log, columns={**log.columns, **planted}).write(folder, f"{name}_planted")
    return schema.suspects, infer([path], label).suspects


def _label(log: Log) -> str:
    return next(
        name
        for name, meant in log.meanings.items()
        if meant.startswith("label") and " or " not in meant
    )


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
    return Verdict(
        log=log,
        column=name,
        meant=meant,
        found=found,
        note=column.note,
        right=is_right(meant, column),
    )
