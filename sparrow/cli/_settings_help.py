"""`sparrow train --help`: every setting of a run, with its value, its choices and what it means."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sparrow.cli import _show
from sparrow.cli._parse import overrides, parse
from sparrow.core.choices import choices, parts
from sparrow.core.comparison import with_extensions
from sparrow.core.config import flatten, to_dict
from sparrow.core.extensions import settings_names
from sparrow.trained.run import Run
from sparrow.training.defaults import defaults


def show(arguments: Sequence[str], command: type) -> None:
    """Print tyro's help, then every setting with the value it would have, and what the settings
    mean.

    Args:
        arguments: of the command line, without --help.
        command: the dataclass of `sparrow train`.
    """
    flags = [
        argument
        for argument in arguments
        if argument not in ("--resume", "--overwrite", "--profile", "--probe")
    ]
    # whether this is the value of a flag
    valued = [False, *(flag.startswith("--") and "=" not in flag for flag in flags)]
    places = [i for i, flag in enumerate(flags) if not flag.startswith("--") and not valued[i]]
    place = flags.pop(places[0]) if places else "data/NAME"
    settings = overrides(flags)
    if place.endswith(".toml"):
        run = Run.load(place, settings)
    else:
        run = Run.of(place, defaults(place, settings) if Path(place).is_dir() else settings)
    run = with_extensions(run, settings_names())
    leaves = flatten(to_dict(run, unset=True))
    width = max(map(len, leaves)) + 2
    try:
        parse(command, ["--help"], "train")
    finally:
        say = partial(_show.out.print, markup=False, soft_wrap=True)
        say(f"settings of {place}, each a flag, with the value it has:")
        for name, value in leaves.items():
            say(f"  --{name:<{width}} {'(unset)' if value is None else json.dumps(value)}")
        for name, names in choices(run).items():
            say(f"--{name} is one of {', '.join(names)}")
        say("\nwhat they mean:")
        for name, part in {"": run, **dict(_parts(run))}.items():
            member = f" {leaves[f'{name}.name']}" if f"{name}.name" in leaves else ""
            say(f"\n{name or 'run'}{member}: {inspect.getdoc(type(part))}")


def _parts(config: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the configs in a config, by dotted name."""
    for name, part in parts(config):
        yield f"{place}{name}", part
        yield from _parts(part, f"{place}{name}.")
