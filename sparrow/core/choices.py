"""The names from which settings can be chosen, for help and documents."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from sparrow.core.config import Family, OneOf, extensions_field, family_of, type_hints


def parts(config: Any) -> Iterator[tuple[str, Any]]:
    """Yields name -> config of the configs that a config holds, and of the settings of extensions
    in it.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == extensions_field(type(config)):
            yield from value.items()
        elif dataclasses.is_dataclass(value):
            yield field.name, value


def families(config: Any, place: str = "") -> dict[str, Family]:
    """Returns dotted name -> family, for each field of a config, and of configs in it, whose member
    can be chosen.
    """
    kinds = type_hints(config.__class__)
    own = {name: family for name, kind in kinds.items() if (family := family_of(kind))}
    members = {f"{place}{name}": family for name, family in own.items()}
    for name, part in parts(config):
        if name not in own:
            members |= families(part, f"{place}{name}.")
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
    for name, part in parts(config):
        names |= _names(part, f"{place}{name}.")
    return names
