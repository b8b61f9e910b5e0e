"""Columns of structs, as Parquet and data frames nest them, as columns of their own: `user.age` of
`user`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError
from sparrow.data.shaping.repair import Repairs
from sparrow.data.shaping.steps import Rows, Shaped, Types
from sparrow.features.types import as_read, is_list, is_nested, left_out, read_as


@dataclass(frozen=True)
class Structs:
    """The step (see `Step`) that makes a column `parent.child` of each field of a struct, however
    deep.

    A list of structs becomes as many lists. Where the parent is missing, so are its children.
    Fields of a type that is not read are left out.

    held: the columns before. log: what the log is called.
    """

    held: Types
    log: str = "the log"

    def types(self) -> Types:
        """See `Step`.

        Raises:
            UserError: for two columns of one name.
        """
        types: Types = {}
        for name, kind in self.held.items():
            for path, _, leaf in _leaves(name, kind):
                if path in types:
                    raise UserError(
                        f"column {path!r}: there is one of this name and a struct with this field;"
                        " rename one"
                    )
                if leaf is not None:
                    types[path] = leaf
        return types

    def needs(self, wanted: Types) -> Types:
        """See `Step`."""
        roots = {
            path: name for name, kind in self.held.items() for path, _, _ in _leaves(name, kind)
        }
        return {
            roots[path]: kind if roots[path] == path else self.held[roots[path]]
            for path, kind in wanted.items()
        }

    def apply(self, stream: Iterator[Rows], wanted: Types, repairs: Repairs) -> Iterator[Rows]:
        """See `Step`."""
        types = self.types()
        for rows in stream:
            columns: dict[str, pa.Array] = {}
            for name, column in zip(rows.batch.schema.names, rows.batch.columns, strict=True):
                columns |= dict(_columns(name, column))
            for path in columns.keys() & types.keys() - self.held.keys():
                columns[path] = columns[path].cast(types[path])
            yield rows.with_columns({path: columns[path] for path in wanted})

    def left_out(self) -> dict[str, str]:
        """Returns what is said of each field of a type that is not read."""
        leaves = [leaf for name, kind in self.held.items() for leaf in _leaves(name, kind)]
        unread = [(path, kind) for path, kind, read in leaves if read is None]
        return {path: f"{self.log}: {left_out(path, kind)}" for path, kind in unread}

    def check(self, logs: Sequence[Shaped]) -> None:
        """See `Step`."""

    def notes(self) -> list[str]:
        """See `Step`. What is left out stands in `Log.left_out`."""
        return []


def shape(log: Shaped, is_earlier: bool) -> Shaped:
    """See `steps.KINDS`."""
    structs = Structs(log.types, log.name)
    return log.then(structs, left_out={**log.left_out, **structs.left_out()})


def _leaves(name: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType, pa.DataType | None]]:
    """Yields name and type of the columns that one becomes, and as what each is read, None where it
    is left out.
    """
    read = read_as(kind)
    if read is None or not is_nested(read):
        yield name, kind, read
        return
    for field in read.value_type if is_list(read) else read:
        yield from _leaves(
            f"{name}.{field.name}", pa.large_list(field.type) if is_list(read) else field.type
        )


def _columns(name: str, column: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    """Yields name and values [N] of the columns that one becomes, each as it is read."""
    if read_as(column.type) is None:
        return
    column = as_read(column)
    kind = column.type
    if not is_nested(kind):
        yield name, column
        return
    if pa.types.is_struct(kind):
        # missing where the struct is
        for field, values in zip(kind, column.flatten(), strict=True):
            yield from _columns(f"{name}.{field.name}", values)
        return
    lengths_N = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths_N, dtype=np.int64)]))
    for field, values in zip(kind.value_type, column.flatten().flatten(), strict=True):
        lists = pa.LargeListArray.from_arrays(offsets, values, mask=column.is_null())
        yield from _columns(f"{name}.{field.name}", lists)
