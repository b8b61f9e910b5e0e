"""tyro reads the flags. Its errors become one line, like all others."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from sparrow.core.errors import UserError


def call(command: Callable[..., Any], arguments: Sequence[str], name: str) -> Any:
    """Call a command's function with what tyro makes of the arguments; UserError for bad ones."""

    @functools.wraps(command)
    def bound(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(command, *args, **kwargs)

    return parse(bound, arguments, name)()  # not inside `parse`, which catches stderr


def parse(target: Callable[..., Any], arguments: Sequence[str], command: str, *, unknown: bool = False) -> Any:
    """Returns what tyro makes of the arguments; with `unknown`, also those it does not know. UserError for bad ones."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options: dict[str, Any] = {"prog": f"sparrow {command}", "return_unknown_args": unknown}
            return tyro.cli(target, args=list(arguments), **options)
    except SystemExit as stop:
        text = re.sub(r"\x1b\[[0-9;]*m|[^\x20-\x7e\n]", " ", said.getvalue())
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().endswith("options")]
        if not stop.code or not lines:  # rich exits so when whoever read our output has ended
            raise
        told = re.sub(r"^(Value error|Invalid choice) | (Argument helptext: |For full helptext).*", "", " ".join(lines))
        raise UserError(f"{command}: {told}; see `sparrow {command} --help`") from None
