"""What a component takes, and the page that tells it: docs/formats.md."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sparrow.core.config import Family, from_dict
from sparrow.embeddings import TableChoices
from sparrow.embeddings.sizes import memory_bytes
from sparrow.embeddings.spec import STATES, Cache, Component

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
FAMILY = Family("sparrow.kernels.formats")
DIMS = (16, 64, 128, 256)


def test_the_page_has_the_bytes_of_every_row() -> None:
    cells = r"\| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$"
    told = re.findall(rf"^\| `(\w+)` \| `(\w+)` {cells}", PAGE, re.MULTILINE)
    found = {
        (
            name,
            state,
            *(
                str(Component(name="t", rows=1, dim=dim, format=make(name), state=state).bytes_row)
                for dim in DIMS
            ),
        )
        for name in FAMILY.names()
        for state in STATES
    }
    assert set(told) == found
    assert len(told) == len(found)


def make(name: str) -> Any:
    return FAMILY.config(name)()


@pytest.mark.parametrize("name", FAMILY.names())
def test_the_page_says_how_many_bytes_and_which_can_be_cut(name: str) -> None:
    (line,) = re.findall(rf"^\| `{name}` \| ([^|]+) \| [^|]+ \| ([\w ]+) \|$", PAGE, re.MULTILINE)
    fields = make(name).fields(17)
    told = {
        "4 D": 68,
        "2 D": 34,
        "D + 8": 25,
        "D / 2 rounded up, + 4": 13,
        "D, and D / 32 rounded up": 18,
    }
    told |= {"3/4 D and D / 32, each rounded up": 14, "D / 2 and D / 32, each rounded up": 10}
    assert told[line[0].split(", of which")[0]] == sum(field.bytes_row for field in fields.values())
    cuts = [
        at
        for at in range(1, 65)
        if not any(field.uncut((0, at), 65) for field in make(name).fields(65).values())
    ]
    assert cuts == {"yes": [*range(1, 65)], "no": [], "between blocks of 32": [32, 64]}[line[1]]


def test_the_settings_of_the_page() -> None:
    block, of_cache = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    cached = from_dict(TableChoices, tomllib.loads(of_cache)["tables"])
    assert cached.cache == Cache(fraction=0.05, policy="lru", protect=2)
    choices = from_dict(TableChoices, tomllib.loads(block)["tables"])
    kinds = [
        (FAMILY.name_of(one.format), one.state)
        for one in (choices, choices.for_table("a", 5), choices.for_table("item", 10**6))
    ]
    assert kinds == [("int8", "bf16"), ("fp32", "bf16"), ("bf16", "fp32")]
    assert choices.for_table("item", 10**6).format.rounding == "nearest"


def test_the_page_has_the_bytes_of_cached_tables() -> None:
    rows = 32 * 100_000
    told = re.findall(r"^\| `(\w+)`, (0\.\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(told) == 2
    for name, fraction, cells in told:
        for dim, cell in zip(DIMS, cells.split(" | "), strict=True):
            component = Component(
                name="t",
                rows=rows,
                dim=dim,
                format=make(name),
                cache=Cache(fraction=float(fraction)),
            )
            whole = Component(name="t", rows=rows, dim=dim).bytes_row
            each = memory_bytes(component, rows, dim) / rows
            assert cell == f"{each:.1f} ({whole / each:.2f})"
