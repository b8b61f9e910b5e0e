from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparrow.core.extensions import callback_modules
from tests.runs import run_of


@pytest.mark.parametrize(
    ("settings", "applies"),
    [
        ({}, False),
        ({"tables.addressing.name": "hashed"}, False),
        ({"tables.addressing.name": "dynamic"}, True),
        ({"tables.overrides": [{"names": ["item"], "addressing": "dynamic"}]}, True),
        (
            {
                "tables.overrides": [
                    {"names": ["item"], "addressing": {"name": "dynamic", "after": 2}}
                ]
            },
            True,
        ),
        ({"tables.overrides": [{"names": ["item"], "format": "fp16"}]}, False),
        ({"tables.sizes": {"item": {"name": "dynamic", "rows": 9}}}, True),
    ],
)
def test_it_goes_along_with_runs_that_choose_it(
    prepared: Path, tmp_path: Path, settings: dict[str, Any], applies: bool
) -> None:
    modules = [
        module.__name__
        for module in callback_modules(run_of(prepared, tmp_path / "run", **settings), ())
    ]
    assert ("sparrow.extensions.dynamic_ids.callback" in modules) == applies
