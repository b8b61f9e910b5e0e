"""The pages that the site of the documents takes from the code."""

from __future__ import annotations

import importlib.util
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import sparrow
from sparrow.cli import main
from sparrow.core.config import flatten, to_dict
from sparrow.models import dcnv2
from sparrow.trained.run import Run

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs/build_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_setting_of_a_run_is_on_the_page_with_its_default(site) -> None:
    page = site.settings_page()
    leaves = flatten(to_dict(Run.of("data/NAME"), unset=True))
    members = {name.removesuffix(".name") for name in leaves if name.endswith(".name")}
    same = dict(
        re.findall(
            r"^`([\w.]+)\.name` is one of .*, with the settings of `([\w.]+)`", page, re.MULTILINE
        )
    )
    assert same["sharding.backward"] == "sharding.forward"
    for name in leaves:
        parent, _, leaf = name.rpartition(".")
        name = f"{same.get(parent, parent)}.{leaf}".lstrip(".")
        assert (
            f"\n| `{name}` |" in page or f"`{name.removesuffix('.name')}.name` is one of" in page
        ), name
    assert {"model", "dense", "loss", "tables.rule"} <= members
    assert "## model\n\nBy default `dcnv2`." in page
    assert f"| `model.cross_layers` | `{dcnv2.Config().cross_layers}` | int |" in page


def test_every_member_of_a_family_has_a_section_once(site) -> None:
    headings = re.findall(r"^##+ (.+)$", site.settings_page(), re.MULTILINE)
    assert {'model.name = "wukong"', 'tables.tier.name = "ssd"', 'dense.name = "sgd"'} <= set(
        headings
    )
    assert len(headings) == len(set(headings))


def help_of(*words: str) -> str:
    """What the site's own asks a process for."""
    with redirect_stdout(StringIO()) as printed:
        try:
            code = main([*words, "--help"])
        except SystemExit as end:
            code = end.code
    assert not code
    return printed.getvalue()


def test_the_commands_page_has_every_command_with_its_flags(
    site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one command the page is made as it is made for the site, by a process."""
    begin = site.help_of("calibrate")
    monkeypatch.setattr(site, "help_of", help_of)
    monkeypatch.setattr(site.os, "cpu_count", lambda: 1)  # what is printed is one stream's
    assert set(re.findall(r"[a-z][\w-]+", begin)) == set(
        re.findall(r"[a-z][\w-]+", help_of("calibrate"))
    )
    page = site.commands_page()
    commands = {path.stem for path in (ROOT / "sparrow/cli").glob("[!_]*.py")}
    assert set(re.findall(r"^## sparrow (\S+)$", page, re.MULTILINE)) == commands
    assert "--infer-only" in page and "--model.cross_layers" in page


def test_the_python_page_has_all_that_the_front_page_offers(site) -> None:
    page = site.python_page()
    assert all(
        f"\n## sparrow.{name}\n" in page for name in sparrow.__all__ if not name.startswith("_")
    )
    assert "predict(" in page and "<factory>" not in page


def test_what_a_page_links_to_goes_along(site) -> None:
    files = {path.relative_to(ROOT).as_posix() for path in site.linked_files()}
    documents = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert documents <= files
    assert {
        "docs/demo.png",
        "recipes/quickstart.py",
        "notes/decisions/0003-prepare-engine.md",
    } <= files


def test_the_navigation_has_every_page_of_docs() -> None:
    navigation = (ROOT / "docs/mkdocs.yml").read_text()
    assert not [
        p.name for p in (ROOT / "docs").glob("*.md") if f" docs/{p.name}\n" not in navigation
    ]
