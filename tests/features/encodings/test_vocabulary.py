from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.core import UserError
from sparrow.features.encodings import BEFORE, FIRST, UNKNOWN, Counts, _counts, _files
from sparrow.features.encodings.range import Range
from sparrow.features.encodings.vocabulary import EMPTY, Vocabulary
from sparrow.features.hashing import hash_ids


def hashes(words: list[str | None]) -> np.ndarray:
    return hash_ids(pa.array(words, pa.string()))


def counted(
    folder: Path, batches: list[list[tuple[str, int, int]]], needed: int, memory: int
) -> Counts:
    """Occurrences (word, time, place) in any order."""
    path = folder / "counts"
    path.unlink(missing_ok=True)
    counts = Counts(path, needed, memory)
    for batch in batches:
        words, times, places = zip(*batch, strict=True) if batch else ((), (), ())
        counts.add(
            np.stack([hashes(list(words)), *np.array([times, places, [1] * len(batch)], np.int64)])
        )
    return counts


def known(
    batches: list[list[tuple[str, int, int]]], needed: int, before: dict[str, int]
) -> dict[str, tuple[int, int]]:
    """The definition: an id is known where earlier moments hold it `needed` times. Returns its last
    moment before.
    """
    found = {}
    for word in {word for batch in batches for word, *_ in batch}:
        moments = sorted(
            (time, place) for batch in batches for w, time, place in batch if w == word
        )
        earlier = {at: before.get(word, 0) + sum(m < at for m in moments) for at in moments}
        unknown = [at for at in moments if earlier[at] < needed]
        if len(unknown) < len(moments):
            found[word] = max(unknown, default=(BEFORE, BEFORE))
    return found


OCCURRENCE = st.tuples(st.sampled_from("abcdefghijklm"), st.integers(-2, 3), st.integers(0, 2))
WORDS = st.lists(st.lists(OCCURRENCE, max_size=40), max_size=8)


def by_row(
    vocabulary: Vocabulary, since_2R: np.ndarray, words: Iterable[str]
) -> dict[str, tuple[int, int]]:
    names = {int(hashes([word])[0]): word for word in words}
    return {
        names[h]: tuple(since_2R[:, i + FIRST].tolist())
        for i, h in enumerate(vocabulary.hashes_V.tolist())
    }


@settings(max_examples=60)
@given(WORDS, st.integers(1, 5), st.sampled_from([1, 5, 1000]))
def test_a_vocabulary_numbers_ids_by_count_and_knows_since_when(
    tmp_path_factory, batches, min_count: int, memory: int
) -> None:
    seen = Counter(word for batch in batches for word, *_ in batch)
    by_hash = dict(zip(hashes(list(seen)).tolist(), seen, strict=True))
    since = known(batches, min_count - 1, {})
    want = sorted((h for h in by_hash if by_hash[h] in since), key=lambda h: (-seen[by_hash[h]], h))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_counts, "MERGED", 8)
        counts = counted(tmp_path_factory.mktemp("counts"), batches, min_count - 1, memory)
        made, since_2R, distinct = EMPTY.grown(counts)
        rare = {
            by_hash[h]: n
            for hs, ns in made.rare()
            for h, n in zip(hs.tolist(), ns.tolist(), strict=True)
        }
    assert distinct == len(seen)
    assert made.hashes_V.tolist() == want
    assert made.counts_V.tolist() == [seen[by_hash[h]] for h in want]
    assert made.rows == len(want) + 2
    assert by_row(made, since_2R, seen) == since
    assert rare == {word: min(n, min_count - 1) for word, n in seen.items() if word not in since}
    asked = [*seen, "never", None]
    place = {h: i + 2 for i, h in enumerate(want)} | {0: 0}
    assert made.rows_of(hashes(asked)).tolist() == [place.get(h, 1) for h in hashes(asked).tolist()]


@settings(max_examples=50)
@given(WORDS, WORDS, st.integers(1, 4))
def test_growing_keeps_every_row_and_remembers_what_is_rare(
    tmp_path_factory, first, second, min_count: int
) -> None:
    folder, needed = tmp_path_factory.mktemp("counts"), min_count - 1
    old, _, _ = EMPTY.grown(counted(folder, first, needed, 10))
    old.save(folder / "old.parquet")
    old = Vocabulary.load(folder / "old.parquet")
    counts = counted(folder, second, needed, 10)
    for rare in old.rare():
        counts.remember(*rare)
    new, since_2R, distinct = old.grown(counts)
    assert new.hashes_V[: len(old.hashes_V)].tolist() == old.hashes_V.tolist()
    assert (since_2R[:, : old.rows] == BEFORE).all()
    today = Counter(word for batch in second for word, *_ in batch)
    assert distinct == len(today)
    before, then = Counter(word for batch in first for word, *_ in batch), known(first, needed, {})
    since = known(second, needed, {word: n for word, n in before.items() if word not in then})
    assert by_row(new, since_2R, before | today) == {
        **since,
        **dict.fromkeys(then, (BEFORE, BEFORE)),
    }
    tail = new.counts_V[len(old.hashes_V) :]
    assert (np.diff(tail) <= 0).all()


