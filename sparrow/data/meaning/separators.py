"""Which columns of a log are text that has to be cut, where a schema that was made of another log
does not say at what.

Parquet has lists and vectors as such. The same log as CSV has text in their place.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError
from sparrow.data import meaning
from sparrow.data.logs.read import Log
from sparrow.features.cells import trimmed, without_words
from sparrow.features.ids import is_text
from sparrow.features.schema import Column, Schema

_ROWS = 1000  # that are looked at
_SHOWN = 40  # characters of a text


def require_separators(log: Log, schema: Schema) -> None:
    """Check that text of lists and vectors is cut where the schema says, or else at white space.

    Text that has white space may be cut there.

    Raises:
        UserError: for text that looks cut at something else. It names the separator.
    """
    uncut = {
        name: c
        for name, c in schema.columns.items()
        if c.kind in ("list", "vector") and c.separator is None
    }
    sources = {name: column.source or name for name, column in uncut.items()}
    texts = {
        name: source
        for name, source in sources.items()
        if is_text(log.types.get(source, pa.null()))
    }
    if not texts:
        return
    sample = log.sample(_ROWS)
    for name, source in texts.items():
        values = trimmed(sample[source].combine_chunks())
        values = (without_words(values) if log.source.has_words else values).drop_null()
        if (separator := _separator(values, uncut[name])) is not None:
            example = repr(values[0].as_py()[:_SHOWN])
            raise UserError(
                f"{log.name}: {source} is text such as {example}, which the schema cuts at white"
                " space; add separator "
                f'= "{separator}" to columns.{name} in the schema.toml of the run, or in the one'
                " given with --schema"
            )


def _separator(values: pa.Array, column: Column) -> str | None:
    """Returns what texts seem to be cut at; None where it is white space, and where nothing is
    found.
    """
    if not len(values):
        return None
    if column.kind == "vector":
        if column.size is not None:
            return meaning.vectors.separator_of(values, column.size)
        vector = meaning.vectors.vector_of(values, values.type)
        return None if vector is None else vector.separator
    separator, _ = meaning.lists.list_of(values) or (None, None)
    is_spaced = pc.any(pc.match_substring_regex(values, r"\s")).as_py()
    return separator if separator == "json" or not is_spaced else None
