"""What a run does not switch on, it does not load."""

from __future__ import annotations

import pytest

from lint.tokens import PACKAGE, loaded

SWITCHED_ON = ("calibration", "dynamic_ids", "warm_start")


@pytest.mark.multi
def test_defaults_load_nothing_of_what_a_run_switches_on() -> None:
    """But what each says of itself. What only they use of the library is not loaded either."""
    files = {str(file.relative_to(PACKAGE)) for file in loaded()}
    assert "training/loop.py" in files
    for name in SWITCHED_ON:
        assert {file for file in files if file.startswith(f"extensions/{name}/")} == {
            f"extensions/{name}/__init__.py"
        }
    assert not any(file.startswith("kernels/row_index/") for file in files)
