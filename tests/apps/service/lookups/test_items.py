from __future__ import annotations

import math
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparrow.apps.service.app import Service
from sparrow.apps.service.lookups import items as module
from sparrow.apps.service.lookups.items import KEPT, Encoded, Items
from sparrow.core.errors import UserError
from sparrow.serving import Scorer
from sparrow.serving.requests import Encoder
from tests.apps.service.asking import ask, counted
from tests.apps.service.protocols.test_v2 import INFER, as_json
from tests.apps.service.test_batcher import CLOSE, OF_USER, held, waits
from tests.serving.test_requests import DEFINED, FAST, TRANSFORMS, assert_same

OF_ITEMS = ("cat_1", "cat_2", "num_0", "num_2")
ALL = {  # a catalogue with a column of every kind
    "key": ["a", "12", "ü", "q"],
    "word": ["a", None, "zzz", "true"],
    "known": [12, -1, None, 7],
    "hashed": [1.0, math.nan, 2.0**53, None],
    "n": ["-5", "007", None, "99999999999999999999"],
    "bucket": [-1.5, 3.3, None, math.nan],
    "words": [["a", None, "12"], None, ["b", "b", "a", "ü", "a"], []],
    "commas": ["a, b", None, "", "x y,a"],
    "json": ['["a"]', "[]", None, "[1, 2]"],
    "numbers": [[-5, 1], None, [], [2**40]],
    "weighted": [["a", "b", "12"], [], ["ü"], ["a", None]],
    "w": [[0.5, 1.0, 2.0], [], [3.0], [1.0, 9.0]],
    "colons": ["a:1 b:2.5", None, "", "ü:0"],
    "plain": [1, None, -8, 3],
    "x": ["1.5", "?", None, "-1e5"],
    "log": [True, None, False, True],
    "title": ["one", "two", "three", "four"],  # no model reads it
}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Items]:
    """Make catalogues of columns."""

    def make(columns: dict[str, Any] | pa.Table, key: str, name: str = "items.parquet") -> Items:
        (tmp_path / "made").mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), tmp_path / name)
        return Items(tmp_path / name, key, tmp_path / "made")

    return make


@pytest.fixture
def catalogue(log: Path, make: Callable[..., Items]) -> Items:
    """Columns of the log's items. Some are missing."""
    first = {row["item"]: row for row in pq.read_table(log).select(["item", *OF_ITEMS]).to_pylist()}
    rows = list(first.values())[:30]
    rows[3] |= {"cat_1": None, "num_0": None}
    return make(pa.Table.from_pylist(rows), "item")


