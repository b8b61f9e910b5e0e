"""What text and numbers look like: lists, times, numbers with odd texts."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pytest

from sparrow.core import UserError
from sparrow.data import prepare
from sparrow.features.schema import Source
from tests.data.logs.reading import inferred

N = 2000
RNG = np.random.default_rng(3)
GENRES = ["Action", "Sci-Fi", "Comedy", "Drama", "Children's", "Film-Noir", "War", "Romance"]
NUMBERS = [str(x) for x in range(900, 1200)]
WORDS = [
    f"{a}{b}"
    for a in ("ba", "do", "ki", "su", "re", "to")
    for b in ("n", "sk", "le", "mi", "rt", "va", "gon")
]
SIZES = [f"{x:.1f}" for x in np.random.default_rng(4).normal(50, 9, 1990)]


def lists_of(tokens: list[str], separator: str, most: int = 4) -> list[str]:
    return [
        separator.join(RNG.choice(tokens, RNG.integers(1, most + 1), replace=False))
        for _ in range(N)
    ]


@pytest.mark.parametrize(
    ("values", "separator", "weights"),
    [
        (lists_of(GENRES, "|"), "|", None),
        (lists_of(GENRES, ", "), ",", None),
        (lists_of(GENRES, " "), None, None),
        (lists_of(["a", "b", "c", "d"], "^"), "^", None),
        (lists_of(NUMBERS, " "), None, None),
        (lists_of(NUMBERS, ","), ",", None),
        (lists_of(NUMBERS, ";"), ";", None),
        (lists_of([f"{g}:{RNG.random():.3f}" for g in GENRES], "|"), "|", ":"),
        (lists_of([f"{g}:{RNG.random():.3f}" for g in NUMBERS], " "), None, ":"),
        ([f"[{x}]" for x in lists_of(NUMBERS, ", ")], "json", None),
        ([f'["{x}"]' for x in lists_of(GENRES, '", "')], "json", None),
        ([f"[{x}]" for x in NUMBERS], "json", None),
    ],
)
def test_text_that_is_a_list(
    tmp_path: Path, values: list[str], separator: str | None, weights: str | None
) -> None:
    values = (values * N)[:N]
    column = inferred(tmp_path, {"label": [0, 1] * (N // 2), "x": values}).columns["x"]
    assert (column.kind, column.separator, column.weights) == ("list", separator, weights)
    assert "looks like a list" in str(column.note)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([" ".join(RNG.choice(WORDS, 6)) + f" {i}." for i in range(N)], id="sentences"),
        pytest.param(
            [f"{a.title()}, {b.title()}" for a, b in RNG.choice(WORDS, (N, 2))], id="names"
        ),
        pytest.param(["Paris, France", "Lyon, France", "Rome, Italy", "Milan, Italy"], id="places"),
        pytest.param(["2026-11-21 10:00", "2026-11-22 11:30"], id="dates"),
        pytest.param(["21/11/2026", "22/11/2026"], id="days"),
        pytest.param([f"{x:032x}" for x in RNG.integers(0, 1 << 60, 300).tolist()], id="hex"),
        pytest.param([f"{x:,}" for x in RNG.integers(0, 1 << 24, N).tolist()], id="thousands"),
        pytest.param(
            [f"{x},{y}" for x, y in RNG.integers(0, 90, (N, 2)).tolist()], id="decimal commas"
        ),
        pytest.param(
            [f"{x:.2f},{y:.2f}" for x, y in RNG.normal(0, 9, (N, 2)).tolist()], id="coordinates"
        ),
        pytest.param([f"Mozilla/5.0 (X11; Linux {i}) Gecko" for i in range(99)], id="agents"),
        pytest.param(
            ["Not in universe", "Never married", "Married", "Divorced", "Not married"], id="phrases"
        ),
        pytest.param(
            [f"192.168.{x}.{y}" for x, y in RNG.integers(0, 255, (N, 2)).tolist()], id="addresses"
        ),
        pytest.param([f"/shop/{a}?q={b}" for a, b in RNG.choice(WORDS, (N, 2))], id="paths"),
        pytest.param(["New York", "San Francisco", "York", "San Jose", "New Orleans"], id="cities"),
    ],
)
def test_text_that_is_no_list(tmp_path: Path, values: list[str]) -> None:
    columns = {"label": [0, 1] * (N // 2), "x": (values * N)[:N]}
    assert inferred(tmp_path, columns).columns["x"].kind != "list"


@pytest.mark.parametrize(
    ("values", "format", "note"),
    [
        ([f"2026-11-{d:02} 10:00:00" for d in range(1, 29)], None, None),
        ([f"2026-11-{d:02}T10:00:00.5Z" for d in range(1, 29)], None, None),
        ([f"{d}/11/2026 10:00" for d in range(1, 29)], "%d/%m/%Y %H:%M", None),
        ([f"11/{d}/2026" for d in range(1, 29)], "%m/%d/%Y", None),
        (["10/11/2026", "09/11/2026", "09/12/2026"], "%d/%m/%Y", "day or month may come first"),
        (["09/11/2026", "09/12/2026", "10/01/2026"], "%m/%d/%Y", "day or month may come first"),
        (["21/Nov/2026:10:00:00 +0100"] * 2, "%d/%b/%Y:%H:%M:%S", None),
        ([20261121, 20261122], "%Y%m%d", None),
        (["20261121"] * 2, "%Y%m%d", None),
        ([1.5e9 + 0.25, 1.5e9 + 1.5], "%s", "seconds since 1970"),
        ([1.5e9, 1.5e9 + 1], None, None),
        ([1500000000, 1500000001], None, None),
        ([datetime.date(2026, 11, 21)] * 2, None, None),
    ],
)
def test_formats_of_times(
    tmp_path: Path, values: list, format: str | None, note: str | None
) -> None:
    name = "when" if isinstance(values[0], str) and values[0] != "20261121" else "ts"
    columns = {"label": ([0, 1] * 50)[: len(values)], name: values}
    column = inferred(tmp_path, columns).columns[name]
    assert (column.kind, column.format) == ("time", format)
    assert column.note is None if note is None else note in str(column.note)


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        pytest.param(
            [*["?", " N/A", "unknown", "-", "Null"] * 2, *SIZES],
            ("?", "N/A", "unknown", "-", "Null"),
            id="none",
        ),
        pytest.param([*["?"] * 1500, *SIZES[:500]], ("?",), id="mostly missing"),
        pytest.param([*SIZES, *SIZES[:9], "oops"], ("oops",), id="a stray"),
        pytest.param([*SIZES, *SIZES[:8], "a", "b"], ("a", "b"), id="two strays"),
        pytest.param([*SIZES, *[f"E{i:02}" for i in range(10)]], None, id="codes among numbers"),
        pytest.param([*SIZES[:1500], *["XL"] * 500], None, id="a word that comes again"),
        pytest.param([*["007", "012"] * 995, *["?"] * 10], None, id="leading zeros"),
        pytest.param([*[f"{3**36 + i}" for i in range(1990)], *["?"] * 10], None, id="hashes"),
        pytest.param([*["1", "2", "3"] * 660, *["unknown"] * 20], None, id="few codes"),
        pytest.param([str(x % 100) for x in range(2000)], None, id="text of integers"),
        pytest.param([*SIZES, *[" "] * 10], (), id="blanks"),
    ],
)
def test_numbers_with_odd_texts(
    tmp_path: Path, values: list[str], missing: tuple[str, ...] | None
) -> None:
    columns = {"click": [0, 1] * 1000, "size": values}
    column = inferred(tmp_path, columns).columns["size"]
    assert column.kind == ("categorical" if missing is None else "numeric"), column
    assert column.missing == (missing or None)
    assert not missing or f"{missing[0]!r}" in str(column.note)
    prepare([tmp_path / "log.parquet"], tmp_path / "out")  # what is inferred, prepares


def test_dates_stand_close_together(tmp_path: Path) -> None:
    """Four days, not four months; in no order."""
    values = ["11/8/2017", "11/6/2017", "11/9/2017", "11/7/2017"] * 25
    column = inferred(tmp_path, {"date": values, "label": [0, 1] * 50}).columns["date"]
    assert column.format == "%m/%d/%Y" and "day or month may come first" in str(column.note)


@pytest.mark.parametrize("stray", ["31/31/2017", "2017-11-06", "soon"])
def test_a_date_that_fits_no_order_is_named(tmp_path: Path, stray: str) -> None:
    """With its line, its text and what to do. Ignored where the name or --bad-rows says that it may
    be.
    """
    dates = [f"{day}/11/2017" for day in range(6, 20)] * 10
    dates[110] = stray
    for name in ("date", "seen_on"):
        rows = "".join(f"{i % 2},{i % 7},{date}\n" for i, date in enumerate(dates))
        (tmp_path / f"{name}.csv").write_text(f"click,n,{name}\n{rows}")
    words = (
        rf"date\.csv, line 112: time 'date', row 110: '{stray}' is not '%d/%m/%Y'; mend it, set"
        r" columns\.date\."
    )
    with pytest.raises(UserError, match=words) as caught:
        prepare([tmp_path / "date.csv"], tmp_path / "out")
    assert "\n" not in str(caught.value)
    for name, source in (("date", Source(bad_rows="repair")), ("seen_on", None)):
        made = prepare([tmp_path / f"{name}.csv"], tmp_path / name, source=source)
        assert made.schema.columns[name].kind == "ignore"
        assert any(
            f"{name}: a time, but {stray!r} is not '%d/%m/%Y'" in note for note in made.notes
        )


def test_texts_that_are_rarely_times_stay_names(tmp_path: Path) -> None:
    values = ["6/11/2017", "alpha", "7/11/2017", "beta"] * 50
    columns = inferred(
        tmp_path, {"label": [0, 1, 1, 0, 1, 0, 0, 1] * 25, "tag": values, "date": values}
    ).columns
    assert columns["tag"].kind == "categorical" and columns["tag"].note is None
    assert "such as '6/11/2017' and 'alpha', have no format in common" in str(columns["date"].note)
