"""A column of the sample of a log, and what is looked up of it more than once."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from sparrow import features
from sparrow.data import meaning
from sparrow.data.meaning.names import Words, is_id, words_of
from sparrow.features.cells import trimmed
from sparrow.features.ids import is_text
from sparrow.features.schema import WORDS
from sparrow.features.types import is_list, is_number

_DECLARED = (":token", ":float", ":token_seq", ":float_seq")
_FEW = 64  # vectors, of which there may be many, and of each only its type is asked


@dataclass(frozen=True)
class SampledColumn:
    """A column of the sample: its name's words, its values (flat, for lists; missing ones left
    out), the distinct ones.

    declared: the type that a header such as user_id:token states (RecBole's atomic files), or "".
    spelled: separator and weights of text that is a list. bare: the column as it stands in the
    sample.
    """

    name: str
    words: Words
    declared: str
    type: pa.DataType
    values: pa.Array
    distinct: pa.Array
    rows: int
    bare: pa.Array
    spelled: tuple[str | None, str | None] | None = None

    @property
    def is_id(self) -> bool:
        """Whether its name is one of ids."""
        return is_id(self.words)

    @property
    def is_list(self) -> bool:
        """Whether its cells are lists."""
        return self.spelled is not None or is_list(self.type)

    @property
    def is_number(self) -> bool:
        """Whether its cells are numbers."""
        return is_number(self.type)

    @property
    def present(self) -> pa.Array:
        """Its values without words for missing."""
        if not is_text(self.values.type):
            return self.values
        return self.values.filter(
            pc.invert(pc.is_in(self.values, pa.array(WORDS, self.values.type)))
        )

    @property
    def called(self) -> str:
        """Its name in lower case, words joined by underscores."""
        return "_".join(self.words)


def _as_text(values: pa.Array) -> pa.Array:
    """Returns text [N], or bytes that spell no text, such as digests, in hexadecimal digits."""
    try:
        values.cast(pa.large_string())
    except pa.ArrowInvalid:
        return pa.array(
            [None if value is None else f"x{value.hex()}" for value in values.to_pylist()],
            pa.string(),
        )
    return values


def look(name: str, column: pa.ChunkedArray) -> SampledColumn:
    """Returns what is looked up of a column of the sample."""
    stem, _, declared = name.rpartition(":") if name.endswith(_DECLARED) else (name, "", "")
    bare = values = column.combine_chunks()
    kind = values.type
    spelled: tuple[str | None, str | None] | None = None
    if is_text(kind):
        bare = values = trimmed(_as_text(values))
    if is_text(kind) and values.null_count < len(values):
        if declared == "token_seq":
            spelled = None, None
        elif not declared:
            spelled = meaning.lists.list_of(values.drop_null())
    if spelled is not None:
        values = features.lists.as_lists(values, name, int, None, *spelled)[0]
    elif is_list(kind):
        values = values.flatten()
        values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    if pa.types.is_float16(values.type):
        values = values.cast(pa.float32())
    values = values.drop_null()
    if is_list(kind) and pa.types.is_floating(values.type):
        values = values[:_FEW]
    if pa.types.is_floating(values.type):
        values = values.filter(pc.invert(pc.is_nan(values)))
    distinct = values.unique() if not pa.types.is_nested(values.type) else values
    return SampledColumn(
        name, words_of(stem), declared, kind, values, distinct, len(column), bare, spelled
    )
