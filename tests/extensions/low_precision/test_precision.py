"""Precisions by name and by file, and what a run says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparrow.core import UserError
from sparrow.core.config import from_dict, to_dict
from sparrow.extensions.low_precision.precision import MEMBERS, recipe_file
from sparrow.extensions.low_precision.recipe import Recipe
from sparrow.layers.precision import (
    Precision,
    computing,
    is_recipe_of,
    native,
    to_compute,
    with_recipe,
)
from sparrow.layers.precisions.bf16 import lacks_bf16

CPU = torch.device("cpu")


def test_every_precision_is_in_the_docs_and_rounds_as_they_say() -> None:
    page = (Path(__file__).parents[3] / "docs" / "precision.md").read_text()
    table = page.split("| `--precision` |")[1].split("\n\n")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]
    named = {name.strip("` "): row for row in rows for name in row[0].split(",")}
    assert named.keys() == MEMBERS.keys()
    # what `train --help` prints
    assert all(f" {name}" in str(Precision.__doc__) for name in MEMBERS)
    for name, row in named.items():
        recipe, between = MEMBERS[name]
        assert row[4] == {torch.float32: "fp32", torch.bfloat16: "bf16"}[between]
        for cell, formats in zip(row[1:4], recipe.passes if recipe else [], strict=False):
            said = (
                cell.replace("`bf16`, cut off", "bf16-truncate")
                .replace("the format", name)
                .replace("`", "")
            )
            pair = [one.strip() for one in said.split(",")]
            assert tuple(pair * (2 // len(pair))) == formats


def test_what_is_between_products_is_as_narrow_as_the_precision_says() -> None:
    for name, member in MEMBERS.items():
        with computing(Precision(name), CPU):
            assert to_compute(torch.ones(2)).dtype == member.between


def test_a_recipe_file_is_kept_in_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("""default = "mxfp8"
        [sites]
        "head.*" = "bf16"
        "dots" = "fp32"
        [sites."cross.*"]
        forward = ["mxfp4", "mx6"]
        input_gradient = ["mxfp8-e5m2", "mxfp4"]
        weight_gradient = ["bf16", "fp32"]
        """)
    own = Recipe(
        forward=("mxfp4", "mx6"),
        input_gradient=("mxfp8-e5m2", "mxfp4"),
        weight_gradient=("bf16", "fp32"),
    )
    want = Precision(
        "mxfp8", {"head.*": Recipe.of("bf16"), "dots": Recipe.of("fp32"), "cross.*": own}, "split"
    )
    for given in ("mine.toml", {"name": "mine.toml"}):
        weights = {"precision.weights": "split"} if isinstance(given, str) else {}
        read = with_recipe({"precision": given}, tmp_path)["precision"]
        assert from_dict(Precision, {**read, "weights": "split"}) == want, weights
    assert with_recipe({"precision": {"name": "mine.toml", "weights": "split"}}, tmp_path)[
        "precision"
    ] == to_dict(want)
    assert with_recipe({"precision": "bf16"}, tmp_path) == {"precision": "bf16"}
    file.write_text(f'weights = "bf16"\n{file.read_text()}')  # unless it is told otherwise
    assert with_recipe({"precision": "mine.toml"}, tmp_path)["precision"]["weights"] == "bf16"
    assert with_recipe({"precision": {"name": "mine.toml", "weights": "split"}}, tmp_path)[
        "precision"
    ] == to_dict(want)
    assert is_recipe_of(file, want) and not is_recipe_of(file, Precision("mxfp8"))


RECIPE = """[sites.x]
forward = ['mx6', 'mx6']
input_gradient = ['bf16', 'bf16']
weight_gradient = ['bf16', 'bf16']
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("defolt = 'bf16'", "defolt: unknown key; did you mean 'default'?"),
        ("sites = 3", "sites: expected a table, pattern = recipe, got 3"),
        ("[sites]\nx = 'mxfp9'", "sites.'x': there is no precision 'mxfp9'"),
        ("[sites", "not valid TOML"),
        ("default = 'mxfp9'", "default: there is no precision 'mxfp9'"),
        ("default = ['bf16']", "default: there is no precision ['bf16']"),
        ("weights = 'fp16'", "weights: 'fp16' is none of fp32, bf16, bf16-stochastic, split"),
        ("[sites]\nx = 3", "sites.'x': there is no precision 3"),
        (
            "[sites.x]\nforward = ['bf16', 'bf16']",
            "sites.'x': no input_gradient and no weight_gradient; a recipe says",
        ),
        (
            "[sites.x]\nfoward = ['bf16', 'bf16']",
            "sites.'x'.foward: unknown key; did you mean 'forward'?",
        ),
        (RECIPE.replace("'mx6'", "'mx7'"), "sites.'x'.forward: there is no format 'mx7'"),
        (
            RECIPE.replace("['mx6', 'mx6']", "'mx6'"),
            "sites.'x'.forward: expected a list, got 'mx6'",
        ),
    ],
)
def test_a_recipe_file_that_is_wrong_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(UserError) as error:
        recipe_file(tmp_path / "mine.toml")
    assert str(error.value).startswith(f"{tmp_path / 'mine.toml'}: ") and said in str(error.value)
    assert "\n" not in str(error.value)