def of(encoder: Encoder) -> Any:
    """What `Encoded` asks of a scorer."""
    return SimpleNamespace(
        schema=TRANSFORMS.schema, encoder=encoder, folder=SimpleNamespace(manifest={"files": {}})
    )


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    keys=st.lists(st.sampled_from([*ALL["key"], 12, 12.0, "new", None]), min_size=1, max_size=12),
    overridden=st.sets(
        st.sampled_from(sorted({*ALL} - {"key", "title", "weighted", "w", "plain"}))
    ),
    of_user=st.sets(st.sampled_from(["word", "x", "words", "weighted", "log"])),
    fast=st.booleans(),
    block=st.sampled_from([1, 3, 100]),
)
def test_a_batch_is_what_the_columns_in_the_request_make(
    keys: list[Any],
    overridden: set[str],
    of_user: set[str],
    fast: bool,
    block: int,
    tmp_path_factory: Any,
) -> None:
    """To the bit, for columns of all kinds, with and without compiled code; those in the request
    win.
    """
    folder, encoder = tmp_path_factory.mktemp("made"), FAST if fast else DEFINED
    pq.write_table(pa.table(ALL), folder / "all.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        encoded = Encoded(Items(folder / "all.parquet", "key", folder), of(encoder))
    of_user |= {"w"} if "weighted" in of_user else set()
    user = {name: ALL[name][2] for name in of_user}
    at = [
        None if key in ("new", None) else ALL["key"].index("12" if key == 12 else key)
        for key in keys
    ]
    whole = {
        n: [None if i is None else ALL[n][i] for i in at]
        for n in encoder.sources
        if n not in of_user
    }
    for name in overridden - of_user:
        whole[name] = [ALL[name][i % 4] for i in range(len(keys))]
    sent = {"key": keys, **{name: whole[name] for name in overridden - of_user}}
    known = encoded.known(sent, user)
    assert known is not None and known.unknown_B.tolist() == [i is None for i in at]
    user_B = np.zeros(len(keys), np.int64)
    assert_same(
        encoder.crossed([user], sent, user_B, known=known.parts),
        encoder.crossed([user], whole, user_B),
    )
    as_rows = [dict(zip(sent, row, strict=True)) for row in zip(*sent.values(), strict=True)]
    again = encoded.known(as_rows, user)
    assert again is not None and again.parts.keys() == known.parts.keys()


def test_a_list_and_its_weights_are_given_together(make: Callable[..., Items]) -> None:
    """A list of the request with weights of the catalogue would be of other lengths."""
    encoded = Encoded(make(ALL, "key"), of(FAST))
    known = encoded.known({"key": ["a"], "weighted": [["a"]]}, ())
    assert known is not None and "weighted" not in known.parts
    with pytest.raises(UserError, match="no column 'w' in the request"):
        FAST.crossed(
            [{}], {"key": ["a"], "weighted": [["a"]]}, np.zeros(1, np.int64), known=known.parts
        )


def test_a_list_without_its_weights_is_refused(make: Callable[..., Items]) -> None:
    """A request that has the weights would have no list."""
    with pytest.raises(
        UserError,
        match="columns.weighted: made of 'weighted', which the catalogue has, and of what",
    ):
        Encoded(
            make({name: values for name, values in ALL.items() if name != "w"}, "key"), of(FAST)
        )


def test_without_its_key_and_without_a_gap_a_catalogue_is_not_asked(
    make: Callable[..., Items],
) -> None:
    encoded = Encoded(make(ALL, "key"), of(FAST))
    assert encoded.known({"item": ["a"]}, ()) is None
    assert (
        encoded.known({"key": ["a"], **{name: ALL[name][:1] for name in FAST.sources}}, ()) is None
    )
    assert encoded.known([], ()) is None
    with pytest.raises(UserError, match="column 'key', row 1: 1.5 .* is not an id"):
        encoded.known({"key": ["a", 1.5]}, ())


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"id": [1]}, "no column 'item'"),
        ({"item": [3, 1, 3]}, "rows 0 and 2 have one 'item', 3; keep one of them"),
        ({"item": ["12", "x", "12"]}, "rows 0 and 2 have one 'item', '12'"),
        ({"item": [1, None]}, "'item' of row 1 is missing; give each row a key"),
        ({"item": [1.5]}, "column 'item', row 0: 1.5 .* is not an id"),
        ({"item": pa.array([], pa.int64())}, "has no rows"),
    ],
)
def test_files_that_are_refused(
    columns: dict[str, Any], says: str, make: Callable[..., Items], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says) as error:
        make(columns, "item")
    assert str(tmp_path) in str(error.value)


def test_files_that_are_none(tmp_path: Path, scorer: Scorer, make: Callable[..., Items]) -> None:
    (tmp_path / "text").write_text("item\n1\n")
    for name in ("text", "absent"):
        with pytest.raises(UserError, match=f"{name}: cannot be read .*; give a Parquet file"):
            Items(tmp_path / name, "item", tmp_path)
    with pytest.raises(
        UserError, match=r"items.parquet: column 'num_0', row 1: 'much' is no number"
    ):
        Encoded(make({"item": [1, 2], "num_0": ["1", "much"]}, "item"), scorer)


def test_raw_columns_are_those_of_the_file(make: Callable[..., Items]) -> None:
    items = make(ALL, "key")
    raw = items.get(["q", 12, "new", None, "12"])
    assert raw["title"] == ["four", "two", None, None, "two"] and raw["key"] == [
        "q",
        "12",
        None,
        None,
        "12",
    ]
    assert raw["weighted"] == [["a", None], [], None, None, []] and raw.keys() == ALL.keys()


def in_request(
    items: Items, user: dict[str, Any], keys: list[Any], **columns: list[Any]
) -> dict[str, Any]:
    """The request with all columns for one that has keys."""
    raw = items.get(keys)
    return {
        "user": user,
        "candidates": {"item": keys, **{name: raw[name] for name in OF_ITEMS}, **columns},
    }


@pytest.fixture
def of_items(catalogue: Items, scorer: Scorer, serve: Callable[..., Service]) -> Service:
    return serve(items=catalogue)


