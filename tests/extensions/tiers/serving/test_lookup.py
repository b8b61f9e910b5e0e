from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from sparrow.core import UserError
from sparrow.embeddings import TableChoices
from sparrow.embeddings.addressing import quotient_remainder
from sparrow.extensions.tiers.serving import Ssd, lookup
from sparrow.extensions.tiers.serving.blocks import ROWS
from sparrow.extensions.tiers.serving.rows import CachedRows, read
from sparrow.kernels import missing
from sparrow.models import dlrm
from sparrow.serving import Scorer, load
from sparrow.serving.deltas import TABLES
from sparrow.serving.export import export
from sparrow.serving.rows import UnreadableError
from sparrow.trained.build import tables_of
from sparrow.trained.run import Loop
from sparrow.trained.scorer import restore
from sparrow.training import train
from tests.embeddings.test_members import CHOICES
from tests.kernels.cached_rows import test_cached_rows as of_kernel
from tests.runs import small_run
from tests.serving.test_deltas import Days, trained

ALL: dict[str, Any] = {
    "fp32": TableChoices,
    "rows that are multiplied": lambda: TableChoices(
        addressing=quotient_remainder.Config(collisions=3)
    ),
    **CHOICES,
}
for elsewhere in ("two components", "some tables"):
    del ALL[elsewhere]


def ssd(place: Path, **changes: Any) -> Ssd:
    """All tables of a small model are on the SSD, and one set of frames is all that they have."""
    return Ssd(**{"folder": place, "least_mb": 0.0, "cache_mb": 0.0, **changes})


def rows_of(scorer: Scorer, log: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        pq.read_table(log).slice(2000, 300).select(list(scorer.encoder.sources)).to_pylist()
    )
    return found


def answers(scorer: Scorer, rows: list[dict[str, Any]]) -> list[bytes]:
    """Bits of scores: of all rows together, of one alone, and of candidates of several users."""
    asked = []
    for first in (0, 7, 50):
        user = {name: rows[first][name] for name in ("user", "history", "tags")}
        asked.append(
            (
                user,
                [
                    {n: v for n, v in row.items() if n not in user}
                    for row in rows[first : first + 9]
                ],
            )
        )
    found = [
        scorer.score(rows),
        scorer.score(rows[5:6]),
        *scorer.rank_all(asked),
        scorer.rank(*asked[0]),
    ]
    return [scores.tobytes() for scores in found]


def counted(scorer: Scorer, name: str) -> int:
    return sum(int(rows.counters[name]) for of in scorer.on_ssd for rows in of.cached.values())


@pytest.mark.parametrize("name", ALL)
def test_as_from_memory(name: str, log: Path, tmp_path: Path) -> None:
    """Every addressing and format, with a delta and without, cold and warm, with the vectors of
    lists and without.
    """
    changes = {"tables": ALL[name](), "model": dlrm.Config(dim=8, bottom=(8,), top=(8,))}
    days = trained(tmp_path, (log, log), **changes)
    export(days.run(0), days.full(0), [log])
    export(days.run(1), days.delta(1), [log], base=[days.full(0)])
    held = load(days.full(0))
    rows, delta = rows_of(held, log), held.updated(days.delta(1))
    expected, later = answers(held, rows), answers(delta, rows)
    assert expected != later
    for settings in (
        ssd(tmp_path / "ssd"),
        ssd(tmp_path / "ssd", cache_mb=10, pooled_mb=1, pooled_length=2),
        ssd(tmp_path / "ssd", cache_mb=10, decoded=True),
    ):
        scorer = load(days.full(0), ssd=settings)
        with_delta = load(days.full(0), [days.delta(1)], ssd=settings)
        for _ in range(2):
            assert answers(scorer, rows) == expected
            assert answers(scorer.updated(days.delta(1)), rows) == later
            assert answers(with_delta, rows) == later
        assert answers(scorer, rows) == expected
        assert bool(scorer.on_ssd) == ("ids that come" not in name and "dynamic" not in name)
        if scorer.on_ssd:
            assert counted(scorer, "hits") and counted(scorer, "reads")


