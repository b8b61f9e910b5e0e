"""Settings of two runs, or of the ranks of one, are compared also where only one of them sets
something of an extension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar, cast

from sparrow.core.config import differences, extensions_field, to_dict
from sparrow.core.extensions import extensions, settings_class

T = TypeVar("T")


def with_extensions(config: T, names: Iterable[str]) -> T:
    """Returns a config that has the settings of these extensions, with their defaults where it
    sets none.
    """
    field = extensions_field(type(config))
    if field is None:
        return config
    defaults = {name: settings_class(name)() for name in names}
    return cast(
        T,
        dataclasses.replace(cast(Any, config), **{field: defaults | getattr(config, field)}),
    )


def settings_differences(left: Any, right: Any) -> list[tuple[str, Any, Any]]:
    """Returns the `differences` of two configs of a class. Where one of them sets nothing of an
    extension it has the defaults.
    """
    field = extensions_field(type(left))
    names = {*getattr(left, field), *getattr(right, field)} if field else set()
    return differences(
        to_dict(with_extensions(left, names)), to_dict(with_extensions(right, names))
    )


def settings_of_each_rank() -> set[str]:
    """Returns the dotted names of settings that ranks may have each for itself."""
    return {
        f"{name}.{setting}"
        for name, extension in extensions().items()
        for setting in extension.may_differ
    }