def test_both_protocols_score_keys_as_columns(
    of_items: Service, catalogue: Items, rows: list[dict[str, Any]], scorer: Scorer
) -> None:
    user = {name: rows[0][name] for name in OF_USER}
    keys = [*catalogue.rows["item"].to_pylist()[:6], 10**9, None]
    for columns in ({}, {"num_0": [7] * 8}, {"num_0": [1.5] * 8, "cat_1": ["c1_2"] * 8}):
        whole = in_request(catalogue, user, keys, **columns)
        want = scorer.rank(whole["user"], whole["candidates"])[:, 0]
        assert len(set(want.tolist())) > 4
        got = ask(of_items, "/rank", {"user": user, "candidates": {"item": keys, **columns}})
        assert got.status == 200, got.body
        assert np.abs(np.array(got.json["scores"]["label"]) - want).max() <= CLOSE
        told = ask(of_items, "/rank", whole).json  # the same service takes all columns too
        assert got.json["scores"] == told["scores"] and got.json["missing"] == told["missing"]
        assert (
            got.json["unknown"] == told["unknown"] | {"item": 2}
            and got.json["missing"]["cat_2"] == 2
        )
    tensors = {
        name: np.array([value]) for name, value in user.items() if not isinstance(value, list)
    }
    for name in ("history", "tags"):
        tensors |= {name: np.array(user[name], None if name == "history" else object)}
        tensors |= {name + ":lengths": np.array([len(user[name])])}
    tensors = {n: a.astype(object) if a.dtype.kind == "U" else a for n, a in tensors.items()}
    got = ask(of_items, INFER, as_json(tensors | {"item": np.array(keys[:7])}))
    assert got.status == 200, got.body
    want = scorer.rank(
        user, {n: v[:7] for n, v in in_request(catalogue, user, keys)["candidates"].items()}
    )[:, 0]
    assert np.abs(np.array(got.json["outputs"][0]["data"]) - want).max() <= CLOSE
    text = counted(of_items)
    assert 'sparrow_lookups_total{outcome="absent",store="items"} 7.0' in text
    assert 'sparrow_lookups_total{outcome="found",store="items"} 24.0' in text


def test_the_columns_of_a_request_are_told_apart(
    of_items: Service, rows: list[dict[str, Any]]
) -> None:
    user = {name: rows[0][name] for name in OF_USER}
    got = ask(of_items, "/rank", {"user": user, "candidates": {"cat_1": ["c1_1"]}})
    assert got.status == 400 and got.json["error"].startswith(
        "no column 'cat_2', 'item', 'num_0', 'num_2'"
    )
    got = ask(of_items, "/rank", {"user": {}, "candidates": {"item": [1]}})
    assert (
        got.status == 400 and "'cat_0', 'history', 'num_1', 'tags' and 1 more" in got.json["error"]
    )
    got = ask(of_items, "/rank", {"user": user, "candidates": {"item": [[1]]}})
    assert got.status == 400 and "column 'item', row 0" in got.json["error"]
    got = ask(of_items, "/rank", {"user": user, "candidates": {"item": [1], "title": ["x"]}})
    assert got.status == 400 and "column 'title': the model does not read it" in got.json["error"]


def test_a_key_that_no_model_reads(
    scorer: Scorer, serve: Callable[..., Service], make: Any, rows: list[Any]
) -> None:
    """The catalogue then gives all columns of a candidate."""
    columns = {n: [row[n] for row in rows[:5]] for n in ("item", *OF_ITEMS)}
    service, user = (
        serve(items=make({"sku": [f"s{i}" for i in range(5)], **columns}, "sku")),
        rows[0],
    )
    user = {name: user[name] for name in OF_USER}
    got = ask(service, "/rank", {"user": user, "candidates": {"sku": ["s4", "s0", "x"]}})
    want = scorer.rank(
        user, {name: [values[4], values[0], None] for name, values in columns.items()}
    )
    assert (
        got.status == 200
        and np.abs(np.array(got.json["scores"]["label"]) - want[:, 0]).max() <= CLOSE
    )
    assert got.json["unknown"]["sku"] == 1 and got.json["missing"]["item"] == 1


