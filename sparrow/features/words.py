"""The texts of the most frequent ids of each column. Tables know ids by their hashes, and people by
their texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from sparrow.core.arrays import Int64s
from sparrow.core.errors import UserError
from sparrow.features.hashing import hashes_of
from sparrow.features.schema import Schema

FILE = "words.json"
KEPT = 256  # ids of a column that the file holds
HELD = 2048  # ids of a column that memory holds; a batch gives a quarter of that at most
LONGEST = 60  # letters of a text


class Words:
    """Counts the ids of columns, and keeps the texts of the most frequent ones.

    Columns with no more than HELD / 4 ids are counted exactly. Of others the rarest are forgotten
    from time to time, so it may depend on how the log was read which of these are kept.
    """

    def __init__(self) -> None:
        self.missing: dict[str, dict[str, int]] = {}  # column -> word for missing -> occurrences
        # column -> hash -> occurrences, text
        self._texts: dict[str, dict[int, tuple[int, str]]] = {}

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

    def count_missing(self, column: str, word: str, count: int) -> None:
        """Takes in how often a word was read as missing, see `sparrow.features.cells`."""
        words = self.missing.setdefault(column, {})
        words[word] = words.get(word, 0) + count

    def notes(self) -> Iterator[str]:
        """Yields a line for each column of ids with words that were read as missing, and how to
        keep them.
        """
        for column, words in sorted(self.missing.items()):
            cells = " and ".join(
                f"{count:,} times {word!r}" for word, count in sorted(words.items())
            )
            present = ", ".join(
                f'"{word}"' if "\\" not in word else f"'{word}'" for word in sorted(words)
            )
            remedy = f"to keep such ids set present = [{present}] in columns.{column} of the schema"
            yield f"{column}: {cells} are read as missing; {remedy}"

    def add(self, column: str, texts: Sequence[str], hashes_U: Int64s, counts_U: Int64s) -> None:
        """Takes in how often each text [U] occurred."""
        texts_by_hash = self._texts.setdefault(column, {})
        for text, key, count in zip(texts, hashes_U.tolist(), counts_U.tolist(), strict=True):
            before, text = texts_by_hash.get(key, (0, text))
            texts_by_hash[key] = before + count, text
        if len(texts_by_hash) > HELD:
            self._texts[column] = dict(_most(texts_by_hash, HELD // 2))

    def state(self) -> Iterator[tuple[str, list[str], Int64s, Int64s]]:
        """Yields what was taken in, for another one's `add`."""
        for column, texts_by_hash in self._texts.items():
            counts, texts = zip(*texts_by_hash.values(), strict=True) if texts_by_hash else ((), ())
            hashes_U = np.array(list(texts_by_hash), np.int64)
            yield column, list(texts), hashes_U, np.array(counts, np.int64)

    def save(self, folder: Path, schema: Schema) -> None:
        """Writes FILE: column -> hash -> text, in the order of the hashes. Tables that number
        integers need none.
        """
        document = {}
        for name, texts_by_hash in sorted(self._texts.items()):
            if schema.encodings[str(schema.columns[name].table)].kind != "range":
                frequent = sorted(_most(texts_by_hash, KEPT))
                document[name] = {key: text for key, (_, text) in frequent}
        (folder / FILE).write_text(
            json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def load(folder: Path, column: str) -> dict[int, str]:
    """Returns hash -> text of a column's most frequent ids; none for a log that was prepared before
    they were kept.

    Raises:
        UserError: when the file is damaged.
    """
    try:
        document = json.loads((folder / FILE).read_text(encoding="utf-8")).get(column, {})
        return {int(key): str(text) for key, text in document.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError):
        raise UserError(
            f"{folder / FILE}: damaged; delete it (slices then lack words), or prepare again"
        ) from None


def _most(
    texts_by_hash: dict[int, tuple[int, str]], most: int
) -> list[tuple[int, tuple[int, str]]]:
    """The most frequent ids; of equally frequent ones those with the lower hashes."""
    return sorted(texts_by_hash.items(), key=lambda item: (-item[1][0], item[0]))[:most]


def _shown(id: int | bytes) -> str:
    """An id as text that a terminal can show."""
    text = id.decode(errors="replace") if isinstance(id, bytes) else str(id)
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text[: LONGEST + 1])
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
