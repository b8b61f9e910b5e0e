"""The names from which settings can be chosen, for help and documents."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from sparrow.core.config import Family, OneOf, family_of, type_hints


def families(config: Any, place: str = "") -> dict[str, Family]:
    """Returns dotted name -> family, for each field of a config, and of configs in it, whose member
    can be chosen.
    """
    members: dict[str, Family] = {}
    for name, kind in type_hints(config.__class__).items():
        family = family_of(kind)
        value = getattr(config, name, None)
        if family:
            members[f"{place}{name}"] = family
        elif dataclasses.is_dataclass(value):
            members |= families(value, f"{place}{name}.")
    return members


def choices(config: Any) -> dict[str, list[str]]:
    """Returns dotted name -> the names to choose from, for each family or `OneOf` in a config."""
    members = {f"{place}.name": family.names() for place, family in families(config).items()}
    return members | _names(config, "")


def _names(config: Any, place: str) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, kind in type_hints(config.__class__).items():
        for note in typing.get_args(kind)[1:]:
            if isinstance(note, OneOf):
                names[f"{place}{name}"] = note.names()
        value = getattr(config, name, None)
        if dataclasses.is_dataclass(value):
            names |= _names(value, f"{place}{name}.")
    return names
