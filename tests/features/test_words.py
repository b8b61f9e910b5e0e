from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sparrow.core import UserError
from sparrow.features import words
from sparrow.features.hashing import hash_ids
from sparrow.features.schema import Column, Encoding, Schema
from sparrow.features.words import HELD, KEPT, Words, load

SCHEMA = Schema(
    columns={
        "country": Column(kind="categorical", table="country"),
        "item": Column(kind="categorical", table="item"),
        "year": Column(kind="categorical", table="year"),
    },
    encodings={
        "country": Encoding(kind="vocabulary"),
        "item": Encoding(kind="hash", rows=16),
        "year": Encoding(kind="range", low=1, high=3),
    },
)


def counted(found: Words, column: str, ids: pa.Array) -> None:
    raw = ids.dictionary_encode()
    is_text = not pa.types.is_integer(raw.dictionary.type)
    distinct = pa.array(hash_ids(raw.dictionary).view(np.uint64)) if is_text else raw.dictionary
    found.count(column, raw, distinct)


def test_texts_of_ids_come_back_by_their_hashes(tmp_path: Path) -> None:
    found = Words()
    counted(found, "country", pa.array(["DE", "FR", None, "DE", 'a "b" <c>', "\x1b[31mred"]))
    # what is no UTF-8 is no error
    counted(found, "country", pa.array([b"caf\xe9"]).view(pa.string()))
    counted(found, "country", pa.array(["ß" * 100, "DE"]))
    counted(found, "country", pa.array([None, None], pa.string()))
    counted(found, "item", pa.array([2**62, -5]))
    counted(found, "year", pa.array([1, 2]))
    counted(found, "year", pa.array([b"\xff\x00", b"DE"]))  # as bytes, where a log has them
    found.save(tmp_path, SCHEMA)
    assert set(load(tmp_path, "country").values()) == {
        "DE",
        "FR",
        'a "b" <c>',
        "�[31mred",
        "caf�",
        "ß" * 59 + "…",
    }
    for column, ids in (("country", ["DE", "FR"]), ("item", [2**62, -5])):
        texts = load(tmp_path, column)
        assert [texts[key] for key in hash_ids(pa.array(ids)).tolist()] == [str(one) for one in ids]
    # a range says its integers itself
    assert load(tmp_path, "year") == load(tmp_path, "gone") == {}


def test_memory_and_file_are_bounded_and_keep_the_frequent_ones(tmp_path: Path) -> None:
    rng, found, exact = np.random.default_rng(0), Words(), Counter[str]()
    for _ in range(12):
        ids = [f"i{n}" for n in np.append(rng.zipf(1.3, 5000), rng.integers(10**6, 10**9, 3000))]
        exact.update(ids)
        counted(found, "item", pa.array(ids))
        assert all(len(hashes_U) <= HELD for _, _, hashes_U, _ in found.state())
    found.save(tmp_path, SCHEMA)
    texts = set(load(tmp_path, "item").values())
    assert len(texts) == KEPT < len(exact)
    assert {text for text, _ in exact.most_common(100)} <= texts


def test_the_order_of_parts_does_not_matter(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = [pa.array([f"w{n}" for n in rng.integers(0, 400, 3000)]) for _ in range(3)]
    digests = []
    for order in ((0, 1, 2), (2, 0, 1)):
        whole = Words()
        for i in order:
            part = Words()
            counted(part, "item", parts[i])
            for state in part.state():
                whole.add(*state)
        whole.save(tmp_path, SCHEMA)
        digests.append((tmp_path / words.FILE).read_bytes())
    assert digests[0] == digests[1]
    assert len(load(tmp_path, "item")) == KEPT


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    assert load(tmp_path, "item") == {}  # logs of before have none
    for text in ("{", "[]", json.dumps({"item": {"x": "y"}}), json.dumps({"item": 3})):
        (tmp_path / words.FILE).write_text(text)
        with pytest.raises(UserError, match="words.json: damaged; delete it"):
            load(tmp_path, "item")
