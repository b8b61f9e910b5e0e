from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow.core import Batch, KeyedJagged, UserError

LISTS = {"user": [[7], [8], [7]], "history": [[1, 2], [], [3]]}


def lists_of(ids: KeyedJagged) -> dict[str, list[list[int]]]:
    out = {}
    for key in ids.keys:
        part = ids[key].expanded()
        out[key] = [x.tolist() for x in part.values_N.split(part.lengths_B.tolist())]
    return out


def test_lists_come_back() -> None:
    ids = KeyedJagged.from_lists(LISTS)
    assert ids.batch_size == 3
    assert lists_of(ids) == LISTS


def test_offsets_are_as_good_as_lengths() -> None:
    one = KeyedJagged.from_lists(LISTS)
    two = KeyedJagged(keys=one.keys, values_N=one.values_N, offsets=one.offsets)
    assert lists_of(two) == LISTS
    assert torch.equal(one.lengths, two.lengths)


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6),
    st.lists(st.integers(0, 99), min_size=1, max_size=12),
)
def test_inverse_index_is_the_expanded_batch(rows: list[list[int]], picks: list[int]) -> None:
    inverse_B = torch.tensor([p % len(rows) for p in picks])
    user = [[i] for i in range(len(picks))]
    flat = [i for row in [*rows, *user] for i in row]
    ids = KeyedJagged(
        keys=("history", "user"),
        values_N=torch.tensor(flat, dtype=torch.int64),
        lengths=torch.tensor([len(row) for row in [*rows, *user]]),
        weights_N=torch.arange(len(flat), dtype=torch.float32),
        inverse_B={("history",): inverse_B},
        rows=(len(rows), len(picks)),
    )
    want = {"history": [rows[p % len(rows)] for p in picks], "user": user}
    assert ids.batch_size == len(picks)
    # a row that no sample uses is dropped
    assert ids.stored("history") == len({p % len(rows) for p in picks})
    assert lists_of(ids) == want
    expanded = ids.expanded()
    assert lists_of(expanded) == want
    assert not expanded.inverse_B
    stored = dict(zip(range(len(flat)), flat, strict=True))  # each weight still belongs to its id
    assert [stored[int(w)] for w in expanded.weights_N] == expanded.values_N.tolist()


def test_moving_keeps_everything() -> None:
    ids = KeyedJagged.from_lists(LISTS)
    moved = ids.to("meta")
    assert moved.keys == ids.keys
    assert moved.batch_size == 3
    assert moved["history"].values_N.shape == (3,)  # known without reading the device


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lengths": None}, "either lengths or offsets"),
        ({"keys": ("a", "a")}, "repeats a name"),
        ({"values_N": torch.zeros(4)}, "convert them to int64"),
        ({"weights_N": torch.zeros(3)}, "one weight per id"),
        ({"lengths": torch.tensor([1, 1, 1])}, "do not divide among"),
        ({"lengths": torch.tensor([1, 1, 1, 5])}, "add up to the ids"),
        ({"lengths": torch.tensor([1, 1, 3, -1])}, "every length must be >= 0"),
        ({"rows": (3, 2)}, "does not add up"),
        ({"inverse_B": {("c",): torch.zeros(2)}}, "no feature 'c'"),
        (
            {"inverse_B": {("a", "b"): torch.zeros(2).long()}, "rows": (1, 3)},
            "share one inverse index",
        ),
        ({"inverse_B": {("a",): torch.tensor([0, 2])}}, "beyond its 2"),
        ({"inverse_B": {("a",): torch.tensor([0, -1])}}, "beyond its 2"),
    ],
)
def test_parts_that_do_not_fit(change: dict, says: str) -> None:
    good = {
        "keys": ("a", "b"),
        "values_N": torch.arange(4),
        "lengths": torch.ones(4, dtype=torch.int64),
    }
    with pytest.raises(UserError, match=says):
        KeyedJagged(**(good | change))