def test_requests_of_many_kinds_together(
    of_items: Service,
    catalogue: Items,
    rows: list[dict[str, Any]],
    scorer: Scorer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those with keys alone share a batch, and none gets the scores or the counts of another."""
    all_keys, sent, whole = catalogue.rows["item"].to_pylist(), [], []
    for i in range(12):
        user = {name: rows[i][name] for name in OF_USER}
        keys = [*all_keys[i : i + 2 + i % 3], *([10**9] * (i % 2))]
        columns = {"num_2": [i] * len(keys)} if i % 4 == 3 else {}
        whole.append(in_request(catalogue, user, keys, **columns))
        sent.append(
            whole[-1] if i % 4 == 2 else {"user": user, "candidates": {"item": keys, **columns}}
        )
    go, sizes = held(of_items, monkeypatch)
    got = waits(of_items, [("/rank", one) for one in sent], (go, sizes), 11)
    assert max(sizes) >= 5
    for i, (one, answer) in enumerate(zip(whole, got, strict=True)):
        want = scorer.rank(one["user"], one["candidates"])[:, 0]
        assert np.abs(np.array(answer.json["scores"]["label"]) - want).max() <= CLOSE
        assert answer.json["unknown"].get("item", 0) == (1 if i % 2 else 0)


def test_a_version_reads_items_with_its_own_transforms(
    models: Path, catalogue: Items, serve: Callable[..., Service], rows: list[dict[str, Any]]
) -> None:
    service, user = serve(items=catalogue), {name: rows[0][name] for name in OF_USER}
    keys = catalogue.rows["item"].to_pylist()[:9]
    whole, named = in_request(catalogue, user, keys), set()
    for names in (["two"], ["one"], ["one", "delta"]):
        paths = tuple(str(models / name) for name in names)
        service.versions.flip(service.version.model._replace(paths=paths, version=""))
        got = ask(service, "/rank", {"user": user, "candidates": {"item": keys}}).json
        want = service.version.scorer.rank(whole["user"], whole["candidates"])[:, 0]
        assert np.abs(np.array(got["scores"]["label"]) - want).max() <= CLOSE
        assert got["version"] == f"{service.version.scorer.folder.digest}-{catalogue.digest[:12]}"
        named.add(got["version"])
    assert len(named) == 3


def test_other_transforms_make_other_files_and_few_stay(
    make: Callable[..., Items], tmp_path: Path
) -> None:
    """The same transforms make none: a delta of rows has its items at once."""
    items, made = make(ALL, "key"), tmp_path / "made"
    one = of(FAST)

    def files() -> list[Path]:
        return sorted(made.glob("*.encoded"))

    first = Encoded(items, one)
    was = files()[0].stat().st_ino
    Encoded(items, one)
    assert [file.stat().st_ino for file in files()] == [was]
    for number in range(KEPT + 2):
        one.folder.manifest["files"] = {
            "schema.toml": {"sha256": str(number)},
            "dense": {"sha256": "x"},
        }
        Encoded(items, one)
        one.folder.manifest["files"]["dense"] = {"sha256": "y"}
        Encoded(items, one)
    assert len(files()) == KEPT and was not in [file.stat().st_ino for file in files()]
    assert first.known({"key": ["a"]}, ()) is not None  # what is mapped stays
    other = items.replaced(tmp_path / "items.parquet")
    assert other.digest == items.digest and len(list(made.glob("*.arrow"))) == 1


def test_two_catalogues_of_one_file(make: Callable[..., Items]) -> None:
    one, other = make({"a": [1, 2], "b": [2, 1]}, "a"), make({"a": [1, 2], "b": [2, 1]}, "b")
    assert one.rows_of([1, 2]).tolist() == [0, 1] and other.rows_of([1, 2]).tolist() == [1, 0]
    assert one.digest != other.digest


def test_a_full_disk(make: Callable[..., Items], tmp_path: Path) -> None:
    """Nothing half-written stays, and with room it goes on."""
    items = make({"key": np.arange(5000), "plain": np.arange(5000.0)}, "key")
    pq.write_table(pa.table({"key": np.arange(9000)}), tmp_path / "larger.parquet")
    before, was = sorted((tmp_path / "made").iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, was[1]))
    try:
        with pytest.raises(UserError, match=r"\.encoded: cannot be written .*; make room"):
            Encoded(items, of(FAST))
        with pytest.raises(UserError, match=r"\.arrow: cannot be written .*; make room"):
            items.replaced(tmp_path / "larger.parquet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
    assert sorted((tmp_path / "made").iterdir()) == before
    assert Encoded(items, of(FAST)).known({"key": [1]}, ()) is not None


def test_processes_share_one_copy(
    make: Callable[..., Items], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who comes first makes the files, and the others wait for it. Nobody has pages of them
    alone.
    """
    make({"key": np.arange(200_000), "plain": np.arange(200_000.0)}, "key")
    for file in (tmp_path / "made").iterdir():
        file.unlink()
    encodings, was = [], Encoded._encode

    def encode(self: Encoded, encoder: Encoder) -> Any:
        encodings.append(encoder)
        return was(self, encoder)

    monkeypatch.setattr(Encoded, "_encode", encode)
    with ThreadPoolExecutor() as pool:
        path, folder = tmp_path / "items.parquet", tmp_path / "made"
        made = list(pool.map(lambda _: Encoded(Items(path, "key", folder), of(FAST)), range(4)))
    assert len(encodings) == 1
    for one in made:
        known = one.known({"key": list(range(0, 200_000, 7))}, ())
        assert known is not None and known.parts["plain"].numbers.tolist() == list(
            range(0, 200_000, 7)
        )  # type: ignore[union-attr]
    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs /proc/self/smaps")
    found, name = {"Rss": 0, "Private_Dirty": 0}, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, value = line.partition(":")
        name = line if "-" in head.split(" ")[0] else name
        if str(folder) in name and head in found:
            found[head] += int(value.split()[0])
    assert found["Rss"] > 2_000 and found["Private_Dirty"] == 0
