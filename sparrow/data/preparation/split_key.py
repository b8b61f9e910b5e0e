"""The column whose ids say which part a row belongs to, of a split that has a key."""

from __future__ import annotations

from sparrow.core.errors import UserError, suggest
from sparrow.features.schema import Schema


def find_split_key(schema: Schema, key: str) -> str:
    """Returns the column of ids that is called `key`, or else is made of the log's column of that
    name.

    Raises:
        UserError: when there is none, or when it holds no ids.
    """
    kinds = ("categorical", "group", "session")
    named = {
        name: column for name, column in schema.columns.items() if key in (name, column.source)
    }
    for name, column in sorted(named.items(), key=lambda item: item[0] != key):
        if column.kind in kinds and not column.quantiles and not column.part:
            return name
    if not named:
        raise UserError(f"split.key: no column {key!r}{suggest(key, schema.columns)}")
    kind = next(iter(named.values())).kind
    raise UserError(
        f"split.key: {key!r} is of kind {kind}, which names no ids; make it categorical, group or"
        " session"
    )