@pytest.mark.parametrize(("low", "high"), [(0, 5), (1, 3), (2, 2), (4, 5)])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_part_keeps_the_unique_rows_that_it_uses(low: int, high: int, weighted: bool) -> None:
    lengths = torch.tensor([1, 0, 2, 1, 1, 2, 0, 3])
    ids = KeyedJagged(
        keys=("a", "b"),
        values_N=torch.arange(10),
        lengths=lengths,
        rows=(5, 3),
        weights_N=torch.rand(10) if weighted else None,
        inverse_B={("b",): torch.tensor([2, 0, 2, 1, 0])},
    )
    part, whole = ids.part(low, high), ids.expanded()
    assert part.stored("b") == len(set([2, 0, 2, 1, 0][low:high])) and part.batch_size == high - low
    for key in ids.keys:
        want = [
            whole[key].values_N[slice(*whole[key].offsets_B1[i : i + 2].tolist())]
            for i in range(low, high)
        ]
        assert torch.equal(
            part.expanded()[key].values_N, torch.cat([torch.empty(0, dtype=torch.int64), *want])
        )
        if weighted:
            assert torch.equal(part.expanded()[key].weights_N, whole.part(low, high)[key].weights_N)  # type: ignore[arg-type]


def test_a_part_of_no_features() -> None:
    batch = Batch(dense_BC=torch.zeros(4, 2), ids=KeyedJagged.from_lists({}))
    assert batch.part(1, 3).batch_size == 2


def test_unknown_feature_suggests() -> None:
    with pytest.raises(UserError, match="did you mean 'history'"):
        KeyedJagged.from_lists(LISTS)["histroy"]


def test_batch_sizes_must_agree() -> None:
    ids = KeyedJagged.from_lists(LISTS)
    Batch(dense_BC=torch.zeros(3, 0), ids=ids)
    with pytest.raises(UserError, match=r"Batch\.ids: 3 samples where dense_BC has 2"):
        Batch(dense_BC=torch.zeros(2, 0), ids=ids)
    with pytest.raises(UserError, match=r"Batch\.labels_BT"):
        Batch(dense_BC=torch.zeros(3, 0), ids=ids, labels_BT=torch.zeros(2, 1))


def test_features_with_different_numbers_of_samples() -> None:
    ids = KeyedJagged(
        keys=("a", "b"),
        values_N=torch.arange(4),
        lengths=torch.ones(4, dtype=torch.int64),
        rows=(3, 1),
    )
    assert (ids.samples("a"), ids.samples("b")) == (3, 1)
    with pytest.raises(UserError, match="differ in their number of samples"):
        _ = ids.batch_size


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KeyedJagged.from_lists(LISTS).keys = ()


def test_torchrec_round_trip() -> None:
    pytest.importorskip("torchrec", reason="torchrec is a peer, not a dependency")
    ids = KeyedJagged.from_lists(LISTS)
    assert lists_of(KeyedJagged.from_torchrec(ids.to_torchrec())) == LISTS


def test_a_copy_on_a_device_keeps_what_it_was_made_of() -> None:
    """Sizes and sums are asked of that; "meta" has no numbers to ask for."""
    ids = KeyedJagged(
        keys=("a", "b"),
        values_N=torch.arange(6),
        lengths=torch.tensor([1, 0, 2, 3]),
        inverse_B={("a", "b"): torch.tensor([1, 0, 1])},
        rows=(2, 2),
    )
    batch = Batch(dense_BC=torch.zeros(3, 1), ids=ids, weights_B=torch.tensor([1.0, 2.0, 0.5]))
    there = batch.to("meta")
    assert there.host is batch and there.to("meta").host is batch
    assert there.mass == batch.mass == 3.5
    assert there.on_host is batch and batch.on_host is batch
    assert there.ids["b"].on_host.lengths_B.tolist() == [2, 3]
    index_N, offsets_B1 = there.ids["b"].places()
    assert index_N.shape == (8,) and offsets_B1.shape == (4,) and index_N.is_meta
    assert batch.to("cpu").host is None and batch.ids.to("cpu").host is None


def test_each_changes_every_tensor() -> None:
    batch = Batch(
        dense_BC=torch.zeros(1, 1),
        ids=KeyedJagged(
            keys=("a",),
            values_N=torch.tensor([3]),
            lengths=torch.tensor([1]),
            weights_N=torch.ones(1),
        ),
        labels_BT=torch.zeros(1, 1),
        weights_B=torch.ones(1),
        session_B=torch.zeros(1, dtype=torch.int64),
    )
    seen: list[torch.Tensor] = []
    batch.map_tensors(lambda t: seen.append(t) or t.clone())
    # numbers, labels, weights, sessions; ids, their lengths, offsets and weights
    assert len(seen) == 8
