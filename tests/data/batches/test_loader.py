from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow import data
from sparrow.core import Batch, UserError
from sparrow.data.batches import loader as loading
from sparrow.data.batches import parts
from sparrow.data.batches.dataset import Dataset
from sparrow.data.batches.loader import Loader
from sparrow.features.rows import batches
from sparrow.features.schema import Split
from tests.data.batches.conftest import ROWS, SCHEMA


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four row groups, or of one."""
    monkeypatch.setattr(loading, "SHUFFLED_GROUPS", 4)
    monkeypatch.setattr(loading, "PLAIN_GROUPS", 1)


def order(batches: Iterable[Batch]) -> list[int]:
    return [int(row) for batch in batches for row in batch.dense_BC[:, 0]]


def same(a: Batch, b: Batch) -> bool:
    pairs = [
        (a.dense_BC, b.dense_BC),
        (a.ids.values_N, b.ids.values_N),
        (a.ids.offsets, b.ids.offsets),
    ]
    pairs += [(a.labels_BT, b.labels_BT), (a.weights_B, b.weights_B), (a.session_B, b.session_B)]
    return all(torch.equal(x, y) for x, y in pairs if x is not None and y is not None)


def test_batches_hold_the_files_rows_in_order(dataset: Dataset) -> None:
    loader = dataset.loader(64)
    batches = list(loader)
    assert len(batches) == len(loader) == 16
    assert [batch.batch_size for batch in batches] == [64] * 15 + [43]
    assert order(batches) == list(range(ROWS))
    assert order(dataset.loader(5000)) == list(range(ROWS))
    batch = batches[3]
    assert batch.dense_BC.dtype == batch.labels_BT.dtype == batch.weights_B.dtype == torch.float32  # type: ignore[union-attr]
    rows = torch.arange(3 * 64, 4 * 64)
    assert batch.ids.keys == ("tags", "code")
    assert torch.equal(batch.ids["code"].values_N, rows + 2)
    assert torch.equal(batch.labels_BT, (rows % 2).float()[:, None])  # type: ignore[arg-type]
    mean = dataset.schema.columns["importance"].mean
    assert torch.equal(batch.weights_B, (rows.double() / 4 / mean).float())  # type: ignore[arg-type]
    assert batch.session_B.unique().numel() == len({int(row) // 5 for row in rows})  # type: ignore[union-attr]


def test_shuffling_is_a_permutation_drawn_from_seed_and_epoch(dataset: Dataset) -> None:
    loader = dataset.loader(64, shuffle=True, seed=3)
    first, second = order(loader), order(loader)
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    assert first != list(range(ROWS))
    windows = [{row // 100 for row in epoch[:400]} for epoch in (first, second)]
    assert windows[0] != windows[1]
    assert len({row // 100 for row in first[:64]}) > 1  # a batch mixes row groups
    assert order(dataset.loader(64, shuffle=True, seed=3)) == first
    assert order(dataset.loader(64, shuffle=True, seed=4)) != first
    by_row = {
        int(b.dense_BC[i, 0]): int(b.ids["code"].values_N[i])
        for b in loader
        for i in range(b.batch_size)
    }
    assert all(code == row + 2 for row, code in by_row.items())  # a row's columns move together


@settings(max_examples=6)
@given(st.integers(1, 300), st.booleans(), st.floats(0, 2.2))
def test_a_restored_loader_goes_on_bitwise(
    dataset: Dataset, batch_size: int, shuffle: bool, position: float
) -> None:
    def make() -> Loader:
        return dataset.loader(batch_size, shuffle=shuffle, seed=7)

    def epochs(loader: Loader) -> Iterable[Batch]:
        return itertools.chain.from_iterable(loader for _ in range(3))

    whole = list(epochs(make()))
    stop = int(position * len(make()))
    first = make()
    stream = iter(epochs(first))
    for _ in range(stop):
        next(stream)
    second = make()
    second.load_state_dict(first.state_dict())
    left = list(itertools.islice(epochs(second), len(whole) - stop))
    assert len(left) == len(whole) - stop
    assert all(same(a, b) for a, b in zip(whole[stop:], left, strict=True))


def test_what_was_seen_is_not_read_again(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []
    plain = pq.ParquetFile.read_row_groups

    def spy(self: pq.ParquetFile, groups: list[int], *args: object, **named: object) -> pa.Table:
        read.append(groups)
        return plain(self, groups, *args, **named)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", spy)
    loader = dataset.loader(50)
    loader.load_state_dict({"epoch": 2, "batch": 17, "batch_size": 50})
    assert order(loader) == list(range(850, ROWS))
    assert read == [[8], [9], [10]]
    assert loader.state_dict() == {"epoch": 3, "batch": 0, "batch_size": 50}


def test_the_reading_threads_end_with_the_iteration(dataset: Dataset) -> None:
    """As soon as they are through with what they are at: see `ahead`."""
    of_others = set(threading.enumerate())
    batches = iter(dataset.loader(10))
    next(batches)
    threads = set(threading.enumerate()) - of_others
    assert {thread.name for thread in threads} == {"sparrow-loader_0", "sparrow-batches_0"}
    del batches
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_an_error_in_the_reading_thread_reaches_the_caller(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **named: object) -> pa.Table:
        raise OSError("the disk is gone")

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", broken)
    with pytest.raises(UserError, match=r"part-00000.parquet: damaged \(the disk is gone\)"):
        list(dataset.loader(10))


def test_misuse_is_said(dataset: Dataset) -> None:
    with pytest.raises(UserError, match=r"batch_size: 0 holds no rows"):
        dataset.loader(0)
    with pytest.raises(UserError, match=r"split: no part 'vaild'; did you mean 'valid'\?"):
        dataset.loader(8, split="vaild")
    with pytest.raises(
        UserError, match=r"batch_size: 8 over 126 batches cannot take up .*'batch_size': 9"
    ):
        dataset.loader(8).load_state_dict({"epoch": 0, "batch": 1, "batch_size": 9})


def test_rows_of_one_window_are_shuffled_anew_each_epoch(dataset: Dataset, tmp_path: Path) -> None:
    log = dataset.path.parent / "log.parquet"
    # one row group
    data.prepare([log], tmp_path / "out", schema=SCHEMA, split=Split(valid=0, test=0))
    loader = data.open(tmp_path / "out").loader(64, shuffle=True)
    assert order(loader) != order(loader)


def test_serving_gets_the_batches_of_training(dataset: Dataset) -> None:
    raw = pq.read_table(dataset.path.parent / "log.parquet")
    served = list(batches(dataset.schema, dataset.transforms.transform(raw, training=False), 100))
    trained = list(dataset.loader(100))
    assert len(served) == len(trained)
    assert all(same(a, b) for a, b in zip(served, trained, strict=True))
    features = dataset.transforms.transform(raw.select(["row", "tags", "code"]), training=False)
    (batch,) = batches(dataset.schema, features, ROWS)
    assert (batch.labels_BT, batch.weights_B, batch.session_B) == (None, None, None)


@settings(max_examples=10)
@given(st.integers(1, 300), st.booleans(), st.integers(1, 7), st.integers(0, 40), st.booleans())
def test_readers_divide_every_batch(
    dataset: Dataset, batch_size: int, shuffle: bool, ranks: int, at: int, large: bool
) -> None:
    """Each row of a batch is one reader's, whatever their number and wherever they take up the
    log.
    """
    with pytest.MonkeyPatch.context() as patch:
        if large:
            patch.setattr(loading, "PLAIN_GROUPS", 3)
        whole = dataset.loader(batch_size, shuffle=shuffle, seed=1)
        readers = [
            dataset.loader(batch_size, shuffle=shuffle, seed=1, rank=r, ranks=ranks)
            for r in range(ranks)
        ]
        for loader in (whole, *readers):
            loader.load_state_dict(
                {"epoch": 1, "batch": min(at, len(whole)), "batch_size": batch_size}
            )
        for share, *mine in zip(
            whole.shares(), *(reader.shares() for reader in readers), strict=True
        ):
            assert sorted(order(one.batch for one in mine)) == sorted(order([share.batch]))
            assert {one.samples for one in mine} == {share.batch.batch_size}
            assert {one.mass for one in mine} == {share.batch.mass}
            sizes = [one.batch.batch_size for one in mine]
            windows = 2 + batch_size // 100  # each of which is divided by itself
            assert max(sizes) - min(sizes) <= windows
            for one in mine:
                codes, rows = one.batch.ids["code"].values_N, one.batch.dense_BC[:, 0]
                assert torch.equal(codes, rows.long() + 2)  # a row's columns stay together
                assert (
                    one.batch.ids.keys == share.batch.ids.keys and one.batch.labels_BT is not None
                )


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_reader_reads_the_row_groups_of_its_rows(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    """Of 64 row groups that are a window, with 4 readers: 16 each, and of the others what tells the
    batch's weight.
    """
    monkeypatch.setattr(loading, "SHUFFLED_GROUPS", 64)
    monkeypatch.setattr(loading, "PLAIN_GROUPS", 64)
    monkeypatch.setattr(parts, "GROUP_ROWS", 16)
    log = (
        pq.read_table(dataset.path.parent / "log.parquet")
        .slice(0, 960)
        .append_column("x", pa.array(range(960)))
    )
    log = pa.concat_tables([log, log.slice(0, 64)])
    pq.write_table(log, tmp_path / "log.parquet")
    data.prepare(
        [tmp_path / "log.parquet"], tmp_path / "out", schema=SCHEMA, split=Split(valid=0, test=0)
    )
    read: list[tuple[int, bool]] = []
    plain = pq.ParquetFile.read_row_groups

    def spy(
        self: pq.ParquetFile, groups: list[int], columns: list[str], **named: object
    ) -> pa.Table:
        read.extend((group, "row" in columns) for group in groups)
        return plain(self, groups, columns, **named)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", spy)
    alone, shared = (
        data.open(tmp_path / "out").loader(256, shuffle=shuffle, ranks=ranks) for ranks in (1, 4)
    )
    assert 1 + 2 * 16 <= (1 + 2 * 64) * shared.bytes_ahead() / alone.bytes_ahead() <= 1 + 2 * 20
    everyone: list[int] = []
    for rank in range(4):
        read.clear()
        list(data.open(tmp_path / "out").loader(256, shuffle=shuffle, seed=1, rank=rank, ranks=4))
        mine = [group for group, features in read if features]
        assert len(mine) == 16
        assert sorted(group for group, features in read if not features) == list(range(64))
        everyone += mine
    assert sorted(everyone) == list(range(64))


@settings(max_examples=8)
@given(st.integers(1, 300), st.booleans(), st.integers(1, 5), st.integers(0, 40))
def test_a_row_has_one_number_whoever_reads_it(
    dataset: Dataset, batch_size: int, shuffle: bool, ranks: int, at: int
) -> None:
    def numbers(rank: int, ranks: int, at: int) -> list[dict[int, int]]:
        """Row -> number, of each batch of two epochs."""
        loader = dataset.loader(batch_size, shuffle=shuffle, seed=1, rank=rank, ranks=ranks)
        loader.with_rows()
        loader.load_state_dict(
            {"epoch": 0, "batch": min(at, len(loader)), "batch_size": batch_size}
        )
        found = [*loader, *loader]
        return [dict(zip(order([batch]), batch.row_B.tolist(), strict=True)) for batch in found]  # type: ignore[union-attr]

    whole = numbers(0, 1, 0)
    every = [number for batch in whole for number in batch.values()]
    assert len(set(every)) == len(every) == 2 * ROWS  # another number in the next epoch
    mine = [numbers(rank, ranks, at) for rank in range(ranks)]
    together = [
        {row: n for batch in of_ranks for row, n in batch.items()}
        for of_ranks in zip(*mine, strict=True)
    ]
    assert together == whole[min(at, -(-ROWS // batch_size)) :]
    assert next(iter(dataset.loader(8))).row_B is None  # unless asked for


@settings(max_examples=15)
@given(st.integers(5, 300), st.booleans(), st.integers(1, 4))
def test_rows_of_a_group_come_together(
    dataset: Dataset, batch_size: int, shuffle: bool, ranks: int
) -> None:
    """Where they stand side by side: the groups of five end where row groups of 100 do."""
    loaders = [
        dataset.loader(batch_size, shuffle=shuffle, seed=2, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    for loader in loaders:
        loader.with_groups()
    assert loaders[0].groups_cut() == (201, 0, ROWS)
    found = [[int(row) for row in batch.dense_BC[:, 0]] for loader in loaders for batch in loader]
    assert sorted(row for rows in found for row in rows) == list(range(ROWS))
    holders = [{row // 5 for row in rows} for rows in found]
    assert sum(len(groups) for groups in holders) == 201  # each group in one batch of one reader


def test_groups_in_pieces_are_counted(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = pq.read_table(dataset.path.parent / "log.parquet")
    at = log.column_names.index("user")

    def cut(users: list[int], batch_size: int, shuffle: bool) -> tuple[int, int, int]:
        monkeypatch.setattr(parts, "GROUP_ROWS", 100)
        pq.write_table(log.set_column(at, "user", pa.array(users)), tmp_path / "log.parquet")
        split = Split(valid=0, test=0)
        data.prepare(
            [tmp_path / "log.parquet"], tmp_path / "out", schema=SCHEMA, split=split, overwrite=True
        )
        loader = data.open(tmp_path / "out").loader(batch_size, shuffle=shuffle)
        loader.with_groups()
        return loader.groups_cut()

    monkeypatch.setattr(loading, "PLAIN_GROUPS", 16)
    of_seven = [row // 7 for row in range(ROWS)]
    assert cut(of_seven, 50, shuffle=False) == (144, 0, ROWS)
    ends = {100 * i // 7 for i in range(1, 11) if 100 * i % 7}
    # row groups are put in random order
    assert cut(of_seven, 50, shuffle=True) == (144, len(ends), ROWS)
    assert cut(of_seven, 6, shuffle=False) == (144, 143, ROWS)  # all but the last, of two rows
    assert cut([row % 9 for row in range(ROWS)], 50, shuffle=False) == (9, 9, ROWS)