@settings(max_examples=30)
@given(WORDS, WORDS, st.integers(1, 4), st.integers(0, 3))
def test_a_range_knows_the_integers_that_a_vocabulary_would(
    tmp_path_factory, first, second, min_count, more
) -> None:
    """Grown as well, and to more integers."""
    folder, needed = tmp_path_factory.mktemp("counts"), min_count - 1
    first, second = (
        [[(str(ord(w)), *at) for w, *at in batch] for batch in log] for log in (first, second)
    )
    low, high = ord("b"), ord("k")
    made, since_2R = Range(low, np.empty(0, np.int32)).grown(
        counted(folder, first, needed, 10), low, high
    )
    then = {int(w): at for w, at in known(first, needed, {}).items() if low <= int(w) <= high}
    assert {i: tuple(since_2R[:, i - low + FIRST].tolist()) for i in then} == then
    integers = np.arange(low - 2, high + 3)
    want = [i - low + FIRST if i in then else UNKNOWN for i in integers.tolist()]
    assert made.rows_of(integers).tolist() == want
    made.save(folder / "range.parquet")
    made = Range.load(folder / "range.parquet", low)
    assert made.rows_of(integers).tolist() == want
    counts = counted(folder, second, needed, 10)
    for rare in made.rare():
        counts.remember(*rare)
    new, since_2R = made.grown(counts, low, high + more)
    before = Counter(
        w for batch in first for w, *_ in batch if low <= int(w) <= high and int(w) not in then
    )
    since = {
        int(w): at
        for w, at in known(second, needed, before).items()
        if low <= int(w) <= high + more
    }
    since |= dict.fromkeys(then, (BEFORE, BEFORE))
    assert {i: tuple(since_2R[:, i - low + FIRST].tolist()) for i in since} == since
    assert new.rows_of(integers).tolist() == [
        i - low + FIRST if i in since else UNKNOWN for i in integers.tolist()
    ]


def test_a_file_gives_the_vocabulary_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_files, "GROUP", 2)
    log = [(word, i, 0) for i, word in enumerate("babaccddx")]
    made, _, _ = EMPTY.grown(counted(tmp_path, [log], 1, 9))
    made.save(tmp_path / "v.parquet")
    back = Vocabulary.load(tmp_path / "v.parquet")
    assert back.hashes_V.tolist() == made.hashes_V.tolist()
    assert back.counts_V.tolist() == made.counts_V.tolist() == [2, 2, 2, 2]
    assert [(h.tolist(), n.tolist()) for h, n in back.rare()] == [(hashes(["x"]).tolist(), [1])]
    assert back.digest == made.digest != EMPTY.digest
    EMPTY.save(tmp_path / "empty.parquet")
    assert Vocabulary.load(tmp_path / "empty.parquet").rows == 2
    with pytest.raises(
        UserError, match=r"none.parquet: missing or damaged \(.*\); prepare the log again"
    ):
        Vocabulary.load(tmp_path / "none.parquet")
    data = bytearray((tmp_path / "v.parquet").read_bytes())
    data[12] ^= 255
    (tmp_path / "v.parquet").write_bytes(data)
    with pytest.raises(UserError, match="missing or damaged"):
        Vocabulary.load(tmp_path / "v.parquet")


def test_counting_needs_little_memory(tmp_path: Path) -> None:
    counts = Counts(tmp_path / "counts", 3, 4000)
    for i in range(50):
        ids = hash_ids(pa.array(np.arange(i * 500, i * 500 + 2000)))
        counts.add(
            np.stack(
                [
                    ids,
                    np.full(len(ids), i),
                    np.zeros(len(ids), np.int64),
                    np.ones(len(ids), np.int64),
                ]
            )
        )
        assert counts._held <= 12000
    made, _, distinct = EMPTY.grown(counts)
    assert distinct == 49 * 500 + 2000
    assert made.counts_V.tolist() == [4] * (distinct - 3000)
    assert sum(len(ids) for ids, _ in made.rare()) == 3000
