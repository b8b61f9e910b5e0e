"""Logs of coarse times: where they are cut, and what is said of it."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow.data import prepare
from sparrow.data.preparation.cuts import FEW, NEVER, time_cuts
from sparrow.data.preparation.cutter import Cut
from sparrow.data.preparation.job import Prepared
from sparrow.features.quantile import Ordered
from sparrow.features.schema import Schema, Split
from tests.data.preparation.coarse import FIRST, days_of, file_of

PARTS = ("train", "valid", "test")


def ordered(times: list[int], tmp_path: Path) -> Ordered:
    made = Ordered(tmp_path / "times", np.int64)
    made.add(np.array(times, np.int64))
    return made


@pytest.mark.parametrize(
    ("counts", "split", "want"),
    [
        ([1] * 100, {}, [Cut(80), Cut(90)]),  # whole times
        ([10] * 14, {}, [Cut(11), Cut(12)]),  # those before the asked places: 112 and 126 of 140
        ([10] * 5, {}, [Cut(4), Cut(4, 0.5)]),  # the last day is both parts
        ([10] * 2, {}, [Cut(1, 0.6), Cut(1, 0.8)]),
        ([10], {}, [Cut(0, 0.8), Cut(0, 0.9)]),
        ([990, 10], {}, [Cut(0, 800 / 990), Cut(0, 900 / 990)]),
        ([10, 990], {}, [Cut(1, 790 / 990), Cut(1, 890 / 990)]),
        ([10], {"valid": 0.0}, [Cut(0, 0.9), Cut(0, 0.9)]),
        ([10], {"valid": 0.0, "test": 0.0}, [Cut(NEVER), Cut(NEVER)]),
        ([10] * 3, {"test": 0.0}, [Cut(2, 0.7), Cut(NEVER)]),
        ([10] * 10, {"until": 0.5}, [Cut(3), Cut(4), Cut(5)]),
        ([10] * 2, {"until": 0.6}, [Cut(0, 0.8), Cut(1), Cut(1, 0.2)]),
        ([1] * 3, {}, [Cut(2), Cut(NEVER)]),  # too few rows for three parts
    ],
)
def test_times_are_whole_where_shares_allow_it(
    counts: list[int], split: dict[str, float], want: list[Cut], tmp_path: Path
) -> None:
    times = ordered([time for time, count in enumerate(counts) for _ in range(count)], tmp_path)
    cuts = time_cuts(Split(by="time", **split), times)
    assert [cut.first for cut in cuts] == [cut.first for cut in want]
    assert [cut.before for cut in cuts] == pytest.approx([cut.before for cut in want])


def near(made: Prepared, total: int) -> None:
    """Each part has half to twice of what was asked, give or take what is drawn."""
    for part, share in (("train", 0.8), ("valid", 0.1), ("test", 0.1)):
        slack = 5 * (share * (1 - share) * total) ** 0.5
        assert 0.5 * share * total - slack <= made.rows[part] <= 2 * share * total + slack
        assert made.rows[part] > 0


@pytest.mark.parametrize("days", [1, 2, 3, 4, 14])
def test_days_give_every_part_about_its_share(days: int, tmp_path: Path) -> None:
    """At default settings, with shares told where they are not those asked for."""
    made = prepare([file_of(days_of(4000, days), tmp_path / "log.parquet")], tmp_path / "out")
    assert made.schema.split.by == "time"
    near(made, 4000)
    (told,) = (note for note in made.notes if note.startswith("split by time (column ts)"))
    assert ("are drawn at random" in told) == (days < 14)
    off = any(
        abs(made.rows[p] - s * 4000) > max(0.25 * s * 4000, FEW)
        for p, s in zip(PARTS, (0.8, 0.1, 0.1), strict=True)
    )
    assert (
        f"train {made.rows['train'] / 4000:.1%}, valid {made.rows['valid'] / 4000:.1%}" in told
    ) == off
    assert ("where 80.0%, 10.0%, 10.0% are asked" in told) == off
    times = {
        part: set(pq.read_table(tmp_path / "out" / part, columns=["ts"])["ts"].to_pylist())
        for part in PARTS
    }
    assert max(times["train"]) <= min(times["valid"]) and max(times["valid"]) <= min(times["test"])
    if days == 14:
        assert not (times["train"] & times["valid"] or times["valid"] & times["test"])
        assert off
    else:
        assert "rows of 2026-03-0" in told


@pytest.mark.parametrize("shares", [(0.99, 0.01), (0.01, 0.99)])
def test_a_day_with_nearly_all_rows(shares: tuple[float, float], tmp_path: Path) -> None:
    days = np.sort(np.random.default_rng(1).choice(2, 4000, p=shares))
    ts = [FIRST + datetime.timedelta(days=int(day)) for day in days]
    made = prepare([file_of(days_of(4000, 2, ts=ts), tmp_path / "log.parquet")], tmp_path / "out")
    near(made, 4000)


@pytest.mark.parametrize(
    "ts",
    [
        pa.array(
            [
                datetime.datetime(2026, 3, 2) + datetime.timedelta(hours=i // 100)
                for i in range(4000)
            ]
        ),
        pa.array([1_772_409_600] * 4000),
        pa.array(["2026-03-02 00:00:00"] * 4000),
    ],
)
def test_hours_and_one_time(ts: pa.Array, tmp_path: Path) -> None:
    near(
        prepare([file_of(days_of(4000, 1, ts=ts), tmp_path / "log.parquet")], tmp_path / "out"),
        4000,
    )


@pytest.mark.parametrize("days", [1, 2])
def test_drawn_rows_of_one_request_stay_together(days: int, tmp_path: Path) -> None:
    """What is drawn hangs on the seed and the request alone, and rows that are not drawn stay where
    time puts them.
    """
    requests = np.arange(4000) // 5
    log = file_of(days_of(4000, 1, request_id=requests), tmp_path / "log.parquet")
    if days == 2:  # a request is of one day
        ts = [FIRST + datetime.timedelta(days=int(i >= 400)) for i in requests]
        log = file_of(days_of(4000, 1, request_id=requests, ts=ts), tmp_path / "log.parquet")
    made = prepare([log], tmp_path / "out")
    near(made, 4000)
    groups = {
        p: set(
            pq.read_table(tmp_path / "out" / p, columns=["request_id"])["request_id"].to_pylist()
        )
        for p in PARTS
    }
    assert sum(map(len, groups.values())) == 800
    assert any(
        "are drawn at random, all rows of one request_id in one part" in note for note in made.notes
    )
    other = prepare([log], tmp_path / "other", split=Split(seed=1))
    assert other.rows != made.rows


def test_a_split_that_whole_times_allow_is_as_before(tmp_path: Path) -> None:
    """The time at the asked place and all later ones are held out, as in logs of finer times."""
    random = np.random.default_rng(0)
    seconds = np.sort(random.integers(1_772_000_000, 1_772_000_900, 4000))
    made = prepare(
        [file_of(days_of(4000, 1, ts=seconds), tmp_path / "log.parquet")], tmp_path / "out"
    )
    first = [seconds[round(4000 * share)] for share in (0.8, 0.9)]
    want = np.diff([0, *(np.searchsorted(seconds, time) for time in first), 4000])
    assert list(made.rows.values()) == want.tolist()
    assert "split by time (column ts)" in made.notes


def test_what_is_said_of_an_empty_part_helps(tmp_path: Path) -> None:
    """Each remedy is tried: a part that is not asked for, and files of its own."""
    few = days_of(3, 1, click=[0, 1, 0], ts=[FIRST] * 3, user_id=[1, 1, 2], item_id=[1, 2, 2])
    log, more = (
        file_of(few, tmp_path / "log.parquet"),
        file_of(days_of(20, 1), tmp_path / "more.parquet"),
    )
    for seed in range(20):  # until train has both outcomes and valid no row
        try:
            made = prepare(
                [log], tmp_path / f"out-{seed}", split=Split(seed=seed, test=0.0), label="click"
            )
        except ValueError:
            continue
        if not made.rows["valid"]:
            break
    told = (
        "valid: no rows, though the split asks for 0.1; the log is too small for it; name files for"
        " it (--valid-files)"
    )
    assert any(note.startswith(told) for note in made.notes)
    without = prepare(
        [log], tmp_path / "without", split=Split(seed=seed, valid=0, test=0), label="click"
    )
    assert without.rows == {"train": 3, "valid": 0, "test": 0}
    assert not any("no rows" in note for note in without.notes)
    named = prepare(
        [log], tmp_path / "named", split=Split(by="file", valid_files=(str(more),)), label="click"
    )
    assert named.rows == {"train": 3, "valid": 20, "test": 0}
    assert isinstance(named.schema, Schema)
