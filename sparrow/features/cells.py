"""What a cell says: which texts mean that there is none, and which texts and numbers are one id.
See docs/preparing.md.

Every door asks here, a log of text, Parquet, a data frame and a request alike: `[source] cells = 2`
of a schema. The schemas of before say nothing. Then a text file's reader takes WORDS for missing,
and elsewhere a text is itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparrow.features.schema import WORDS

TRUE = ("true", "True", "TRUE")
FALSE = ("false", "False", "FALSE")
Tally = Callable[[str, int], None]
_WHITE = " \t\n\v\f\r\x1c\x1d\x1e\x1f"
_WHOLE = r"^(-?[1-9][0-9]*|0)\.0+$"  # as a float's text
_ZERO = r"^-0\.0+$"
_ODD = frozenset((*WORDS, *TRUE[1:], *FALSE[1:]))


def trimmed(texts: pa.Array) -> pa.Array:
    """Returns text [N] without the white space of ASCII around it. Bytes stay as they are."""
    if not len(texts) or pa.types.is_binary(texts.type) or pa.types.is_large_binary(texts.type):
        return texts
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64 if pa.types.is_large_string(texts.type) else np.int32)
    first = bounds[texts.offset]
    last = bounds[texts.offset + len(texts)]
    # told fast
    has_white = np.frombuffer(data or b"", np.uint8)[first:last].min(initial=255) <= ord(" ")
    return pc.ascii_trim(texts, _WHITE) if has_white else texts


def without_words(texts: pa.Array, present: Sequence[str] = ()) -> pa.Array:
    """Returns texts [N] in which those that are a word for missing are missing. White space around
    one does not count.

    Args:
        texts: text or bytes; of bytes, white space is a part.
        present: words that stand for themselves.
    """
    words = _array([word for word in WORDS if word not in present], texts.type)
    has_word_N = pc.is_in(trimmed(texts), words)
    return pc.if_else(has_word_N, None, texts) if pc.any(has_word_N).as_py() else texts


def as_id_texts(
    texts: pa.Array, present: Sequence[str] = (), tally: Tally | None = None
) -> pa.Array:
    """Returns the ids that texts [N] say, in the spelling by which they are hashed.

    A word for missing is none. `True` and `TRUE` are `true`, as `False` and `FALSE` are `false`. A
    whole float such as `5.0` is the integer `5`. Any other text is itself, such as `007`, `1e5`,
    `5.50` and `+5`.

    Args:
        texts: text or bytes, without white space around it.
        present: words for missing that are ids.
        tally: is told how often each word was read as missing, but for the empty text.
    """
    coded = texts.dictionary_encode()  # each distinct text is looked at once
    distinct = coded.dictionary
    spelt = without_words(distinct, present)
    if tally is not None and spelt.null_count > distinct.null_count:
        counts_U = np.bincount(coded.indices.drop_null().to_numpy(), minlength=len(distinct))
        for place in np.flatnonzero(spelt.is_null().to_numpy(zero_copy_only=False)).tolist():
            word = distinct[place].cast(pa.string()).as_py()
            if word:
                tally(word, int(counts_U[place]))
    for words in (TRUE, FALSE):
        spelt = pc.if_else(
            pc.is_in(spelt, _array(words, spelt.type)), pa.scalar(words[0], spelt.type), spelt
        )
    if pc.any(pc.ends_with(spelt, "0")).as_py():
        spelt = pc.replace_substring_regex(
            pc.replace_substring_regex(spelt, _WHOLE, r"\1"), _ZERO, "0"
        )
    return texts if spelt.equals(distinct) else spelt.take(coded.indices)


def spelt_as_id(text: str) -> str:
    """Returns what `as_id_texts` makes of a text that is not to be missing."""
    return str(as_id_texts(_array([text], pa.string()), WORDS)[0].as_py())


def as_number_texts(texts: pa.Array) -> pa.Array:
    """Returns texts [N] that are to be read as numbers: no word for missing among them, and 1 and 0
    for booleans.
    """
    spelt = without_words(texts.cast(pa.large_string()))
    bare = trimmed(spelt)
    for words, number in ((TRUE, "1"), (FALSE, "0")):
        has_word_N = pc.is_in(bare, _array(words, bare.type))
        spelt = pc.if_else(has_word_N, number, spelt) if pc.any(has_word_N).as_py() else spelt
    return spelt


def are_odd(texts: Iterable[str]) -> bool:
    """Returns whether `as_id_texts` may make something else of one of these texts. It is told fast,
    and rather yes.
    """
    bare = [text.strip() for text in texts]
    return not _ODD.isdisjoint(bare) or ".0" in "\n".join(bare)


def _array(words: Sequence[str], kind: pa.DataType) -> pa.Array:
    # of a list, Arrow would import pandas
    return pa.array(np.array(words, object), pa.string()).cast(kind)
