from __future__ import annotations

import datetime
import re
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from sparrow.core import UserError
from sparrow.features.times import (
    FORMATS,
    UNITS,
    as_times,
    far_times,
    far_words,
    misfits_of,
    part_of,
    time_format,
    time_name,
)

TEN = int(datetime.datetime(2026, 11, 21, 10, tzinfo=datetime.UTC).timestamp()) * 1_000_000
DAY = TEN - 10 * 3_600_000_000


@pytest.mark.parametrize(
    ("text", "format", "want"),
    [
        ("2026-11-21 10:00:00", None, TEN),
        ("2026-11-21T10:00:00", None, TEN),
        ("2026-11-21T10:00:00Z", None, TEN),
        ("2026-11-21 12:00:00.000250+02:00", None, TEN + 250),
        ("2026-11-21 10:00:00.000250499 UTC", None, TEN + 250),
        ("2026-11-21 09:30-0030", None, TEN),
        ("2026-11-21", None, DAY),
        ("21/11/2026 10:00", "%d/%m/%Y %H:%M", TEN),
        ("11/21/2026", "%m/%d/%Y", DAY),
        ("11/21/2026 10:00 AM", "%m/%d/%Y %I:%M %p", TEN),
        ("21/Nov/2026:10:00:00", "%d/%b/%Y:%H:%M:%S", TEN),
        ("21/Nov/2026:11:00:00 +0100", "%d/%b/%Y:%H:%M:%S", TEN),
        ("Sat, 21 Nov 2026 10:00:00 GMT", "%a, %d %b %Y %H:%M:%S", TEN),
        ("20261121", "%Y%m%d", DAY),
        (20261121, "%Y%m%d", DAY),
        ("2026112110", "%Y%m%d%H", TEN),
        (" 2026/11/21 10:00:00 ", "%Y/%m/%d %H:%M:%S", TEN),
        (TEN / 1e6, "%s", TEN),
        (TEN // 1_000_000, "%s", TEN),
        (f"{TEN // 1_000_000}.5", "%s", TEN + 500_000),
        (datetime.date(2026, 11, 21), None, DAY),
        (datetime.datetime(2026, 11, 21, 10), None, TEN),
        (TEN // 1000, None, TEN // 1000),
        (float(TEN // 1000), None, TEN // 1000),
        (Decimal(TEN), None, TEN),
        (-5, None, -5),
    ],
)
def test_times_become_microseconds_and_integers_stay(
    text: object, format: str | None, want: int
) -> None:
    assert as_times(pa.array([text, text]), "t", 0, format).tolist() == [want, want]
    if isinstance(text, str) and format != "%s":
        assert as_times(pa.array([text]), "t", 0, time_format(pa.array([text]))).tolist() == [want]


def test_texts_may_differ_in_what_may_be_left_out() -> None:
    texts = [
        "2026-11-21",
        "2026-11-21 10:00",
        "2026-11-21T10:00:00.5",
        "2026-11-21 10:00:00+01:00",
        "2026-03-01",
    ]
    want = [DAY, TEN, TEN + 500_000, TEN - 3_600_000_000]
    assert as_times(pa.array(texts).dictionary_encode(), "t", 0).tolist()[:4] == want
    assert (
        as_times(pa.array(["1/2/2026", "01/02/2026"]), "t", 0, "%d/%m/%Y").tolist()
        == [1769904000000000] * 2
    )


@pytest.mark.parametrize(
    ("values", "format", "words"),
    [
        (["2026-11-21", None], None, r"time 't', row 8: missing; fill it in, or split by ratio"),
        ([1, None], None, r"time 't', row 8: missing"),
        (
            ["2026-11-21", "noon"],
            None,
            r"row 8: 'noon' is not ISO 8601, such as .*set columns\.t\.format",
        ),
        (["2026-11-21", "2026-02-31"], None, r"row 8: '2026-02-31' is not ISO"),
        (["21/11/2026", "31/02/2026"], "%d/%m/%Y", r"row 8: '31/02/2026' is not '%d/%m/%Y'"),
        (["21/11/2026", "21/11/26"], "%d/%m/%Y", r"row 8: '21/11/26' is not '%d/%m/%Y'"),
        ([1.0, 1.5], None, r"row 8: 1.5 is no whole number; .*columns\.t\.format to '%s'"),
        ([1.0, 1e300], "%s", r"row 8: 1e\+300 is no number of seconds"),
        (["1", "x"], "%s", r"'t': .*'x'"),
        ([1.0, float("nan")], None, r"row 8: nan is no whole number"),
        ([20261121, 5], "%Y%m%d", r"row 8: '5' is not '%Y%m%d'"),
        ([True, False], None, r"time 't': bool is not a time; write times as"),
    ],
)
def test_what_is_no_time_is_named_with_its_row(
    values: list, format: str | None, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        as_times(pa.array(values), "t", 7, format)


@pytest.mark.parametrize(
    ("texts", "want"),
    [
        (["11/21/2026", "1/2/2026"], "%m/%d/%Y"),
        (["21/11/2026", "1/2/2026"], "%d/%m/%Y"),
        (["1/2/2026"], "%d/%m/%Y"),
        (["21.11.2026 10:00"], "%d.%m.%Y %H:%M"),
        (["1612110501"], "%s"),
        (["2026-11-21", "x"], None),
        (["hello"], None),
        (["10:30"], None),
        ([], None),
    ],
)
def test_formats_are_found_out(texts: list[str], want: str | None) -> None:
    assert time_format(pa.array(texts, pa.string())) == want
    assert want is None or want in FORMATS


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
def test_parts_of_times(unit: int) -> None:
    moments = [
        datetime.datetime(2026, 11, 21, 10),
        datetime.datetime(2000, 2, 29, 23, 59),
        datetime.datetime(1990, 1, 1),
    ]
    seconds = [int(moment.replace(tzinfo=datetime.UTC).timestamp()) for moment in moments]
    times_N = np.array(seconds) * unit
    assert part_of(times_N, "hour").tolist() == [moment.hour for moment in moments]
    assert part_of(times_N, "weekday").tolist() == [moment.weekday() for moment in moments]
    assert part_of(times_N, "day").tolist() == [moment.day for moment in moments]
    assert part_of(times_N, "month").tolist() == [moment.month for moment in moments]


def test_misfits_are_texts_that_are_no_times() -> None:
    texts = pa.array(["21/11/2026", " 1/2/2026 ", "31/02/2026", "2026-11-21", "21/11/0999", ""])
    assert misfits_of(texts, "%d/%m/%Y").tolist() == [False, False, True, True, True, True]
    assert misfits_of(texts, None).tolist() == [True, True, True, False, True, True]


def test_times_are_far_that_a_model_can_hardly_be_asked_about() -> None:
    """Not those a while later or some months earlier; the span of a long log moves both ends."""
    low, high = (
        datetime.datetime(2026, month, 1, tzinfo=datetime.UTC).timestamp() for month in (3, 4)
    )
    years = [1970, 2024, 2025, 2026, 2027, 2030, 2033, 2262]
    seconds = [
        int(datetime.datetime(year, 9, 1, tzinfo=datetime.UTC).timestamp()) for year in years
    ]
    assert far_times(np.array(seconds), low, high).tolist() == [
        True,
        True,
        False,
        False,
        False,
        False,
        True,
        True,
    ]
    long = low - 20 * 366 * 86400
    assert far_times(np.array(seconds), long, high).tolist() == [True, *[False] * 6, True]


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (
            1e-3,
            (
                r"1970-01-21 \d\d:\d\d:\d\d, .*; 1,000 times larger it would be 2026-03-1\d.*:"
                r" check its unit"
            ),
        ),
        (
            1e-6,
            (
                r"1970-01-01 00:29:33, .*; 1,000,000 times larger it would be 2026-03-\d.*: check"
                r" its unit"
            ),
        ),
        (1 / 86400, r"1970-01-01 05:4\d:.*; 86,400 times larger it would be 2026-03-1\d"),
        (60, r"; 60 times smaller it would be 2026-03-15 10:00:00: check its unit"),
        (0, r"1970-01-01, and training's are 2026-03-01 .. 2026-04-01; check it"),
    ],
)
def test_a_far_time_that_another_unit_explains_says_so(factor: float, words: str) -> None:
    low, high = (
        datetime.datetime(2026, month, 1, tzinfo=datetime.UTC).timestamp() for month in (3, 4)
    )
    right = datetime.datetime(2026, 3, 15, 10, tzinfo=datetime.UTC).timestamp()
    assert re.search(words, far_words(int(right * factor), low, high))


def test_names_of_times() -> None:
    moment = int(datetime.datetime(2026, 3, 4, 5, 6, 7, tzinfo=datetime.UTC).timestamp())
    assert [time_name(moment * unit) for unit in UNITS] == ["2026-03-04 05:06:07"] * 4
    assert time_name(moment - moment % 86400) == "2026-03-04"
    assert time_name(17) == "17"
