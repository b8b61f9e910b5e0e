"""Build the site of the documents: `make docs`. A broken link is an error.

Pages are copied to build/pages at their paths in the repository, with all that they link to, so a
link says the same on both. Commands, settings and the Python interface are written from the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import sparrow
from sparrow.core.config import Family, OneOf, extensions_field
from sparrow.core.extensions import settings_class, settings_names
from sparrow.trained.run import Run
from sparrow.training.fit import Fitted

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)[^)\s]*\)")
STYLE = "docs/site.css"
BEGIN = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/README.md",
    "notes/README.md",
    "benchmarks/README.md",
)


def main() -> int:
    """Write build/pages, and of them build/site. Returns the exit code of mkdocs."""
    pages = ROOT / "build/pages"
    shutil.rmtree(pages, ignore_errors=True)
    for file in linked_files():
        target = pages / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    reference = pages / "reference"
    reference.mkdir()
    (reference / "commands.md").write_text(commands_page(), encoding="utf-8")
    (reference / "settings.md").write_text(settings_page(), encoding="utf-8")
    (reference / "python.md").write_text(python_page(), encoding="utf-8")
    mkdocs = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        "docs/mkdocs.yml",
    ]
    return subprocess.call(mkdocs, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})


def linked_files() -> list[Path]:
    """Returns the first pages, the style, and every file that a page links to, pages of pages
    too.
    """
    files = [ROOT / name for name in (*BEGIN, STYLE)]
    for file in files:  # it grows while it is read
        if file.suffix != ".md":
            continue
        for link in LINK.findall(file.read_text(encoding="utf-8")):
            target = (file.parent / link).resolve()
            if target.is_file() and target not in files:
                files.append(target)
    return files


def help_of(*words: str) -> str:
    """Returns what a command prints for --help, as wide as a page."""
    environment = os.environ | {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "sparrow", *words, "--help"]
    return subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout


def commands_page() -> str:
    """Returns the page of all commands with their flags."""
    names = re.findall(r"^  (\S+) +\S", help_of(), re.MULTILINE)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        texts = list(threads.map(help_of, names))
    sections = [
        f"## sparrow {name}\n\n```text\n{text.strip()}\n```"
        for name, text in zip(names, texts, strict=True)
    ]
    return "\n\n".join(["# Commands", "What `sparrow COMMAND --help` prints.", *sections]) + "\n"


def settings_page() -> str:
    """Returns the page of every setting of a run, of every member of a family too."""
    begin = (
        "Every setting is a flag of `sparrow train` and a key of a run file"
        " ([runs](../docs/runs.md#settings))."
    )
    sections = ["# Settings of a run", begin, "## At the top", *_sections(Run, "", {})]
    return "\n\n".join(sections) + "\n"


def _sections(config: Any, place: str, described: dict[object, str]) -> Iterator[str]:
    """Yields what a dataclass of settings says, its table, and sections for those that it holds,
    each once.
    """
    yield _describe(config)
    hints = typing.get_type_hints(config, include_extras=True)
    rows = []
    of_extensions = extensions_field(config)
    fields = [field for field in dataclasses.fields(config) if field.name != of_extensions]
    for field in fields:
        if not _family(hints[field.name]) and not dataclasses.is_dataclass(hints[field.name]):
            rows.append(
                f"| `{place}{field.name}` | {_default(field)} | {_kind(hints[field.name])} |"
            )
    if rows:
        yield "\n".join(["| setting | default | is |", "|---|---|---|", *rows])
    for field in fields:
        inner, kind = place + field.name, hints[field.name]
        if family := _family(kind):
            default = _value(field)
            chosen = f"`{family.name_of(default)}`" if dataclasses.is_dataclass(default) else "none"
            yield f"{_level(inner)} {inner}\n\nBy default {chosen}."
            yield from _members(family, inner, described)
        elif dataclasses.is_dataclass(kind) and kind not in described:
            described[kind] = inner
            yield f"{_level(inner)} {inner}"
            yield from _sections(kind, f"{inner}.", described)
    for name in settings_names() if of_extensions else []:
        yield f"## {name}"
        yield from _sections(settings_class(name), f"{name}.", described)


def _members(family: Family, place: str, described: dict[object, str]) -> Iterator[str]:
    """Yields the names of a family's members, and a section for each where the family comes
    first.
    """
    first = described.get(family.package)
    names = ", ".join(f"`{name}`" for name in family.names())
    yield f"`{place}.name` is one of {names}{f', with the settings of `{first}`' if first else ''}."
    if first is None:
        described[family.package] = place
        for name in family.names():
            yield f'### {place}.name = "{name}"'
            yield from _sections(family.config(name), f"{place}.", described)


def _level(place: str) -> str:
    return "###" if "." in place else "##"


def _describe(config: Any) -> str:
    """Returns a dataclass's docstring with the names of its settings in bold, where the text of
    each begins.
    """
    name = "|".join(field.name for field in dataclasses.fields(config)) or "-"
    names = re.compile(rf"(?:(?<=\. )|(?<=: )|^)(?:{name})(?:, (?:{name}))*(?=: )", re.MULTILINE)
    return names.sub(r"**\g<0>**", _escape(inspect.getdoc(config) or ""))


def _family(kind: Any) -> Family | None:
    """Returns the family that an annotation names, within a union too."""
    inside = [*getattr(kind, "__metadata__", ()), *map(_family, typing.get_args(kind))]
    return next((each for each in inside if isinstance(each, Family)), None)


def _value(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return factory() if callable(factory) else field.default


def _default(field: dataclasses.Field[Any]) -> str:
    value = _value(field)
    if value is dataclasses.MISSING:
        return "must be given"
    return "unset" if value is None else f"`{json.dumps(value, default=str)}`"


def _kind(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    for note in getattr(kind, "__metadata__", ()):
        if isinstance(note, OneOf):
            return ", ".join(f"`{name}`" for name in note.names())
    text = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    return _escape(text.replace("typing.", "").replace(" | None", "").replace("|", "or"))


def _escape(text: str) -> str:
    """Returns prose that markdown shows as it is written."""
    return re.sub(r"([*<\[\]])", r"\\\1", text)


def python_page() -> str:
    """Returns the page of what `import sparrow` offers."""
    sections = ["# Python", "What `import sparrow` offers, and what `sparrow.fit` returns."]
    offered = [
        (name, getattr(sparrow, name)) for name in sparrow.__all__ if not name.startswith("_")
    ]
    for name, value in [*offered, ("training.fit.Fitted", Fitted)]:
        sections.append(f"## sparrow.{name}\n\n{_entry(name.rpartition('.')[2], value)}")
        members = inspect.getmembers(value, inspect.isfunction) if inspect.isclass(value) else []
        for method, function in members:
            if not method.startswith("_") and function.__doc__ and method in vars(value):
                sections.append(f"### {name}.{method}\n\n{_entry(method, function)}")
    return "\n\n".join(sections) + "\n"


class _Text(str):
    """An annotation that a signature shows without quotes."""

    __repr__ = str.__str__


def _signature(value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, Exception):
        return "(message)"
    whole = inspect.signature(value)
    shown = [
        p.replace(annotation=_unquoted(p.annotation))
        for p in whole.parameters.values()
        if p.name != "self"
    ]
    whole = whole.replace(parameters=shown, return_annotation=_unquoted(whole.return_annotation))
    return str(whole).replace("<factory>", "...").removesuffix(" -> None")


def _unquoted(annotation: Any) -> Any:
    return _Text(annotation) if isinstance(annotation, str) else annotation


def _entry(name: str, value: Any) -> str:
    return f"```python\n{name}{_signature(value)}\n```\n\n```text\n{inspect.getdoc(value)}\n```"


if __name__ == "__main__":
    sys.exit(main())
