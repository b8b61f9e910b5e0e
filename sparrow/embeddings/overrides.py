"""Other choices for some tables: for which ones an `Override` is, and what it changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from sparrow.core.config import changed, to_dict
from sparrow.core.errors import UserError
from sparrow.embeddings.choices import Override, TableChoices

_CONDITION = re.compile(r"\s*rows\s*(<=|>=|==|!=|<|>)\s*([0-9]+(?:_[0-9]+)*)\s*")
_PARTS = ("addressing", "format", "rule", "state", "cache", "tier", "init_scale")
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<": int.__lt__,
    "<=": int.__le__,
    ">": int.__gt__,
    ">=": int.__ge__,
    "==": int.__eq__,
    "!=": int.__ne__,
}


def check(override: Override) -> None:
    """Check that an override says for which tables it is.

    Raises:
        UserError: when it does not, or its condition cannot be read.
    """
    if override.names is None and override.where is None:
        raise UserError('of which tables? give names = ["item"] or where = "rows > 100_000"')
    for condition in _conditions(override):
        if not _CONDITION.fullmatch(condition):
            raise UserError(
                f'where: {condition.strip()!r} is no test of rows; write such as "rows > 100_000"'
            )


def is_for(override: Override, name: str, rows: int) -> bool:
    """Returns whether an override is for a table of this name, with so many rows."""
    if override.names is not None and name not in override.names:
        return False
    matches = [_CONDITION.fullmatch(condition) for condition in _conditions(override)]
    return all(_COMPARE[match[1]](rows, int(match[2])) for match in matches if match)


def apply(override: Override, choices: TableChoices) -> TableChoices:
    """Returns the choices with what an override changes, and without their overrides."""
    parts = [part for part in _PARTS if getattr(override, part) is not None]
    merged = to_dict(choices, only=parts)
    for part in parts:
        change = getattr(override, part)
        before = merged.get(part, {})
        if isinstance(change, dict):
            is_same_member = before.get("name") == change.get("name", before.get("name"))
            change = {**(before if is_same_member else {}), **change}
        merged[part] = change
    return changed(replace(choices, overrides=()) if choices.overrides else choices, merged)


def check_all(choices: TableChoices) -> None:
    """Check that each override fits the defaults, or else what an earlier one makes of them.

    Raises:
        UserError: names the first that fits none of them.
    """
    results = [choices]
    for number, override in enumerate(choices.overrides):
        results.append(_apply_to_first(override, results, number))


def _apply_to_first(override: Override, results: list[TableChoices], number: int) -> TableChoices:
    errors = []
    for choices in results:
        try:
            return apply(override, replace(choices, overrides=()))
        except UserError as error:
            errors.append(str(error))
    raise UserError(f"overrides[{number}].{errors[0]}")


def _conditions(override: Override) -> list[str]:
    return [] if override.where is None else override.where.split(" and ")
