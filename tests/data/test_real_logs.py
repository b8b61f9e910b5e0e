"""Every real log of `benchmarks/real_data.py` prepares with nothing said but where it is."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks._peers.raw_logs import SETS
from sparrow.data import prepare
from sparrow.features.schema import Split

MAKE = SETS | {"globo": partial(SETS["globo"], every=50)}
# rows, share of ones, features: numbers, those of them that are sometimes missing, ids and lists
KNOWN = {
    "globo": (123_480, 0.2, 2, 0, 11),
    "criteo": (8_000, 0.216, 13, 12, 26),
    "census_kdd": (99_762, 0.062, 6, 0, 35),
    "ml_100k": (100_000, 0.554, 2, 1, 9),
    "rees46": (108_190, 0.2, 0, 0, 6),
    "open_bandit": (20_000, 0.006, 36, 0, 10),
    "retail": (425_730, 0.2, 0, 0, 2),
}
SLOW = ("globo",)  # 17 s of its tool


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in SETS]
)
def test_real_log(name: str, real_data: Path, tmp_path: Path) -> None:
    try:
        log = MAKE[name](real_data, tmp_path)
    except FileNotFoundError as error:
        pytest.skip(f"no {error}")
    inputs, options = (
        log.arguments[:1],
        dict(zip(log.arguments[1::2], log.arguments[2::2], strict=True)),
    )
    split = Split(by="ratio") if options.pop("--split", None) else None
    made = prepare(inputs, tmp_path / "out", label=options.pop("--label", None), split=split)
    assert not options
    mean = sum(made.rows[p] * made.label_means[p][made.schema.labels[0]] for p in made.rows) / sum(
        made.rows.values()
    )
    missing = sum(made.schema.columns[name].transform == "missing" for name in made.schema.dense)
    numbers, ids = len(made.schema.dense) - missing, len(made.schema.sparse)
    found = (sum(made.rows.values()), round(mean, 3), numbers, missing, ids)
    assert found == KNOWN[name]
    if name == "ml_100k":
        assert made.schema.columns["release_year"].missing == ("unkonwn", "V")
        assert any(
            "release_year: text of numbers, but for" in note and "'V'" in note
            for note in made.notes
        )