def test_other_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        recipe_file(tmp_path / "none.toml")
    with pytest.raises(
        UserError, match=r"precision.name: there is no precision 'mxfp9'.*or name a recipe file"
    ):
        from_dict(Precision, "mxfp9", "precision")
    with pytest.raises(UserError, match=r"forward: there is no format 'mxfp5'; did you mean"):
        Recipe(
            forward=("mxfp5", "bf16"),
            input_gradient=("bf16", "bf16"),
            weight_gradient=("bf16", "bf16"),
        )
    with pytest.raises(
        UserError, match=r"forward: \['bf16'\] names 1 format\(s\); name those of the two operands"
    ):
        Recipe(forward=("bf16",), input_gradient=("bf16", "bf16"), weight_gradient=("bf16", "bf16"))
    with pytest.raises(
        UserError, match=r"mxfp8, weights fp32, and the run began in bf16, weights fp32; leave"
    ):
        Precision("mxfp8").check_goes_on("bf16")
    # the last that matches counts
    one, other = {"deep.*": Recipe.of("mx4")}, {"deep.0": Recipe.of("mxfp8")}
    with pytest.raises(
        UserError, match=r"bf16 with 2 patterns.*, and the run began in others, or in another order"
    ):
        Precision("bf16", one | other).check_goes_on(to_dict(Precision("bf16", other | one)))
    Precision("bf16", one | other).check_goes_on(to_dict(Precision("bf16", one | other)))
    Precision("bf16").check_goes_on("bf16")  # as older runs say it
    Precision().check_goes_on({})


@pytest.mark.parametrize("units", [False, True])
def test_what_is_native_is_said(monkeypatch: pytest.MonkeyPatch, units: bool) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: units)
    told = {name: native(Precision(name), CPU) for name in MEMBERS}
    assert told["fp32"] is None and native(Precision(weights="split"), CPU) is None
    end = ", so times say nothing about it" + (
        "" if units else "; this processor has no bf16 units"
    )
    by = "bf16" if units else "fp32"
    assert told["bf16"] == ("bf16: native" if units else f"bf16: emulated by products in fp32{end}")
    assert told["mxfp8"] == f"mxfp8: emulated by products in {by}{end}"
    assert told["fp8"] == f"fp8, fp8-e5m2: emulated by products in fp32{end}"
    assert told["bf16-truncate"] == f"bf16-truncate: emulated by products in fp32{end}"
    if units:
        assert (
            told["fp8-rowwise-gw"]
            == f"bf16: native; fp8-rowwise: emulated by products in fp32{end}"
        )
    mixed = Precision("mxfp8", {"deep.*": Recipe.of("fp8")})
    both = "bf16 and fp32" if units else "fp32"
    assert native(mixed, CPU) == f"fp8, mxfp8: emulated by products in {both}{end}"
    monkeypatch.setattr(
        "sparrow.extensions.low_precision.candidates.fp8_rowwise.missing", lambda device: ""
    )
    told_first = str(native(Precision("fp8-rowwise"), CPU)).split("; ")[0]
    assert told_first == "fp8-rowwise: native where its units take the sizes, else emulated"


@pytest.mark.parametrize(
    ("flags", "has_units"),
    [({"bf16": True, "neon": True}, True), ({"bf16": False, "neon": True}, False), ({}, False)],
)
def test_other_processors_have_the_units_that_torch_knows_of(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, object], has_units: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
    assert lacks_bf16(CPU) != has_units
    assert str(native(Precision("bf16"), CPU)).startswith(
        "bf16: native" if has_units else "bf16: emulated"
    )
