"""What a precision loads, and what its settings are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparrow.core import UserError
from sparrow.core.config import from_dict, to_dict
from sparrow.extensions.low_precision.precision import MEMBERS
from sparrow.extensions.low_precision.recipe import Recipe
from sparrow.layers.precision import Precision, precision_names

PROGRAM = """
import sys
from sparrow.training import train
from tests.runs import run_of

train(run_of({prepared!r}, {run_dir!r}, **{{"model.name": "dcnv2", "loop.max_steps": 3, **{settings}}}))
print(*sorted(name for name in sys.modules if name.startswith("sparrow.")))
"""
FEW_BITS = {
    *("sparrow.extensions.low_precision.precision", "sparrow.extensions.low_precision.recipe"),
    *("sparrow.numerics.blocks", "sparrow.numerics.formats", "sparrow.kernels.quantise"),
}
OTHERS = {
    *("sparrow.extensions.low_precision.callback", "sparrow.extensions.low_precision.probe"),
    *(
        "sparrow.extensions.low_precision.layers",
        "sparrow.layers.norm",
        "sparrow.layers.transformer",
    ),
    *("sparrow.layers.attention", "sparrow.kernels.formats.int4"),
}


@pytest.mark.parametrize(
    ("settings", "loaded"),
    [
        ({}, set[str]()),
        ({"precision.name": "bf16"}, {"sparrow.layers.precisions.bf16"}),
        ({"precision.name": "mxfp8"}, FEW_BITS | {"sparrow.layers.precisions.bf16"}),
    ],
)
def test_a_run_loads_what_its_precision_uses(
    prepared: Path, tmp_path: Path, settings: dict[str, str], loaded: set[str]
) -> None:
    program = PROGRAM.format(
        prepared=str(prepared), run_dir=str(tmp_path / "run"), settings=settings
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    modules = set(done.stdout.splitlines()[-1].split())
    assert modules & (FEW_BITS | OTHERS | {"sparrow.layers.precisions.bf16"}) == loaded


def test_the_names_are_those_of_all_members() -> None:
    assert precision_names() == sorted(MEMBERS)
    for name in MEMBERS:
        assert Precision(name).is_plain == (name == "fp32")
    with pytest.raises(UserError, match=r"there is no precision '.toml'; .*or name a recipe file"):
        Precision(".toml")


def test_recipes_of_sites_are_read_from_plain_data_and_written_as_such() -> None:
    plain = {"name": "fp32", "sites": {"deep.*": to_dict(Recipe.of("mx9"))}, "weights": "fp32"}
    precision = from_dict(Precision, plain, "precision")
    assert precision.sites == {"deep.*": Recipe.of("mx9")} and not precision.is_plain
    assert to_dict(precision) == plain
    with pytest.raises(UserError, match=r"precision\.sites\.x\.forward: there is no format 'mx7'"):
        from_dict(
            Precision,
            {"sites": {"x": {**plain["sites"]["deep.*"], "forward": ["mx7", "mx7"]}}},
            "precision",
        )  # type: ignore[index]
    with pytest.raises(UserError, match=r"precision\.sites: expected a table"):
        from_dict(Precision, {"sites": 3}, "precision")
