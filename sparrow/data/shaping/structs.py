"""Columns of structs, as Parquet and data frames nest them, as columns of their own: `user.age` of `user`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.errors import UserError
from sparrow.data.shaping.repair import Repairs
from sparrow.data.shaping.steps import Rows, Types


@dataclass(frozen=True)
class Structs:
    """The step (see `Step`) that makes a column `parent.child` of each field of a struct, however deep.

    A list of structs becomes as many lists. Where the parent is missing, so are its children. held: the columns before.
    """

    held: Types

    def types(self) -> Types:
        """See `Step`.

        Raises:
            UserError: for two columns of one name.
        """
        made: Types = {}
        for name, kind in self.held.items():
            for path, leaf in _leaves(name, kind):
                if path in made:
                    raise UserError(
                        f"column {path!r}: there is one of this name and a struct with this field; rename one"
                    )
                made[path] = leaf
        return made

    def needs(self, wanted: Types) -> Types:
        """See `Step`."""
        roots = {path: name for name, kind in self.held.items() for path, _ in _leaves(name, kind)}
        return {roots[path]: kind if roots[path] == path else self.held[roots[path]] for path, kind in wanted.items()}

    def made(self, stream: Iterator[Rows], wanted: Types, repairs: Repairs) -> Iterator[Rows]:
        """See `Step`."""
        types = self.types()
        for rows in stream:
            columns: dict[str, pa.Array] = {}
            for name, column in zip(rows.batch.schema.names, rows.batch.columns, strict=True):
                columns |= dict(_columns(name, column))
            for path in columns.keys() & types.keys() - self.held.keys():
                columns[path] = columns[path].cast(types[path])
            yield rows.of({path: columns[path] for path in wanted})

    def notes(self) -> list[str]:
        """See `Step`."""
        return []


def is_list(kind: pa.DataType) -> bool:
    """Returns whether an arrow type is a list of any length."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def is_nested(kind: pa.DataType) -> bool:
    """Returns whether an arrow type is a struct or a list of structs."""
    return pa.types.is_struct(kind.value_type if is_list(kind) else kind)


def plain(kind: pa.DataType) -> pa.DataType:
    """Returns the type that Sparrow reads a column as. Dictionaries and views are read as what they stand for."""
    if pa.types.is_dictionary(kind):
        return plain(kind.value_type)
    if kind == pa.string_view() or kind == pa.binary_view():
        return pa.large_string() if kind == pa.string_view() else pa.large_binary()
    return pa.float32() if pa.types.is_float16(kind) else kind


def _leaves(name: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """Yields name and type of the columns that one becomes."""
    if not is_nested(kind):
        yield name, plain(kind)
        return
    for field in kind.value_type if is_list(kind) else kind:
        yield from _leaves(f"{name}.{field.name}", pa.large_list(plain(field.type)) if is_list(kind) else field.type)


def _columns(name: str, column: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    """Yields name and values [N] of the columns that one becomes."""
    kind = column.type
    if not is_nested(kind):
        yield name, column
        return
    if pa.types.is_struct(kind):
        for field, values in zip(kind, column.flatten(), strict=True):  # missing where the struct is
            yield from _columns(f"{name}.{field.name}", values)
        return
    lengths_N = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths_N, dtype=np.int64)]))
    for field, values in zip(kind.value_type, column.flatten().flatten(), strict=True):
        lists = pa.LargeListArray.from_arrays(offsets, values, mask=column.is_null())
        yield from _columns(f"{name}.{field.name}", lists)
