"""The texts of the most frequent ids of each column. Tables know ids by their hashes, and people by their texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.core.arrays import Int64s
from sparrow.core.errors import UserError
from sparrow.features.hashing import hashes_of
from sparrow.features.ids import is_text
from sparrow.features.schema import Schema

FILE = "words.json"
KEPT = 256  # ids of a column that the file holds
HELD = 2048  # ids of a column that memory holds; a batch gives a quarter of that at most
LONGEST = 60  # letters of a text


class Words:
    """Counts the ids of columns, and keeps the texts of the most frequent ones.

    Columns with no more than HELD / 4 ids are counted exactly. Of others the rarest are forgotten from time to time, so
    it may depend on how the log was read which of these are kept.
    """

    def __init__(self) -> None:
        self._found: dict[str, dict[int, tuple[int, str]]] = {}  # column -> hash -> occurrences, text

    def count(self, column: str, raw: pa.DictionaryArray, distinct: pa.Array) -> None:
        """Takes in the ids of a batch.

        Args:
            column: its name.
            raw: the ids as the log has them, [N].
            distinct: what became of the raw dictionary: int64, or hashes as uint64, [U].
        """
        counts_U = np.bincount(raw.indices.drop_null().to_numpy(), minlength=len(distinct))
        top = np.flatnonzero(counts_U)
        if len(top) > HELD // 4:
            top = np.argpartition(-counts_U, HELD // 4)[: HELD // 4]
        if len(top):
            ids = raw.dictionary.take(pa.array(top))
            if not pa.types.is_integer(ids.type):
                ids = ids.cast(pa.large_binary())  # not all that a log calls text is UTF-8
            texts = [_shown(id) for id in ids.to_pylist()]
            self.add(column, texts, hashes_of(distinct.take(pa.array(top))), counts_U[top])

    def add(self, column: str, texts: Sequence[str], hashes_U: Int64s, counts_U: Int64s) -> None:
        """Takes in how often each text [U] occurred."""
        found = self._found.setdefault(column, {})
        for text, key, count in zip(texts, hashes_U.tolist(), counts_U.tolist(), strict=True):
            before, text = found.get(key, (0, text))
            found[key] = before + count, text
        if len(found) > HELD:
            self._found[column] = dict(_most(found, HELD // 2))

    def state(self) -> Iterator[tuple[str, list[str], Int64s, Int64s]]:
        """Yields what was taken in, for another one's `add`."""
        for column, found in self._found.items():
            counts, texts = zip(*found.values(), strict=True) if found else ((), ())
            yield column, list(texts), np.array(list(found), np.int64), np.array(counts, np.int64)

    def save(self, folder: Path, schema: Schema) -> None:
        """Writes FILE: column -> hash -> text, in the order of the hashes. Tables that number integers need none."""
        whole = {}
        for name, found in sorted(self._found.items()):
            if schema.encodings[str(schema.columns[name].table)].kind != "range":
                whole[name] = {key: text for key, (_, text) in sorted(_most(found, KEPT))}
        (folder / FILE).write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def together(parts: Sequence[pa.Array], coded: pa.DictionaryArray) -> pa.Array:
    """Returns the texts [U] of the ids of a cross, such as "berlin & 5".

    Args:
        parts: the ids [N] of each column that it is made of, as the log has them.
        coded: the cross [N], of whose distinct ids [U] the first row of each tells the text.
    """
    rows_N = np.flatnonzero(coded.is_valid().to_numpy(zero_copy_only=False))
    _, first_U = np.unique(coded.indices.drop_null().to_numpy(), return_index=True)
    rows = pa.array(rows_N[first_U])
    texts = [of if is_text(of.type) else of.cast(pa.string()) for of in (part.take(rows) for part in parts)]
    between = pa.scalar(b" & ", pa.large_binary())  # not all that a log calls text is UTF-8
    return pc.binary_join_element_wise(*(of.cast(pa.large_binary()) for of in texts), between)


def load(folder: Path, column: str) -> dict[int, str]:
    """Returns hash -> text of a column's most frequent ids; none for a log that was prepared before they were kept.

    Raises:
        UserError: when the file is damaged.
    """
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8")).get(column, {})
        return {int(key): str(text) for key, text in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError):
        raise UserError(f"{folder / FILE}: damaged; delete it (slices then lack words), or prepare again") from None


def _most(found: dict[int, tuple[int, str]], most: int) -> list[tuple[int, tuple[int, str]]]:
    """The most frequent ids; of equally frequent ones those with the lower hashes."""
    return sorted(found.items(), key=lambda item: (-item[1][0], item[0]))[:most]


def _shown(id: int | bytes) -> str:
    """An id as text that a terminal can show."""
    text = id.decode(errors="replace") if isinstance(id, bytes) else str(id)
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text[: LONGEST + 1])
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