@pytest.fixture(scope="module")
def model(prepared: Path, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    train(small_run(prepared, place / "run", loop=Loop(max_steps=2)))
    export(place / "run", place / "model", [log])
    return place / "model"


@pytest.fixture(scope="module")
def expected(model: Path, log: Path) -> list[bytes]:
    scorer = load(model)
    return answers(scorer, rows_of(scorer, log))


def test_lists_in_any_order_as_from_memory(
    model: Path, log: Path, tmp_path: Path, expected: list[bytes]
) -> None:
    """Two orders of one list have one vector, whose last bits are those of the order that came
    first.
    """
    held, exact = load(model), load(model, ssd=ssd(tmp_path, pooled_mb=1, pooled_length=2))
    scorer = load(model, ssd=ssd(tmp_path, pooled_mb=1, pooled_length=2, pooled_order="any"))
    rows = rows_of(held, log)
    turned = [{**row, "history": row["history"][::-1], "tags": row["tags"][::-1]} for row in rows]
    for _ in range(2):
        for found, want in zip(answers(scorer, rows), expected, strict=True):
            np.testing.assert_allclose(
                np.frombuffer(found, np.float32), np.frombuffer(want, np.float32), rtol=1e-5
            )
    known = [dict(of.pooled.counters) for of in scorer.on_ssd if of.pooled]
    assert np.array_equal(scorer.score(turned), scorer.score(rows))
    after = [dict(of.pooled.counters) for of in scorer.on_ssd if of.pooled]
    assert [of["misses"] for of in after] == [of["misses"] for of in known]
    assert sum(of["hits"] for of in after) > sum(of["hits"] for of in known)
    exact.score(rows)  # in their own order each has its own bits
    assert np.array_equal(exact.score(turned), held.score(turned))
    assert not np.array_equal(held.score(turned), held.score(rows))


def test_scorers_share_a_cache(
    model: Path, log: Path, tmp_path: Path, expected: list[bytes]
) -> None:
    settings = ssd(tmp_path / "ssd", cache_mb=10, shared=tmp_path)
    one, other = load(model, ssd=settings), load(model, ssd=settings.divided(2))
    assert answers(one, rows_of(one, log)) == expected
    misses = counted(one, "misses")
    assert answers(other, rows_of(other, log)) == expected
    assert misses and (missing() or not counted(other, "misses"))


@pytest.mark.parametrize("way", ["io_uring", "threads", "reference"])
def test_all_ways_are_the_same(
    way: Any, model: Path, log: Path, tmp_path: Path, expected: list[bytes]
) -> None:
    try:
        scorer = load(model, ssd=ssd(tmp_path, way=way))
    except UserError as error:  # without a compiler, or where io_uring is forbidden
        pytest.skip(str(error))
    assert answers(scorer, rows_of(scorer, log)) == expected


def test_rows_that_never_learnt_are_pruned(model: Path, log: Path, tmp_path: Path) -> None:
    """They are of zeros, in memory and on an SSD, behind the map of its blocks, and all others have
    their bits.
    """
    run = restore(model.parent / "run")
    export(model.parent / "run", tmp_path / "model", [log], prune=True)
    held, pruned = load(model), load(tmp_path / "model")
    records = (next(iter(tables_of(of.model))).all_records() for of in (held, pruned, run))
    for whole, zeros, learnt in zip(*records, strict=True):
        touched_R = learnt.fields["touched"] > 0
        assert touched_R.any() and not touched_R.all()
        expected_RD = whole.store.read(slice(None))["weight"] * touched_R[:, None]
        assert zeros.store.read(slice(None))["weight"].equal(expected_RD)
    rows = rows_of(pruned, log)
    assert answers(pruned, rows) != answers(held, rows)
    assert answers(load(tmp_path / "model", ssd=ssd(tmp_path / "ssd")), rows) == answers(
        pruned, rows
    )


def test_a_request_asks_for_all_its_rows_at_once(
    model: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User and candidates; see tests/kernels/cached_rows for how they are read."""
    asked: list[list[str]] = []

    def noted(of: Any) -> Any:
        asked.append([rows.table for rows, _ in of])
        return read(of)

    scorer = load(model, ssd=ssd(tmp_path))
    monkeypatch.setattr(lookup, "read", noted)
    answers(scorer, rows_of(scorer, log))
    # scored twice, then ranked twice
    assert asked == [["user", "item", "tags", "cat_0", "cat_1", "cat_2"]] * 4


def test_tables_in_memory_are_not_read(
    model: Path, log: Path, tmp_path: Path, expected: list[bytes]
) -> None:
    scorer = load(model, ssd=ssd(tmp_path, in_memory=("item", "cat_0", "cat_1", "cat_2")))
    assert [rows.table for of in scorer.on_ssd for rows in of.cached.values()] == ["user", "tags"]
    assert answers(scorer, rows_of(scorer, log)) == expected
    assert load(model, ssd=ssd(tmp_path, least_mb=1.0)).on_ssd == ()
    with pytest.raises(UserError, match="no table 'itm'; did you mean 'item'"):
        load(model, ssd=ssd(tmp_path, in_memory=("itm",)))


def test_a_folder_that_cannot_be_made_is_refused(model: Path, tmp_path: Path) -> None:
    """Also where all tables stay in memory, so that a slip of the pen is not found when the first
    one has grown.
    """
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError,
        match=r".*/x: cannot be made \(Not a directory\); name another folder$",
    ):
        load(model, ssd=ssd(tmp_path / "file" / "x", least_mb=64.0))


def test_threads_share_a_cache(model: Path, log: Path, tmp_path: Path) -> None:
    """One set of frames for far more rows: threads take frames from each other all the time."""
    held, scorer, failed = (
        load(model),
        load(model, ssd=ssd(tmp_path, pooled_mb=0.01, pooled_length=2)),
        [],
    )
    rows = rows_of(held, log)
    expected = [held.score(rows[first : first + 25]) for first in range(0, 300, 25)]

    def work(seed: int) -> None:
        for part in np.random.default_rng(seed).permutation(len(expected)).tolist() * 3:
            if not np.array_equal(scorer.score(rows[25 * part : 25 * part + 25]), expected[part]):
                failed.append(part)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_delta_shares_the_cache_and_forgets_vectors(
    days: Days, log: Path, tmp_path: Path
) -> None:
    scorer = load(days.full(0), ssd=ssd(tmp_path, pooled_mb=1, pooled_length=2))
    later = scorer.updated(days.delta(1))
    for before, after in zip(scorer.on_ssd, later.on_ssd, strict=True):
        assert after.cached == before.cached
        assert (
            before.pooled is not None
            and after.pooled is not None
            and after.pooled is not before.pooled
        )
        assert before.pooled.hits + before.pooled.misses > 0


@pytest.fixture(scope="module")
def days(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Days:
    days = trained(tmp_path_factory.mktemp("days"), (log, log))
    export(days.run(0), days.full(0), [log])
    export(days.run(1), days.delta(1), [log], base=[days.full(0)])
    return days


def flip(cached: CachedRows, path: Path) -> None:
    path.write_bytes(
        bytes(byte ^ 1 if at % 4096 == 100 else byte for at, byte in enumerate(path.read_bytes()))
    )


def cut(cached: CachedRows, path: Path) -> None:
    os.truncate(path, 4096 + 100)


def fail(cached: CachedRows, path: Path) -> None:
    """Have reads end with EIO, see tests/kernels/cached_rows."""
    of_kernel.fail(cached.cache, 0)


@pytest.mark.parametrize("fault", [flip, cut, fail])
def test_a_bad_block_gives_no_score(
    model: Path,
    log: Path,
    tmp_path: Path,
    expected: list[bytes],
    fault: Callable[[CachedRows, Path], None],
) -> None:
    """It fails those who ask for its rows, as long as it is bad, and nothing of it stays in the
    cache.
    """
    scorer = load(model, ssd=ssd(tmp_path, in_memory=("item", "cat_0", "cat_1", "cat_2", "tags")))
    (cached,) = scorer.on_ssd[0].cached.values()
    rows = rows_of(scorer, log)
    path = cached.place / ROWS
    whole = path.read_bytes()
    device = os.dup(cached.blocks.file.fd)
    fault(cached, path)
    for _ in range(2):
        with pytest.raises(
            UnreadableError,
            match=r"^table user, rows .*(is damaged|Input/output).*; remove .*user-",
        ):
            scorer.score(rows)
    held = set(cached.cache.rows_F.tolist())
    known = [
        row
        for row in rows
        if set(scorer.encoder.batch([row]).ids["user"].values_N.tolist()) <= held
    ]
    # they ask for no bad block
    assert known and np.array_equal(scorer.score(known), load(model).score(known))
    path.write_bytes(whole)
    os.dup2(device, cached.blocks.file.fd)
    os.close(device)
    assert answers(scorer, rows) == expected


def test_a_damaged_block_is_found_when_a_model_is_loaded(model: Path, tmp_path: Path) -> None:
    load(model, ssd=ssd(tmp_path))
    (place,) = tmp_path.glob("user-*")
    whole = (place / ROWS).read_bytes()
    (place / ROWS).write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    with pytest.raises(UserError, match=r"rows .*remove .*user-"):
        load(model, ssd=ssd(tmp_path))
    shutil.rmtree(place)
    assert load(model, ssd=ssd(tmp_path)).on_ssd
    assert (model / TABLES).is_dir()
