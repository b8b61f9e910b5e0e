"""tyro reads the flags. Its errors become one line, like all others."""

from __future__ import annotations

import contextlib
import io
import re
import tomllib
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from sparrow.cli._flags import expand
from sparrow.core.errors import UserError


def call(command: Callable[..., Any], arguments: Sequence[str], name: str) -> Any:
    """Call a command's function with what tyro makes of the arguments; UserError for bad ones."""
    return parse(expand(command), arguments, name)()  # not inside `parse`, which catches stderr


def parse(
    target: Callable[..., Any], arguments: Sequence[str], command: str, *, unknown: bool = False
) -> Any:
    """Returns what tyro makes of the arguments; with `unknown`, also those it does not know.
    UserError for bad ones.
    """
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            options: dict[str, Any] = {"prog": f"sparrow {command}", "return_unknown_args": unknown}
            return tyro.cli(target, args=list(arguments), **options)
    except SystemExit as stop:
        text = re.sub(r"\x1b\[[0-9;]*m|[^\x20-\x7e\n]", " ", stderr.getvalue())
        # a frame may be of dashes
        lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
        lines = [line for line in lines if not line.endswith("options")]
        if not stop.code or not lines:  # rich exits so when whoever read our output has ended
            raise
        complaint = re.sub(
            r"^(Value error|Invalid choice) | (Argument helptext: |For full helptext).*",
            "",
            " ".join(lines),
        )
        raise UserError(f"{command}: {complaint}; see `sparrow {command} --help`") from None


def overrides(rest: Sequence[str]) -> dict[str, Any]:
    """Returns `--a.b 1 --c=x` as {"a.b": 1, "c": "x"}: a value is TOML if it parses, else plain
    text.
    """
    settings: dict[str, Any] = {}
    items = iter(rest)
    for item in items:
        if not item.startswith("--"):
            raise UserError(f"{item!r}: expected --name value; see `sparrow train --help`")
        name, has_value, text = item[2:].partition("=")
        if not has_value:
            following = next(items, None)
            if following is None or following.startswith("--"):
                raise UserError(f"{item}: a value must follow; see `sparrow train --help`")
            text = following
        try:
            value = tomllib.loads(f"value = {text.lower() if text in ('True', 'False') else text}")[
                "value"
            ]
        except tomllib.TOMLDecodeError:
            value = text
        settings[name.replace("-", "_")] = value
    return settings
