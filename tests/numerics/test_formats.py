"""Choices of a format that do not fit each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sparrow.core.errors import UserError
from sparrow.numerics.elements import ELEMENTS, whole
from sparrow.numerics.formats import FORMATS, Format


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ({"element": "e2m1"}, "e2m1 cannot say"),
        ({"element": "bf16", "block": 32}, "bf16 has the range"),
        ({"element": "e4m3", "block": 0}, "block: 0"),
        ({"element": "e4m3", "block": 32, "shift_bits": 4, "pair": 2}, "shift_bits: 4"),
        ({"element": "e4m3", "block": 32, "shift_bits": 1, "pair": 3}, "pair: 3 does not divide"),
        ({"element": "e4m3", "block": "row", "shift_bits": 1}, "pair: 1 does not divide"),
        ({"element": "e4m3", "block": 32, "shift_bits": 1, "scale": "fp32"}, "shifts go with"),
    ],
)
def test_what_does_not_fit_is_refused(choices: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        Format(**{**choices, "element": ELEMENTS[choices["element"]]})


def test_bits_of_formats() -> None:
    assert Format(element=whole(3), block=64, pair=4, shift_bits=2).bits == 4 + 8 / 64 + 2 / 4
    assert Format(element=ELEMENTS["e4m3"], block=16, scale="fp32").bits == 8 + 32 / 16
    assert FORMATS["bf16"].bytes_row(5) == 10
    assert FORMATS["fp8-rowwise"].bytes_row(5) == 9


def test_which_values_bf16_holds() -> None:
    exact = {name for name, format in FORMATS.items() if format.is_exact_in_bf16}
    assert exact == {
        name for name in FORMATS if name.startswith("mx") or name in ("bf16", "e4m3", "e5m2")
    }


def test_the_page_has_a_row_of_every_format_and_its_bytes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "precision.md").read_text()
    table = page.partition("## The formats")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| `")]
    told = {name: cells for cells in rows for name in re.findall("`(.*?)`", cells[0])}
    assert set(told) == set(FORMATS)
    for name, format in FORMATS.items():
        bits, bytes_block = (told[name][column].strip() for column in (4, 5))
        assert float(bits) == format.bits, name
        assert bytes_block == (
            str(format.bytes_row(format.block)) if isinstance(format.block, int) else ""
        ), name
