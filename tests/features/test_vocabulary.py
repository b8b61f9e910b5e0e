from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.core import UserError
from sparrow.features import hash_ids, vocabulary
from sparrow.features.vocabulary import EMPTY, Counts, Vocabulary


def hashes(words: list[str | None]) -> np.ndarray:
    return hash_ids(pa.array(words, pa.string()))


def counted(folder: Path, batches: list[list[str]], memory: int) -> Counts:
    path = folder / "counts"
    path.unlink(missing_ok=True)
    counts = Counts(path, memory)
    for batch in batches:
        seen = Counter(batch)
        counts.add(hashes(list(seen)), np.array(list(seen.values()), np.int64))
    return counts


WORDS = st.lists(st.lists(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), max_size=40), max_size=8)


@settings(max_examples=100, deadline=None)
@given(WORDS, st.integers(1, 5), st.sampled_from([1, 5, 1000]))
def test_a_vocabulary_numbers_the_frequent_ids(tmp_path_factory, batches, min_count: int, memory: int) -> None:
    seen = Counter(word for batch in batches for word in batch)
    by_hash = dict(zip(hashes(list(seen)).tolist(), seen, strict=True))
    want = sorted((h for h in by_hash if seen[by_hash[h]] >= min_count), key=lambda h: (-seen[by_hash[h]], h))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "MERGED", 8)
        counts = counted(tmp_path_factory.mktemp("counts"), batches, memory)
        made, distinct = EMPTY.grown(counts, min_count)
    assert distinct == len(seen)
    assert made.hashes_V.tolist() == want
    assert made.counts_V.tolist() == [seen[by_hash[h]] for h in want]
    assert made.rows == len(want) + 2
    asked = [*seen, "never", None]
    place = {h: i + 2 for i, h in enumerate(want)} | {0: 0}
    assert made.rows_of(hashes(asked)).tolist() == [place.get(h, 1) for h in hashes(asked).tolist()]


@settings(max_examples=50, deadline=None)
@given(WORDS, WORDS, st.integers(1, 3))
def test_growing_keeps_every_row(tmp_path_factory, first, second, min_count: int) -> None:
    folder = tmp_path_factory.mktemp("counts")
    old, _ = EMPTY.grown(counted(folder, first, 10), min_count)
    new, distinct = old.grown(counted(folder, second, 10), min_count)
    assert new.hashes_V[: len(old.hashes_V)].tolist() == old.hashes_V.tolist()
    today = Counter(word for batch in second for word in batch)
    assert distinct == len(today)
    known = set(old.hashes_V.tolist())
    added = {h for h, n in zip(hashes(list(today)).tolist(), today.values(), strict=True) if n >= min_count} - known
    assert set(new.hashes_V[len(old.hashes_V) :].tolist()) == added
    tail = new.counts_V[len(old.hashes_V) :]
    assert (np.diff(tail) <= 0).all()
    total = dict(zip(old.hashes_V.tolist(), old.counts_V.tolist(), strict=True))
    by_hash = dict(zip(hashes(list(today)).tolist(), today.values(), strict=True))
    assert new.counts_V.tolist() == [total.get(h, 0) + by_hash.get(h, 0) for h in new.hashes_V.tolist()]


def test_a_file_gives_the_vocabulary_back(tmp_path: Path) -> None:
    made, _ = EMPTY.grown(counted(tmp_path, [["b", "a", "b"], ["c", "c"]], 9), 1)
    made.save(tmp_path / "v.parquet")
    back = Vocabulary.load(tmp_path / "v.parquet")
    assert back.hashes_V.tolist() == made.hashes_V.tolist()
    assert back.counts_V.tolist() == made.counts_V.tolist() == [2, 2, 1]
    assert back.digest == made.digest != EMPTY.digest
    with pytest.raises(UserError, match=r"none.parquet: missing or damaged \(.*\); prepare the log again"):
        Vocabulary.load(tmp_path / "none.parquet")
    data = bytearray((tmp_path / "v.parquet").read_bytes())
    data[12] ^= 255
    (tmp_path / "v.parquet").write_bytes(data)
    with pytest.raises(UserError, match="missing or damaged"):
        Vocabulary.load(tmp_path / "v.parquet")


def test_counting_needs_little_memory(tmp_path: Path) -> None:
    counts = Counts(tmp_path / "counts", 1000)
    for i in range(50):
        ids = hash_ids(pa.array(np.arange(i * 500, i * 500 + 2000)))
        counts.add(ids, np.ones(len(ids), np.int64))
        assert counts._held <= 3000
    made, distinct = EMPTY.grown(counts, 4)
    assert distinct == 49 * 500 + 2000
    assert made.counts_V.tolist() == [4] * (distinct - 3000)
